"""A module that goes on where it was stopped: what a checkpoint says, and what comes of it."""

from typing import Any

import lightning as L
import torch
from torch.optim.lr_scheduler import LambdaLR

from dflash_lightning.checkpoints import (
    Change,
    check_drafter,
    check_resumable,
    compare_settings,
    record_of,
)
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.data.loops import keep_step_axis
from dflash_lightning.data.run_plan import Position
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.functional.optimizer import set_rates
from dflash_lightning.functional.schedule import Schedule
from dflash_lightning.functional.step_statistics import StepStatistics
from dflash_lightning.step import Objective
from dflash_lightning.target import HFTarget


class ResumableModule(L.LightningModule):
    """Counts how far a run is, writes it into checkpoints and goes on from them.

    Weights, moments and schedule are Lightning's business; here are the plan's position, the
    counters, the warm-up that must not repeat, and the settings that may have changed.
    """

    target: HFTarget
    drafter: Drafter
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    warmup_ratio: float
    warmup_steps: int | None
    schedule: Schedule
    objective: Objective
    _schedule: LambdaLR

    def __init__(self) -> None:
        super().__init__()
        self.statistics: StepStatistics | None = None
        self.starts_fresh = True
        self._begin_run()

    def _begin_run(self) -> None:
        """Count from nothing: the module may have been trained in another run before."""
        self.progress = {"tokens_seen": 0, "skipped_steps": 0, "skips_in_a_row": 0, "restarts": 0}
        self.changes: list[Change] = []
        self.resumed: Position | None = None
        self.resumed_step = 0
        self._kept_warmup: int | None = None

    @property
    def _data(self) -> DFlashDataModule:
        data = vars(self.trainer).get("datamodule")
        if not isinstance(data, DFlashDataModule):
            raise ValueError(
                "trainer.fit must be given a DFlashDataModule as datamodule, got "
                f"{type(data).__name__}."
            )
        return data

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
        return self._data.num_steps(epochs, at_most=at_most)

    def _warmup(self, total: int) -> int:
        given = self.warmup_steps
        return given if given is not None else round(self.warmup_ratio * total)

    def effective_warmup(self) -> int:
        """Optimizer steps in which the rate rises; a restart keeps those of the first start."""
        kept = self._kept_warmup
        return kept if kept is not None else self._warmup(self.total_steps())

    def settings(self) -> dict[str, Any]:
        """What a run depends on, by full name, in plain types."""
        trainer = self.trainer
        return {
            "model.lr": self.lr,
            "model.schedule": self.schedule,
            "model.warmup_steps": self._warmup(self.total_steps()),
            "model.weight_decay": self.weight_decay,
            "model.betas": list(self.betas),
            **self.objective.settings(),
            "model.target.dtype": self.target.dtype,
            **self._data.settings(),
            "trainer.world_size": trainer.world_size,
            "trainer.accumulate_grad_batches": trainer.accumulate_grad_batches,
            "trainer.precision": str(trainer.precision),
            "trainer.gradient_clip_val": trainer.gradient_clip_val,
            "trainer.max_epochs": trainer.max_epochs,
            "trainer.max_steps": trainer.max_steps,
            "optimizer steps in all": self.total_steps(),
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name the target, whose weights are not in the file, and say how far the run is."""
        checkpoint["dflash"] = {
            "spec": self.drafter.spec.to_dict(),
            "target": self.target.path,
            "target_fingerprint": self.target.fingerprint,
        }
        if self.trainer.state.fn == "fit" and self.statistics is not None:
            checkpoint["dflash"] |= {
                "settings": {
                    **self.settings(),
                    "model.warmup_steps": self.effective_warmup(),
                },
                "position": self._data.position().to_dict(),
                "progress": {**self.progress, "statistics": self.statistics.state_dict()},
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint is of this drafter and target; under ``fit``, go on from it."""
        self.starts_fresh = False
        found = record_of(checkpoint)
        check_drafter(found, self.drafter.spec.to_dict())
        if self.target.is_loaded and found["target_fingerprint"] != self.target.fingerprint:
            raise ValueError(
                f"the checkpoint was trained for target {found['target']} (fingerprint "
                f"{found['target_fingerprint']}), this run has {self.target.path} "
                f"({self.target.fingerprint}). Give the same target."
            )
        if self._trainer is not None and self._trainer.state.fn == "fit":
            self._resume(checkpoint)

    def _resume(self, checkpoint: dict[str, Any]) -> None:
        """Go on with plan, counters and warm-up; before optimizer and schedule are made."""
        check_resumable(checkpoint)
        found = checkpoint["dflash"]
        position = Position.from_dict(found["position"])
        progress = dict(found["progress"])
        self._data.run_plan.keep_boundaries(found["settings"])
        given = {**self._data.settings(), "trainer.world_size": self.trainer.world_size}
        compare_settings(found["settings"], given, mid_epoch=position.is_mid_epoch)
        assert self.statistics is not None  # made in setup
        ranks = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        self.statistics = StepStatistics(self._data.plan.boundaries, **ranks)
        self.statistics.load_state_dict(progress.pop("statistics"))
        again = {"restarts": progress["restarts"] + 1, "skips_in_a_row": 0}
        self.progress = {**progress, **again}
        self._data.resume(checkpoint, position)
        given = self.settings()
        self.changes = compare_settings(found["settings"], given, mid_epoch=position.is_mid_epoch)
        self.resumed, self.resumed_step = position, checkpoint["global_step"]
        self._kept_warmup = found["settings"]["model.warmup_steps"]

    def on_train_start(self) -> None:
        """After a restart the optimizer's state brought old rates back: give it the settings."""
        optimizer = self.trainer.optimizers[0]
        if self.progress["restarts"]:
            set_rates(
                optimizer,
                self._schedule,
                lr=self.lr,
                betas=self.betas,
                weight_decay=self.weight_decay,
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Log the step under its own number."""
        keep_step_axis(self.trainer)

    def check_ranks_agree(self) -> None:
        """Refuse ranks that go on from different files: DDP would align nothing but weights.

        Call it before anything else that ranks do together.

        Raises:
            ValueError: They stand at different places.
        """
        run, reduce = self._data.run_plan, self.trainer.strategy.reduce
        own = [self.resumed_step, run.epoch, run.first_step, self.progress["restarts"]]
        low, high = (
            reduce(torch.tensor(own, device=self.device), reduce_op=op).tolist()
            for op in ("min", "max")
        )
        if low != high:
            raise ValueError(
                "ckpt_path must be the same file on all ranks; they are at optimizer steps "
                f"{low[0]} to {high[0]}. Give the file by name, on a disk that all nodes see."
            )
