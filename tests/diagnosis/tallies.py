"""The ledger's columns from rows, as ``dflash_lightning.functional.step_statistics`` has them."""

import math

import numpy as np
from diagnosis.dealt import Floats, Ints

from dflash_lightning.diagnosis.run import BUCKET_COLUMNS

KEEP = 0.9  # of the running mean of a bucket's loss, each step that has the bucket
ROUNDING = 1e-12  # a row holds all weight of its bucket where no more than this is left


def tally(
    step: Ints,
    bucket: Ints,
    rows: Ints,
    s: Floats,
    n: Floats,
    log_length: Floats,
    *,
    shape: tuple[int, int],
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Columns of steps and of buckets.

    Args:
        step: Of each row, ``[M]``, rising, every step at least once.
        bucket: Of each row.
        rows: Row ids.
        s: Weighted loss sum of each row.
        n: Weight of each row.
        log_length: Logarithm of each row's length.
        shape: Steps and buckets.

    Returns:
        ``loss``, ``weight``, ``rows``, ``tokens``, ``top_row``, ``top_share``, ``top_pull``,
        ``[T]`` each; and all six bucket columns, ``[T, K]`` each.
    """
    steps, k = shape
    cell = step * k + bucket
    sum_s, sum_n, sum_n2, sum_length = (
        np.bincount(cell, values, steps * k) for values in (s, n, n * n, n * log_length)
    )
    count = np.bincount(cell, minlength=steps * k)
    with np.errstate(invalid="ignore", divide="ignore"):
        loss = sum_s / sum_n
        eff = np.where(count > 0, sum_n**2 / sum_n2, 0.0)
        rest = sum_n[cell] - n
        pull = np.where(rest > ROUNDING * sum_n[cell], (s - loss[cell] * n) / rest, 0.0)
        noise = (count - 1) / count * np.bincount(cell, pull * pull, steps * k)
        length = sum_length / sum_n
    noise[(count < 2) | (eff < 1.5)] = np.nan
    flat = (loss, sum_n, count, noise, eff, length)
    buckets = {
        name: values.reshape(steps, k).astype(float)
        for name, values in zip(BUCKET_COLUMNS, flat, strict=True)
    }
    weight = sum_n.reshape(steps, k).sum(1)
    columns = {
        "loss": sum_s.reshape(steps, k).sum(1) / weight,
        "weight": weight,
        "rows": count.reshape(steps, k).sum(1).astype(float),
        "tokens": np.bincount(step, np.rint(np.exp(log_length))),
    }
    ref = running_means(buckets["loss"]).ravel()[cell]
    return columns | _top_row(step, cell, rows, s, n, ref, columns["loss"], weight), buckets


def _top_row(
    step: Ints,
    cell: Ints,
    rows: Ints,
    s: Floats,
    n: Floats,
    ref: Floats,
    loss: Floats,
    weight: Floats,
) -> dict[str, Floats]:
    """The row of each step that deviates most from its bucket's ``ref``; NaN where none does."""
    deviation = np.abs(s - ref * n)
    deviation = np.where(deviation > ROUNDING * np.abs(s), deviation, 0.0)
    deviation = np.where(np.isfinite(s), deviation, np.inf)
    sums = np.bincount(cell, np.where(np.isfinite(s), deviation, 0.0))
    top = first_largest(deviation, step)
    bad, some = ~np.isfinite(deviation[top]), deviation[top] > 0
    rest = weight - n[top]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(bad, 1.0, deviation[top] / sums[cell[top]])
        pull = np.where(rest > ROUNDING * weight, (s[top] - loss * n[top]) / rest, np.nan)
    found = {"top_row": rows[top], "top_share": share, "top_pull": pull}
    return {name: np.where(some, values, np.nan) for name, values in found.items()}


def running_means(loss: Floats) -> Floats:
    """What each bucket's loss is held against: the mean of earlier steps, or at first itself."""
    held = []
    ref = [math.nan] * loss.shape[1]
    for row in loss.tolist():
        held.append([now if old != old else old for old, now in zip(ref, row, strict=True)])
        ref = [
            old if not math.isfinite(now) else now if old != old else KEEP * old + (1 - KEEP) * now
            for old, now in zip(ref, row, strict=True)
        ]
    return np.array(held)


def first_largest(values: Floats, step: Ints) -> Ints:
    """Position of the largest value of each step."""
    starts = np.flatnonzero(np.diff(step, prepend=-1))
    largest = np.maximum.reduceat(values, starts)
    at = np.flatnonzero(values == largest[step])
    return at[np.flatnonzero(np.diff(step[at], prepend=-1))]
