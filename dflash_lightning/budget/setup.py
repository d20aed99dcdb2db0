"""What the memory of a step depends on beside sizes: the heaviest batch, and how a run trains."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dflash_lightning.functional.head import Goal


class BatchLoad(NamedTuple):
    """The heaviest batch of one GPU.

    Args:
        tokens: Padded tokens.
        rows: Rows.
        slots: Anchor slots of all rows together.
        width: Padded length of a row in tokens.
        chunk_anchors: Anchors of a row that attend together on the sdpa path.
    """

    tokens: int
    rows: int
    slots: int
    width: int
    chunk_anchors: int = 16

    @property
    def chunks(self) -> int:
        """Chunks of anchors; all anchors are one when they fill at most one and a half."""
        per_row = -(-self.slots // max(self.rows, 1))
        if 2 * per_row <= 3 * self.chunk_anchors:
            return 1
        return -(-per_row // self.chunk_anchors)

    @property
    def visible(self) -> float:
        """Context tokens of the mean chunk, which sees up to its last of evenly spread anchors."""
        return self.width * (self.chunks + 1) / (2 * self.chunks)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the run trains.

    Args:
        ranks: GPUs.
        target_bytes: Bytes of a number of the target.
        compute_bytes: Bytes of a number in the drafter's products: 2 under bf16-mixed, else 4.
        gradients: Copies of all gradients on a GPU.
        shard_optimizer: Whether each GPU keeps its share of the moments only.
        activation_checkpointing: Whether draft layers are computed again in the backward pass.
        attention: Backend of the drafter's attention.
        on_gpu: Whether sdpa runs on a GPU, where it needs as many key heads as query heads.
        goal: What a slot should predict; other goals than ``ce`` run all of the target.
    """

    ranks: int = 1
    target_bytes: int = 2
    compute_bytes: int = 2
    gradients: int = 1
    shard_optimizer: bool = False
    activation_checkpointing: bool = False
    attention: Literal["flex", "sdpa"] = "flex"
    on_gpu: bool = True
    goal: Goal = "ce"
