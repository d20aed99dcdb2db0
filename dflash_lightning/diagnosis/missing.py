"""What the source of a run does not tell, and what would supply it."""

from collections.abc import Mapping

import numpy as np

from dflash_lightning.diagnosis.run import Floats, Ints

# By the column that is absent or empty, and a few words of their own.
MISSING = {
    "gaps": "most steps, since one of {gap:,} is logged: log_every_n_steps=1 logs all, and "
    "ledger.csv always has them; what is said of single steps holds for the logged ones",
    "buckets": "loss per length bucket and its noise: the ledger.csv of the run folder has them",
    "bucket_columns": "{names} of the length buckets: the ledger.csv of the run folder has them",
    "header": "shares of the buckets in the data set, length of the warm-up, settings of the plan: "
    "the first line of ledger.csv and the config of a W&B run that this project logs have them",
    "lr": "learning rate: log it as lr",
    "grad_norm": "gradient norm: log it as grad_norm",
    "epoch": "edges of epochs, which look like jumps: log epoch",
    "tokens_seen": "tokens seen, at which runs with other batches compare: log tokens_seen",
    "rows": "rows of a step: log them as train/rows",
    "top_row": "the row that moves a step most: ledger.csv names it",
    "restart": "restarts: ledger.csv marks them",
    "skipped": "updates that were skipped: ledger.csv counts them",
}


def missing_of(
    step: Ints, columns: Mapping[str, Floats], buckets: Mapping[str, Floats], *, has_header: bool
) -> tuple[str, ...]:
    """What a source does not tell, and what would supply it; a sentence each.

    Args:
        step: Steps, int64 ``[T]``.
        columns: Columns of the steps, float64 ``[T]`` each.
        buckets: Columns of the buckets, float64 ``[T, K]`` each.
        has_header: Whether a header says what the run is.
    """
    gap = int(np.median(np.diff(step))) if len(step) > 1 else 1
    empty = [name for name, values in buckets.items() if np.isnan(values).all()]
    known = {name for name, values in columns.items() if not np.isnan(values).all()}
    known |= {"gaps"} if gap == 1 else set()
    known |= {"buckets"} if buckets else set()
    known |= {"bucket_columns"} if not empty else set()
    known |= {"header"} if has_header else set()
    values = {"gap": gap, "names": ", ".join(empty)}
    return tuple(text.format_map(values) for name, text in MISSING.items() if name not in known)
