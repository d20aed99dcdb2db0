"""Checkpoints to go on from: at intervals, at a stop signal, after too many skipped updates."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import WandbLogger

from dflash_lightning.callbacks.run import parts, run_folder, say
from dflash_lightning.callbacks.run_lock import RunLock, check_writable
from dflash_lightning.callbacks.stop_signals import StopSignals, requeue_job

STOPPED = 75  # "try again later" (sysexits.h): stopped with a checkpoint to go on from


class Stopped(BaseException):
    """The run ended before its last step, with a checkpoint.

    Args:
        reason: One line for the user.
        code: Exit code: 75 where the same command may simply go on.
    """

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


class ResumePoints(Checkpoint):
    """Keeps ``last.ckpt`` and the one before it, ``previous.ckpt``, and stops at step boundaries.

    SIGTERM, SIGINT or SIGUSR1 to any rank lets all ranks finish the step, save one checkpoint and
    leave with exit code 75. ``fit --ckpt_path auto`` goes on from the newest complete one.

    Args:
        every_n_steps: Optimizer steps between saves.
        every_minutes: Minutes between saves, whichever comes first; null for steps alone.
    """

    def __init__(self, every_n_steps: int = 1000, every_minutes: float | None = 30.0) -> None:
        if every_n_steps < 1 or (every_minutes is not None and every_minutes <= 0):
            raise ValueError(
                "every_n_steps must be at least 1 and every_minutes positive or null, got "
                f"{every_n_steps} and {every_minutes}."
            )
        self.every_n_steps = every_n_steps
        self.every_minutes = every_minutes
        self.signals = StopSignals()
        self.saved_step = -1
        self._saved_at = 0.0
        self._stopping = self._validation_cut = False
        self._folder = Path()
        self._lock = RunLock()

    def __str__(self) -> str:
        minutes = "" if self.every_minutes is None else f" or {self.every_minutes:g} minutes"
        return f"every {self.every_n_steps:,} optimizer steps{minutes}"

    # -- when -----------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a folder that cannot be written, while nothing is lost yet."""
        if stage == "fit":
            self._stopping = self._validation_cut = False
            self.signals.expect()
            folder = run_folder(trainer)
            check_writable(folder)
            self._lock.take(trainer, folder)
            self._folder = folder / "checkpoints"

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give back signals and folder."""
        if stage == "fit":
            self.signals.give_back(trainer)
        self._lock.release()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """The same where the run ends early."""
        self.teardown(trainer, pl_module, str(trainer.state.fn and trainer.state.fn.value))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over the signals; Lightning registered its own handlers before."""
        self._saved_at = time.monotonic()
        self.saved_step = trainer.global_step
        self.signals.take_over(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The validation before the first step comes before this class is told of the start."""
        if trainer.state.fn == "fit":
            self.signals.take_over(trainer)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        """Let wish and clock of each rank ride on the reduction of the step's statistics."""
        extra = parts(trainer)[0].extra
        extra["stop"], extra["requeue"] = float(self.signals.asked), float(self.signals.requeue)
        late = self.every_minutes is not None and (
            time.monotonic() - self._saved_at > 60 * self.every_minutes
        )
        extra["save"] = float(late)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save or stop where a step ends; every rank comes to the same decision."""
        if trainer.fit_loop._should_accumulate():
            return
        module, data = parts(trainer)
        stats, step = module.step_stats, trainer.global_step
        if stats["skipped"]:
            say(skipped_line(stats, data.rows_of_step(stats["step"])))
        if module.progress["skips_in_a_row"] >= module.max_skipped_steps:
            self.stop(trainer, f"{module.max_skipped_steps} updates in a row were not finite", 1)
        if stats["stop"]:
            self.signals.requeue = stats["requeue"]
            self.stop(trainer, "a signal asked for it", STOPPED)
        if step % self.every_n_steps == 0 or stats["save"]:
            self.save(trainer)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_args: Any, **_more: Any
    ) -> None:
        """Stop within a validation too, which may take longer than a scheduler waits."""
        if trainer.state.fn != "fit":
            return
        wishes = torch.tensor([self.signals.asked, self.signals.requeue], device=pl_module.device)
        stop, requeue = trainer.strategy.reduce(wishes.float(), reduce_op="sum").tolist()
        if stop:
            self._validation_cut, self.signals.requeue = True, bool(requeue)
            self.stop(trainer, "a signal asked for it", STOPPED)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the end of the run: more epochs may follow."""
        if self.saved_step != trainer.global_step:
            self.save(trainer)

    # -- how ------------------------------------------------------------------------------------

    def save(self, trainer: L.Trainer) -> bool:
        """Write ``last.ckpt`` on all ranks together; the file before becomes ``previous.ckpt``.

        Returns:
            Whether the file is there. A disk that fails is said aloud and ends nothing: the files
            from before are still whole.
        """
        self._saved_at = time.monotonic()
        new = self._folder / "next.ckpt"
        if trainer.is_global_zero:
            with suppress(OSError):  # what a killed process left must not be taken for the new file
                new.unlink(missing_ok=True)
        for logger in trainer.loggers:
            logger.save()  # what is logged up to here is not lost with the process
        trainer.save_checkpoint(new, weights_only=False)
        saved = trainer.strategy.broadcast(trainer.is_global_zero and self._rotate(new))
        if saved:
            self.saved_step = trainer.global_step
        return saved

    def _rotate(self, new: Path) -> bool:
        """Give the new file its name; False where the disk refuses."""
        last = self._folder / "last.ckpt"
        try:
            if not new.exists():
                return False  # said by the writer
            if last.exists():
                last.replace(self._folder / "previous.ckpt")
            new.replace(last)
        except OSError as error:
            say(f"NOT SAVED {last}: {error}. Free or mount its disk.")
            return False
        return True

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Say whether the process ended with this file, and so had the time to close its logs."""
        checkpoint["stopped"] = self._stopping
        checkpoint["validation_cut"] = self._validation_cut

    def stop(self, trainer: L.Trainer, why: str, code: int) -> None:
        """Save, and leave on all ranks.

        Raises:
            Stopped: Always.
        """
        self.signals.ignore()
        self._stopping = True
        saved = self.save(trainer)
        if not self._validation_cut:
            # Lightning logs a step after this hook: not any more, if nothing is said here.
            trainer._logger_connector.on_batch_end()
            trainer._logger_connector.update_train_step_metrics()
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                logger.experiment.mark_preempting()
        where = self._folder / "last.ckpt"
        if self.signals.requeue and trainer.is_global_zero and saved:
            requeue_job()
        go_on = "; go on with --ckpt_path auto" if code == STOPPED else ""
        done = f"stopped after step {trainer.global_step}, as {why}"
        line = f"{done}; saved {where}{go_on}"
        raise Stopped(
            line if saved else f"stopped without a checkpoint: {why}", code if saved else 1
        )


def skipped_line(stats: dict[str, Any], rows: list[int]) -> str:
    """What to say of a skipped update: rows whose loss is not finite, else those of the step."""
    if not stats["weight"]:
        return f"step {stats['step']}: update skipped, nothing to learn in rows {few(rows)}"
    bad = stats["bad_rows"]
    which = f"the loss of rows {bad} is not finite" if bad else f"it is from rows {few(rows)}"
    return f"step {stats['step']}: update skipped, gradient norm {stats['grad_norm']:g}; {which}"


def few(rows: list[int], most: int = 12) -> str:
    """The first of some rows, and how many more there are."""
    more = f" and {len(rows) - most} more" if len(rows) > most else ""
    return f"{rows[:most]}{more}"
