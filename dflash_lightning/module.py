"""The Lightning module: one training step, the global ratio, the optimizer and its warm-up."""

import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from dflash_lightning.data.collate import Batch
from dflash_lightning.drafter.backends import AttentionChoice
from dflash_lightning.drafter.checkpoint import load_weights
from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.drafter.start import init_from_target, init_random
from dflash_lightning.functional.head import Goal
from dflash_lightning.functional.objective import Weighting
from dflash_lightning.functional.optimizer import check_rates, make_optimizer, scale_and_clip
from dflash_lightning.functional.schedule import Schedule, schedule_factor
from dflash_lightning.functional.step_statistics import StepStatistics
from dflash_lightning.functional.step_totals import StepTotals
from dflash_lightning.metrics import BlockMetrics
from dflash_lightning.phases import PhaseClock
from dflash_lightning.resume import ResumableModule
from dflash_lightning.step import Objective, StepSums
from dflash_lightning.target import HFTarget


class DFlashModule(ResumableModule):
    """Trains a drafter for a frozen target.

    The loss is one ratio over all ranks and accumulated batches: sum of weighted losses over sum of
    weights.

    Args:
        target: The frozen target (verifier).
        drafter: The dials of the drafter.
        init: ``target`` starts from the target's last layers, half its final norm and an averaging
            fusion where shapes allow; ``random`` does not; the path of an exported drafter or of a
            checkpoint starts a new run from its weights.
        goal: What a slot should predict: ``ce`` the token of the data; ``argmax`` the target's most
            likely token; ``kl`` the target's distribution. The latter two run all of the target.
        weighting: ``decay`` weighs slots by their position; ``dpace`` by how far the drafter is
            likely to get, from its own probabilities.
        loss_decay_gamma: Decay constant of ``decay`` in tokens; null is the paper's for the block
            size.
        dpace_alpha: Floor of the smoothed probabilities of ``dpace``.
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
        attention: What computes the drafter's attention: ``flex`` is one compiled kernel for GPUs,
            ``sdpa`` runs anywhere, ``auto`` is flex on a GPU that has it and sdpa elsewhere.
        max_skipped_steps: Updates in a row that may be skipped as not finite before the run ends.
    """

    _totals: StepTotals

    def __init__(
        self,
        target: HFTarget,
        drafter: DrafterConfig = DrafterConfig(),
        init: str = "target",
        goal: Goal = "ce",
        weighting: Weighting = "decay",
        loss_decay_gamma: float | None = None,
        dpace_alpha: float = 0.5,
        lr: float = 6e-4,
        warmup_ratio: float = 0.04,
        warmup_steps: int | None = None,
        schedule: Schedule = "cosine",
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        seed: int = 0,
        shard_optimizer: bool = False,
        activation_checkpointing: bool = False,
        attention: AttentionChoice = "auto",
        max_skipped_steps: int = 10,
    ) -> None:
        super().__init__()
        check_rates(lr, warmup_ratio, warmup_steps, weight_decay, betas)
        if max_skipped_steps < 1:
            raise ValueError(f"max_skipped_steps must be at least 1, got {max_skipped_steps}.")
        self.target = target
        self.drafter = Drafter(
            drafter.for_target(target.config),
            attention=attention,
            checkpoint_layers=activation_checkpointing,
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
        self.objective = Objective(
            self.drafter.spec,
            goal=goal,
            weighting=weighting,
            loss_decay_gamma=loss_decay_gamma,
            dpace_alpha=dpace_alpha,
        )
        self.val_metrics = BlockMetrics(self.drafter.spec.block_size)
        self.step_stats: dict[str, Any] = {}
        self.phases = PhaseClock()  # stands still until someone asks
        # of this rank; summed over ranks with the statistics
        self.extra = dict.fromkeys(("wait_seconds", "stop", "requeue", "save"), 0.0)
        init_random(self.drafter, seed)

    @property
    def goal(self) -> Goal:
        """What a slot should predict."""
        return self.objective.goal

    # -- before the first step ------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Load the target onto this rank's device and start the drafter from it."""
        self.target.load(self.device)
        data = self._data
        self.drafter.reserve(self.device, data.batching.token_budget, data.most_anchors)
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
        return self.objective(self.target, self.drafter, batch, self.phases)

    def training_step(self, batch: Batch) -> Tensor:
        """Return the numerator of the loss; the denominator follows once all weights are known."""
        s = self.sums(batch)
        slots_of_row = batch.anchors.shape[1] * self.drafter.spec.block_size
        self._statistics.add(
            rows=batch.rows,
            lengths=batch.lengths,
            row_of_label=batch.label_slots // slots_of_row,
            weights=s.weights,
            losses=s.losses,
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

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        """Sum the statistics over ranks; nothing is read yet."""
        strategy = self.trainer.strategy
        self._totals = self._statistics.reduce(
            lambda sums: strategy.reduce(sums, reduce_op="sum"), extra=list(self.extra.values())
        )

    def _read_step(self, rate: float, totals: StepTotals, grad_norm: Tensor) -> None:
        """Read the step's numbers with its one wait for the device.

        Args:
            rate: Learning rate of the step.
            totals: Sums over ranks.
            grad_norm: Norm of the gradient of the global ratio, before clipping.
        """
        stats = totals.read(grad_norm)
        summed = dict(zip(self.extra, stats.pop("extra"), strict=True))
        self.extra = dict.fromkeys(self.extra, 0.0)
        self.progress["tokens_seen"] += int(stats["tokens"])
        self.step_stats = {
            **stats,
            "step": self.trainer.global_step,
            "epoch": self._data.epoch,
            "lr": rate,
            "tokens_seen": self.progress["tokens_seen"],
            "restart": self.progress["restarts"],
            "wait_seconds": summed["wait_seconds"] / self.trainer.world_size,
            "stop": bool(summed["stop"]),
            "requeue": bool(summed["requeue"]),
            "save": bool(summed["save"]),
        }

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Turn the summed gradient into that of the global ratio, and clip it by global norm.

        A gradient that is not finite skips the update on all ranks.
        """
        if gradient_clip_algorithm not in (None, "norm"):
            raise ValueError(
                "trainer.gradient_clip_algorithm must be norm, got "
                f"{gradient_clip_algorithm}. Remove the setting."
            )
        # DDP averaged over ranks and Lightning divided by the accumulation: undo both, divide by
        # the weight.
        batches = self.trainer.world_size * self.trainer.accumulate_grad_batches
        factor = batches / self._totals.weight.clamp_min(1e-20)
        norm = scale_and_clip(self.drafter.parameters(), factor, gradient_clip_val)
        self._read_step(optimizer.param_groups[0]["lr"], self._totals, norm)
        bad = not math.isfinite(self.step_stats["grad_norm"])
        skip = bad or self.step_stats["weight"] == 0  # without labels there is nothing to learn
        self.progress["skipped_steps"] += skip
        self.progress["skips_in_a_row"] = self.progress["skips_in_a_row"] + 1 if bad else 0
        self.step_stats["skipped"] = int(skip)
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
            s.losses, s.weights, s.correct, batch.label_slots, batch.anchors.numel()
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
