"""Metrics as sums and counts; the ratios are made last, so ranks and batches merge freely."""

import torch
from torch import Tensor
from torchmetrics import Metric

from dflash_lightning.functional.acceptance import accepted_length


class BlockMetrics(Metric):
    """Loss, acceptance and per-slot accuracy of drafted blocks under teacher forcing.

    ``update`` takes what :class:`~dflash_lightning.module.DFlashModule` knows of a batch;
    ``compute`` returns

    * ``loss``: weighted mean over slots in nats, and ``cross_entropy``, the unweighted one; with
      goal ``kl`` both are divergences;
    * ``est_tau``: mean accepted length + 1 over blocks with all K - 1 labels; a draft token is
      accepted where it is the goal's: the label for ``ce``, the target's most likely token, which a
      greedy verifier would keep, for ``argmax`` and ``kl``;
    * ``est_tau_all``: over all blocks that have a label, cut short by the end of supervision or
      not;
    * ``cut_short``: share of those;
    * ``accuracy/pos_01`` ...: share of right draft tokens in each slot.

    A slot without a label ends a block's accepted length, also where labels follow it.

    Args:
        block_size: Tokens of a block, anchor included (K).
    """

    full_state_update = False
    sums: Tensor
    correct: Tensor
    labels: Tensor

    FIELDS = ("numerator", "weight", "losses", "full", "accepted_full", "blocks", "accepted")

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        zeros = torch.zeros(block_size - 1, dtype=torch.float64)
        self.add_state(
            "sums", torch.zeros(len(self.FIELDS), dtype=torch.float64), dist_reduce_fx="sum"
        )
        self.add_state("correct", zeros, dist_reduce_fx="sum")
        self.add_state("labels", zeros.clone(), dist_reduce_fx="sum")

    def update(
        self,
        losses: Tensor,
        weights: Tensor,
        correct: Tensor,
        label_slots: Tensor,
        num_blocks: int,
    ) -> None:
        """Add the M labelled slots of a batch.

        Args:
            losses: Of each slot in nats, float32 ``[M]``.
            weights: Of each slot, float32 ``[M]``.
            correct: Whether the draft token is the goal's, bool ``[M]``.
            label_slots: Flat index of each slot into ``[blocks, K]``, int64 ``[M]``.
            num_blocks: Blocks of the batch, empty slots included.
        """
        right = torch.zeros(num_blocks * self.block_size, dtype=torch.bool, device=correct.device)
        valid = torch.zeros_like(right)
        # not by index: assigning a number would copy it to the device and wait
        right.index_copy_(0, label_slots, correct)
        valid.index_fill_(0, label_slots, True)
        right = right.view(-1, self.block_size)[:, 1:]
        valid = valid.view(-1, self.block_size)[:, 1:]
        accepted = accepted_length(right, valid)
        full, any_label = valid.all(1), valid.any(1)
        self.sums += torch.stack(
            [
                (losses * weights).double().sum(),
                weights.double().sum(),
                losses.double().sum(),
                full.double().sum(),
                (accepted * full).double().sum(),
                any_label.double().sum(),
                accepted.double().sum(),
            ]
        )
        self.correct += right.sum(0)
        self.labels += valid.sum(0)

    def compute(self) -> dict[str, Tensor]:
        """Return the ratios."""
        total = dict(zip(self.FIELDS, self.sums, strict=True))
        values = {
            "loss": total["numerator"] / total["weight"],
            "cross_entropy": total["losses"] / self.labels.sum(),
            "est_tau": 1 + total["accepted_full"] / total["full"],
            "est_tau_all": 1 + total["accepted"] / total["blocks"],
            "cut_short": 1 - total["full"] / total["blocks"],
        }
        accuracy = self.correct / self.labels
        values |= {f"accuracy/pos_{k:02d}": accuracy[k - 1] for k in range(1, self.block_size)}
        return {name: value.float() for name, value in values.items()}
