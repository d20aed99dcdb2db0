"""The plan of an epoch: every batch of every step, a pure function of its arguments."""

import dataclasses
import hashlib
import json
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dflash_lightning.batching.buckets import best_boundaries, bucket_of
from dflash_lightning.batching.epoch import (
    Batches,
    cut_epoch,
    deal_steps,
    fill_last_step,
    random_stream,
)
from dflash_lightning.batching.settings import Batching, check_fit, checked_int, checked_lengths

if TYPE_CHECKING:
    from dflash_lightning.batching.report import PlanReport


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EpochPlan:
    """All batches of one epoch, or of what is left of it, in the order in which they are trained.

    A batch is named by ``(step, rank, micro)``. Its place inside the step is
    ``micro * world_size + rank``, so a step holds the same rows however the product of
    ``world_size`` and ``accumulate`` is made up. Made by ``plan_epoch``.

    Args:
        lengths: Row lengths in tokens, int32 ``[rows]``, also of rows that are not in the plan.
        batching: The settings followed.
        boundaries: Edges of the length buckets in tokens, 0 first.
        seed: Seed of the run.
        epoch: The epoch, from 0.
        world_size: Ranks.
        accumulate: Batches that each rank adds up for one optimizer step.
        batches: The batches, step by step and place by place.
        done: What was delivered of this epoch before: ``(world_size, accumulate, steps)`` of each
            earlier layout.
    """

    lengths: npt.NDArray[np.int32] = dataclasses.field(repr=False)
    batching: Batching
    boundaries: tuple[int, ...]
    seed: int
    epoch: int
    world_size: int
    accumulate: int
    batches: Batches = dataclasses.field(repr=False)
    done: tuple[tuple[int, int, int], ...] = ()

    @property
    def places(self) -> int:
        """Batches of one step."""
        return self.world_size * self.accumulate

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the plan, the same on every rank."""
        return len(self.batches) // self.places

    @property
    def num_buckets(self) -> int:
        """Length buckets."""
        return len(self.boundaries) - 1

    @cached_property
    def longest(self) -> npt.NDArray[np.int32]:
        """Longest row of each batch in tokens, before rounding, int32 ``[batches]``."""
        return self.batches.longest(self.lengths)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that differ wherever lengths, settings, seed, epoch or layout do."""
        layout = [self.boundaries, self.seed, self.epoch, self.world_size, self.accumulate]
        settings = dataclasses.asdict(self.batching)
        text = json.dumps([settings, *layout, *self.done], sort_keys=True)
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
            Row ids, int64 ``[rows of the batch]``, a copy. Empty only in the last step of a plan
            made by ``resume``, where rows were too few for every place.

        Raises:
            ValueError: The plan has no such place.
        """
        start = self._batch(step, rank, micro)
        first, end = self.batches.offsets[start : start + 2]
        return self.batches.rows[first:end].astype(np.int64)

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

    def report(self) -> "PlanReport":
        """Padding, limits, waiting and mixing of this plan; see ``PlanReport``."""
        from dflash_lightning.batching.measure import report_plan

        return report_plan(self)

    def remaining(self, after_step: int) -> npt.NDArray[np.int64]:
        """Rows that are not delivered yet.

        Args:
            after_step: Steps of this plan that are done, 0 to ``num_steps``.

        Returns:
            Row ids, int64, in the order of the plan.

        Raises:
            ValueError: The plan has fewer steps.
        """
        after_step = checked_int("after_step", after_step, at_least=0, at_most=self.num_steps)
        first = self.batches.offsets[after_step * self.places]
        return self.batches.rows[first:].astype(np.int64)

    def resume(self, after_step: int, *, world_size: int, accumulate: int) -> "EpochPlan":
        """The rest of the epoch under another layout: every remaining row once.

        Batches stay as they are, except that the last ones are halved for whole steps. Where the
        product of ``world_size`` and ``accumulate`` stays, so do the steps; otherwise the remaining
        batches are dealt anew. Places that rows are too few for hold none.

        Args:
            after_step: Steps of this plan that are done, 0 to ``num_steps``.
            world_size: Ranks from now on.
            accumulate: Batches that each rank adds up from now on.

        Returns:
            A plan whose first step follows; with what was done, a pure function of the arguments.

        Raises:
            ValueError: An argument is outside its range.
        """
        after_step = checked_int("after_step", after_step, at_least=0, at_most=self.num_steps)
        world_size = checked_int("world_size", world_size, at_least=1)
        accumulate = checked_int("accumulate", accumulate, at_least=1)
        done = (*self.done, (self.world_size, self.accumulate, after_step))
        rest = self.batches.take(np.arange(after_step * self.places, len(self.batches)))
        if world_size * accumulate != self.places:
            rest = rest.take(np.flatnonzero(rest.sizes))
            places = world_size * accumulate
            stream = random_stream(self.seed, self.epoch, part=len(done))
            longest = rest.longest(self.lengths)
            order = deal_steps(longest, self.batching.deal, stream, places=places)
            rest = fill_last_step(rest.take(order), places=places)
        layout = {"world_size": world_size, "accumulate": accumulate}
        return dataclasses.replace(self, batches=_read_only(rest), done=done, **layout)

    def _batch(self, step: int, rank: int, micro: int) -> int:
        """Position of a batch in the plan."""
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
        batching: Order, limits, buckets, windows and deal.
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
    >>> plan.num_steps, sorted(plan.remaining(0).tolist())
    (2, [0, 1, 2, 3])
    """
    seed = checked_int("seed", seed, at_least=0, at_most=2**63 - 1)
    epoch = checked_int("epoch", epoch, at_least=0)
    world_size = checked_int("world_size", world_size, at_least=1)
    accumulate = checked_int("accumulate", accumulate, at_least=1)
    own = checked_lengths(lengths).copy()
    own.flags.writeable = False
    check_fit(own, batching)
    boundaries = batching.boundaries or best_boundaries(own, batching.num_buckets, batching)
    batches = _all_batches(
        own, batching, boundaries, random_stream(seed, epoch), world_size, accumulate
    )
    return EpochPlan(
        lengths=own,
        batching=batching,
        boundaries=boundaries,
        seed=seed,
        epoch=epoch,
        world_size=world_size,
        accumulate=accumulate,
        batches=_read_only(batches),
    )


def _all_batches(
    lengths: npt.NDArray[np.int32],
    batching: Batching,
    boundaries: tuple[int, ...],
    stream: np.random.Philox,
    world_size: int,
    accumulate: int,
) -> Batches:
    """The batches of an epoch in the order of its steps."""
    places = world_size * accumulate
    layout = f"world_size={world_size} and accumulate={accumulate}, {places} batches a step"
    if places > lengths.size:
        raise ValueError(
            f"world_size * accumulate must not exceed the number of rows ({lengths.size}), got "
            f"{layout}. Lower world_size or accumulate, or add rows."
        )
    batches = cut_epoch(lengths, batching, boundaries, stream, places=places)
    if batches is None:
        raise ValueError(
            "world_size * accumulate must divide a number of batches the rows can make: "
            f"{lengths.size} rows make too many under token_budget={batching.token_budget}, "
            f"max_rows={batching.max_rows} and cost_budget={batching.cost_budget}, got {layout}. "
            "Raise these limits, or lower world_size or accumulate."
        )
    if batching.order == "sorted":
        # Before the deal: which batches are split must not depend on the epoch.
        batches = fill_last_step(batches, places=places)
    order = deal_steps(batches.longest(lengths), batching.deal, stream, places=places)
    return fill_last_step(batches.take(order), places=places)


def _read_only(batches: Batches) -> Batches:
    """The same batches, whose arrays refuse to be changed."""
    for array in (batches.rows, batches.offsets, batches.closed_by):
        array.flags.writeable = False
    return batches
