"""What loggers get of a step: one table of names for training, and for W&B after a kill."""

import math
from collections.abc import Mapping
from typing import Any

from dflash_lightning.diagnosis.run import BUCKET_COLUMNS

# Columns of the ledger that loggers have under the same name behind ``train/``.
BY_MODULE = ("loss", "lr", "grad_norm", "rows", "tokens", "labels", "weight")
BY_LEDGER = ("top_row", "top_share", "top_pull", "restart")


def step_values(row: Mapping[str, Any]) -> dict[str, float]:
    """Top row, rates over all ranks and the numbers of each bucket; the same keys at every step.

    Args:
        row: Of a finished step, as ``LedgerFile.write`` takes it.

    Returns:
        By the names that loggers have behind ``train/``; NaN where the row has no value.
    """
    seconds = max(row["seconds"], 1e-9)
    values = {name: row[name] for name in BY_LEDGER}
    for name in BUCKET_COLUMNS:
        values |= {f"bucket_{k}/{name}": value for k, value in enumerate(row[f"{name}_k"])}
    values |= {
        "tokens_per_second": row["tokens"] / seconds,
        "padded_tokens_per_second": row["padded_tokens"] / seconds,
        "labels_per_second": row["labels"] / seconds,
        "data_wait_share": row["wait_seconds"] / seconds,
    }
    return {name: math.nan if value is None else value for name, value in values.items()}
