"""What goes wrong in a run, as callbacks that the command line can name."""

import resource
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger


class Poison(Callback):
    """Makes the loss, or one gradient, of a rank not finite, before ranks share gradients.

    Args:
        first: First optimizer step, from 0.
        last: Last one.
        rank: Whose.
        what: ``loss`` spoils the drafter's output, ``gradient`` a gradient behind a good loss.
    """

    def __init__(
        self,
        first: int,
        last: int = 10**9,
        rank: int = 0,
        what: Literal["loss", "gradient"] = "loss",
    ) -> None:
        self.first, self.last, self.rank, self.what = first, last, rank, what
        self.active = False

    def on_train_start(self, trainer, pl_module) -> None:
        def spoiled(value: torch.Tensor) -> torch.Tensor:
            return value * float("nan") if self.active else value

        if trainer.global_rank != self.rank:
            return
        if self.what == "loss":
            pl_module.drafter.register_forward_hook(lambda _module, _args, out: spoiled(out))
        else:
            pl_module.drafter.fc.weight.register_hook(spoiled)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.active = self.first <= trainer.global_step <= self.last

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.active = False


class FullDisk(Callback):
    """Lets no file grow beyond a size for some steps: what a full disk does to a large file.

    Args:
        first: First optimizer step, from 0.
        last: Last one.
        size: In bytes; a ledger is smaller, a checkpoint larger.
    """

    def __init__(self, first: int, last: int, size: int = 100_000) -> None:
        self.first, self.last, self.size = first, last, size
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        full = self.first <= trainer.global_step <= self.last
        soft = self.size if full else self.before[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, self.before[1]))

    def on_exception(self, trainer, pl_module, exception) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer, pl_module, stage) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


class LogsBeside(Callback):
    """Gives W&B a value of its own at every step, without saying which step it is."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                logger.experiment.log({"beside": trainer.global_step})


class Crash(Callback):
    """Raises at the start of a step: the process ends without a word to anyone.

    Args:
        step: Optimizer step, from 0.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            raise CrashError


class CrashError(Exception):
    """Stands for whatever ends a process."""


class LogsRanked(Callback):
    """Logs a given value at each validation, for a monitor.

    Args:
        values: By optimizer steps done.
    """

    def __init__(self, values: dict[int, float]) -> None:
        self.values = values

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("val/given", self.values[trainer.global_step], batch_size=1)
