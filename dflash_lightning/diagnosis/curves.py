"""Reads tables of other loggers: Lightning's ``metrics.csv``, and a CSV of steps and losses."""

import csv
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from dflash_lightning.diagnosis.logged import Cells, falls, ledger_name, run_of_cells
from dflash_lightning.diagnosis.run import Run


def read_curve(path: Path, *, name: str) -> Run:
    """The run in a CSV file.

    A step in several rows takes each column from the last row that has it. Where the steps of a
    ``metrics.csv`` go back, the run was restarted, and the rows that it left are void; another
    file may be in any order.

    Args:
        path: With a line of column names, among them a step and a loss under one of the names that
            trainers use; or two columns of numbers without names.
        name: How reports call the run.

    Raises:
        ValueError: Columns are missing or ambiguous, a cell is no number, or there is no step.
    """
    cells = Cells(str(path), "line")
    is_lightning = _fill(cells, path)
    return run_of_cells(
        cells,
        name=name,
        kind="Lightning's metrics.csv" if is_lightning else "CSV of a loss",
        marks=falls(cells) if is_lightning else (),
    )


def _fill(cells: Cells, path: Path) -> bool:
    """Read the columns that have a meaning; whether Lightning wrote them."""
    lines = (line for line in _lines(path) if line[1])
    first = next(lines, (0, [], False))
    names = [name.strip() for name in first[1]]
    if all(_is_number(name) for name in names):
        _check_headless(path, names)
        names, lines = ["step", "loss"], chain([first], lines)
    cells.names = dict.fromkeys(names)
    wanted = [(i, name) for i, name in enumerate(names) if ledger_name(name)]
    for number, row, is_cut in lines:
        if is_cut and not _is_whole(row, len(names)):  # the process was killed while it wrote
            break
        if len(row) != len(names):
            raise ValueError(
                f"{path}, line {number}: a row must have {len(names)} cells, as the line of names "
                f"has, got {len(row)}. Mend or remove the line."
            )
        for i, name in wanted:
            cell = row[i].strip()
            if cell:
                cells.add(number, name, _number(path, number, name, cell))
    return path.name == "metrics.csv" or {"epoch", "step"} <= set(names)


def _lines(path: Path) -> Iterator[tuple[int, list[str], bool]]:
    """Number and cells of each line, and whether it is the last one and has no end."""
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        unfinished = file.read() not in (b"\n", b"\r")
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as text:
        reader = csv.reader(text)
        number, row = 0, []
        try:
            for following in reader:
                if number:
                    yield number, row, False
                number, row = reader.line_num, following
        except csv.Error as error:
            line = reader.line_num
            raise ValueError(f"{path}, line {line}: must be CSV, but {error}.") from error
        if number:
            yield number, row, unfinished


def _check_headless(path: Path, first: list[str]) -> None:
    """Refuse a file without names whose columns cannot be guessed."""
    if not first:
        raise ValueError(f"{path} must hold steps with a loss, and is empty.")
    if len(first) != 2:
        raise ValueError(
            f"{path}, line 1: must name the columns, as more than step and loss are there; got "
            f"{len(first)} numbers. Put a line of names before them."
        )


def _is_whole(row: list[str], width: int) -> bool:
    return len(row) == width and all(not cell or _is_number(cell) for cell in row)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _number(path: Path, line: int, name: str, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ValueError(
            f"{path}, line {line}: {name} must be a number or empty, got {cell[:40]!r}. Mend or "
            "remove the line."
        ) from None
