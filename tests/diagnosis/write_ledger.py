"""Runs as the folders that a fit leaves: ``ledger.csv``, written by what writes real ones."""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lightning.callbacks.ledger_file import LedgerFile
from dflash_lightning.diagnosis.run import BUCKET_COLUMNS, STEP_COLUMNS, Run

WHOLE = ("epoch", "skipped", "rows", "tokens", "padded_tokens", "anchors", "labels")
WHOLE += ("tokens_seen", "top_row", "restart")
CONFIG = "seed_everything: 0\n"  # of a run folder; nobody but its user reads it


def write_ledger(run: Run, folder: Path) -> Path:
    """Write a run into a folder, a process for each of its headers.

    Args:
        run: With at least one header; what is NaN stays empty, but for a loss, which is no number.
        folder: Made where it is not there.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    starts = [*(first for first, _ in run.headers), len(run)]
    assert starts[0] == 0
    for (_, header), (first, end) in zip(run.headers, pairwise(starts), strict=True):
        file = LedgerFile(folder, header, say=_complain)
        file.resume(int(run.step[first]))
        for at in range(first, end):
            file.write(row_of(run, at))
        file.close()
    return folder


def row_of(run: Run, at: int) -> dict[str, Any]:
    """The step at a position as the trainer hands it to the file."""
    row: dict[str, Any] = {"step": int(run.step[at]), "loss": float(run.loss[at])}
    for name in STEP_COLUMNS:
        if name not in row:
            row[name] = _cell(run.column(name)[at], whole=name in WHOLE)
    for name in BUCKET_COLUMNS:
        row[f"{name}_k"] = [_cell(x, whole=name == "rows") for x in run.bucket(name)[at]]
    return row


def _cell(value: float, *, whole: bool) -> float | int | None:
    if np.isnan(value):
        return None
    return int(value) if whole else float(value)


def _complain(line: str) -> None:
    raise AssertionError(line)


# -- less than a ledger ----------------------------------------------------------------------------


def write_curve(run: Run, path: Path) -> Path:
    """The bare curve of a run: step and loss."""
    lines = [f"{step},{loss:.7g}" for step, loss in zip(run.step, run.loss, strict=True)]
    path.write_text("\n".join(["step,loss", *lines]) + "\n")
    return path


def write_metrics(run: Run, folder: Path) -> Path:
    """What Lightning's CSVLogger has of a run that logs its loss and its rate."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = [run.column("epoch"), run.step, run.loss, run.column("lr")]
    lines = [",".join(f"{x:.7g}" for x in cells) for cells in zip(*columns, strict=True)]
    (folder / "metrics.csv").write_text(
        "\n".join(["epoch,step,train/loss,lr-AdamW", *lines]) + "\n"
    )
    return folder


# -- JSON ------------------------------------------------------------------------------------------


def strict_json(text: str) -> Mapping[str, Any]:
    """What a text in JSON says; NaN and the infinities, which are none, are refused."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(word: str) -> float:
    raise AssertionError(f"{word} is no JSON")
