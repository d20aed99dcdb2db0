"""The ledger as a file: one line per optimizer step, cut back on resume, never a reason to stop."""

import csv
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from dflash_lightning.diagnosis.run import BUCKET_COLUMNS, STEP_COLUMNS

RETRY_SECONDS = 60.0  # between attempts to cut the file: a large one must not be copied every step


class LedgerFile:
    """Writes ``ledger.csv``, and ``ledger-replaced.csv`` for rows that a restart repeats.

    Every row goes to the operating system as one write, so a killed process loses none. A row that
    the disk refuses is lost and counted; the run goes on.

    Args:
        folder: The run folder.
        header: What readers need to know of the run, plain types; ``boundaries`` decides the
            columns. Written as ``# `` and one line of JSON before the first row of this process.
        say: Told once of the first trouble with the disk, and at the end how many rows are missing.
    """

    def __init__(
        self, folder: Path, header: Mapping[str, Any], *, say: Callable[[str], None]
    ) -> None:
        self.path = folder / "ledger.csv"
        self.replaced = folder / "ledger-replaced.csv"
        self.header = dict(header)
        self.num_buckets = len(self.header["boundaries"]) - 1
        self.lost = 0
        self._say = say
        self._file: FileIO | None = None
        self._size = 0  # up to which the file holds whole lines
        self._began = False  # whether this process has written its header
        self._cut_at: int | None = 0  # a cut still to be made; None: the old file is in order
        self._retry = -math.inf
        self._told = False

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in order."""
        buckets = range(self.num_buckets)
        return [*STEP_COLUMNS, *(f"{name}_{k}" for k in buckets for name in BUCKET_COLUMNS)]

    def resume(self, step: int) -> int:
        """Cut the file back to the rows before ``step``; without it, the first row cuts all.

        What is cut, and a line that a killed process left unfinished, goes to
        ``ledger-replaced.csv``.

        Args:
            step: The step that comes next, from 0.

        Returns:
            Lines cut; 0 as well where the disk refused, which is tried again with a later row.
        """
        self.close()
        self._began, self._cut_at = False, step
        try:
            return self._cut()
        except OSError as error:
            self._trouble(error)
            self._retry = time.monotonic() + RETRY_SECONDS
            return 0

    def write(self, row: Mapping[str, Any]) -> None:
        """Append the row of a finished step.

        Args:
            row: Values by column; those of buckets as lists under ``loss_k``, ``weight_k`` and so
                on. What is missing or None stays empty, what is no column is left out.
        """
        try:
            self._append(self._line(row))
        except OSError as error:
            self.lost += 1
            self._trouble(error)

    def close(self) -> None:
        """Close the file; say how many rows are missing."""
        self._release()
        if self.lost:
            self._say(f"ledger: {self.lost:,} rows could not be written to {self.path}")
            self.lost = 0

    # -- lines ----------------------------------------------------------------------------------

    def _line(self, row: Mapping[str, Any]) -> bytes:
        fields = [_text(name, row.get(name)) for name in STEP_COLUMNS]
        lists = [row.get(f"{name}_k") or [None] * self.num_buckets for name in BUCKET_COLUMNS]
        for bucket in zip(*lists, strict=True):
            fields += [_text("", value) for value in bucket]
        return _joined(fields)

    def _start(self) -> bytes:
        """What comes before this process's first row."""
        header = b"# " + json.dumps(self.header).encode() + b"\n"
        return header if self._size else header + _joined(self.columns)

    def _append(self, line: bytes) -> None:
        if self._cut_at is not None:
            if time.monotonic() < self._retry:
                raise OSError("the rows before a restart are still in place")
            self._retry = time.monotonic() + RETRY_SECONDS
            self._cut()
        file = self._open()
        data = line if self._began else self._start() + line
        try:
            if file.write(data) != len(data):
                raise OSError("the disk took part of a line")
        except OSError:
            self._release()  # the next row opens it anew, without what was written of this one
            raise
        self._size += len(data)
        self._began = True

    def _open(self) -> FileIO:
        """The file, opened where it is not, without a line that was written in part."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = FileIO(self.path, "ab")
            try:
                if file.seek(0, os.SEEK_END) > self._size:
                    file.truncate(self._size)
            except OSError:
                file.close()
                raise
            self._file = file
        return self._file

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._trouble(error)

    def _trouble(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            self._say(
                f"ledger: {self.path} could not be written ({error}); the run goes on, and rows "
                "that are lost are counted"
            )

    # -- restarts -------------------------------------------------------------------------------

    def _cut(self) -> int:
        """Divide the old file: rows before the step stay, others are kept in the other file."""
        cut = 0
        if self.path.exists():
            scratch = self.path.with_suffix(".csv.new")
            aside = self.path.with_suffix(".csv.cut")
            try:
                cut = self._divide_into(scratch, aside)
                if cut:
                    self._set_aside(aside)
                scratch.replace(self.path)
            finally:
                scratch.unlink(missing_ok=True)
                aside.unlink(missing_ok=True)
        self._size = self.path.stat().st_size if self.path.exists() else 0
        self._cut_at = None
        return cut

    def _divide_into(self, scratch: Path, aside: Path) -> int:
        step = self._cut_at or 0
        with self.path.open("rb") as old, scratch.open("wb") as kept, aside.open("wb") as gone:
            cut = _divide(old, kept, gone, step, self.columns)
            _sync(kept)
        return cut

    def _set_aside(self, lines: Path) -> None:
        """Append lines that were cut to the other file; before they leave the first."""
        with lines.open("rb") as source, self.replaced.open("ab") as target:
            note = {"replaced_from_step": self._cut_at, "time": round(time.time(), 3)}
            target.write(b"# " + json.dumps(note).encode() + b"\n")
            for line in source:
                target.write(line if line.endswith(b"\n") else line + b"\n")
            _sync(target)


def last_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """The last rows of a ledger as ``LedgerFile.write`` takes them, NaN where a cell is empty.

    There are none where there is no ledger.
    """
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        names: list[str] = []
        rows: deque[list[str]] = deque(maxlen=count)
        for cells in csv.reader(x for x in file if not x.startswith("#") and x.endswith("\n")):
            names = names or cells
            rows.append(cells)
    whole = [cells for cells in rows if len(cells) == len(names) and cells != names]
    return [_row_of(names, cells) for cells in whole]


def _row_of(names: list[str], cells: list[str]) -> dict[str, Any]:
    """A line as numbers, those of buckets as lists under ``loss_k``, ``weight_k`` and so on."""
    row = {name: float(cell or "nan") for name, cell in zip(names, cells, strict=True)}
    buckets = range(sum(name.startswith("loss_") for name in names))
    return {name: row.get(name, math.nan) for name in STEP_COLUMNS} | {
        f"{name}_k": [row.get(f"{name}_{k}", math.nan) for k in buckets] for name in BUCKET_COLUMNS
    }


def _divide(old: BinaryIO, kept: BinaryIO, gone: BinaryIO, step: int, columns: list[str]) -> int:
    """Deal the lines of a ledger: those that stay, and those that do not, which are counted.

    A header stays where a row behind it does. Columns that an earlier version of this package did
    not write are filled in, empty; a file with others does not stay at all.
    """
    headers: list[bytes] = []
    cut, ours, places = 0, True, range(len(columns))
    commas = len(columns) - 1
    for line in old:
        if line.startswith(b"# "):
            headers.append(line)
            continue
        if line.startswith(b"step,"):
            commas, places = line.count(b","), _places(line, columns)
            ours = ours and bool(places)
            headers.append(_joined(columns) if ours else line)
            continue
        whole = ours and line.endswith(b"\n") and line.count(b",") == commas
        stays = whole and _step_of(line) < step
        target = kept if stays else gone
        target.writelines([*headers, _placed(line, places) if whole else line])
        headers.clear()
        cut += not stays
    return cut


def _places(line: bytes, columns: list[str]) -> Sequence[int]:
    """Where a ledger has each of our columns, -1 for one of a step that it lacks.

    Args:
        line: Names of the ledger's columns.
        columns: Ours.

    Returns:
        As many as columns; none where the ledger has others, or other buckets.
    """
    names = line.decode(errors="replace").rstrip("\n").split(",")
    if names == columns:
        return range(len(columns))
    if not set(names) <= set(columns) or not set(columns) - set(names) <= set(STEP_COLUMNS):
        return []
    return [names.index(column) if column in names else -1 for column in columns]


def _placed(line: bytes, places: Sequence[int]) -> bytes:
    """A row with its cells where our columns are."""
    if isinstance(places, range):
        return line
    cells = [*line[:-1].split(b","), b""]  # the last one for what it lacks
    return b",".join(cells[place] for place in places) + b"\n"


def _step_of(line: bytes) -> float:
    """Step of a row; infinite for a line that is none, or was not finished."""
    number = line.partition(b",")[0]
    return int(number) if number.isdigit() and line.endswith(b"\n") else math.inf


def _text(name: str, value: Any) -> str:
    """A value as the ledger has it: seven digits are enough, except for the time of day."""
    if value is None:
        return ""
    if name == "time":
        return f"{value:.3f}"
    return f"{value:.7g}" if isinstance(value, float) else str(int(value))


def _joined(fields: list[str]) -> bytes:
    return ",".join(fields).encode() + b"\n"


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
