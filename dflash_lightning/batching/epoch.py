"""How an epoch is made: rows shuffled, sorted in windows, cut into batches, dealt into steps."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dflash_lightning.batching.buckets import Ints, bucket_of
from dflash_lightning.batching.settings import Batching, Deal

# What closed a batch: the limit that one more row would break, the end of a bucket, or a split.
CLOSED_BY = ("token_budget", "max_rows", "cost_budget", "bucket end", "split")
_TOKENS, _ROWS, _COST, _END, _SPLIT = range(len(CLOSED_BY))
WINDOWS_PER_BUCKET = 8  # at least, or a small bucket would make the same batches every epoch


@dataclass(frozen=True)
class Batches:
    """Batches in order.

    Args:
        rows: Row ids, batch after batch, int32 ``[rows]``.
        offsets: Where each batch starts, and the end of the last, int64 ``[batches + 1]``. A batch
            without rows holds a place of a step that there was no row for.
        closed_by: Index into ``CLOSED_BY``, uint8 ``[batches]``.
        longest_first: Whether buckets and order were given up, since rows were too few.
    """

    rows: npt.NDArray[np.int32]
    offsets: Ints
    closed_by: npt.NDArray[np.uint8]
    longest_first: bool = False

    def __len__(self) -> int:
        return self.offsets.size - 1

    @property
    def sizes(self) -> Ints:
        """Rows of each batch, int64 ``[batches]``."""
        return np.diff(self.offsets)

    def longest(self, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Longest row of each batch in tokens, int32 ``[batches]``; 1 in a batch without rows."""
        longest = np.ones(len(self), np.int32)
        filled = np.flatnonzero(self.sizes)
        if filled.size:
            longest[filled] = np.maximum.reduceat(lengths[self.rows], self.offsets[filled])
        return longest

    def take(self, order: Ints) -> "Batches":
        """The batches at the positions of ``order``, int64, in that order."""
        sizes = self.sizes[order]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        source = np.repeat(self.offsets[order] - offsets[:-1], sizes) + np.arange(offsets[-1])
        return replace(
            self, rows=self.rows[source], offsets=offsets, closed_by=self.closed_by[order]
        )


def random_stream(seed: int, epoch: int, part: int = 0) -> np.random.Philox:
    """Random bits of one epoch.

    Philox and its raw stream are the same in every NumPy release; Generator's methods need not be,
    and the rows behind a step of an old run must stay nameable.

    Args:
        seed: Seed of the run.
        epoch: The epoch.
        part: 0 makes the epoch; later numbers deal what is left of it under another layout.
    """
    return np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=[0, 0, 0, part])


def cut_epoch(
    lengths: npt.NDArray[np.int32],
    batching: Batching,
    boundaries: tuple[int, ...],
    stream: np.random.Philox,
    *,
    places: int,
) -> Batches | None:
    """Cut all rows into batches whose number, rounded up to whole steps, the rows can fill.

    Should buckets and windows leave too few rows for that, rows are cut longest first, which makes
    the fewest batches of all ways.

    Args:
        lengths: Row lengths in tokens, int32 ``[rows]``.
        batching: Order, limits and windows.
        boundaries: Edges of the buckets.
        stream: Where the random bits come from.
        places: Batches of a step.

    Returns:
        The batches in the order of the cut, or None where even the fewest are too many.
    """
    rows, run_ends = _runs(lengths, batching, boundaries, stream)
    batches = cut_batches(rows, lengths, run_ends, batching)
    if rounded_up(len(batches), places) > rows.size:
        longest_first = np.argsort(-lengths, kind="stable").astype(np.int32)
        batches = cut_batches(longest_first, lengths, [rows.size], batching)
        batches = replace(batches, longest_first=True)
    return batches if rounded_up(len(batches), places) <= rows.size else None


def cut_batches(
    rows: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32],
    run_ends: list[int],
    batching: Batching,
) -> Batches:
    """Close each batch where one more row would break a limit.

    Args:
        rows: Row ids in the order in which they are batched, int32 ``[rows]``.
        lengths: Row lengths in tokens, int32; each row fits a batch of its own.
        run_ends: Ends of the runs of rows that no batch may cross, rising, the last ``rows``.
        batching: The limits.

    Returns:
        The batches, in the order of the rows.

    >>> lengths = np.array([5, 4, 3, 9], np.int32)
    >>> cut_batches(np.arange(4, dtype=np.int32), lengths, [4], Batching(token_budget=10)).offsets
    array([0, 2, 3, 4])
    """
    widths = batching.padded(lengths[rows])
    most = batching.most_rows(widths)
    counts = np.arange(1, min(most.max(initial=1), rows.size) + 1)
    offsets = [0]
    start = 0
    for run_end in run_ends:
        while start < run_end:
            reach = min(run_end - start, int(most[start]))
            # The longest row so far decides; the bound falls while the count rises.
            bound = np.minimum.accumulate(most[start : start + reach])
            start += int(np.count_nonzero(bound >= counts[:reach]))
            offsets.append(start)
    ends = np.array(offsets, np.int64)
    return Batches(rows, ends, _closed_by(widths, ends, run_ends, batching))


def _closed_by(
    widths: Ints, offsets: Ints, run_ends: list[int], batching: Batching
) -> npt.NDArray[np.uint8]:
    """What closed each batch; index into ``CLOSED_BY``, uint8 ``[batches]``."""
    one_more = np.diff(offsets) + 1
    ends = offsets[1:]
    longest = np.maximum.reduceat(widths, offsets[:-1])
    longest = np.maximum(longest, widths[np.minimum(ends, widths.size - 1)])
    closed = np.full(ends.size, _COST, np.uint8)
    closed[one_more * longest > batching.token_budget] = _TOKENS
    closed[one_more > batching.max_rows] = _ROWS
    closed[np.isin(ends, run_ends)] = _END
    return closed


def _runs(
    lengths: npt.NDArray[np.int32],
    batching: Batching,
    boundaries: tuple[int, ...],
    stream: np.random.Philox,
) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Row ids in the order in which they are cut, and the ends of the runs no batch may cross."""
    bucket = bucket_of(lengths, boundaries)
    if batching.order == "sorted":
        return np.argsort(lengths, kind="stable").astype(np.int32), [lengths.size]
    rows = np.argsort(stream.random_raw(lengths.size), kind="stable")
    if batching.order == "random":
        return rows.astype(np.int32), [lengths.size]
    rows = rows[np.argsort(bucket[rows].astype(np.min_scalar_type(len(boundaries))), kind="stable")]
    sizes = np.bincount(bucket, minlength=len(boundaries) - 1)
    rows = _sort_windows(rows, lengths, sizes, windows_of(lengths, batching, boundaries))
    return rows.astype(np.int32), np.cumsum(sizes)[sizes > 0].tolist()


def windows_of(
    lengths: npt.NDArray[np.int32], batching: Batching, boundaries: tuple[int, ...]
) -> Ints:
    """Sort windows of each bucket: of equally many rows, as many as ``sort_window`` mean batches.

    Equal rows rather than equal batches: both padding and the chance that batch-mates meet again
    are then lower, since windows over long rows, where most tokens are, get more batches.

    Args:
        lengths: Row lengths in tokens, int32 ``[rows]``.
        batching: Limits and ``sort_window``.
        boundaries: Edges of the buckets.

    Returns:
        Windows, int64 ``[buckets]``; 0 where nothing is to be sorted.
    """
    bucket = bucket_of(lengths, boundaries)
    rows = np.bincount(bucket, minlength=len(boundaries) - 1)
    batches = np.bincount(bucket, 1 / batching.most_rows(batching.padded(lengths)), rows.size)
    most = batching.sort_window * lengths.size / batches.sum()
    window = np.minimum(most, rows / WINDOWS_PER_BUCKET)
    sorts = window * batches > rows  # more rows than one batch
    return np.where(sorts, np.rint(rows / np.maximum(window, 1)), 0).astype(np.int64)


def _sort_windows(rows: Ints, lengths: npt.NDArray[np.int32], sizes: Ints, windows: Ints) -> Ints:
    """Sort shuffled rows by length inside windows of their bucket, rising and falling in turn.

    Neighbouring windows then meet where both are long or both are short, and a batch may cross.
    """
    if not windows.any():
        return rows
    starts = np.cumsum(sizes) - sizes
    at = np.arange(rows.size) - np.repeat(starts, sizes)
    # Without windows every row is a window of its own.
    count = np.where(windows > 0, windows, sizes)
    window = at * np.repeat(count, sizes) // np.repeat(np.maximum(sizes, 1), sizes)
    sign = np.where(window % 2 == 0, 1, -1)
    window += np.repeat(np.cumsum(count) - count, sizes)
    span = int(lengths.max()) * 2 + 1
    return rows[np.argsort(window * span + sign * lengths[rows], kind="stable")]


def deal_steps(
    longest: npt.NDArray[np.int32], deal: Deal, stream: np.random.Philox, *, places: int
) -> Ints:
    """Order batches so that each run of ``places`` is one step; what fills no step comes last.

    Args:
        longest: Longest row of each batch in tokens, int32 ``[batches]``.
        deal: ``stratified``, ``aligned`` or ``independent``; see ``Batching``.
        stream: Where the random bits come from.
        places: Batches of a step.

    Returns:
        Positions of the batches in the order of the steps, int64 ``[batches]``.
    """
    order = _shuffled(stream, longest.size)
    if deal != "independent":
        order = order[np.argsort(longest[order], kind="stable")]
    full, left = divmod(longest.size, places)
    if deal == "aligned":  # the last, unfilled step is a run of neighbours too
        late = int(stream.random_raw() % (full + 1)) * places + np.arange(left)
    else:  # and otherwise taken evenly from all lengths
        late = ((np.arange(left) + 0.5) * longest.size / max(left, 1)).astype(np.int64)
    early = np.delete(order, late)
    if deal == "stratified":
        within = np.argsort(stream.random_raw(early.size).reshape(places, full), axis=1)
        steps = np.take_along_axis(early.reshape(places, full), within, axis=1).T
    else:
        steps = early.reshape(full, places)[_shuffled(stream, full)]
    seats = np.argsort(stream.random_raw(early.size).reshape(full, places), axis=1)
    steps = np.take_along_axis(steps, seats, axis=1)
    return np.concatenate([steps.ravel(), order[late][_shuffled(stream, left)]])


def fill_last_step(batches: Batches, *, places: int) -> Batches:
    """Halve batches near the end, most rows first, until ``places`` divides their number.

    The end is the last, unfilled step and the full step before it, so that few batches are halved
    twice; where these have too few rows, it grows by whole steps. Where all rows are too few,
    places at the end stay without rows.

    Args:
        batches: Batches in the order of the steps.
        places: Batches of a step.

    Returns:
        The batches, some halved.
    """
    wanted = rounded_up(len(batches), places)
    missing = min(wanted, batches.rows.size) - len(batches)
    offsets, closed = batches.offsets, batches.closed_by
    if missing > 0:
        first = _tail_start(offsets, places)
        tail, tail_closed = offsets[first:], closed[first:].copy()
        while missing > 0:
            sizes = np.diff(tail)
            halved = np.argsort(-sizes, kind="stable")[:missing]
            halved = halved[2 * sizes[halved] > sizes[halved[0]]]
            middles = tail[halved] + (sizes[halved] + 1) // 2
            tail_closed[halved] = _SPLIT
            tail_closed = np.insert(tail_closed, halved + 1, _SPLIT)
            tail = np.insert(tail, halved + 1, middles)
            missing -= halved.size
        offsets = np.concatenate([offsets[:first], tail])
        closed = np.concatenate([closed[:first], tail_closed])
    empty = wanted - (offsets.size - 1)
    return replace(
        batches,
        offsets=np.append(offsets, np.full(empty, offsets[-1])),
        closed_by=np.append(closed, np.full(empty, _SPLIT, np.uint8)),
    )


def _tail_start(offsets: Ints, places: int) -> int:
    """First batch of the end that is split: the fewest last steps with a row for every place."""
    full = (offsets.size - 1) // places
    steps = np.arange(min(1, full), full + 1)
    has_rows = offsets[-1] - offsets[(full - steps) * places] >= (steps + 1) * places
    return int(full - steps[has_rows.argmax()]) * places if has_rows.any() else 0


def rounded_up(batches: int, places: int) -> int:
    """The next multiple of the places of a step."""
    return -(-batches // places) * places


def _shuffled(stream: np.random.Philox, count: int) -> Ints:
    """Positions 0 to ``count - 1`` in random order, int64."""
    return np.argsort(stream.random_raw(count), kind="stable")
