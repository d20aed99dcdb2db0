"""Reads runs of Weights & Biases: the files of an offline run, and runs on its servers.

An offline file is a log in the format of LevelDB (github.com/google/leveldb, doc/log_format.md)
around one protobuf record each; W&B ships no reader for it. ``wandb`` is imported where a run is
read, as everything else here works without it.
"""

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dflash_lightning.diagnosis.logged import Cells, falls, ledger_name, run_of_cells
from dflash_lightning.diagnosis.run import Run

MAGIC = b":W&B"
START, BLOCK, HEADER = 7, 32768, 7  # bytes: the file's own, a block, a record's
FULL, FIRST, LAST = 1, 2, 4  # kinds of record: a whole one, the first and last part of one
STEP, RESTART = "trainer/global_step", "restart"  # keys of the row that marks a restart
NEEDS_WANDB = "A run of W&B can only be read where wandb is installed. Run: pip install wandb."
RUN_PATH = re.compile(
    r"(?:wandb:)?(?:https?://[^/]+/(?P<project>[^/]+/[^/]+)/runs/(?P<run>[^/?#]+)(?:[/?#].*)?"
    r"|(?P<short_project>\w[\w.-]*/\w[\w.-]*)/(?:runs/)?(?P<short_run>[\w-]+))"
)


class Process(NamedTuple):
    """What one process of a run logged.

    Args:
        rows: Values by key.
        config: Settings of the run, complete once all rows are read.
    """

    rows: Iterable[Mapping[str, Any]]
    config: Mapping[str, Any]


def run_of_history(processes: Iterable[Process], *, source: str, name: str, kind: str) -> Run:
    """The run that was logged to W&B.

    Lightning's step counts, and W&B's own where there is none; rows that come before a restart
    and belong to its first step or a later one are void.

    Args:
        processes: In the order in which they ran.
        source: How messages call the run.
        name: How reports call it.
        kind: What it was read from, in words.

    Raises:
        ValueError: No step with a loss was logged.
    """
    cells = Cells(source, "row")
    marks: list[tuple[int, int]] = []
    headers: list[tuple[int, Mapping[str, Any]]] = []
    number = 0
    for process in processes:
        first: int | None = None
        for row in process.rows:
            number += 1
            if RESTART in row and STEP in row:
                first = int(row[STEP])
                marks.append((number, first))
            _fill(cells, number, row)
        header = process.config.get("ledger")
        if isinstance(header, Mapping):
            headers.append((int(header.get("step", first or 0)), header))
    marks = marks or falls(cells)
    return run_of_cells(cells, name=name, kind=kind, headers=headers, marks=marks)


def _fill(cells: Cells, number: int, row: Mapping[str, Any]) -> None:
    """Keep the numbers of a row that have a meaning."""
    cells.names.update(dict.fromkeys(row))
    for key, value in row.items():
        if ledger_name(key) and not isinstance(value, bool):
            if isinstance(value, int | float):
                cells.add(number, key, value)
            elif value in ("NaN", "Infinity", "-Infinity"):  # as W&B's servers write them
                cells.add(number, key, float(value))


# -- offline --------------------------------------------------------------------------------------


class OfflineFile:
    """A ``run-ID.wandb`` file.

    Args:
        path: Its place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.stem.removeprefix("run-")
        self.display_name = ""
        self.config: dict[str, Any] = {}

    def rows(self, wanted: Callable[[str], object] = bool) -> Iterator[dict[str, Any]]:
        """Rows that were logged; name and configuration fill up on the way.

        Args:
            wanted: Whether a key's values are; those of others, which are not parsed, are None.
        """
        for record in records(self.path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = _values(record.history.item, wanted)
                yield {**row, "_step": record.history.step.num}
            elif kind == "run":
                self.display_name = record.run.display_name or self.display_name
                self._configure(record.run.config)
            elif kind == "config":
                self._configure(record.config)

    def _configure(self, config: Any) -> None:
        self.config.update({_key(item): json.loads(item.value_json) for item in config.update})


def offline_files(folder: Path) -> list[Path]:
    """Files of the newest run in a folder, oldest first; of a run in one folder with its restarts.

    Args:
        folder: ``offline-run-TIME-ID``, or ``wandb``, which holds such folders, or the folder
            above that.
    """
    own = sorted(folder.glob("run-*.wandb"))
    places = (folder.absolute().parent,) if own else (folder, folder / "wandb")
    found = [path for place in places for path in place.glob("*run-*/run-*.wandb")]
    newest = own or sorted(found, key=_time_of)[-1:]
    same = [path for path in found if newest and path.name == newest[0].name]
    return sorted(same, key=_time_of) or own


def _key(item: Any) -> str:
    """The key of a value: one word, or what nested dictionaries would have as keys."""
    return item.key or "/".join(item.nested_key)


def _values(items: Iterable[Any], wanted: Callable[[str], object]) -> dict[str, Any]:
    """Values of a row by key, None for a key that is not wanted; parsed at once, for speed."""
    pairs = [(_key(item), item.value_json) for item in items]
    texts = [text if wanted(key) else "null" for key, text in pairs]
    values = json.loads(f"[{','.join(texts)}]")
    return {key: value for (key, _), value in zip(pairs, values, strict=True)}


def _time_of(path: Path) -> tuple[str, str]:
    """When a process began: ``run-20260101_120000-ID`` and ``offline-run-...`` alike."""
    return path.parent.name.removeprefix("offline-"), path.name


def read_offline(paths: Sequence[Path], *, name: str | None = None) -> Run:
    """The run in one file or several, one for each process.

    Args:
        paths: Of one run, oldest first.
        name: How reports call the run; None takes the name W&B knows, or its id.

    Raises:
        ValueError: wandb is not installed, a file is of something else, or no step was logged.
    """
    files = [OfflineFile(path) for path in paths]
    processes = [Process(file.rows(_is_read), file.config) for file in files]
    run = run_of_history(processes, source=str(paths[-1]), name="", kind="offline W&B run")
    return replace(run, name=name or files[-1].display_name or files[-1].run_id)


def _is_read(key: str) -> bool:
    return key == RESTART or ledger_name(key) is not None


def records(path: Path) -> Iterator[Any]:
    """Every whole record of a ``run-ID.wandb`` file; what a killed process cut short is left out.

    Raises:
        ValueError: wandb is not installed, or the file is of something else or damaged.
    """
    protobuf, decode_error = _protobuf()
    data, at, parts = path.read_bytes(), START, b""
    if not data.startswith(MAGIC):
        raise ValueError(f"{path} must be a file of W&B, which begins with {MAGIC.decode()}.")
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if left < HEADER or (not kind and not size):
            at += left
            continue
        at += HEADER + size
        if at > len(data):
            return
        parts = data[at - size : at] if kind in (FULL, FIRST) else parts + data[at - size : at]
        if kind in (FULL, LAST):
            record = protobuf.Record()
            try:
                record.ParseFromString(parts)
            except decode_error as error:
                if not data[at:].strip(b"\0"):  # the disk never got the end of it
                    return
                raise ValueError(f"{path} is damaged before byte {at:,}: {error}.") from error
            yield record


def _protobuf() -> tuple[Any, type[Exception]]:
    """The format of W&B's records, and what is raised for one that is damaged."""
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto import wandb_internal_pb2
    except ImportError as error:
        raise ValueError(NEEDS_WANDB) from error
    return wandb_internal_pb2, DecodeError


# -- online ---------------------------------------------------------------------------------------


def run_path(source: str) -> str | None:
    """``ENTITY/PROJECT/RUN_ID`` of a source that has the form of it, or of a run's address.

    >>> (
    ...     run_path("https://wandb.ai/us/dflash/runs/ab12cd34/overview"),
    ...     run_path("us/dflash/ab12cd34"),
    ... )
    ('us/dflash/ab12cd34', 'us/dflash/ab12cd34')
    """
    match = RUN_PATH.fullmatch(source)
    if match is None:
        return None
    return f"{match['project'] or match['short_project']}/{match['run'] or match['short_run']}"


def read_online(path: str, *, name: str | None = None) -> Run:
    """The run on W&B's servers.

    Args:
        path: ``ENTITY/PROJECT/RUN_ID``.
        name: How reports call the run; None takes the name W&B knows.

    Raises:
        ValueError: wandb is not installed, W&B does not give the run, or it has no step.
    """
    try:
        import wandb
    except ImportError as error:
        raise ValueError(NEEDS_WANDB) from error
    try:
        found = wandb.Api().run(path)
    except (wandb.errors.Error, OSError, ValueError) as error:
        raise _not_given(path, error) from error
    process = Process(found.scan_history(), found.config)
    try:
        return run_of_history([process], source=path, name=str(name or found.name), kind="W&B run")
    except (wandb.errors.Error, OSError) as error:
        raise _not_given(path, error) from error


def _not_given(path: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:200].rstrip(".")
    return ValueError(
        f"W&B run {path} could not be read: {reason}. Check the name and wandb login, or give the "
        "run folder or the offline W&B folder."
    )
