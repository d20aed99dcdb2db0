"""Runs as the folders that a fit leaves: ``ledger.csv``, written by what writes real ones."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from diagnosis.tallies import tally

from dflash_lightning.batching import Batching
from dflash_lightning.callbacks.ledger_file import LedgerFile
from dflash_lightning.data.run_plan import RunPlan
from dflash_lightning.data.store import RowStore
from dflash_lightning.diagnosis.run import BUCKET_COLUMNS, STEP_COLUMNS, Floats, Run

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
    starts = [*(first for first, _ in run.headers), len(run)]
    assert starts[0] == 0
    for (_, header), (first, end) in zip(run.headers, pairwise(starts), strict=True):
        write_process(
            run.take((run.step >= run.step[first]) & (run.step <= run.step[end - 1])),
            folder,
            header,
        )
    return folder


def write_process(run: Run, folder: Path, header: Mapping[str, Any]) -> None:
    """What one process adds to a run folder; it cuts back what it trains anew."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    file = LedgerFile(folder, header, say=_complain)
    file.resume(int(run.step[0]))
    for at in range(len(run)):
        file.write(row_of(run, at))
    file.close()


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


# -- a run on a store ------------------------------------------------------------------------------


def run_on(
    store: RowStore,
    *,
    epochs: int,
    harder: Floats | None = None,
    world_size: int = 1,
    seed: int = 0,
) -> Run:
    """What a fit on a store might have met: its own plan, and row losses that are drawn.

    Args:
        store: The rows; all are trained on.
        epochs: Of the run.
        harder: What each row costs more than others of its bucket in nats, ``[rows]``.
        world_size: Ranks.
        seed: Of plan and losses.
    """
    rng = np.random.default_rng(seed)
    batching = Batching(token_budget=2048, max_rows=4, num_buckets=2)
    run = RunPlan(store.lengths, batching, seed=seed, world_size=world_size)
    header = _header(run, store)
    visits, sizes, counts = [], [], []
    for epoch in range(epochs):
        run.set_epoch(epoch, 0)
        plan = run.plan
        per_step = plan.batches.sizes.reshape(-1, world_size)
        padded = plan.batches.sizes * plan.batching.padded(plan.longest)
        visits.append(plan.batches.rows)
        sizes.append(per_step.sum(1))
        counts.append(
            np.stack([np.full(len(per_step), epoch), padded.reshape(-1, world_size).sum(1)])
        )
    rows, per_step = np.concatenate(visits), np.concatenate(sizes)
    step = np.repeat(np.arange(len(per_step)), per_step)
    bucket = run.plan.row_buckets(rows)
    weight = store.supervised[rows].astype(float)
    loss = 2 + 3 / np.sqrt(1 + step / 20) + 0.3 * bucket + 0.2 * rng.standard_normal(len(rows))
    loss += 0 if harder is None else harder[rows]
    columns, buckets = tally(
        step,
        bucket,
        rows,
        weight * loss,
        weight,
        np.log(store.lengths[rows]),
        shape=(len(per_step), run.plan.num_buckets),
    )
    epoch, padded = np.concatenate(counts, axis=1).astype(float)
    columns |= {
        "epoch": epoch,
        "padded_tokens": padded,
        "labels": np.bincount(step, weight),
        "lr": np.full(len(epoch), 1e-3),
        "tokens_seen": np.cumsum(columns["tokens"]),
        "skipped": np.zeros(len(epoch)),
        "restart": np.zeros(len(epoch)),
    }
    return Run(
        name="planned",
        kind="simulated",
        headers=((0, header),),
        step=np.arange(len(epoch)),
        columns=columns,
        buckets=buckets,
    )


def _header(run: RunPlan, store: RowStore) -> dict[str, Any]:
    """What names the rows of a run that has not begun."""
    plan = run.plan
    weight = np.bincount(plan.row_buckets(np.arange(len(store))), store.supervised)
    settings = {f"data.batching.{name}": value for name, value in asdict(run.batching).items()}
    settings |= {
        "data.batching.boundaries": list(plan.boundaries),
        "data.seed": run.seed,
        "data.store": store.fingerprint,
        "data.val_fraction": 0.0,
    }
    return {
        "format": 1,
        "boundaries": list(plan.boundaries),
        "weight_share": (weight / weight.sum()).tolist(),
        "warmup_steps": 0,
        "world_size": run.world_size,
        "accumulate": 1,
        "position": run.position(0).to_dict(),
        "step": 0,
        "settings": settings,
        "store": str(store.path),
        "order": run.batching.order,
        "deal": run.batching.deal,
        "plan": plan.fingerprint,
    }


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
