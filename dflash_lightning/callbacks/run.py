"""What every callback asks of a run: its parts, its folder, a line on the terminal."""

import sys
from pathlib import Path
from typing import TypeVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.module import DFlashModule

C = TypeVar("C", bound=Callback)


def parts(trainer: L.Trainer) -> tuple[DFlashModule, DFlashDataModule]:
    """The module and the data module of a run.

    Raises:
        ValueError: If the trainer was given others.
    """
    module, data = trainer.lightning_module, vars(trainer).get("datamodule")
    if not isinstance(module, DFlashModule) or not isinstance(data, DFlashDataModule):
        raise ValueError(
            "trainer.fit must be given a DFlashModule and a DFlashDataModule, got "
            f"{type(module).__name__} and {type(data).__name__}."
        )
    return module, data


def callbacks_of(trainer: L.Trainer, kind: type[C]) -> list[C]:
    """The callbacks of a kind that a run has."""
    return [callback for callback in vars(trainer)["callbacks"] if isinstance(callback, kind)]


def run_folder(trainer: L.Trainer) -> Path:
    """Where a run leaves its files; call it on all ranks, since Lightning broadcasts the answer."""
    return Path(trainer.log_dir or trainer.default_root_dir)


@rank_zero_only
def say(line: str) -> None:
    """Print a line on rank 0, above any bar."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
