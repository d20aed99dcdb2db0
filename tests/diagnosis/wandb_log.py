"""Writes files as W&B does: the log format of LevelDB around one protobuf record each."""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2 as protobuf

BLOCK, HEADER = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def run_of(run_id: str, name: str = "") -> Any:
    """The record by which a run begins."""
    return protobuf.Record(run=protobuf.RunRecord(run_id=run_id, display_name=name))


def config_of(config: Mapping[str, Any]) -> Any:
    """The record of a configuration."""
    record = protobuf.Record()
    for key, value in config.items():
        record.config.update.add(key=key, value_json=json.dumps(value))
    return record


def history_of(row: Mapping[str, Any], number: int) -> Any:
    """The record of a logged row."""
    record = protobuf.Record()
    record.history.step.num = number
    for key, value in row.items():
        record.history.item.add(nested_key=[key], value_json=json.dumps(value))
    return record


def write_log(path: Path, records: Sequence[Any]) -> Path:
    """Write records one behind the other, cut where a block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = bytearray(b":W&B" + struct.pack("<HB", 0xBEE1, 0))
    for record in records:
        rest, begun = record.SerializeToString(), False
        while rest or not begun:
            left = BLOCK - len(data) % BLOCK
            if left < HEADER:
                data += bytes(left)
                continue
            part, rest = rest[: left - HEADER], rest[left - HEADER :]
            kind = (MIDDLE if begun else FIRST) if rest else (LAST if begun else FULL)
            data += struct.pack("<IHB", zlib.crc32(part), len(part), kind) + part
            begun = True
    path.write_bytes(data)
    return path
