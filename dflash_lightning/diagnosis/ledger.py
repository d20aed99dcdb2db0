"""Reads runs: ``ledger.csv`` itself, and whatever else a run is found in."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lightning.diagnosis.curves import read_curve
from dflash_lightning.diagnosis.logged import bucket_arrays, first_bad_step
from dflash_lightning.diagnosis.missing import missing_of
from dflash_lightning.diagnosis.run import STEP_COLUMNS, Floats, Ints, Run
from dflash_lightning.diagnosis.tracker import offline_files, read_offline, read_online, run_path

CHUNK = 500  # rows that are parsed at a time: they stay in the processor's cache
ACCEPTED = (
    "a run folder with ledger.csv or metrics.csv or the folder above its version_N, one of these "
    "files, a CSV with step and loss, an offline W&B folder, or ENTITY/PROJECT/RUN_ID of W&B"
)


def read_run(source: str | Path, *, name: str | None = None) -> Run:
    """The steps of a run, from whatever is left of it.

    Args:
        source: A run folder; the folder above ``version_0``, ``version_1``, ..., of which the
            newest counts; a ``ledger.csv`` or ``metrics.csv``; a CSV with steps and losses; a
            folder or file that W&B wrote offline; or ``ENTITY/PROJECT/RUN_ID`` of a run on W&B,
            also as its address or after ``wandb:``. A file or folder that exists comes first.
        name: How reports call the run; None takes it from the source.

    Raises:
        ValueError: There is no run in the source, or it cannot be read; one line.
    """
    path = Path(source)
    if not str(source).startswith("wandb:"):
        if path.is_dir():
            return _read_folder(path, name)
        if path.is_file():
            return _read_file(path, name)
    online = run_path(str(source))
    # What begins like a folder that is there is a mistake in the rest of the path.
    if online is None or (path.parts and Path(path.parts[0]).is_dir()):
        raise ValueError(f"{source} must be {ACCEPTED}; nothing of that name is there.")
    return read_online(online, name=name)


def read_ledger(path: Path, *, name: str) -> Run:
    """The run in a ledger.

    A last line without an end, which a killed process left, does not count. Of rows with the same
    step the last one does. Columns may be in any order; step and loss are needed.

    Args:
        path: The file.
        name: How reports call the run.

    Raises:
        ValueError: A line cannot be read, with its number; or there is no step.
    """
    headers, names, rows, numbers = _divide(path)
    table = _table(path, names, rows, numbers)
    values = dict(zip(names, table, strict=True))
    bad = first_bad_step(values["step"])
    if bad is not None:
        raise ValueError(
            f"{path}, line {numbers[bad]}: step must be a whole number from 0 on, got "
            f"{values['step'][bad]:g}. Mend or remove the line."
        )
    steps = values["step"].astype(np.int64)
    order = _last_of_each(steps)
    if np.any(order != np.arange(len(steps))[: len(order)]):
        values = {name: column[order] for name, column in values.items()}
    columns = {x: values[x] for x in STEP_COLUMNS[1:] if x in values}
    buckets = bucket_arrays(values, len(order))
    return Run(
        name=name,
        kind="ledger",
        headers=_positions(headers, order, len(steps)),
        missing=missing_of(steps[order], columns, buckets, has_header=bool(headers)),
        step=steps[order],
        columns=columns,
        buckets=buckets,
    )


# -- what a source is -----------------------------------------------------------------------------


def _read_folder(folder: Path, name: str | None) -> Run:
    versions = sorted(folder.glob("version_*"), key=_version, reverse=True)
    for file in ("ledger.csv", "metrics.csv"):
        for place in (folder, *versions):
            if (place / file).is_file():
                return _read_file(place / file, name)
    files = offline_files(folder)
    if not files:
        raise ValueError(
            f"{folder} must hold a run, and has neither ledger.csv nor metrics.csv, also in no "
            f"version_N, nor files of an offline W&B run. Give {ACCEPTED}."
        )
    return read_offline(files, name=name)


def _read_file(path: Path, name: str | None) -> Run:
    if path.suffix == ".wandb":
        return read_offline([path], name=name)
    name = _name_of(path) if name is None else name
    return read_ledger(path, name=name) if _is_ledger(path) else read_curve(path, name=name)


def _version(folder: Path) -> tuple[int, str]:
    number = re.fullmatch(r"version_(\d+)", folder.name)
    return (int(number[1]) if number else -1), folder.name


def _name_of(path: Path) -> str:
    """A run's name after its folder, or after a file of another name than the usual ones."""
    path = path.absolute()
    if path.name not in ("ledger.csv", "metrics.csv"):
        return path.stem
    folder = path.resolve().parent
    return f"{folder.parent.name}/{folder.name}" if _version(folder)[0] >= 0 else folder.name


def _is_ledger(path: Path) -> bool:
    """Whether a CSV has the ledger's header, columns or name."""
    with path.open("rb") as file:
        first = file.readline(100_000)
    return path.name == "ledger.csv" or first.startswith(b"# ") or b",loss_0," in first


# -- the ledger -----------------------------------------------------------------------------------

Headers = list[tuple[int, Mapping[str, Any]]]


def _divide(path: Path) -> tuple[Headers, list[str], list[bytes], list[int]]:
    """Headers with the count of rows before them, names of columns, rows, and their line numbers.

    Raises:
        ValueError: A header is no JSON, a name is missing, or there is no row.
    """
    data = path.read_bytes()
    *lines, _ = (data.replace(b"\r\n", b"\n") if b"\r" in data else data).split(b"\n")
    headers: Headers = []
    columns = b""
    rows: list[bytes] = []
    numbers: list[int] = []
    for number, line in enumerate(lines, 1):
        if line.startswith(b"#"):
            headers.append((len(rows), _header(path, number, line)))
        elif not columns:
            columns = line
        elif line not in (b"", columns):
            rows.append(line)
            numbers.append(number)
    names = [name.strip() for name in columns.decode("utf-8-sig", "replace").split(",")]
    lacking = [name for name in ("step", "loss") if name not in names]
    if columns and lacking:
        raise ValueError(
            f"{path} must have the columns step and loss, and lacks {' and '.join(lacking)}; it "
            f"has {', '.join(names)[:200]}."
        )
    if not rows:
        raise ValueError(f"{path} must hold steps, and holds no finished one.")
    return headers, names, rows, numbers


def _header(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    try:
        header = json.loads(line[1:])
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ValueError(
            f"{path}, line {number}: a line that begins with # must be an object in JSON, got "
            f"{line[:40].decode(errors='replace')!r}. Mend or remove the line."
        )
    return header


def _table(path: Path, names: Sequence[str], rows: list[bytes], numbers: Sequence[int]) -> Floats:
    """All cells as numbers, float64 ``[columns, rows]``; NaN where a cell is empty.

    JSON's parser does the work, as it is the fastest at hand that takes no mistake for a number.
    What it refuses is read again cell by cell.
    """
    width = len(names)
    for row, number in zip(rows, numbers, strict=True):
        if row.count(b",") != width - 1:
            raise ValueError(
                f"{path}, line {number}: a row must have {width} cells, as the line of names has, "
                f"got {row.count(b',') + 1}. Mend or remove the line."
            )
    table = np.empty((width, len(rows)))
    for first in range(0, len(rows), CHUNK):
        some = rows[first : first + CHUNK]
        try:
            cells = _quickly(some)
        except ValueError:
            cells = _slowly(path, names, some, numbers[first:])
        table[:, first : first + CHUNK] = np.array(cells, np.float64).reshape(-1, width).T
    return table


def _quickly(rows: list[bytes]) -> list[float]:
    """Cells of rows as numbers.

    Raises:
        ValueError: At least one of them is none, or is none in JSON.
    """
    text = b",".join([b"", *rows, b""])
    others = text.translate(None, b"0123456789.,+-e")
    if others.translate(None, b"inaf"):  # JSON has words and lists as well
        raise ValueError
    if others:
        text = text.replace(b"nan", b"NaN").replace(b"inf", b"Infinity")
    text = text.replace(b",,", b",NaN,").replace(b",,", b",NaN,")
    return json.loads(b"[" + text[1:-1] + b"]")


def _slowly(
    path: Path, names: Sequence[str], rows: list[bytes], numbers: Sequence[int]
) -> list[float]:
    """Cells of rows as numbers, or which of them is none."""
    cells = []
    for row, number in zip(rows, numbers, strict=False):
        for name, cell in zip(names, row.decode(errors="replace").split(","), strict=True):
            try:
                cells.append(float(cell) if cell.strip() else np.nan)
            except ValueError:
                raise ValueError(
                    f"{path}, line {number}: {name} must be a number or empty, got {cell[:40]!r}. "
                    "Mend or remove the line."
                ) from None
    return cells


def _last_of_each(steps: Ints) -> Ints:
    """Positions of the last row of each step, by rising step, int64 ``[T]``."""
    if np.all(np.diff(steps) > 0):
        return np.arange(len(steps))
    _, last = np.unique(steps[::-1], return_index=True)
    return len(steps) - 1 - last


def _positions(
    headers: Headers, order: Ints, count: int
) -> tuple[tuple[int, Mapping[str, Any]], ...]:
    """Headers with the position of their first row that counts; those without one are left out."""
    starts = [*(first for first, _ in headers), count]
    found: list[tuple[int, Mapping[str, Any]]] = []
    for (first, header), end in zip(headers, starts[1:], strict=True):
        own = np.flatnonzero((order >= first) & (order < end))
        found += [(int(own[0]), header)] if len(own) else []
    return tuple(sorted(found, key=lambda x: x[0]))
