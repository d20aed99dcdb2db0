"""Padding foretold from the lengths alone, to be set beside what a plan then does.

Rows in random order: the model in the head of ``buckets``, completed. A row that did not fit opens
the next batch, so the first row of a batch has another distribution, ``G``, than the others, ``F``:
the one that reproduces itself from batch to batch:

    P(N >= n) = G(reach(n)) F(reach(n))^(n-1)
    G(x)      = sum_n [P(N >= n) F(x) - P(M_n <= reach(n+1)) F(min(x, reach(n+1)))]

Rows in sort windows: an ideal window, whose rows stand at the quantiles of their bucket, is cut.
"""

import itertools

import numpy as np
import numpy.typing as npt

from dflash_lightning.batching.buckets import Floats, Ints
from dflash_lightning.batching.epoch import cut_batches, windows_of
from dflash_lightning.batching.settings import Batching

ROUNDS = 6  # G stands still to seven digits after about four


def predicted_padding(
    lengths: npt.NDArray[np.int32], batching: Batching, boundaries: tuple[int, ...]
) -> Floats:
    """Padded tokens that an epoch can be expected to have.

    Args:
        lengths: Row lengths in tokens, int32 ``[rows]``.
        batching: Order, limits and windows.
        boundaries: Edges of the buckets.

    Returns:
        Padded tokens of each bucket, float64 ``[buckets]``; of all rows, ``[1]``, where ``order``
        is not ``bucketed``.
    """
    rising = np.sort(lengths)
    if batching.order == "sorted":
        return np.array([_padded_in_order(rising, batching)], np.float64)
    if batching.order == "random":
        return np.array([_padded_at_random(rising, batching)])
    cuts = rising.searchsorted(boundaries, side="right")
    windows = windows_of(lengths, batching, boundaries).tolist()
    return np.array(
        [
            _padded_in_bucket(rising[low:high], count, batching) if high > low else 0.0
            for (low, high), count in zip(itertools.pairwise(cuts), windows, strict=True)
        ]
    )


def _padded_in_bucket(rising: npt.NDArray[np.int32], windows: int, batching: Batching) -> float:
    if windows == 0:
        return _padded_at_random(rising, batching)
    rows = max(rising.size // windows, 1)
    window = rising[((np.arange(rows) + 0.5) / rows * rising.size).astype(np.int64)]
    pair = np.concatenate([window, window[::-1]])
    return _padded_in_order(pair, batching) * rising.size / pair.size


def _padded_in_order(lengths: npt.NDArray[np.int32], batching: Batching) -> int:
    """Padded tokens of rows that are batched as they stand."""
    batches = cut_batches(
        np.arange(lengths.size, dtype=np.int32), lengths, [lengths.size], batching
    )
    return int((batches.sizes * batching.padded(batches.longest(lengths))).sum())


def _padded_at_random(rising: npt.NDArray[np.int32], batching: Batching) -> float:
    """Expected padded tokens of rows in random order, all in one run."""
    widths, counts = np.unique(batching.padded(rising), return_counts=True)
    rows, padded = mean_batch(widths, counts, batching)
    return rising.size * padded / rows


def mean_batch(widths: Ints, counts: Ints, batching: Batching) -> tuple[float, float]:
    """Mean rows and padded tokens of a batch filled with rows in random order.

    Args:
        widths: Distinct widths in tokens, rising, int64 ``[m]``.
        counts: Rows of each width, int64 ``[m]``.
        batching: The limits.

    Returns:
        Rows, and padded tokens.
    """
    share = counts.cumsum() / counts.sum()
    sizes = np.arange(1, batching.most_rows(widths[:1])[0] + 2)
    reach = (-batching.most_rows(widths)).searchsorted(-sizes, side="right").tolist()
    first = share
    for _ in range(ROUNDS):
        first = _one_batch(first, share, widths, reach)[0]
    _, rows, padded = _one_batch(first, share, widths, reach)
    return rows, padded


def _one_batch(
    first: Floats, share: Floats, widths: Ints, reach: list[int]
) -> tuple[Floats, float, float]:
    """How the first row of the next batch is distributed, and this batch's mean rows and padding.

    Args:
        first: Distribution function of the first row over the widths, ``[m]``.
        share: That of every other row, ``[m]``.
        widths: Distinct widths in tokens, rising, ``[m]``.
        reach: Of 1, 2, ... rows: how many of the widths leave room for them; ends with 0.
    """
    rest = np.ones(share.size)
    opened = np.zeros(share.size)
    rows = padded = 0.0
    for n, (now, more) in enumerate(itertools.pairwise(reach), start=1):
        below = first[:now] * rest[:now]  # P(the longest of n rows <= width)
        next_fits, next_share = (below[more - 1], share[more - 1]) if more else (0.0, 0.0)
        opened += below[-1] * share - next_fits * np.minimum(share, next_share)
        rows += float(below[-1])
        steps = np.diff(below, prepend=0.0) * widths[:now]
        padded += n * float(steps.sum() - steps[:more].sum() * next_share)
        rest[:more] *= share[:more]
    return opened, rows, padded
