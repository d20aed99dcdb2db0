"""Validation before the first step and after the last."""

import lightning as L
from lightning.pytorch.callbacks import Callback


class ValidateAtBothEnds(Callback):
    """Validates before the first step, and after the last where ``max_steps`` ends an epoch early.

    Lightning's sanity check logs nothing, and a run cut by ``max_steps`` would end without a
    number for the drafter that it leaves.
    """

    def __init__(self) -> None:
        self.validated_step = -1

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember when the last validation was."""
        self.validated_step = trainer.global_step

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validate at the last step unless that was done; before the checkpoint is ranked."""
        last = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if last and trainer.enable_validation and self.validated_step != trainer.global_step:
            self._validate(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Run the whole validation at step 0."""
        if trainer.global_step == 0 and trainer.enable_validation:
            self._validate(trainer)

    @staticmethod
    def _validate(trainer: L.Trainer) -> None:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
