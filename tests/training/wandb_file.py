"""Reads what W&B wrote to disk: the log format of LevelDB around one protobuf record each."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2 as protobuf

BLOCK, HEADER = 32768, 7


def records(path: Path) -> Iterator[Any]:
    """Every whole record of a ``run-*.wandb`` file."""
    data, at, parts = path.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        if not kind and not size:
            at += left
            continue
        parts += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # a whole record, or its last part
            record = protobuf.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(folder: Path) -> tuple[set[str], list[dict[str, Any]]]:
    """Run ids and logged rows of all offline runs in a folder, oldest first."""
    ids, rows = set(), []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
            elif kind == "history":
                items = record.history.item
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                rows.append({**row, "_step": record.history.step.num})
    return ids, rows
