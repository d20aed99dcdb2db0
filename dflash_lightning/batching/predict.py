"""Padding predicted from the lengths alone, to be set beside what a plan then does.

Rows in random order: ``mean_batches`` of ``buckets``, with every distinct width told apart. Rows in
sort windows: an ideal window, whose rows stand at the quantiles of their bucket, is cut.
"""

import itertools

import numpy as np
import numpy.typing as npt

from dflash_lightning.batching.buckets import Floats, mean_batches
from dflash_lightning.batching.epoch import cut_batches, windows_of
from dflash_lightning.batching.settings import Batching


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
    tokens = rising.sum(dtype=np.int64) / pair.sum(dtype=np.int64)
    return _padded_in_order(pair, batching) * float(tokens)


def _padded_in_order(lengths: npt.NDArray[np.int32], batching: Batching) -> int:
    """Padded tokens of rows that are batched as they stand."""
    batches = cut_batches(
        np.arange(lengths.size, dtype=np.int32), lengths, [lengths.size], batching
    )
    return int((batches.sizes * batching.padded(batches.longest(lengths))).sum())


def _padded_at_random(rising: npt.NDArray[np.int32], batching: Batching) -> float:
    """Expected padded tokens of rows in random order, all in one run."""
    widths, counts = np.unique(batching.padded(rising), return_counts=True)
    below = np.concatenate([[0.0], np.cumsum(counts)])
    most = batching.most_rows(widths)
    one = np.zeros(1, np.int64)
    rows, padded = mean_batches(below, widths.astype(np.float64), most, one, widths.size)
    return rising.size * float(padded[0] / rows[0])
