"""One batch through target, drafter and head: the loss of each labelled slot, and its weight."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from dflash_lightning.data.collate import Batch
from dflash_lightning.drafter.config import DrafterSpec
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.functional.anchors import block_ids, predicting_positions
from dflash_lightning.functional.head import ChunkedHead, Goal
from dflash_lightning.functional.objective import (
    Weighting,
    check_objective,
    decay_gamma,
    dpace_label_weights,
    position_weights,
    untrained_dpace_weights,
)
from dflash_lightning.phases import PhaseClock
from dflash_lightning.target import HFTarget


class StepSums(NamedTuple):
    """What a batch contributes: sums only, so that any grouping of rows gives the same totals.

    Args:
        numerator: Sum of weight times loss in nats, differentiable.
        weights: Of each labelled slot, float32 ``[M]``.
        losses: Of each labelled slot in nats, float32 ``[M]``.
        correct: Whether each draft token is the goal's, bool ``[M]``.
    """

    numerator: Tensor
    weights: Tensor
    losses: Tensor
    correct: Tensor


class Objective(nn.Module):
    """What a drafter should predict, and what each slot of its blocks counts.

    Args:
        spec: The drafter.
        goal: As :class:`~dflash_lightning.functional.head.ChunkedHead` says.
        weighting: ``decay`` by position, or ``dpace`` by the drafter's own probabilities.
        loss_decay_gamma: Decay constant of ``decay`` in tokens; None is the paper's.
        dpace_alpha: Floor of the smoothed probabilities of ``dpace``.

    Raises:
        ValueError: A setting is out of range, or would not be honoured.
    """

    slot_weights: Tensor

    def __init__(
        self,
        spec: DrafterSpec,
        *,
        goal: Goal,
        weighting: Weighting,
        loss_decay_gamma: float | None,
        dpace_alpha: float,
    ) -> None:
        super().__init__()
        check_objective(goal, weighting, loss_decay_gamma, dpace_alpha)
        self.goal: Goal = goal
        self.weighting: Weighting = weighting
        self.dpace_alpha = dpace_alpha
        self.loss_decay_gamma = loss_decay_gamma
        size = spec.block_size
        if weighting == "dpace":  # nothing is known before the first step
            weights = untrained_dpace_weights(size, dpace_alpha, spec.vocab_size)
        else:
            self.loss_decay_gamma = loss_decay_gamma or decay_gamma(size)
            weights = position_weights(size, self.loss_decay_gamma)
        self.register_buffer("slot_weights", F.pad(weights, (1, 0)), persistent=False)
        self.head = ChunkedHead(goal=goal)

    def settings(self) -> dict[str, Any]:
        """What decides the loss of a batch, by full name, in plain types."""
        return {
            "model.goal": self.goal,
            "model.weighting": self.weighting,
            "model.loss_decay_gamma": self.loss_decay_gamma,
            "model.dpace_alpha": self.dpace_alpha,
        }

    def forward(
        self, target: HFTarget, drafter: Drafter, batch: Batch, phases: PhaseClock
    ) -> StepSums:
        """Run a batch; draws nothing, logs nothing, counts nothing.

        Args:
            target: Loaded.
            drafter: The one that is trained.
            batch: Rows with anchors and labels.
            phases: Marked where a phase begins.
        """
        spec = drafter.spec
        phases.mark("target")
        features, teacher = self._read_target(target, spec, batch)
        phases.mark("drafter")
        ids = block_ids(
            batch.input_ids,
            batch.anchors,
            block_size=spec.block_size,
            mask_token_id=spec.mask_token_id,
        )
        hidden = drafter(features, target.embed(ids), batch.anchors, batch.anchor_valid)
        phases.mark("head")
        labelled = hidden.flatten(0, 2).index_select(0, batch.label_slots)
        out = self.head(labelled, target.head_weight, batch.labels, teacher)
        weights = self._weights(out.losses, batch, spec.block_size)
        numerator = (weights * out.losses).sum()
        phases.mark(None)
        return StepSums(numerator, weights, out.losses.detach(), out.correct)

    def _read_target(
        self, target: HFTarget, spec: DrafterSpec, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """Context features, and the states that predict the labels where the goal needs them."""
        if batch.features is not None:
            return batch.features, None
        if self.goal == "ce":
            return target.context_features(batch.input_ids, spec.target_layer_ids), None
        final_at = predicting_positions(
            batch.anchors,
            batch.label_slots,
            block_size=spec.block_size,
            width=batch.input_ids.shape[1],
        )
        return target.features_and_final(batch.input_ids, spec.target_layer_ids, final_at)

    def _weights(self, losses: Tensor, batch: Batch, block_size: int) -> Tensor:
        """Weight of each label, float32 ``[M]``; no gradient flows through it."""
        if self.weighting == "decay":
            return self.slot_weights.index_select(0, batch.label_slots % block_size)
        return dpace_label_weights(
            losses,
            batch.label_slots,
            num_blocks=batch.anchors.numel(),
            block_size=block_size,
            alpha=self.dpace_alpha,
        )
