"""The row store: flat memory-mapped ids and loss mask, offsets, and a fingerprinted description.

A folder with ``ids.bin`` (int32), ``loss_mask.bin`` (bool), ``offsets.npy``, ``line.npy`` (line of
the chat file), ``conversation.npy`` (rows of one conversation, and copies of one row, share a
number), ``source.npy`` (index into the sources), ``used_ids.npy`` (bool over ids that occur) and
``meta.json``, which is written last.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FORMAT = 1


class StoredRow(NamedTuple):
    """What a writer needs to know of a row."""

    ids: np.ndarray
    loss_mask: np.ndarray
    line: int
    source: str


@dataclass(frozen=True)
class RowStore:
    """Prepared rows, opened without reading them.

    Args:
        path: The folder.
        meta: What ``meta.json`` says.
        offsets: Start of every row and the end of the last, int64 ``[R + 1]``.
    """

    path: Path
    meta: dict[str, Any]
    offsets: np.ndarray
    _ids: np.ndarray
    _mask: np.ndarray

    @classmethod
    def open(cls, path: str | Path, setting: str = "data.store") -> "RowStore":
        """Open a finished store.

        Args:
            path: The folder.
            setting: Where the user gave it, for the message.

        Raises:
            FileNotFoundError: If there is none, or a half-written one.
        """
        path = Path(path)
        if not (path / "meta.json").is_file():
            raise FileNotFoundError(
                f"{setting} must be a folder written by `dflash-lightning prepare`; {path} holds "
                "no finished store. Run prepare, or give another folder."
            )
        meta = json.loads((path / "meta.json").read_text())
        if meta["format"] != FORMAT:
            raise ValueError(
                f"store {path} has format {meta['format']}, this version reads {FORMAT}. Prepare "
                "it again."
            )
        offsets = np.load(path / "offsets.npy")
        ids = np.memmap(path / "ids.bin", dtype=np.int32, mode="r")
        mask = np.memmap(path / "loss_mask.bin", dtype=np.bool_, mode="r")
        if not len(ids) == len(mask) == offsets[-1]:
            raise ValueError(
                f"store {path} is damaged: its files disagree on its size. Prepare it again."
            )
        return cls(path, meta, offsets, ids, mask)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every row, int64 ``[R]``."""
        return np.diff(self.offsets)

    @property
    def supervised(self) -> np.ndarray:
        """Supervised tokens of every row, int64 ``[R]``; reads the whole loss mask."""
        return np.add.reduceat(self._mask, self.offsets[:-1], dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        """Hash of the rows and of everything that decided them."""
        return self.meta["fingerprint"]

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids (int32) and loss mask (bool) of a row, views of the files."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self._ids[part], self._mask[part]

    def column(self, name: str) -> np.ndarray:
        """A per-row column: ``line``, ``conversation`` or ``source``."""
        return np.load(self.path / f"{name}.npy")

    @property
    def used_ids(self) -> np.ndarray:
        """Whether an id occurs in any row, bool ``[largest id + 1]``."""
        return np.load(self.path / "used_ids.npy")


def write_json(path: Path, numbers: Any) -> None:
    """Write numbers, with the folder they go to.

    Args:
        path: The file; one that is there is replaced.
        numbers: Plain types.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(numbers, indent=1) + "\n")


def write_store(
    path: Path,
    rows: Iterable[StoredRow],
    meta: dict[str, Any],
    conversations: Callable[[], list[int]],
) -> RowStore:
    """Write a store next to its place and move it there when it is complete.

    Args:
        path: The folder; one that is there is replaced.
        rows: Read once, one at a time.
        meta: Settings and provenance; counts and the fingerprint are added. May still change while
            rows are read.
        conversations: Called after the last row: the conversation number of every row.

    Raises:
        ValueError: If there is no row.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.mkdir(parents=True)
    try:
        _write_rows(scratch, rows, meta, conversations)
        if path.exists():
            shutil.rmtree(path)
        scratch.replace(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return RowStore.open(path)


def _write_rows(
    folder: Path,
    rows: Iterable[StoredRow],
    meta: dict[str, Any],
    conversations: Callable[[], list[int]],
) -> None:
    digest = hashlib.sha256()
    lengths, lines, sources = [], [], []
    names: dict[str, int] = {}
    used = np.zeros(0, dtype=np.int64)
    supervised = 0
    with (
        (folder / "ids.bin").open("wb") as ids_file,
        (folder / "loss_mask.bin").open("wb") as mask_file,
    ):
        for row in rows:
            ids, mask = row.ids.astype(np.int32), row.loss_mask.astype(np.bool_)
            for file, values in ((ids_file, ids), (mask_file, mask)):
                file.write(values.tobytes())
                digest.update(values.tobytes())
            counts = np.bincount(ids, minlength=len(used))
            counts[: len(used)] += used
            used = counts
            supervised += int(mask.sum())
            lengths.append(len(ids))
            lines.append(row.line)
            sources.append(names.setdefault(row.source, len(names)))
    if not lengths:
        raise ValueError(f"no row was kept: {meta.get('report')}. Nothing was written.")
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    columns = {"line": lines, "conversation": conversations(), "source": sources}
    for name, values in columns.items():
        np.save(folder / f"{name}.npy", np.array(values, dtype=np.int32))
    np.save(folder / "used_ids.npy", used > 0)
    digest.update(json.dumps(meta.get("key"), sort_keys=True).encode())
    counts = {"rows": len(lengths), "tokens": sum(lengths), "supervised": supervised}
    meta |= {
        "format": FORMAT,
        **counts,
        "sources": list(names),
        "fingerprint": digest.hexdigest()[:16],
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def check_val_fraction(val_fraction: float) -> None:
    """Refuse a share that leaves no row for training."""
    if not 0 <= val_fraction < 1:
        raise ValueError(
            f"val_fraction must be at least 0 and below 1, got {val_fraction}. 0.05 holds back a "
            "twentieth of the conversations."
        )


def split_rows(conversation: np.ndarray, val_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide rows into training and validation by conversation, the same way every time.

    Args:
        conversation: Conversation number of every row, int ``[R]``.
        val_fraction: Share of conversations for validation.

    Returns:
        Row numbers for training and for validation, sorted.

    Raises:
        ValueError: The share is below 0, or 1 or more.
    """
    check_val_fraction(val_fraction)
    numbers = np.unique(conversation)
    # splitmix64's finaliser: an order that depends on nothing but the conversation's number
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    chosen = numbers[np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")]
    chosen = chosen[: round(val_fraction * len(numbers))]
    in_val = np.isin(conversation, chosen)
    return np.flatnonzero(~in_val), np.flatnonzero(in_val)
