"""Inputs that two steps train on side by side, and our step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from oracles import make_spec, naive_forward, plain_loss, random_drafter
from torch import Tensor

from dflash_lightning.drafter.config import LayerType
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.functional.anchors import block_ids, block_positions
from dflash_lightning.functional.head import ChunkedHead
from dflash_lightning.functional.objective import decay_gamma, position_weights

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49_152,
}
NARROW = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8_192,
}


@dataclass(frozen=True)
class Case:
    """One batch; every token of it is supervised, so that few slots are without a label.

    Args:
        drafter: Trained by both steps.
        embedding: Frozen, ``[V, D]``.
        head: Frozen, ``[V, D]``.
        input_ids: int64 ``[B, T]``.
        features: Of the target, ``[B, T, F]``.
        anchors: Sorted positions, int64 ``[B, N]``.
        anchor_valid: bool ``[B, N]``.
    """

    drafter: Drafter
    embedding: Tensor
    head: Tensor
    input_ids: Tensor
    features: Tensor
    anchors: Tensor
    anchor_valid: Tensor

    def embedded(self) -> Tensor:
        """Embeddings of [anchor, mask, mask, ...], ``[B, N, K, D]``."""
        spec = self.drafter.spec
        ids = block_ids(
            self.input_ids,
            self.anchors,
            block_size=spec.block_size,
            mask_token_id=spec.mask_token_id,
        )
        return F.embedding(ids, self.embedding)

    @cached_property
    def dense_weights(self) -> Tensor:
        """Weight of every slot, zero without a label, float32 ``[B, N, K]``."""
        size = self.drafter.spec.block_size
        weights = torch.cat([torch.zeros(1), position_weights(size, decay_gamma(size))])
        inside = block_positions(self.anchors, size) < self.input_ids.shape[1]
        return weights * inside * self.anchor_valid[..., None]

    @cached_property
    def dense_labels(self) -> Tensor:
        """The token at each slot's position, int64 ``[B, N, K]``; anything beyond the row."""
        positions = block_positions(self.anchors, self.drafter.spec.block_size)
        inside = positions.clamp(max=self.input_ids.shape[1] - 1)
        return self.input_ids.gather(1, inside.flatten(1)).view(positions.shape)

    @cached_property
    def label_slots(self) -> Tensor:
        """Flat indices of the slots that carry a label, int64 ``[M]``."""
        return self.dense_weights.flatten().nonzero()[:, 0]

    @cached_property
    def labels(self) -> Tensor:
        """Of the labelled slots, int64 ``[M]``."""
        return self.dense_labels.flatten()[self.label_slots]

    @cached_property
    def weights(self) -> Tensor:
        """Of the labelled slots, float32 ``[M]``."""
        return self.dense_weights.flatten()[self.label_slots]


def make_case(
    sizes: dict[str, int],
    *,
    rows: int,
    width: int,
    anchors: int,
    block_size: int,
    kinds: tuple[LayerType, ...] = ("full_attention",) * 3,
    window: int | None = None,
) -> Case:
    """A drafter that reads as many target layers as it has, and a batch."""
    spec = make_spec(
        **sizes,
        num_layers=len(kinds),
        block_size=block_size,
        layer_types=kinds,
        sliding_window=window,
        num_target_layers=len(kinds),
        target_layer_ids=tuple(range(len(kinds))),
        max_position_embeddings=width + block_size,
    )
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    vocab, hidden = spec.vocab_size, spec.hidden_size
    starts = [torch.randperm(width - 1, generator=generator)[:anchors] for _ in range(rows)]
    return Case(
        drafter=random_drafter(spec),
        embedding=normal(vocab, hidden),
        head=normal(vocab, hidden) / hidden**0.5,
        input_ids=torch.randint(vocab, (rows, width), generator=generator),
        features=normal(rows, width, len(kinds) * hidden),
        anchors=torch.stack(starts).sort().values,
        anchor_valid=torch.ones(rows, anchors, dtype=torch.bool),
    )


def own_sums(case: Case, head: ChunkedHead) -> tuple[Tensor, Tensor]:
    """Sum of weight times cross-entropy, differentiable, and the number of correct slots."""
    hidden = case.drafter(case.features, case.embedded(), case.anchors, case.anchor_valid)
    labelled = hidden.flatten(0, 2).index_select(0, case.label_slots)
    out = head(labelled, case.head, case.labels)
    return (case.weights * out.losses).sum(), out.correct.sum()


def oracle_sums(case: Case) -> tuple[Tensor, Tensor]:
    """The same in matrix products, with a mask made in loops."""
    hidden = naive_forward(
        case.drafter, case.features, case.embedded(), case.anchors, case.anchor_valid
    )
    labelled = hidden.flatten(0, 2)[case.label_slots]
    correct = (labelled @ case.head.T).argmax(1) == case.labels
    return plain_loss(labelled, case.head, case.labels, case.weights), correct.sum()


def train(case: Case, sums: tuple[Tensor, Tensor]) -> None:
    """Backward of the weighted mean; gradients start from nothing."""
    case.drafter.zero_grad(set_to_none=True)
    (sums[0] / case.dense_weights.sum()).backward()


def largest_gap(case: Case, others: Callable[[Case], tuple[Tensor, Tensor]]) -> float:
    """Largest relative difference to another way, of the loss and of each gradient's tensor.

    Both find the same slots correct.
    """
    found = []
    for sums in (own_sums(case, ChunkedHead()), others(case)):
        train(case, sums)
        grads = [weight.grad for weight in case.drafter.parameters() if weight.grad is not None]
        found.append((int(sums[1]), [sums[0].detach(), *grads]))
    (correct, ours), (their_correct, theirs) = found
    assert correct == their_correct
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
