"""The Lightning module: one training step, the global ratio, the optimizer and its warm-up."""

import math
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from dflash_lightning.data.collate import Batch
from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.drafter.model import Drafter, init_from_target, init_random
from dflash_lightning.functional.anchors import block_ids
from dflash_lightning.functional.objective import ChunkedHead, decay_gamma, position_weights
from dflash_lightning.functional.schedule import Schedule, schedule_factor
from dflash_lightning.metrics import BlockMetrics
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


class DFlashModule(L.LightningModule):
    """Trains a drafter for a frozen target.

    The loss is one ratio over all ranks and accumulated batches: sum of weighted losses over sum of
    weights.

    Args:
        target: The frozen target (verifier).
        drafter: The dials of the drafter.
        init: ``target`` starts from the target's final norm, last layers and an averaging fusion
            where shapes allow; ``random`` does not.
        loss_decay_gamma: Decay constant of the position weights in tokens; null is the paper's for
            the block size.
        lr: Peak learning rate.
        warmup_ratio: Share of the optimizer steps in which the rate rises.
        warmup_steps: The same in optimizer steps; wins over the ratio.
        schedule: How the rate falls after the warm-up.
        weight_decay: On matrices only.
        betas: Of AdamW.
        seed: Of the random start.
    """

    def __init__(
        self,
        target: HFTarget,
        drafter: DrafterConfig = DrafterConfig(),
        init: Literal["target", "random"] = "target",
        loss_decay_gamma: float | None = None,
        lr: float = 6e-4,
        warmup_ratio: float = 0.04,
        warmup_steps: int | None = None,
        schedule: Schedule = "cosine",
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        seed: int = 0,
    ) -> None:
        super().__init__()
        if lr <= 0 or not 0 <= warmup_ratio < 1 or (warmup_steps or 0) < 0:
            raise ValueError(
                "lr must be positive, warmup_ratio in [0, 1) and warmup_steps not negative, "
                f"got {lr}, {warmup_ratio} and {warmup_steps}."
            )
        if (loss_decay_gamma is not None and loss_decay_gamma <= 0) or weight_decay < 0:
            raise ValueError(
                "loss_decay_gamma must be positive and weight_decay not negative, "
                f"got {loss_decay_gamma} and {weight_decay}."
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {betas}.")
        self.target = target
        self.drafter = Drafter(drafter.for_target(target.config))
        self.init = init
        self.lr = lr
        self.warmup_ratio = warmup_ratio
        self.warmup_steps = warmup_steps
        self.schedule: Schedule = schedule
        self.weight_decay = weight_decay
        self.betas = betas
        spec = self.drafter.spec
        gamma = loss_decay_gamma if loss_decay_gamma is not None else decay_gamma(spec.block_size)
        weights = torch.cat([torch.zeros(1), position_weights(spec.block_size, gamma)])
        self.register_buffer("slot_weights", weights, persistent=False)
        self.head = ChunkedHead()
        self.val_metrics = BlockMetrics(spec.block_size)
        self.step_stats: dict[str, float] = {}
        self.skipped_steps = 0
        self._pending: Tensor | None = None
        self._fresh = True
        init_random(self.drafter, seed)

    # -- before the first step ------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Load the target onto this rank's device and start the drafter from it."""
        self.target.load(self.device)
        if stage == "fit":
            if self.trainer.precision == "16-mixed":
                raise ValueError(
                    "trainer.precision must not be 16-mixed: sums of losses overflow. Use "
                    "bf16-mixed or 32-true."
                )
            if self.init == "target" and self._fresh:
                init_from_target(self.drafter, list(self.target.layers), self.target.norm_weight)
            self._fresh = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Weights come from a file: check that they were trained for this target."""
        if self._trainer is not None and self._trainer.state.fn == "fit":
            raise ValueError(
                "ckpt_path must not be given to fit: a run cannot be continued from a checkpoint. "
                "Use it with validate, or export its drafter."
            )
        self._fresh = False
        if "dflash" not in checkpoint:
            raise ValueError(
                "ckpt_path must be a checkpoint that dflash-lightning fit wrote; this one was "
                "written by something else. Give one of a run folder's checkpoints."
            )
        found = checkpoint["dflash"]
        spec = self.drafter.spec.to_dict()
        differing = {k: (v, spec[k]) for k, v in found["spec"].items() if v != spec[k]}
        if differing:
            raise ValueError(
                "the checkpoint's drafter differs from model.drafter in "
                + ", ".join(f"{k} ({a} there, {b} here)" for k, (a, b) in differing.items())
                + ". Give the settings in the run folder's config.yaml."
            )
        if self.target.is_loaded and found["target_fingerprint"] != self.target.fingerprint:
            raise ValueError(
                f"the checkpoint was trained for target {found['target']} (fingerprint "
                f"{found['target_fingerprint']}), this run has {self.target.path} "
                f"({self.target.fingerprint}). Give the same target."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name the target; its weights are not in the file."""
        checkpoint["dflash"] = {
            "spec": self.drafter.spec.to_dict(),
            "target": self.target.path,
            "target_fingerprint": self.target.fingerprint,
        }

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
        counts = [
            len(batch.rows),
            int(batch.lengths.sum()),
            batch.input_ids.numel(),
            len(batch.labels),
        ]
        sums = torch.stack(
            [s.weights.double().sum(), s.numerator.detach().double(), s.correct.double().sum()]
        )
        sums = torch.cat([sums, torch.tensor(counts, dtype=torch.float64, device=sums.device)])
        self._pending = sums if self._pending is None else self._pending + sums
        return s.numerator

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        """Turn the summed gradient into that of the global ratio, before clipping."""
        total = self.trainer.strategy.reduce(self._pending, reduce_op="sum")
        self._pending = None
        weight = total[0]
        # DDP averaged over ranks and Lightning divided by the accumulation: undo both, divide by
        # the weight.
        factor = (
            self.trainer.world_size * self.trainer.accumulate_grad_batches / weight.clamp_min(1e-20)
        )
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, factor.float())
        self._log_step(total)

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
        )
        skip = not torch.isfinite(norm) or self.step_stats["weight"] == 0
        self.skipped_steps += skip
        self.log("train/grad_norm", norm, batch_size=1)
        self.log("train/skipped_steps", float(self.skipped_steps), batch_size=1)
        if skip:
            # No gradient at all: AdamW then touches neither weights nor moments nor its step count.
            for parameter in self.drafter.parameters():
                parameter.grad = None

    def _log_step(self, total: Tensor) -> None:
        """Log ratios of global sums: every rank logs the same numbers under the same keys."""
        weight, numerator, correct, rows, tokens, padded, labels = total.tolist()
        stats = {
            "loss": numerator / max(weight, 1e-20),
            "accuracy": correct / max(labels, 1),
            "rows": rows,
            "tokens": tokens,
            "labels": labels,
            "weight": weight,
            "padding_fraction": 1 - tokens / padded,
        }
        self.step_stats = stats
        for name, value in stats.items():
            self.log(f"train/{name}", value, batch_size=1)
        self.log("train/lr", self.trainer.optimizers[0].param_groups[0]["lr"], batch_size=1)

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

    # -- optimizer ------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW on float32 weights, with a schedule that moves once per optimizer step."""
        matrices = [p for p in self.drafter.parameters() if p.dim() > 1]
        vectors = [p for p in self.drafter.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas)
        total = self.total_steps()
        warmup = (
            self.warmup_steps if self.warmup_steps is not None else round(self.warmup_ratio * total)
        )

        def factor(step: int) -> float:
            return schedule_factor(
                step, warmup_steps=warmup, total_steps=total, schedule=self.schedule
            )

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        per_step = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": per_step}

    def total_steps(self) -> int:
        """Optimizer steps of the run, from the plans of all its epochs."""
        trainer: Any = self.trainer
        epochs = trainer.max_epochs
        if epochs in (None, -1):
            if trainer.max_steps == -1:
                raise ValueError(
                    "trainer.max_epochs or trainer.max_steps must be set: the schedule ends with "
                    "the run. Set max_epochs."
                )
            return trainer.max_steps
        at_most = None if trainer.max_steps == -1 else trainer.max_steps
        return trainer.datamodule.num_steps(epochs, at_most=at_most)
