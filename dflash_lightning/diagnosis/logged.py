"""What loggers keep of a run: the names of their columns, and one step made of several rows.

Trainers log the rate in one row and the loss in another, and a run that was killed logs steps
again. A step takes each column from the last row that has it, rows with a loss before others.
"""

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from dflash_lightning.diagnosis.missing import missing_of
from dflash_lightning.diagnosis.run import BUCKET_COLUMNS, Bools, Floats, Ints, Run

# Names that trainers use, the first one that is there counts; in lower case.
NAMES = {
    "step": (
        *("trainer/global_step", "train/global_step", "global_step", "step", "iteration", "iter"),
        "_step",
    ),
    "loss": (
        *("train/loss", "train/loss_step", "train_loss", "train_loss_step", "training_loss"),
        *("loss", "loss_step", "value"),
    ),
    "epoch": ("epoch", "train/epoch"),
    "lr": ("train/lr", "train/learning_rate", "lr", "learning_rate"),
    "grad_norm": ("train/grad_norm", "grad_norm"),
    "weight": ("train/weight",),
    "rows": ("train/rows",),
    "tokens": ("train/tokens",),
    "labels": ("train/labels",),
    "tokens_seen": ("tokens_seen", "train/tokens_seen", "num_tokens_seen"),
    "top_row": ("train/top_row",),
    "top_share": ("train/top_share",),
    "top_pull": ("train/top_pull",),
    "restart": ("train/restart",),
    "skipped_steps": ("train/skipped_steps",),
}
KNOWN = {key: (name, rank) for name, keys in NAMES.items() for rank, key in enumerate(keys)}
BUCKET = re.compile(rf"train/bucket_(\d{{1,3}})/({'|'.join(BUCKET_COLUMNS)})")
BUCKET_NAME = re.compile(rf"({'|'.join(BUCKET_COLUMNS)})_(\d{{1,3}})")
LIGHTNING_RATE = re.compile(r"lr-\w+(/pg1)?")


class Cells:
    """Numbers of a table with many empty cells, column by column.

    Args:
        source: How messages call the table.
        unit: How messages call one of its rows, which are counted from 1.
        names: Its columns, those of no use as well.
    """

    def __init__(self, source: str, unit: str, names: Iterable[str] = ()) -> None:
        self.source = source
        self.unit = unit
        self.names = dict.fromkeys(names)
        self.num_rows = 0
        self._columns: dict[str, tuple[array[int], array[float]]] = {}

    def add(self, row: int, column: str, value: float) -> None:
        """Fill a cell; rows come in rising order."""
        if column not in self._columns:
            self._columns[column] = array("q"), array("d")
        rows, values = self._columns[column]
        rows.append(row)
        values.append(value)
        self.num_rows = row

    @property
    def columns(self) -> list[str]:
        """Columns with a value."""
        return list(self._columns)

    def column(self, name: str) -> tuple[Ints, Floats]:
        """Rows that have a value, int64 ``[n]``, and the values, float64 ``[n]``."""
        rows, values = self._columns[name]
        return np.frombuffer(rows, np.int64), np.frombuffer(values, np.float64)


@cache
def ledger_name(column: str) -> tuple[str, int] | None:
    """The ledger's name of a logged column, and its rank among the names of that; None: no use.

    >>> ledger_name("train/bucket_2/noise"), ledger_name("train/lr"), ledger_name("val/loss")
    (('noise_2', 0), ('lr', 0), None)
    >>> ledger_name("orange - train/loss")  # of a chart that W&B exports
    ('loss', 0)
    """
    key = column.rpartition(" - ")[2].strip().lower()
    bucket = BUCKET.fullmatch(key)
    if bucket:
        return f"{bucket[2]}_{int(bucket[1])}", 0
    if LIGHTNING_RATE.fullmatch(key):
        return "lr", len(NAMES["lr"])
    return KNOWN.get(key)


def run_of_cells(
    cells: Cells,
    *,
    name: str,
    kind: str,
    headers: Iterable[tuple[int, Mapping[str, Any]]] = (),
    marks: Iterable[tuple[int, int]] = (),
) -> Run:
    """The run that was logged.

    Args:
        cells: Its table, with at least a step and a loss.
        name: How reports call the run.
        kind: What it was read from, in words.
        headers: Of each process in turn: its first step, and what it says of the run.
        marks: Restarts: a row, and the step that came next; earlier rows of that step and of
            later ones are void.

    Raises:
        ValueError: Columns are missing or ambiguous, steps are no whole numbers, or there is none.
    """
    chosen = _choose(cells)
    marks = list(marks)
    loss_rows, step_of_row = _loss_rows(cells, chosen)
    valid = np.ones(len(loss_rows), np.bool_)
    for row, first in marks:
        valid &= (loss_rows > row) | (step_of_row[loss_rows] < first)
    step = np.unique(step_of_row[loss_rows[valid]])
    at = np.minimum(np.searchsorted(step, step_of_row), len(step) - 1)
    at = np.where(step[at] == step_of_row, at, -1)
    has_loss = np.zeros(len(at), np.bool_)
    has_loss[loss_rows] = True
    values = {
        ledger: _filled(*cells.column(column), at, has_loss, len(step))
        for ledger, column in chosen.items()
        if ledger != "step"
    }
    columns = {ledger: x for ledger, x in values.items() if not BUCKET_NAME.fullmatch(ledger)}
    _restarts_and_skips(columns, step, [first for _, first in marks])
    buckets = bucket_arrays(values, len(step))
    told = {int(np.searchsorted(step, first)): header for first, header in headers}
    return Run(
        name=name,
        kind=kind,
        headers=tuple((i, header) for i, header in sorted(told.items()) if i < len(step)),
        missing=missing_of(step, columns, buckets, has_header=bool(told)),
        step=step,
        columns=columns,
        buckets=buckets,
    )


def falls(cells: Cells) -> list[tuple[int, int]]:
    """Where logged steps go back, as they do at a restart: row and step, the marks of a run."""
    rows, step_of_row = _loss_rows(cells, _choose(cells))
    rises = np.diff(step_of_row[rows])
    if (rises < 0).sum() > (rises > 0).sum():  # a file that begins with the newest step
        return []
    at = np.flatnonzero(rises < 0) + 1
    return [(int(rows[i]) - 1, int(step_of_row[rows[i]])) for i in at]


def bucket_arrays(values: Mapping[str, Floats], count: int) -> dict[str, Floats]:
    """Columns ``loss_0``, ``weight_0``, ... as arrays ``[T, K]``; none where no loss is there.

    Args:
        values: Columns by name, float64 ``[T]``.
        count: Steps (T).
    """
    found = [BUCKET_NAME.fullmatch(name) for name in values]
    known = [int(match[2]) for match in found if match and match[1] == "loss"]
    if not known:
        return {}
    absent = np.full(count, np.nan)
    return {
        name: np.stack([values.get(f"{name}_{k}", absent) for k in range(max(known) + 1)], 1)
        for name in BUCKET_COLUMNS
    }


def first_bad_step(values: Floats) -> int | None:
    """Position of the first value that is no step, which is a whole number from 0 on."""
    good = (values >= 0) & (values < 2**53)
    good &= np.floor(np.where(good, values, 0)) == values
    return None if good.all() else int(np.argmin(good))


# -- helpers --------------------------------------------------------------------------------------


def _choose(cells: Cells) -> dict[str, str]:
    """The column to take for each name of the ledger."""
    found: dict[str, list[tuple[int, str]]] = {}
    for column in cells.columns:
        known = ledger_name(column)
        if known:
            found.setdefault(known[0], []).append((known[1], column))
    for name in ("step", "loss"):
        if name not in found:
            raise _not_found(cells, name)
    chosen = {}
    for name, columns in found.items():
        rank = min(columns)[0]
        best = [column for number, column in columns if number == rank]
        if len(best) == 1:
            chosen[name] = best[0]
        elif name in ("step", "loss"):
            raise ValueError(
                f"{cells.source} must be of one run, and has {len(best)} columns of the {name}: "
                f"{_listed(best)}. Keep one of them."
            )
    return chosen


def _not_found(cells: Cells, name: str) -> ValueError:
    """Why there is no step, or no loss."""
    if name in {known[0] for known in map(ledger_name, cells.names) if known}:
        return ValueError(f"{cells.source} must hold steps with a loss, and no row has a {name}.")
    return ValueError(
        f"{cells.source} must have a column of the {name}, called {_listed(NAMES[name])}; its "
        f"columns are {_listed(cells.names) or 'none'}. Give a CSV with step and loss."
    )


def _loss_rows(cells: Cells, chosen: Mapping[str, str]) -> tuple[Ints, Ints]:
    """Rows with step and loss, int64 ``[n]``, and the step of every row, -1 where it has none."""
    rows, values = cells.column(chosen["step"])
    bad = first_bad_step(values)
    if bad is not None:
        raise ValueError(
            f"{cells.source}, {cells.unit} {rows[bad]}: {chosen['step']} must be a whole number "
            f"from 0 on, got {values[bad]:g}."
        )
    step_of_row = np.full(cells.num_rows + 1, -1)
    step_of_row[rows] = values.astype(np.int64)
    loss_rows, _ = cells.column(chosen["loss"])
    loss_rows = loss_rows[step_of_row[loss_rows] >= 0]
    if not len(loss_rows):
        raise ValueError(
            f"{cells.source} must have a {chosen['step']} and a {chosen['loss']} in one row, and "
            "no row has both."
        )
    return loss_rows, step_of_row


def _filled(rows: Ints, values: Floats, at: Ints, has_loss: Bools, count: int) -> Floats:
    """A column for the steps, float64 ``[T]``: the last row that has it, rows with a loss first.

    Args:
        rows: Rows that have a value, int64 ``[n]``.
        values: The values, float64 ``[n]``.
        at: Position of each row's step, int64 ``[rows]``; -1 for a step that is not kept.
        has_loss: Whether a row has a loss, bool ``[rows]``.
        count: Steps (T).
    """
    filled = np.full(count, np.nan)
    for of_loss in (False, True):
        some = (has_loss[rows] == of_loss) & (at[rows] >= 0)
        filled[at[rows[some]]] = values[some]  # of equal positions NumPy assigns the last
    return filled


def _restarts_and_skips(columns: dict[str, Floats], step: Ints, restarts: Sequence[int]) -> None:
    """Make columns of the ledger from what is logged in their place."""
    if "restart" in columns:
        columns["restart"] = _carried(columns["restart"])
    elif restarts:
        columns["restart"] = np.searchsorted(np.sort(restarts), step, side="right").astype(float)
    if "skipped_steps" in columns:  # of the run so far
        total = _carried(columns.pop("skipped_steps"))
        more = np.diff(total, prepend=0.0 if step[0] == 0 else total[0]) > 0
        columns["skipped"] = np.where(np.isnan(total), np.nan, more)
    if "epoch" in columns:  # some trainers count parts of one
        columns["epoch"] = np.floor(columns["epoch"])


def _carried(values: Floats) -> Floats:
    """A column whose gaps take the value before them, float64 ``[T]``."""
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, np.arange(len(values))))
    return np.where(last < 0, np.nan, values[last])


def _listed(names: Iterable[str]) -> str:
    """Names of columns for a message, the first few of them."""
    names = list(names)
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
