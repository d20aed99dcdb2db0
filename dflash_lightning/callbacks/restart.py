"""One run over all its processes: the same folder, the same files, the same W&B run."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from dflash_lightning.callbacks.ledger_file import last_rows
from dflash_lightning.callbacks.resume_points import ResumePoints
from dflash_lightning.callbacks.run import callbacks_of, run_folder, say
from dflash_lightning.callbacks.step_values import BY_MODULE, step_values

WANDB_MARGIN = 10_000  # W&B steps that a killed process may have used after its last checkpoint
WANDB_UNWRITTEN = 500  # rows that may be in memory when W&B is killed: it writes 32 KB at a time


def join_run(trainer: L.Trainer, checkpoint: Mapping[str, Any], path: Path) -> None:
    """Let loggers go on where a checkpoint's run stopped: same run folder, same W&B run.

    A checkpoint from another place starts a new folder.

    Args:
        trainer: Its loggers have written nothing yet.
        checkpoint: What is read from ``path``.
        path: ``RUN/checkpoints/FILE``.
    """
    folder = path.absolute().parent.parent
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and folder.parent == Path(logger.root_dir).absolute():
            logger._version = folder.name
            if trainer.is_global_zero:
                _append_to_metrics(logger)
        elif isinstance(logger, WandbLogger) and logger._id is None and "wandb" in checkpoint:
            logger._id = logger._wandb_init["id"] = checkpoint["wandb"]["id"]


def _append_to_metrics(logger: CSVLogger) -> None:
    """Open ``metrics.csv`` for more rows; Lightning would delete what is there."""
    path = Path(logger.log_dir) / "metrics.csv"
    aside = path.with_name("metrics.csv.part")
    if path.is_file():
        path.replace(aside)
    if not aside.is_file():
        return
    writer: Any = logger.experiment
    aside.replace(path)
    with path.open(newline="") as file:
        writer.metrics_keys = next(csv.reader(file), [])


class WandbRun(Callback):
    """Keeps a run's id in its checkpoints, and never lets W&B stop a run or wait for a keyboard."""

    def __init__(self) -> None:
        self.folder = Path()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Ask where the run's files are; Lightning broadcasts the answer to all ranks."""
        self.folder = run_folder(trainer)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep id and step: a later process goes on with both."""
        logger = wandb_logger(trainer)
        if logger is not None and trainer.is_global_zero:
            run: Any = logger.experiment
            checkpoint["wandb"] = {"id": run.id, "step": run.step}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Let no value be lost.

        W&B drops those whose own step does not rise: go on well above the steps used. And what a
        killed process logged last was still in memory: log it again from the run's own files.
        """
        logger = wandb_logger(trainer)
        saved = checkpoint.get("wandb")
        if logger is None or saved is None or not trainer.is_global_zero:
            return
        run: Any = logger.experiment
        if run.id != saved["id"]:
            return
        step, restarts = checkpoint["global_step"], checkpoint["dflash"]["progress"]["restarts"]
        saver = next(iter(callbacks_of(trainer, ResumePoints)), None)
        margin = max(WANDB_MARGIN, 3 * saver.every_n_steps if saver else 0)
        first = max(run.step, saved["step"] + margin)
        mark = {"restart": restarts + 1, "trainer/global_step": step}
        run.log(mark, first, commit=True)  # else it would share a row with what comes next
        if checkpoint.get("stopped"):
            return  # W&B had the time to write everything
        rows = last_rows(self.folder / "ledger.csv", WANDB_UNWRITTEN)
        rows = [row for row in rows if row["restart"] == restarts and row["step"] < step]
        for row in rows:
            values = {name: row[name] for name in BY_MODULE} | step_values(row)
            axes = {"trainer/global_step": int(row["step"]), "tokens_seen": row["tokens_seen"]}
            named = {f"train/{name}": value for name, value in values.items()}
            run.log({**named, **axes, "epoch": row["epoch"]})
        if rows:
            for values in logged_between(self.folder / "metrics.csv", int(rows[0]["step"]), step):
                run.log(values)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say how to upload what was written to disk."""
        logger = wandb_logger(trainer)
        if logger is not None and trainer.is_global_zero:
            run: Any = logger.experiment
            if run.settings._offline:
                say(f"W&B run {run.id} is on disk: wandb sync {Path(run.dir).parent}")


def open_wandb(trainer: L.Trainer) -> None:
    """Open the run on rank 0; without a key or a network it is written to disk.

    Call it before ``trainer.fit``: Lightning opens every logger before any callback is asked.
    """
    logger = wandb_logger(trainer)
    if logger is None or not trainer.is_global_zero:
        return
    import wandb

    if not logger._offline and not _has_key():
        say("W&B: no API key, so the run is written to disk; upload it later with wandb sync")
        logger._wandb_init["mode"] = "offline"
    try:
        _ = logger.experiment
    except wandb.errors.Error as error:
        reason = " ".join(str(error).split())[:200]
        say(f"W&B could not be reached, so the run is written to disk: {reason}")
        logger._wandb_init["mode"] = "offline"
        _ = logger.experiment


def logged_between(path: Path, first: int, last: int) -> list[dict[str, float]]:
    """Validations and diagnoses in ``metrics.csv``, as W&B gets them; none where there is no file.

    Args:
        path: The file.
        first: Step of the first row that is wanted.
        last: Of the last one. Validations count the steps that are done; diagnoses are of a step,
            from 0, and so not of this one.
    """
    if not path.is_file():
        return []
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            step = row.get("step") or ""
            # Only these have a value of their kind.
            kinds = {"val/": row.get("val/loss"), "diagnosis/": row.get("diagnosis/verdict")}
            kind = next((name for name, value in kinds.items() if value), None)
            if kind is None or not step.isdigit():
                continue
            if first <= int(step) <= last - (kind == "diagnosis/"):
                values = {k: float(v) for k, v in row.items() if k.startswith(kind) and v}
                found.append({**values, "trainer/global_step": int(step)})
    return found


def wandb_logger(trainer: L.Trainer) -> WandbLogger | None:
    """The W&B logger of a run, if it has one."""
    return next((x for x in trainer.loggers if isinstance(x, WandbLogger)), None)


def _has_key() -> bool:
    import wandb

    mode = os.environ.get("WANDB_MODE", "online")
    return mode != "online" or bool(wandb.api.api_key)
