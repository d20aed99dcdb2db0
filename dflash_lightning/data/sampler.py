"""One rank's walk through a plan."""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from torch.utils.data import DistributedSampler

from dflash_lightning.batching import EpochPlan
from dflash_lightning.data.collate import BatchIndex
from dflash_lightning.data.run_plan import RunPlan


class PlanHolder(Protocol):
    """What the sampler asks of the data module."""

    rank: int
    accumulate: int
    train_rows: np.ndarray

    @property
    def run_plan(self) -> RunPlan:
        """The plans of the run's epochs."""

    def set_epoch(self, epoch: int) -> None:
        """Plan another epoch."""


class BucketSampler(DistributedSampler):
    """Yields this rank's batches of the current plan, in order, from where the run is.

    Its length counts the whole plan: Lightning adds what a restarted run has behind it.

    The base class is there for Lightning's ``isinstance`` check only: it leaves such a sampler
    alone under DDP and calls ``set_epoch`` on it.

    Args:
        holder: Holds the plan; asked anew at each epoch.
    """

    def __init__(self, holder: PlanHolder) -> None:
        self.holder = holder  # no super().__init__(): nothing of the base class is used

    def __len__(self) -> int:
        return self.holder.run_plan.plan.num_steps * self.holder.accumulate

    def __iter__(self) -> Iterator[BatchIndex]:
        h, run = self.holder, self.holder.run_plan
        plan, epoch = run.plan, run.epoch
        for step in range(run.first_step, plan.num_steps):
            for micro in range(h.accumulate):
                rows = h.train_rows[plan.rows(step, h.rank, micro)]
                yield BatchIndex(epoch, rows, plan.width(step, h.rank, micro))

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        self.holder.set_epoch(epoch)


class ValidationSampler(DistributedSampler):
    """Deals the batches of a one-rank plan over the ranks; places left over stay empty.

    Every row is seen once for any number of ranks, also when there are fewer rows than ranks.

    Args:
        plan: Of all validation rows, for one rank.
        rows: Store rows behind the plan's row numbers, int64 ``[R]``.
        rank: Asked when iterating, since it is known late.
        world_size: Likewise.
    """

    def __init__(
        self,
        plan: EpochPlan,
        rows: np.ndarray,
        rank: Callable[[], int],
        world_size: Callable[[], int],
    ) -> None:
        self.plan, self.rows, self._rank, self._world_size = plan, rows, rank, world_size

    def __len__(self) -> int:
        return -(-self.plan.num_steps // self._world_size())

    def __iter__(self) -> Iterator[BatchIndex]:
        for turn in range(len(self)):
            step = turn * self._world_size() + self._rank()
            if step < self.plan.num_steps:
                yield BatchIndex(None, self.rows[self.plan.rows(step, 0)], self.plan.width(step, 0))
            else:
                yield BatchIndex(None, self.rows[:0], 1)

    def set_epoch(self, epoch: int) -> None:
        """Validation is the same in every epoch."""
