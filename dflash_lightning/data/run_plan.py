"""The plans of all epochs of a run, and how far the run is in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from dflash_lightning.batching import Batching, EpochPlan, plan_epoch

Segment = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run is: rows consumed of a global plan, never batches of one rank.

    Args:
        epoch: The epoch that is being trained, from 0.
        segments: What of it is done: ``(world_size, accumulate, steps)`` of each layout in turn.
        finished: Whether that is all of it.
    """

    epoch: int
    segments: tuple[Segment, ...] = ()
    finished: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for a checkpoint."""
        return {
            "epoch": self.epoch,
            "segments": [list(segment) for segment in self.segments],
            "finished": self.finished,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Position":
        """The inverse of :meth:`to_dict`."""
        return cls(
            epoch=values["epoch"],
            segments=tuple((w, a, s) for w, a, s in values["segments"]),
            finished=values["finished"],
        )

    @property
    def is_mid_epoch(self) -> bool:
        """Whether part of the epoch is done and part is left."""
        return bool(self.segments) and not self.finished


class RunPlan:
    """Plans every epoch of a run under one layout of ranks, and knows what is left of it.

    Args:
        lengths: Row lengths in tokens, integers ``[rows]``.
        batching: How rows become batches.
        seed: Of the run.
        world_size: Ranks.
        accumulate: Batches that each rank adds up for one optimizer step.
        epoch: The epoch to begin with.
        step: Optimizer steps that the run has done before it.
        quiet: Show no bar while planning.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        batching: Batching,
        *,
        seed: int,
        world_size: int = 1,
        accumulate: int = 1,
        epoch: int = 0,
        step: int = 0,
        quiet: bool = True,
    ) -> None:
        self.lengths, self.batching, self.seed = lengths, batching, seed
        self.world_size, self.accumulate = world_size, accumulate
        self.quiet = quiet
        self._steps: dict[int, int] = {}
        self._begin(epoch, self._whole(epoch), step)
        self._mark_start()

    def _begin(
        self,
        epoch: int,
        plan: EpochPlan,
        step: int,
        *,
        done: Sequence[Segment] = (),
        first: int = 0,
    ) -> None:
        """Deliver ``plan`` from now on; its step 0 is step ``step`` of the run."""
        self.epoch, self.plan = epoch, plan
        self.first_step = first
        self._began, self._done = step, tuple(done)

    def _mark_start(self) -> None:
        """Remember where this process takes the run up: totals are counted from there."""
        left = int(self.lengths[self.plan.remaining(0)].sum())
        before = self.epoch * self.tokens_per_epoch + self.tokens_per_epoch - left
        self._start = (self.epoch, self._began, self.plan.num_steps, before)

    @property
    def tokens_per_epoch(self) -> int:
        """Real tokens that all ranks together see in an epoch."""
        return int(self.lengths.sum())

    def set_epoch(self, epoch: int, step: int) -> bool:
        """Plan another epoch, which begins after ``step`` steps of the run; False if it is there.

        Args:
            epoch: From 0.
            step: Optimizer steps done.
        """
        if epoch == self.epoch:
            return False
        self._begin(epoch, self._whole(epoch), step)
        return True

    # -- where the run is -----------------------------------------------------------------------

    def step_in_plan(self, step: int) -> int:
        """Step of the current plan that is optimizer step ``step`` of the run, both from 0."""
        return step - self._began

    def position(self, step: int) -> Position:
        """The position after ``step`` optimizer steps of the run."""
        steps = step - self._began
        here = [(self.world_size, self.accumulate, steps)] if steps else []
        return Position(
            epoch=self.epoch,
            segments=(*self._done, *here),
            finished=steps >= self.plan.num_steps,
        )

    def keep_boundaries(self, saved: Mapping[str, Any]) -> None:
        """Take a stopped run's bucket edges where the configuration leaves them to be found.

        Args:
            saved: Settings in its checkpoint.
        """
        edges = tuple(saved["data.batching.boundaries"])
        same = saved["data.batching.num_buckets"] == self.batching.num_buckets
        if self.batching.boundaries is not None or not same or edges == self.plan.boundaries:
            return
        self.batching = replace(self.batching, boundaries=edges)
        self._steps.clear()
        self._begin(self.epoch, self._whole(self.epoch), self._began)
        self._mark_start()

    def resume(self, position: Position, step: int) -> bool:
        """Go on where another process stopped, with every row of the epoch exactly once.

        Args:
            position: Where it was.
            step: Optimizer steps it had done.

        Returns:
            Whether what is left goes on in the plan that the stopped process had.

        Raises:
            ValueError: The epoch has fewer steps than the position says.
        """
        if position.finished or not position.segments:
            epoch = position.epoch + position.finished
            self._begin(epoch, self._whole(epoch), step)
            self._mark_start()
            return not position.finished
        *earlier, (world_size, accumulate, steps) = position.segments
        plan = self._stopped_in(position)
        same = (world_size, accumulate) == (self.world_size, self.accumulate)
        if same:
            plan.remaining(steps)  # refused where there are fewer
            self._begin(position.epoch, plan, step - steps, done=earlier, first=steps)
        else:
            rest = plan.resume(steps, world_size=self.world_size, accumulate=self.accumulate)
            self._begin(position.epoch, rest, step, done=position.segments)
        self._mark_start()
        return same

    def _stopped_in(self, position: Position) -> EpochPlan:
        """The plan that the stopped process had: that of the position's last segment."""
        world_size, accumulate, _ = position.segments[0]
        plan = self._whole(position.epoch, world_size=world_size, accumulate=accumulate)
        for (_, _, steps), (world_size, accumulate, _) in pairwise(position.segments):
            plan = plan.resume(steps, world_size=world_size, accumulate=accumulate)
        return plan

    # -- how long the run is --------------------------------------------------------------------

    def num_steps(self, epochs: int, *, at_most: int | None = None) -> int:
        """Optimizer steps of the run up to the end of its first ``epochs`` epochs, exactly.

        Epochs differ by a few steps, so each is planned once; only its number of steps is kept.

        Args:
            epochs: How many epochs.
            at_most: Where the run ends anyway; no epoch beyond is planned.
        """
        first, began, left, _ = self._start
        from tqdm import tqdm  # naming the rows of a step works without it

        steps = began + left if epochs > first else began
        bar = tqdm(
            range(first + 1, epochs), "planning", unit="epoch", delay=2, disable=self.quiet or None
        )
        for epoch in bar:
            if at_most is not None and steps >= at_most:
                return at_most
            steps += self._steps_of(epoch)
        return steps if at_most is None else min(steps, at_most)

    def num_tokens(self, steps: int) -> int:
        """Real tokens of the first steps of a run, taking the steps of an epoch as equal."""
        epoch, began, planned, before = self._start
        if steps <= began:
            return round(before * steps / max(began, 1))
        tokens, steps = float(before), steps - began
        epoch_tokens = (epoch + 1) * self.tokens_per_epoch - before
        while steps > 0:
            tokens += epoch_tokens * min(1.0, steps / planned)
            steps -= planned
            epoch, epoch_tokens = epoch + 1, self.tokens_per_epoch
            planned = self._steps_of(epoch) if steps > 0 else 1
        return round(tokens)

    def _steps_of(self, epoch: int) -> int:
        """Optimizer steps of a whole epoch; planned where that was not done before."""
        if epoch not in self._steps:
            self._whole(epoch)
        return self._steps[epoch]

    def _whole(self, epoch: int, **layout: int) -> EpochPlan:
        own = {"world_size": self.world_size, "accumulate": self.accumulate}
        plan = plan_epoch(
            self.lengths, self.batching, seed=self.seed, epoch=epoch, **{**own, **layout}
        )
        if {**own, **layout} == own:
            self._steps[epoch] = plan.num_steps
        return plan
