"""Rows of a store in words: where they come from, how long they are, how they begin."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dflash_lightning.batching.buckets import bucket_of
from dflash_lightning.data.store import RowStore

FIRST_TOKENS = 12  # shown of a row's prompt, and of its answer
COMPARED = 16  # rows that tell what every prompt begins and ends with


class RowFacts(NamedTuple):
    """One row.

    Args:
        row: Number in the store.
        source: What the chat said of its origin; may be empty.
        line: Line of the chat file, from 1.
        length: In tokens.
        bucket: Length bucket, from 0; None where the edges are not known.
        prompt: First words of its own, without what the chat template puts around every prompt.
        answer: First words that are supervised.
    """

    row: int
    source: str
    line: int
    length: int
    bucket: int | None
    prompt: str
    answer: str


def describe_rows(
    store: RowStore,
    rows: Sequence[int],
    *,
    boundaries: Sequence[int] = (),
    tokenizer: str | None = None,
) -> list[RowFacts]:
    """Say what some rows are.

    Args:
        store: The rows.
        rows: Numbers in the store, in any order.
        boundaries: Edges of the length buckets in tokens, 0 first; empty where they are not known.
        tokenizer: Folder or hub name of the one that made the store. Nothing is downloaded: where
            it is not on this machine, or is another one, words are shown as token ids.

    Returns:
        One entry for each of ``rows``, in their order.

    Raises:
        ValueError: The store has no such row, or a row is longer than the last boundary.
    """
    unknown = [row for row in rows if not 0 <= row < len(store)]
    if unknown:
        raise ValueError(
            f"row {unknown[0]} is not in the store {store.path}, which holds rows 0 to "
            f"{len(store) - 1}. Give the store that the run was trained on."
        )
    if not len(rows):
        return []
    chosen = np.asarray(rows, dtype=np.int64)
    lines, sources = store.column("line")[chosen], store.column("source")[chosen]
    lengths, names = store.lengths[chosen], store.meta["sources"]
    buckets = bucket_of(lengths, tuple(boundaries)).tolist() if boundaries else [None] * len(rows)
    words = FirstWords(store, find_tokenizer(tokenizer, store))
    columns = zip(chosen, sources, lines, lengths, buckets, strict=True)
    return [
        RowFacts(int(row), names[source], int(line), int(length), bucket, *words.of(int(row)))
        for row, source, line, length, bucket in columns
    ]


class FirstWords:
    """Shows how rows begin: their own prompt, and their answer.

    A chat template begins all prompts alike, and ends them alike. What at least half of the rows
    that are compared share with a row is left out, in front and behind.

    Args:
        store: The rows.
        decode: Text of token ids; None shows the ids.
    """

    def __init__(self, store: RowStore, decode: Callable[[list[int]], str] | None) -> None:
        self.store, self.decode = store, decode
        self.compared = np.linspace(0, len(store) - 1, COMPARED).round().astype(int).tolist()
        self._prompts = {row: self._parts(row)[0] for row in self.compared}

    def of(self, row: int) -> tuple[str, str]:
        """First words of a row's prompt and of its answer."""
        prompt, answer = self._parts(row)
        others = [ids for other, ids in self._prompts.items() if other != row]
        first = _typical([_shared(prompt, ids) for ids in others])
        last = _typical([_shared(prompt[::-1], ids[::-1]) for ids in others])
        own = prompt[first : len(prompt) - last]
        return self._show(own if len(own) else prompt), self._show(answer)

    def _parts(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids before the first supervised token, and from there on to the last of the answer."""
        ids, mask = self.store.row(row)
        if not mask.any():
            return ids, ids[:0]
        first = int(mask.argmax())
        rest = mask[first:]
        end = len(ids) if rest.all() else first + int(rest.argmin())
        return ids[:first], ids[first:end]

    def _show(self, ids: np.ndarray) -> str:
        few = ids[:FIRST_TOKENS].tolist()
        text = " ".join(map(str, few)) if self.decode is None else self.decode(few)
        # A damaged row may hold what moves a terminal's cursor.
        shown = "".join(x if x.isprintable() else "\N{MIDDLE DOT}" for x in " ".join(text.split()))
        return shown + " ..." * (len(ids) > FIRST_TOKENS)


def find_tokenizer(name: str | None, store: RowStore) -> Callable[[list[int]], str] | None:
    """What turns ids of a store into text.

    Args:
        name: Folder or hub name; only this machine is searched.
        store: Says by a fingerprint which tokenizer made it.

    Returns:
        Text of token ids; None where there is no such tokenizer, or it is not the store's.
    """
    if name is None:
        return None
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (ImportError, OSError, ValueError):
        return None
    if not _made(tokenizer, store):
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def _made(tokenizer: Any, store: RowStore) -> bool:
    """Whether a tokenizer made a store; where torch is missing, that is taken for granted."""
    try:
        from dflash_lightning.target import tokenizer_fingerprint
    except ImportError:
        return True
    return tokenizer_fingerprint(tokenizer) == store.meta["key"]["tokenizer"]


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """Ids with which both begin."""
    size = min(len(one), len(other))
    same = one[:size] == other[:size]
    return size if same.all() else int(same.argmin())


def _typical(counts: list[int]) -> int:
    """What at least half of the counts reach; 0 where there are none."""
    return sorted(counts, reverse=True)[(len(counts) - 1) // 2] if counts else 0
