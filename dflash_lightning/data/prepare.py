"""Chats to a row store: render, mask, check every row, count what is kept and what is not."""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from dflash_lightning.data.chat import RejectedRowError, make_row, read_conversations
from dflash_lightning.data.store import RowStore, StoredRow, write_json, write_store
from dflash_lightning.target import load_tokenizer, tokenizer_fingerprint

RULES = 1  # raise when the same chats would give other rows


def prepare(
    input: Path,  # noqa: A002 - the option's name
    tokenizer: str,
    output: Path,
    *,
    max_length: int = 4096,
    long_rows: Literal["truncate", "drop"] = "truncate",
    overwrite: bool = False,
    json: Path | None = None,
) -> None:
    """Turn chats into rows for training and report what was kept.

    Args:
        input: JSONL with ``messages`` or ShareGPT ``conversations``, compressed or not.
        tokenizer: The target's folder or hub name, or ``smollm2``.
        output: Folder of the row store.
        max_length: Longest row in tokens.
        long_rows: Cut longer rows at ``max_length``, or drop them.
        overwrite: Replace a store that was made from something else.
        json: Also write the report here.
    """
    store = prepare_store(
        input,
        load_tokenizer(tokenizer),
        output,
        max_length=max_length,
        long_rows=long_rows,
        overwrite=overwrite,
    )
    if json:
        write_json(json, store.meta["report"])
    sys.stdout.write(describe(store) + "\n")


def prepare_store(
    chats: Path,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    *,
    max_length: int,
    long_rows: Literal["truncate", "drop"] = "truncate",
    overwrite: bool = False,
) -> RowStore:
    """Write the row store of a chat file, or open it when it is there already.

    Raises:
        ValueError: If OUTPUT holds a store made from other chats, settings, tokenizer or rules, or
            anything that is no store.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "tokenizer must have a chat template; this one has none. Use the instruct model's."
        )
    key = {
        "chats": _file_hash(chats),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "max_length": max_length,
        "long_rows": long_rows,
        "rules": RULES,
    }
    if (output / "meta.json").exists():
        found = RowStore.open(output)
        if found.meta["key"] == key:
            return found
        if not overwrite:
            differing = [name for name in key if found.meta["key"].get(name) != key[name]]
            raise ValueError(
                f"store {output} was made with another {', '.join(differing)}. "
                "Give another output, or overwrite=true."
            )
    elif output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(
            f"output must be a new folder or a row store, got {output}, which holds something else."
            " Give another output."
        )
    report: dict[str, Any] = {"kept": 0, "rejected": {}, "first_rejected_line": {}, "truncated": 0}
    meta = {"key": key, "chats": chats.name, "report": report}
    groups = _Conversations()
    rows = _rows(chats, tokenizer, max_length, long_rows, report, groups)
    return write_store(output, rows, meta, groups.resolve)


def describe(store: RowStore) -> str:
    """The report of a store in a few lines."""
    meta, report = store.meta, store.meta["report"]
    cut = f"{report['truncated']} cut at {meta['key']['max_length']}"
    longest = store.lengths.max()
    lines = [
        f"{meta['rows']} rows in {store.path}, {report['duplicates']} copies of another row",
        f"{meta['tokens']} tokens, {meta['supervised']} supervised; longest {longest}, {cut}",
    ]
    for reason, count in report["rejected"].items():
        first = report["first_rejected_line"][reason]
        lines.append(f"rejected {count}: {reason} (first in line {first})")
    if report["sources"].keys() - {""}:
        shares = ", ".join(f"{name or 'none'} {n}" for name, n in report["sources"].items())
        lines.append(f"rows by source: {shares}")
    return "\n".join(lines)


def _rows(
    chats: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    long_rows: Literal["truncate", "drop"],
    report: dict[str, Any],
    groups: "_Conversations",
) -> Iterator[StoredRow]:
    rejected: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    end_ids = frozenset([tokenizer.eos_token_id])
    for entry in tqdm(read_conversations(chats), unit="row", disable=None, desc="prepare"):
        try:
            if isinstance(entry, tuple):
                raise RejectedRowError(entry[1])
            row = make_row(
                tokenizer,
                entry.messages,
                end_ids=end_ids,
                max_length=max_length,
                long_rows=long_rows,
            )
        except RejectedRowError as error:
            rejected[str(error)] += 1
            line = entry[0] if isinstance(entry, tuple) else entry.line
            report["first_rejected_line"].setdefault(str(error), line)
            continue
        report["kept"] += 1
        report["truncated"] += row.truncated
        sources[entry.source] += 1
        content = hashlib.sha256(row.ids.tobytes()).hexdigest()
        groups.add(entry.id, content)
        yield StoredRow(row.ids, row.loss_mask, entry.line, entry.source)
    report |= {
        "rejected": dict(rejected),
        "sources": dict(sources),
        "duplicates": groups.duplicates,
    }


class _Conversations:
    """Groups rows that share an id or their content, through any chain of links (union-find)."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        self.parent: list[int] = []
        self.duplicates = 0

    def add(self, conversation_id: str, content: str) -> int:
        """Register the next row and return its number; :meth:`resolve` gives the group's."""
        number = len(self.parent)
        self.parent.append(number)
        self.duplicates += f"content {content}" in self.first
        for key in (f"content {content}", f"id {conversation_id}"):
            other = self.first.setdefault(key, number)
            self.parent[self._root(number)] = self._root(other)
        return number

    def resolve(self) -> list[int]:
        """Conversation number of every row so far."""
        return [self._root(number) for number in range(len(self.parent))]

    def _root(self, number: int) -> int:
        while self.parent[number] != number:
            self.parent[number] = self.parent[self.parent[number]]
            number = self.parent[number]
        return number


def _file_hash(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(
            f"input must be a JSONL file (.jsonl or .jsonl.gz), got {path}, which is not there. "
            "Check the path."
        )
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]
