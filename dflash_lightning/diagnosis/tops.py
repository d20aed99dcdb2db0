"""Rows that deviate: the ledger names the row that moved each step most.

How far out a top row is, is told in deviations of a row: its pull on the loss, over what a usual
row pulls in the bucket of the step where that is most, since the ledger does not tell its bucket.
Where a step has one bucket, that is the row's own deviation in units of its bucket's, whatever the
batch size; elsewhere a row may be farther out than it looks. Real data has rows that are hard in
every epoch, so coming up again is no fault by itself: only rows far beyond what top rows usually
are count as bad.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_lightning.diagnosis.causes import Evidence
from dflash_lightning.diagnosis.pool import Steps, pooled, usable
from dflash_lightning.diagnosis.result import Cause
from dflash_lightning.diagnosis.run import Bools, Floats, Ints, Run
from dflash_lightning.diagnosis.statistics import robust_spread

FAR = 4.5  # robust deviations of the tops
OFTEN, TWICE = 3, 2
TOWERS = 3.0  # times the next row's size, for a row seen once
OWN_NOISE, BEYOND = 3.0, 2.0  # times the pooled noise; residuals
NAMED = 5  # rows that a diagnosis names


@dataclass(frozen=True, eq=False)
class Tops:
    """The top row of each step that has one; ``[M]`` each.

    Args:
        step: Int64.
        row: Row number in the store, int64.
        share: Of its bucket's deviations.
        pull: Change of the step's loss, nats.
        size: How far out, in deviations of a row.
        portion: Its squared pull over the step's expected variance.
    """

    step: Ints
    row: Ints
    share: Floats
    pull: Floats
    size: Floats
    portion: Floats

    @property
    def bound(self) -> float:
        """The size from which a row is far beyond the usual top."""
        return float(np.median(self.size)) + FAR * robust_spread(self.size)


@dataclass(frozen=True, kw_only=True)
class Deviator:
    """A row that moved steps most, over the run.

    Args:
        row: Row number in the store.
        times: Steps of which it was the top row.
        steps: These steps, at most the last ten.
        pull: Mean change of the step's loss, nats.
        size: Median distance from its like, in deviations of a row.
        far: Whether its loss is far above its like, beyond what top rows usually are.
    """

    row: int
    times: int
    steps: tuple[int, ...]
    pull: float
    size: float
    far: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "row": self.row,
            "times": self.times,
            "steps": list(self.steps),
            "pull": self.pull,
            "size": self.size,
            "far": self.far,
        }


def tops_of(run: Run) -> Tops | None:
    """The top rows of a run; None where its source does not name any."""
    run = run.take(usable(run))
    pull = run.column("top_pull")
    named = np.isfinite(run.column("top_row")) & np.isfinite(pull)
    if named.sum() < OFTEN or not run.num_buckets:
        return None
    steps = pooled(run)
    size = np.abs(pull) / (_usual_pull(steps) * np.sqrt(steps.slow_ratio))
    return Tops(
        step=run.step[named],
        row=run.column("top_row")[named].astype(np.int64),
        share=run.column("top_share")[named],
        pull=pull[named],
        size=size[named],
        portion=np.square(pull[named]) / np.maximum(steps.expected_noise[named], 1e-12),
    )


def _usual_pull(steps: Steps) -> Floats:
    """Deviation of a row's pull, in the bucket of the step where it is most: nats, ``[T]``."""
    rows = np.where(steps.precision > 0, steps.precision * steps.row_variance, np.inf)
    return (steps.portion * np.sqrt(steps.row_variance) / rows).max(1)


def deviators(tops: Tops) -> list[Deviator]:
    """Rows that were on top more than once, the farthest out first."""
    order, bound = np.argsort(tops.row, kind="stable"), tops.bound
    rows, first, times = np.unique(tops.row[order], return_index=True, return_counts=True)
    found = []
    for row, start, count in zip(rows, first, times, strict=True):
        if count < TWICE:
            continue
        at = order[start : start + count]
        size = float(np.median(tops.size[at]))
        found.append(
            Deviator(
                row=int(row),
                times=int(count),
                steps=tuple(int(x) for x in tops.step[at][-10:]),
                pull=float(tops.pull[at].mean()),
                size=size,
                far=size > bound and bool(np.median(tops.pull[at]) > 0),
            )
        )
    return sorted(found, key=lambda d: (-d.size * np.sqrt(d.times), d.row))


def bad_rows(evidence: Evidence, tops: Tops | None) -> list[Cause]:
    """Rows far out, again and again, or once in a step that they alone explain."""
    if tops is None:
        return []
    heavy = tops.share >= np.quantile(tops.share, 0.95)
    bound, alone_at = tops.bound, _alone(evidence, tops)
    chosen: dict[int, float] = {}
    # Below its like a row is easy, not bad.
    harder = tops.pull > 0
    for row in np.unique(tops.row[harder & (tops.size > bound)]):
        at = tops.row == row
        often = at.sum() >= OFTEN or (at & heavy).sum() >= TWICE
        alone = (at & alone_at).any()
        # With two, the smaller: one visit far out is no habit.
        size = float(np.sort(tops.size[at])[(at.sum() - 1) // 2])
        hard = np.median(tops.pull[at]) > 0
        if ((often and size > bound) or alone) and hard:
            chosen[int(row)] = size * float(np.sqrt(at.sum()))
    if not chosen:
        return []
    rows = sorted(chosen, key=lambda row: -chosen[row])[:NAMED]
    at = np.isin(tops.row, rows)
    share = float(tops.portion[at].sum() / len(evidence.run))
    times = ", ".join(f"row {row} in {(tops.row == row).sum()} steps" for row in rows)
    says = f"rows far beyond the others, likely bad data: {times}"
    steps = tuple(int(x) for x in tops.step[at][:20])
    return [Cause(cause="rows", steps=steps, rows=tuple(rows), share=share, says=says)]


def _alone(evidence: Evidence, tops: Tops) -> Bools:
    """Top rows that by themselves make their step an outlier, bool ``[M]``."""
    steps = evidence.taken.steps
    out = steps.step_noise > OWN_NOISE * steps.pooled_noise
    out &= np.abs(evidence.z) > BEYOND
    bound = float(np.median(tops.share)) + FAR * robust_spread(tops.share)
    alone = np.isin(tops.step, steps.step[out]) & (tops.share > bound)
    # Heavy tails have outliers of all sizes; one that towers over the next is none of theirs.
    largest = int(tops.size.argmax())
    others = tops.size[tops.row != tops.row[largest]]
    alone &= tops.row == tops.row[largest]
    return alone & (tops.size > TOWERS * others.max(initial=0.0))
