"""The plan of an epoch: every batch of every step, a pure function of its arguments."""

import dataclasses
import hashlib
import json
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dflash_lightning.batching.buckets import (
    Batching,
    bucket_of,
    check_fit,
    checked_int,
    checked_lengths,
    cut_batches,
    quantile_boundaries,
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EpochPlan:
    """All batches of one epoch, in the order in which they are trained; see ``plan_epoch``.

    A batch is named by ``(step, rank, micro)``. Its place inside the step is
    ``micro * world_size + rank``, so a step holds the same rows however the product of
    ``world_size`` and ``accumulate`` is made up.

    Args:
        lengths: Row lengths in tokens, int32 ``[rows]``.
        batching: The settings followed.
        boundaries: Edges of the length buckets in tokens, 0 first.
        seed: Seed of the run.
        epoch: The epoch, from 0.
        world_size: Ranks.
        accumulate: Batches that each rank adds up for one optimizer step.
        row_order: Row ids in the order in which they are trained, int32 ``[rows]``.
        offsets: Where each batch starts in ``row_order``, and its end, int64 ``[batches + 1]``.
    """

    lengths: npt.NDArray[np.int32] = dataclasses.field(repr=False)
    batching: Batching
    boundaries: tuple[int, ...]
    seed: int
    epoch: int
    world_size: int
    accumulate: int
    row_order: npt.NDArray[np.int32] = dataclasses.field(repr=False)
    offsets: npt.NDArray[np.int64] = dataclasses.field(repr=False)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch, the same on every rank."""
        return (self.offsets.size - 1) // (self.world_size * self.accumulate)

    @property
    def num_buckets(self) -> int:
        """Length buckets."""
        return len(self.boundaries) - 1

    @cached_property
    def longest(self) -> npt.NDArray[np.int32]:
        """Longest row of each batch in tokens, before rounding, int32 ``[batches]``."""
        return np.maximum.reduceat(self.lengths[self.row_order], self.offsets[:-1])

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that differ wherever lengths, settings, seed, epoch or layout do."""
        layout = [self.boundaries, self.seed, self.epoch, self.world_size, self.accumulate]
        text = json.dumps([dataclasses.asdict(self.batching), *layout], sort_keys=True)
        digest = hashlib.sha256(text.encode())
        digest.update(self.lengths.astype("<i4", copy=False).tobytes())
        return digest.hexdigest()[:16]

    def rows(self, step: int, rank: int, micro: int = 0) -> npt.NDArray[np.int64]:
        """Rows of one batch.

        Args:
            step: Optimizer step, from 0.
            rank: Rank that trains the batch.
            micro: Which of the rank's accumulated batches.

        Returns:
            Row ids, int64 ``[rows of the batch]``, never empty; a copy.

        Raises:
            ValueError: The plan has no such place.
        """
        batch = self._batch(step, rank, micro)
        return self.row_order[self.offsets[batch] : self.offsets[batch + 1]].astype(np.int64)

    def width(self, step: int, rank: int, micro: int = 0) -> int:
        """Padded length of one batch in tokens; arguments and errors as ``rows``."""
        batch = self._batch(step, rank, micro)
        return int(self.batching.padded(self.longest[batch : batch + 1])[0])

    def bucket(self, step: int, rank: int, micro: int = 0) -> int:
        """Bucket of one batch's longest row; arguments and errors as ``rows``."""
        batch = self._batch(step, rank, micro)
        return int(bucket_of(self.longest[batch : batch + 1], self.boundaries)[0])

    def row_buckets(self, rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Bucket of each row, by its own length and wherever it is batched.

        Args:
            rows: Row ids, integers ``[n]``, at least one.

        Returns:
            Buckets, int64 ``[n]``.
        """
        return bucket_of(self.lengths[np.asarray(rows)], self.boundaries)

    def summary(self) -> dict[str, int | float]:
        """Counts and ratios of the whole epoch.

        Returns:
            ``rows``, ``batches``, ``steps``; ``efficiency``, real over padded tokens; ``fill``,
            padded tokens over what all batches may hold; ``peak``, the largest batch over the
            budget.
        """
        sizes = np.diff(self.offsets)
        padded = sizes * self.batching.padded(self.longest)
        total = int(padded.sum())
        budget = self.batching.token_budget
        return {
            "rows": self.lengths.size,
            "batches": sizes.size,
            "steps": self.num_steps,
            "efficiency": int(self.lengths.sum(dtype=np.int64)) / total,
            "fill": total / (budget * sizes.size),
            "peak": int(padded.max()) / budget,
        }

    def _batch(self, step: int, rank: int, micro: int) -> int:
        """Position of a batch in the epoch."""
        sizes = {"step": self.num_steps, "rank": self.world_size, "micro": self.accumulate}
        for (name, size), value in zip(sizes.items(), (step, rank, micro), strict=True):
            if not 0 <= value < size:
                raise ValueError(
                    f"{name} must lie in 0..{size - 1}, got {value}. The plan has {self.num_steps} "
                    f"steps for world_size={self.world_size} and accumulate={self.accumulate}."
                )
        return (step * self.accumulate + micro) * self.world_size + rank


def plan_epoch(
    lengths: npt.ArrayLike,
    batching: Batching,
    *,
    seed: int,
    epoch: int,
    world_size: int = 1,
    accumulate: int = 1,
) -> EpochPlan:
    """Plan every batch of one epoch: each row once, equal steps on all ranks, no empty batch.

    The last batches are split until ``world_size * accumulate`` divides their number. Should the
    rows be too few for that, buckets are given up and rows are batched longest first, which makes
    the fewest batches; so a plan is refused only where none exists.

    Args:
        lengths: Row lengths in tokens, integers ``[rows]``, each at least 1.
        batching: Order, budget, cap and buckets.
        seed: Seed of the run, 0 or more.
        epoch: The epoch, from 0.
        world_size: Ranks.
        accumulate: Batches that each rank adds up for one optimizer step.

    Returns:
        The plan; it depends on nothing but the arguments.

    Raises:
        ValueError: An argument is outside its range, a row is longer than the budget or the last
            boundary, or the rows cannot fill every place of every step.

    >>> plan = plan_epoch([5, 3, 4, 9], Batching(token_budget=10), seed=0, epoch=0, world_size=2)
    >>> plan.num_steps, sorted(plan.row_order.tolist())
    (2, [0, 1, 2, 3])
    """
    seed = checked_int("seed", seed, at_least=0, at_most=2**63 - 1)
    epoch = checked_int("epoch", epoch, at_least=0)
    world_size = checked_int("world_size", world_size, at_least=1)
    accumulate = checked_int("accumulate", accumulate, at_least=1)
    own = checked_lengths(lengths).copy()
    check_fit(own, batching)
    boundaries = batching.boundaries or quantile_boundaries(own, batching.num_buckets)
    # Philox and its raw stream are the same in every NumPy release; Generator's methods need not
    # be, and the rows behind a step of an old run must stay nameable.
    stream = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    row_order, offsets = _all_batches(
        own, batching, boundaries, stream, world_size=world_size, accumulate=accumulate
    )
    for array in (own, row_order, offsets):
        array.flags.writeable = False
    return EpochPlan(
        lengths=own,
        batching=batching,
        boundaries=boundaries,
        seed=seed,
        epoch=epoch,
        world_size=world_size,
        accumulate=accumulate,
        row_order=row_order,
        offsets=offsets,
    )


def _all_batches(
    lengths: npt.NDArray[np.int32],
    batching: Batching,
    boundaries: tuple[int, ...],
    stream: np.random.Philox,
    *,
    world_size: int,
    accumulate: int,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Row ids in training order and the offsets of the batches in them."""
    places = world_size * accumulate
    layout = f"world_size={world_size} and accumulate={accumulate}, {places} batches a step"
    if places > lengths.size:
        raise ValueError(
            f"world_size * accumulate must not exceed the number of rows ({lengths.size}), got "
            f"{layout}. Lower world_size or accumulate, or add rows."
        )
    rows, run_ends = _runs(lengths, batching, boundaries, stream)
    offsets = cut_batches(batching.padded(lengths[rows]), run_ends, batching)
    if _num_batches(offsets, places) > rows.size:
        rows = np.argsort(-lengths, kind="stable").astype(np.int32)
        offsets = cut_batches(batching.padded(lengths[rows]), [rows.size], batching)
    if _num_batches(offsets, places) > rows.size:
        raise ValueError(
            "world_size * accumulate must divide a number of batches the rows can make: "
            f"{rows.size} rows make {offsets.size - 1} or more under token_budget="
            f"{batching.token_budget} and max_rows={batching.max_rows}, got {layout}. "
            "Raise token_budget or max_rows, or lower world_size or accumulate."
        )
    if batching.order == "sorted":
        # Before the shuffle: which batches are split must not depend on the epoch.
        offsets = _split_tail(offsets, places)
    rows, offsets = _shuffle_batches(rows, offsets, stream)
    return rows, _split_tail(offsets, places)


def _runs(
    lengths: npt.NDArray[np.int32],
    batching: Batching,
    boundaries: tuple[int, ...],
    stream: np.random.Philox,
) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Row ids in the order in which they are cut, and the ends of the runs no batch may cross."""
    bucket = bucket_of(lengths, boundaries)
    if batching.order == "sorted":
        rows = np.argsort(lengths, kind="stable")
    else:
        rows = np.argsort(stream.random_raw(lengths.size), kind="stable")
    if batching.order != "bucketed":
        return rows.astype(np.int32), [rows.size]
    rows = rows[np.argsort(bucket[rows].astype(np.min_scalar_type(len(boundaries))), kind="stable")]
    return rows.astype(np.int32), np.cumsum(np.bincount(bucket)).tolist()


def _num_batches(offsets: npt.NDArray[np.int64], places: int) -> int:
    """Batches after the split of the tail: the next multiple of the places of a step."""
    return -(-(offsets.size - 1) // places) * places


def _shuffle_batches(
    rows: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], stream: np.random.Philox
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The same batches in random order: their rows, and the new offsets."""
    order = np.argsort(stream.random_raw(offsets.size - 1), kind="stable")
    sizes = np.diff(offsets)[order]
    shuffled = np.concatenate([[0], np.cumsum(sizes)])
    source = np.repeat(offsets[:-1][order] - shuffled[:-1], sizes) + np.arange(rows.size)
    return rows[source], shuffled


def _split_tail(offsets: npt.NDArray[np.int64], places: int) -> npt.NDArray[np.int64]:
    """Offsets with batches near the end halved, most rows first, until the places divide them.

    The end is the last unfilled step and the full step before it, so that few batches are halved
    twice; where these have too few rows, it grows by whole steps.
    """
    missing = _num_batches(offsets, places) - (offsets.size - 1)
    if missing == 0:
        return offsets
    full = (offsets.size - 1) // places
    steps = np.arange(min(1, full), full + 1)
    has_rows = offsets[-1] - offsets[(full - steps) * places] >= (steps + 1) * places
    first = int(full - steps[has_rows.argmax()]) * places
    tail = offsets[first:]
    while missing > 0:
        sizes = np.diff(tail)
        halved = np.argsort(-sizes, kind="stable")[:missing]
        halved = halved[2 * sizes[halved] > sizes[halved[0]]]
        tail = np.insert(tail, halved + 1, tail[halved] + (sizes[halved] + 1) // 2)
        missing -= halved.size
    return np.concatenate([offsets[:first], tail])
