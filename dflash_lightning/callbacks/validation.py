"""Validation before the first step and after the last."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from dflash_lightning.callbacks.run import parts


class ValidateAtBothEnds(Callback):
    """Validates before the first step, and after the last where ``max_steps`` ends an epoch early.

    Lightning's sanity check logs nothing, and a run cut by ``max_steps`` would end without a
    number for the drafter that it leaves. A run that was stopped between a step and the validation
    behind it, or within it, gets that validation when it goes on.
    """

    def __init__(self) -> None:
        self.validated_step = -1
        self.cut = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember when the last validation was."""
        self.validated_step = trainer.global_step

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validate at the last step unless that was done; before the checkpoint is ranked."""
        last = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if last and trainer.enable_validation and self.validated_step != trainer.global_step:
            self._validate(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Run the whole validation at step 0, or the one that a stop cut off."""
        due = self._was_due(trainer) and self.validated_step != trainer.global_step
        owed, self.cut = due or self.cut, False
        if (trainer.global_step == 0 or owed) and trainer.enable_validation:
            self._validate(trainer)

    @staticmethod
    def _was_due(trainer: L.Trainer) -> bool:
        """Whether a validation belongs behind the step at which the run was stopped."""
        position = parts(trainer)[0].resumed
        every, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
        if position is None or not position.segments or not isinstance(interval, int | float):
            return False
        _, accumulate, steps = position.segments[-1]
        batches = steps * accumulate
        if every is None:
            batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        elif (position.epoch + 1) % every:
            return False
        if isinstance(interval, float):
            of_epoch = batches if position.finished else trainer.num_training_batches
            interval = max(1, int(of_epoch * interval))
        return batches % interval == 0

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """A validation that a stop cut off is run again, as a whole."""
        self.cut = checkpoint.get("validation_cut", False)

    def state_dict(self) -> dict[str, Any]:
        """When the last validation was."""
        return {"validated_step": self.validated_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.validated_step = state_dict["validated_step"]

    @staticmethod
    def _validate(trainer: L.Trainer) -> None:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
