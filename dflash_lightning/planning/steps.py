"""How many steps a run has: every epoch planned as fit will plan it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from dflash_lightning.batching import EpochPlan, plan_epoch
from dflash_lightning.data.buckets import read_lengths
from dflash_lightning.data.store import RowStore, split_rows
from dflash_lightning.planning.job import Job


class Rows(NamedTuple):
    """Row lengths of the training data, and where they are from.

    Args:
        lengths: In tokens, integers ``[rows]``.
        origin: In words.
    """

    lengths: np.ndarray
    origin: str


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What the epochs of a run hold together.

    Args:
        rows: Rows of an epoch.
        tokens: Real tokens of an epoch.
        longest: Longest row in tokens.
        epoch_steps: Optimizer steps of each planned epoch.
        epoch_padded: Padded tokens of each planned epoch.
        total: Optimizer steps of the run.
        width: Mean padded length of a row in tokens, weighted by padded tokens.
    """

    rows: int
    tokens: int
    longest: int
    epoch_steps: tuple[int, ...]
    epoch_padded: tuple[int, ...]
    total: int
    width: float

    @property
    def padded_per_step(self) -> float:
        """Mean padded tokens of a step, all GPUs together."""
        return sum(self.epoch_padded) / sum(self.epoch_steps)

    @property
    def tokens_per_step(self) -> float:
        """Mean real tokens of a step, all GPUs together."""
        return self.tokens * len(self.epoch_steps) / sum(self.epoch_steps)


def find_rows(job: Job, lengths: Path | None) -> Rows | None:
    """Training rows of a file of lengths, else of the configuration's store, if it is there.

    Args:
        job: The run.
        lengths: A ``.npy`` file of row lengths, all of which are trained on; None takes the store.
    """
    if lengths is not None:
        return Rows(read_lengths(lengths), f"all rows of {lengths.name}")
    if not Path(job.data.store_path).is_dir():
        return None
    store = RowStore.open(job.data.store_path)
    rows = np.arange(len(store))
    if job.data.val_store_path is None:
        rows, _ = split_rows(store.column("conversation"), job.data.val_fraction)
    return Rows(store.lengths[rows], f"training rows of {store.path.name}")


def count_steps(lengths: np.ndarray, job: Job) -> Steps:
    """Plan the epochs of a run until it ends.

    Args:
        lengths: Row lengths in tokens, integers ``[rows]``.
        job: The run.
    """
    steps, padded, squares = [], [], 0
    rows = np.asarray(lengths)
    batching = job.data.batching
    bar = tqdm(range(job.epochs or 10**6), "planning", unit="epoch", delay=2, disable=None)
    for epoch in bar:
        plan = plan_epoch(
            lengths,
            batching,
            seed=job.data.seed,
            epoch=epoch,
            world_size=job.setup.ranks,
            accumulate=job.accumulate,
        )
        batching = replace(batching, boundaries=plan.boundaries)  # found once: they do not change
        tokens, square = _padded(plan)
        steps.append(plan.num_steps)
        padded.append(tokens)
        squares += square
        if job.max_steps is not None and sum(steps) >= job.max_steps:
            break
    bar.close()
    return Steps(
        rows=rows.size,
        tokens=int(rows.sum(dtype=np.int64)),
        longest=int(rows.max()),
        epoch_steps=tuple(steps),
        epoch_padded=tuple(padded),
        total=min(sum(steps), job.max_steps or sum(steps)),
        width=squares / sum(padded),
    )


def _padded(plan: EpochPlan) -> tuple[int, int]:
    """Padded tokens of a plan, and the sum over them of the width that each stands in."""
    widths = plan.batching.padded(plan.longest)
    tokens = plan.batches.sizes * widths
    return int(tokens.sum()), int((tokens * widths).sum())
