"""Going on with a run: which checkpoint, whether it fits, and what changed since.

A checkpoint is complete when its file is: it is written under another name and renamed, and the
table at the end of the archive, without which nothing reads it, is the last thing written.
"""

import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dflash_lightning.drafter.config import spec_differences
from dflash_lightning.table import Table

# Settings that a checkpoint decides whatever the configuration says.
KEPT = {"model.warmup_steps": "a warm-up is not repeated"}
# Settings that decide which rows make a batch: fixed while an epoch is under way.
PLANNED = ("data.batching.", "data.seed", "data.store", "data.val_fraction")
FIXED = "data.batching.boundaries"
# Follows from the edges of the buckets, which are compared themselves.
FREE = ("data.batching.num_buckets",)


class Change(NamedTuple):
    """A setting that is not what it was when the checkpoint was written.

    Args:
        setting: Its name.
        saved: In the checkpoint.
        given: In the configuration.
        used: What holds from now on, and why.
    """

    setting: str
    saved: Any
    given: Any
    used: str


def compare_settings(
    saved: Mapping[str, Any], given: Mapping[str, Any], *, mid_epoch: bool
) -> list[Change]:
    """What changed, and which value holds.

    Args:
        saved: Settings in the checkpoint, by full name.
        given: Those of the configuration.
        mid_epoch: Whether part of an epoch is left.

    Raises:
        ValueError: A setting that decides the rest of the epoch changed within it.
    """
    changes = []
    # Edges last: others decide them, and are what was changed.
    for name, value in sorted(given.items(), key=lambda item: item[0] == FIXED):
        before = saved.get(name)
        if name not in saved or before == value:
            continue
        if name == FIXED:
            raise ValueError(
                f"{name} must stay {shown(before)} for the whole run: its curves are per bucket, "
                f"got {shown(value)}. Give them, or start a new run from this one's weights with "
                "model.init."
            )
        if mid_epoch and name.startswith(PLANNED) and name not in FREE:
            raise ValueError(
                f"{name} must stay {shown(before)} until the epoch ends: the rest of it is planned "
                f"with that, got {shown(value)}. Give the old value, or resume from a checkpoint "
                "at an epoch's end."
            )
        why = KEPT.get(name)
        used = f"{shown(before)} ({why})" if why else f"{shown(value)}{_note(name, mid_epoch)}"
        changes.append(Change(name, before, value, used))
    return changes


def _note(name: str, mid_epoch: bool) -> str:
    dealt = name in ("trainer.world_size", "trainer.accumulate_grad_batches")
    return " (the rest of the epoch is dealt anew)" if dealt and mid_epoch else ""


def shown(value: Any) -> str:
    """A setting as a user would write it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def changes_table(changes: Iterable[Change]) -> str:
    """The changes as a table."""
    rows = [(c.setting, shown(c.saved), shown(c.given), c.used) for c in changes]
    title = "Settings that changed since the checkpoint"
    return Table(title, ("setting", "checkpoint", "config", "used"), rows, "llll").text()


# -- which checkpoint ------------------------------------------------------------------------------


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """A checkpoint of ``fit``, its tensors still on disk; None where the file is not complete."""
    if not zipfile.is_zipfile(path):
        return None
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError):
        return None
    return found if isinstance(found, dict) and "dflash" in found else None


def newest_complete(folders: Iterable[Path]) -> tuple[Path | None, list[Path]]:
    """The newest complete checkpoint in some run folders, and the newer ones that are not complete.

    Args:
        folders: Run folders; each keeps its files in ``checkpoints``.
    """
    found = [path for folder in folders for path in (folder / "checkpoints").glob("*.ckpt")]
    broken = []
    for path in sorted(found, key=_age):
        if can_resume(read_checkpoint(path)):
            return path, broken
        broken.append(path)
    return None, broken


def _age(path: Path) -> tuple[int, bool]:
    """Newest first; of files equally old the one that is replaced most often."""
    return -path.stat().st_mtime_ns, path.stem != "last"


def can_resume(checkpoint: Mapping[str, Any] | None) -> bool:
    """Whether a checkpoint holds all that goes on, and not only weights."""
    return bool(checkpoint) and bool(checkpoint.get("optimizer_states")) and "loops" in checkpoint


def check_resumable(checkpoint: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that holds weights only.

    Raises:
        ValueError: There is no optimizer state or no position in it.
    """
    if not can_resume(checkpoint):
        raise ValueError(
            "ckpt_path must be a checkpoint with optimizer state to be resumed; this one holds "
            "weights only. To start a new run from its weights give it as model.init."
        )


# -- where runs are -------------------------------------------------------------------------------


def run_root(trainer: Any) -> Path:
    """The folder of run folders that a trainer's configuration names."""
    given = csv_logger(trainer)
    if given is not None:
        return Path(given["save_dir"]) / (given.get("name") or "")
    first = first_logger(trainer)
    return Path(
        (first and first["init_args"].get("save_dir")) or trainer["default_root_dir"] or "."
    )


def run_version(trainer: Any) -> str | None:
    """The run folder that it names, if it names one."""
    version = (csv_logger(trainer) or {}).get("version")
    return f"version_{version}" if isinstance(version, int) else version


def csv_logger(trainer: Any) -> Any:
    """Arguments of the logger that decides the run folder; None without one."""
    logger = first_logger(trainer)
    return logger["init_args"] if logger and logger["class_path"].endswith("CSVLogger") else None


def first_logger(trainer: Any) -> Any:
    """The logger that decides where a run's files are; None without one."""
    loggers = trainer["logger"]
    first = next(iter(loggers), None) if isinstance(loggers, list) else loggers
    return None if isinstance(first, bool) else first


# -- whether it fits -------------------------------------------------------------------------------


def check_drafter(found: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another drafter.

    Args:
        found: The checkpoint's record.
        spec: What the configuration describes.

    Raises:
        ValueError: They differ.
    """
    differences = spec_differences(found["spec"], spec)
    if differences:
        raise ValueError(
            f"the checkpoint's drafter differs from model.drafter in {differences}. Give the "
            "settings in the run folder's config.yaml."
        )


def record_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What this project wrote into a checkpoint beside Lightning's own.

    Raises:
        ValueError: Something else wrote it.
    """
    if "dflash" not in checkpoint:
        raise ValueError(
            "ckpt_path must be a checkpoint that dflash-lightning fit wrote; this one was "
            "written by something else. Give one of a run folder's checkpoints."
        )
    return checkpoint["dflash"]
