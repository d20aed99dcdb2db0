"""The Lightning module: one training step, the global ratio, the optimizer and its warm-up."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from dflash_lightning.data.collate import Batch
from dflash_lightning.drafter.checkpoint import load_weights
from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.drafter.model import Drafter, init_from_target, init_random
from dflash_lightning.functional.anchors import block_ids
from dflash_lightning.functional.objective import ChunkedHead, decay_gamma, position_weights
from dflash_lightning.functional.optimizer import check_rates, make_optimizer
from dflash_lightning.functional.schedule import Schedule, schedule_factor
from dflash_lightning.functional.step_statistics import StepStatistics
from dflash_lightning.metrics import BlockMetrics
from dflash_lightning.resume import ResumableModule
from dflash_lightning.target import HFTarget


class StepSums(NamedTuple):
    """What a batch contributes: sums only, so that any grouping of rows gives the same totals.

    Args:
        numerator: Sum of weight times cross-entropy in nats, differentiable.
        weights: Of each labelled slot, float32 ``[M]``.
        cross_entropy: Of each labelled slot in nats, float32 ``[M]``.
        correct: Whether each draft token is the label, bool ``[M]``.
    """

    numerator: Tensor
    weights: Tensor
    cross_entropy: Tensor
    correct: Tensor


class DFlashModule(ResumableModule):
    """Trains a drafter for a frozen target.

    The loss is one ratio over all ranks and accumulated batches: sum of weighted losses over sum of
    weights.

    Args:
        target: The frozen target (verifier).
        drafter: The dials of the drafter.
        init: ``target`` starts from the target's final norm, last layers and an averaging fusion
            where shapes allow; ``random`` does not; the path of an exported drafter or of a
            checkpoint starts a new run from its weights.
        loss_decay_gamma: Decay constant of the position weights in tokens; null is the paper's for
            the block size.
        lr: Peak learning rate.
        warmup_ratio: Share of the optimizer steps in which the rate rises.
        warmup_steps: The same in optimizer steps; wins over the ratio.
        schedule: How the rate falls after the warm-up.
        weight_decay: On matrices only.
        betas: Of AdamW.
        seed: Of the random start.
        shard_optimizer: Keep AdamW's moments spread over the ranks: the same updates, less memory.
        activation_checkpointing: Recompute each draft layer in the backward pass: less memory, a
            third more time in the drafter.
        max_skipped_steps: Updates in a row that may be skipped as not finite before the run ends.
    """

    def __init__(
        self,
        target: HFTarget,
        drafter: DrafterConfig = DrafterConfig(),
        init: str = "target",
        loss_decay_gamma: float | None = None,
        lr: float = 6e-4,
        warmup_ratio: float = 0.04,
        warmup_steps: int | None = None,
        schedule: Schedule = "cosine",
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        seed: int = 0,
        shard_optimizer: bool = False,
        activation_checkpointing: bool = False,
        max_skipped_steps: int = 10,
    ) -> None:
        super().__init__()
        check_rates(lr, warmup_ratio, warmup_steps, weight_decay, betas)
        if (loss_decay_gamma is not None and loss_decay_gamma <= 0) or max_skipped_steps < 1:
            raise ValueError(
                "loss_decay_gamma must be positive and max_skipped_steps must be at least 1, "
                f"got {loss_decay_gamma} and {max_skipped_steps}."
            )
        self.target = target
        self.drafter = Drafter(
            drafter.for_target(target.config), checkpoint_layers=activation_checkpointing
        )
        self.init = init
        self.lr = lr
        self.warmup_ratio = warmup_ratio
        self.warmup_steps = warmup_steps
        self.schedule: Schedule = schedule
        self.weight_decay = weight_decay
        self.betas = (betas[0], betas[1])
        self.shard_optimizer = shard_optimizer
        self.max_skipped_steps = max_skipped_steps
        spec = self.drafter.spec
        gamma = loss_decay_gamma if loss_decay_gamma is not None else decay_gamma(spec.block_size)
        self.loss_decay_gamma = gamma
        weights = torch.cat([torch.zeros(1), position_weights(spec.block_size, gamma)])
        self.register_buffer("slot_weights", weights, persistent=False)
        self.head = ChunkedHead()
        self.val_metrics = BlockMetrics(spec.block_size)
        self.step_stats: dict[str, Any] = {}
        # of this rank; summed over ranks with the statistics
        self.extra = dict.fromkeys(("wait_seconds", "stop", "requeue", "save"), 0.0)
        init_random(self.drafter, seed)

    # -- before the first step ------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Load the target onto this rank's device and start the drafter from it."""
        self.target.load(self.device)
        if stage != "fit":
            return
        if self.trainer.precision == "16-mixed":
            raise ValueError(
                "trainer.precision must not be 16-mixed: sums of losses overflow. Use "
                "bf16-mixed or 32-true."
            )
        if self.starts_fresh:
            self._start_weights()
        self.starts_fresh = False
        if self.trainer.global_step == 0:
            self._begin_run()
        ranks = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        self.statistics = StepStatistics(self._data.plan.boundaries, **ranks)

    def _start_weights(self) -> None:
        """Give a new run its first weights."""
        if self.init == "target":
            init_from_target(self.drafter, list(self.target.layers), self.target.norm_weight)
        elif self.init != "random":
            load_weights(self.drafter, Path(self.init))

    # -- one step -------------------------------------------------------------------------------

    def sums(self, batch: Batch) -> StepSums:
        """Run target and drafter on a batch; draws nothing, logs nothing, counts nothing."""
        spec = self.drafter.spec
        features = batch.features
        if features is None:
            features = self.target.context_features(batch.input_ids, spec.target_layer_ids)
        ids = block_ids(
            batch.input_ids,
            batch.anchors,
            block_size=spec.block_size,
            mask_token_id=spec.mask_token_id,
        )
        hidden = self.drafter(features, self.target.embed(ids), batch.anchors, batch.anchor_valid)
        weights = self.slot_weights[batch.label_slots % spec.block_size]
        out = self.head(
            hidden.flatten(0, 2).index_select(0, batch.label_slots),
            self.target.head_weight,
            batch.labels,
            weights,
        )
        return StepSums(out.numerator, weights, out.cross_entropy, out.correct)

    def training_step(self, batch: Batch) -> Tensor:
        """Return the numerator of the loss; the denominator follows once all weights are known."""
        s = self.sums(batch)
        slots_of_row = batch.anchors.shape[1] * self.drafter.spec.block_size
        self._statistics.add(
            rows=batch.rows,
            lengths=batch.lengths,
            row_of_label=batch.label_slots // slots_of_row,
            weights=s.weights,
            cross_entropy=s.cross_entropy,
            correct=s.correct,
            padded_tokens=batch.input_ids.numel(),
            anchors=batch.anchor_valid.sum(),
        )
        return s.numerator

    @property
    def _statistics(self) -> StepStatistics:
        if self.statistics is None:
            raise RuntimeError("DFlashModule.setup('fit') must run before a training step.")
        return self.statistics

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn the summed gradient into that of the global ratio, before clipping."""
        strategy = self.trainer.strategy
        totals = self._statistics.reduce(
            lambda sums: strategy.reduce(sums, reduce_op="sum"), extra=list(self.extra.values())
        )
        # DDP averaged over ranks and Lightning divided by the accumulation: undo both, divide by
        # the weight.
        batches = self.trainer.world_size * self.trainer.accumulate_grad_batches
        factor = batches / totals.weight.clamp_min(1e-20)
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, factor.float())
        stats = totals.read()
        summed = dict(zip(self.extra, stats.pop("extra"), strict=True))
        self.extra = dict.fromkeys(self.extra, 0.0)
        self.progress["tokens_seen"] += int(stats["tokens"])
        self.step_stats = {
            **stats,
            "step": self.trainer.global_step,
            "epoch": self._data.epoch,
            "lr": optimizer.param_groups[0]["lr"],
            "tokens_seen": self.progress["tokens_seen"],
            "restart": self.progress["restarts"],
            "wait_seconds": summed["wait_seconds"] / self.trainer.world_size,
            "stop": bool(summed["stop"]),
            "requeue": bool(summed["requeue"]),
            "save": bool(summed["save"]),
        }

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by global norm; a gradient that is not finite skips the update on all ranks."""
        if gradient_clip_algorithm not in (None, "norm"):
            raise ValueError(
                "trainer.gradient_clip_algorithm must be norm, got "
                f"{gradient_clip_algorithm}. Remove the setting."
            )
        norm = torch.nn.utils.clip_grad_norm_(
            self.drafter.parameters(), gradient_clip_val or math.inf
        ).item()
        bad = not math.isfinite(norm)
        skip = bad or self.step_stats["weight"] == 0  # without labels there is nothing to learn
        self.progress["skipped_steps"] += skip
        self.progress["skips_in_a_row"] = self.progress["skips_in_a_row"] + 1 if bad else 0
        self.step_stats |= {"grad_norm": norm, "skipped": int(skip)}
        self._log_step()
        if skip:
            # No gradient at all: AdamW then touches neither weights nor moments nor its step count.
            for parameter in self.drafter.parameters():
                parameter.grad = None

    @property
    def skipped_steps(self) -> int:
        """Updates of the run that were skipped."""
        return self.progress["skipped_steps"]

    def _log_step(self) -> None:
        """Log ratios of global sums: every rank logs the same numbers under the same keys."""
        stats = self.step_stats
        names = ("loss", "accuracy", "rows", "tokens", "labels", "weight", "lr", "grad_norm")
        values = {name: float(stats[name]) for name in names}
        values["padding_fraction"] = 1 - stats["tokens"] / stats["padded_tokens"]
        values["skipped_steps"] = float(self.skipped_steps)
        # Tensors on the CPU: Lightning would copy a number to the device and wait for it.
        tensors = {f"train/{name}": torch.tensor(value) for name, value in values.items()}
        self.log_dict(tensors, batch_size=1)
        self._log_tokens_seen()

    def _log_tokens_seen(self) -> None:
        """The axis on which runs with other batches compare, beside the steps."""
        self.log("tokens_seen", torch.tensor(float(self.progress["tokens_seen"])), batch_size=1)

    # -- validation -----------------------------------------------------------------------------

    def validation_step(self, batch: Batch) -> None:
        """Add a batch to the validation sums."""
        s = self.sums(batch)
        self.val_metrics.update(
            s.cross_entropy, s.weights, s.correct, batch.label_slots, batch.anchors.numel()
        )

    def on_validation_epoch_end(self) -> None:
        """Log ratios of global sums."""
        values = self.val_metrics.compute()
        self.val_metrics.reset()
        for name, value in values.items():
            self.log(f"val/{name}", value, batch_size=1)
        self._log_tokens_seen()

    # -- optimizer ------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW on float32 weights, with a schedule that moves once per optimizer step."""
        self.check_ranks_agree()
        optimizer = make_optimizer(
            self.drafter,
            lr=self.lr,
            betas=self.betas,
            weight_decay=self.weight_decay,
            shard=self.shard_optimizer and self.trainer.world_size > 1,
        )
        total, warmup = self.total_steps(), self.effective_warmup()

        def factor(step: int) -> float:
            return schedule_factor(
                step, warmup_steps=warmup, total_steps=total, schedule=self.schedule
            )

        self.rate_factor = factor
        self._schedule = LambdaLR(optimizer, factor)
        per_step = {"scheduler": self._schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": per_step}
