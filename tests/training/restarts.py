"""Runs that are stopped and taken up again, for the tests of restarts."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from training.faults import CrashError

from dflash_lightning import Batching, DFlashDataModule, DFlashModule, DrafterConfig, RandomTarget
from dflash_lightning.callbacks import (
    AtomicCheckpointIO,
    Ledger,
    ResumePoints,
    RunReport,
    Stopped,
    ValidateAtBothEnds,
)
from dflash_lightning.data.store import RowStore

BATCHING = {"token_budget": 400, "max_rows": 2, "num_buckets": 2}
EPOCHS = 3
DEFAULTS = {
    "max_epochs": EPOCHS,
    "gradient_clip_val": 1.0,
    "enable_checkpointing": True,
    "logger": False,
}


class Watch(Callback):
    """Remembers what every step was given, when it was validated, and the state after a step."""

    def __init__(self, snapshot: int | None = None) -> None:
        self.rows: dict[int, list[int]] = {}
        self.anchors: dict[int, list[list[int]]] = {}
        self.epochs: dict[int, int] = {}
        self.rates: dict[int, float] = {}
        self.validated: list[int] = []
        self.snapshot = snapshot
        self.state: dict[str, torch.Tensor] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        step = trainer.global_step
        self.rows[step] = batch.rows.tolist()
        self.anchors[step] = batch.anchors.tolist()
        self.epochs[step] = trainer.current_epoch
        self.rates[step] = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.snapshot:
            self.state = state_of(trainer)

    def on_validation_end(self, trainer, pl_module) -> None:
        self.validated.append(trainer.global_step)


def state_of(trainer: L.Trainer) -> dict[str, torch.Tensor]:
    """Weights and moments, copied."""
    state = {n: p.detach().clone() for n, p in trainer.lightning_module.named_parameters()}
    for number, moments in enumerate(trainer.optimizers[0].state.values()):
        state |= {f"{number}.{name}": value.clone() for name, value in moments.items()}
    return state


class Run(NamedTuple):
    """One process of a run."""

    watch: Watch
    trainer: L.Trainer
    error: BaseException | None

    @property
    def steps_of_epochs(self) -> list[int]:
        epochs = list(self.watch.epochs.values())
        return [epochs.count(epoch) for epoch in sorted(set(epochs))]


def make_module(seed: int = 0, **settings: Any) -> DFlashModule:
    dials = DrafterConfig(num_layers=1, block_size=4, target_layer_ids=(0, 2), mask_token_id=500)
    return DFlashModule(
        RandomTarget(seed=seed), dials, **{"lr": 3e-3, "warmup_steps": 5} | settings
    )


def run(
    store: RowStore,
    folder: Path,
    *extra: Callback,
    ckpt: Path | None = None,
    module: DFlashModule | None = None,
    data: dict[str, Any] | None = None,
    saves: int = 1000,
    snapshot: int | None = None,
    **settings: Any,
) -> Run:
    """Train in this process until the end, a stop, or a crash."""
    values = {"batching": Batching(**BATCHING), "num_workers": 0, "val_fraction": 0.2}
    watch = Watch(snapshot)
    own = [ValidateAtBothEnds(), RunReport(), Ledger(), watch, *extra]
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=[*own, ResumePoints(saves, None)],
        plugins=[AtomicCheckpointIO()],
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **DEFAULTS | settings,
    )
    datamodule = DFlashDataModule(str(store.path), **values | (data or {}))
    error = None
    try:
        trainer.fit(module or make_module(), datamodule=datamodule, ckpt_path=ckpt)
    except (Stopped, CrashError) as end:
        error = end
    return Run(watch, trainer, error)


def last(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


# -- over processes ------------------------------------------------------------------------------

RECORD = {"class_path": "training.chain.RecordRows"}


def fault(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"training.faults.{name}", "init_args": arguments}


def said(folder: Path, number: int = 0) -> str:
    return (folder / f"log-{number}.txt").read_text()


def csv_logger(folder: Path) -> dict[str, Any]:
    arguments = {"save_dir": str(folder), "name": "runs"}
    return {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": arguments}


def wandb_logger(folder: Path, **more: Any) -> dict[str, Any]:
    arguments = {"save_dir": str(folder), "project": "tests", "offline": True, **more}
    return {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": arguments}


def both_loggers(folder: Path, **more: Any) -> list[dict[str, Any]]:
    return [csv_logger(folder), wandb_logger(folder, **more)]


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs" / "version_0" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))
