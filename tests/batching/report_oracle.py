"""Slow twin of a plan's report: every number by walking through the plan."""

import dataclasses
import itertools
import math
from collections import Counter
from fractions import Fraction
from statistics import fmean, pstdev

import numpy as np
import pytest
from batching.plans import (
    batches_of,
    fits,
    rounded,
    steps_of,
)

from dflash_lightning.batching import EpochPlan, plan_epoch
from dflash_lightning.batching.epoch import cut_epoch, random_stream
from dflash_lightning.batching.predict import predicted_padding
from dflash_lightning.batching.report import PlanReport

REASONS = ("token_budget", "max_rows", "cost_budget", "bucket end", "split")


def bucket_by_walking(length: int, boundaries: tuple[int, ...]) -> int:
    """The bucket whose edges hold a length."""
    return next(k for k, (a, b) in enumerate(itertools.pairwise(boundaries)) if a < length <= b)


def width_of(plan: EpochPlan, rows: list[int]) -> int:
    return rounded(max(int(plan.lengths[row]) for row in rows), plan.batching.pad_to)


def tokens_of(plan: EpochPlan, rows: list[int]) -> int:
    return sum(int(plan.lengths[row]) for row in rows)


def full_batches(plan: EpochPlan) -> list[list[int]]:
    return [batch for batch in batches_of(plan) if batch]


def whole_steps(plan: EpochPlan) -> list[list[list[int]]]:
    """Steps whose every place has rows."""
    return [step for step in steps_of(plan) if all(step)]


def reasons_by_walking(plan: EpochPlan) -> Counter:
    """What closed each batch: put one more row in, the next of the cut, and see what breaks."""
    places = plan.places
    for world_size, accumulate, _ in plan.done[:1]:
        places = world_size * accumulate
    stream = random_stream(plan.seed, plan.epoch)
    cut = cut_epoch(plan.lengths, plan.batching, plan.boundaries, stream, places=places)
    order, known = cut.rows.tolist(), {}
    for start, end in itertools.pairwise(cut.offsets.tolist()):
        rows = order[start:end]
        known[frozenset(rows)] = reason_of(plan, rows, order[end : end + 1])
    return Counter(known.get(frozenset(batch), "split") for batch in full_batches(plan))


def reason_of(plan: EpochPlan, rows: list[int], following: list[int]) -> str:
    """The limit that ``following``, one row or none, would break; the cap counts before tokens."""

    def bucket(row: int) -> int:
        return bucket_by_walking(int(plan.lengths[row]), plan.boundaries)

    bucketed = plan.batching.order == "bucketed"
    if not following or (bucketed and bucket(following[0]) > bucket(rows[-1])):
        return "bucket end"
    wider = [*rows, *following]
    assert not fits(len(wider), width_of(plan, wider), plan.batching)
    if len(wider) > plan.batching.max_rows:
        return "max_rows"
    too_many = len(wider) * width_of(plan, wider) > plan.batching.token_budget
    return "token_budget" if too_many else "cost_budget"


def again_by_pairs(plan: EpochPlan) -> float:
    """Try every pair of batch-mates in the next epoch's plan."""
    layout = {"world_size": plan.world_size, "accumulate": plan.accumulate}
    following = plan_epoch(
        plan.lengths, plan.batching, seed=plan.seed, epoch=plan.epoch + 1, **layout
    )
    later = {row: k for k, batch in enumerate(batches_of(following)) for row in batch}
    pairs = [pair for batch in full_batches(plan) for pair in itertools.combinations(batch, 2)]
    return sum(later[a] == later[b] for a, b in pairs) / len(pairs) if pairs else 0.0


def lag1_by_pairs(plan: EpochPlan) -> float | None:
    """Correlation over each rank's consecutive batches, in exact numbers; None where undefined."""
    means = [
        [Fraction(tokens_of(plan, batch), len(batch)) for batch in step]
        for step in whole_steps(plan)
    ]
    pairs = []
    for rank in range(plan.world_size):
        seen = [
            step[micro * plan.world_size + rank]
            for step in means
            for micro in range(plan.accumulate)
        ]
        pairs += itertools.pairwise(seen)
    if len(pairs) < 2:
        return None
    x, y = ([value - sum(side) / len(side) for value in side] for side in zip(*pairs, strict=True))
    spread = sum(a * a for a in x) * sum(b * b for b in y)
    if not spread:
        return None
    return float(sum(a * b for a, b in zip(x, y, strict=True))) / float(spread) ** 0.5


def waiting_by_hand(plan: EpochPlan, steps: list[list[list[int]]], *, quadratic: bool) -> float:
    """Mean over steps of the slowest rank's work over the mean rank's."""
    found = []
    for step in steps:
        work = [0.0] * plan.world_size
        for place, batch in enumerate(step):
            width = width_of(plan, batch) if batch else 0
            padded = len(batch) * width
            factor = 1 + width / plan.batching.cost_knee if quadratic else 1
            work[place % plan.world_size] += padded * factor
        found.append(max(work) / fmean(work))
    return fmean(found)


def step_std_by_hand(plan: EpochPlan, steps: list[list[list[int]]]) -> float:
    """Each token of bucket k has a loss of k / 10; deviation of the steps' mean losses."""
    means = []
    for step in steps:
        rows = [int(plan.lengths[row]) for batch in step for row in batch]
        loss = sum(0.1 * bucket_by_walking(n, plan.boundaries) * n for n in rows)
        means.append(loss / sum(rows))
    return pstdev(means)


def deal_by_hand(plan: EpochPlan, steps: list[list[list[int]]]) -> dict[str, float]:
    return {
        "waiting_linear": waiting_by_hand(plan, steps, quadratic=False),
        "waiting_quadratic": waiting_by_hand(plan, steps, quadratic=True),
        "step_std": step_std_by_hand(plan, steps),
    }


def whole_by_hand(plan: EpochPlan) -> dict[str, float]:
    """Every number of a report that concerns all batches, with the names of the report."""
    batches = full_batches(plan)
    shapes = [(len(batch), width_of(plan, batch)) for batch in batches]
    padded = [rows * width for rows, width in shapes]
    tokens = sum(tokens_of(plan, batch) for batch in batches)
    budget = plan.batching.token_budget
    closed = reasons_by_walking(plan)
    rising = np.array(sorted(int(plan.lengths[row]) for batch in batches for row in batch))
    foretold = predicted_padding(rising.astype(np.int32), plan.batching, plan.boundaries).sum()
    return {
        "rows": sum(len(batch) for batch in batches),
        "batches": len(batches),
        "steps": len(steps_of(plan)),
        "tokens": tokens,
        "padded_tokens": sum(padded),
        "efficiency": tokens / sum(padded),
        "predicted": tokens / foretold,
        "fill": sum(padded) / (budget * len(batches)),
        "peak": max(padded) / budget,
        "widths": len({width for _, width in shapes}),
        "shapes": len(set(shapes)),
        "again": again_by_pairs(plan),
    } | {f"closed by {reason}": closed[reason] / len(batches) for reason in REASONS}


def bucket_by_hand(plan: EpochPlan, k: int) -> dict[str, float | None]:
    """One bucket of a report: its rows wherever they are batched, and the batches it leads."""
    low, high = plan.boundaries[k : k + 2]
    rows = {int(row) for row in plan.batches.rows if low < plan.lengths[row] <= high}
    tokens = tokens_of(plan, sorted(rows))
    everything = tokens_of(plan, plan.batches.rows.tolist())
    places, led = 0, []
    for batch in full_batches(plan):
        places += len(rows.intersection(batch)) * width_of(plan, batch)
        if low < max(int(plan.lengths[row]) for row in batch) <= high:
            led.append((len(batch), width_of(plan, batch)))
    found = {
        "low": low,
        "high": high,
        "rows": len(rows),
        "token_share": tokens / everything,
        "batches": len(led),
        "batch_rows": fmean(rows for rows, _ in led) if led else None,
        "batch_width": fmean(width for _, width in led) if led else None,
        "mean_length": tokens / len(rows) if rows else None,
        "efficiency": tokens / places if rows else None,
    }
    return without_none(found)


def whole_of(report: PlanReport) -> dict[str, float]:
    """The numbers of a report that ``whole_by_hand`` has."""
    names = "rows batches steps tokens padded_tokens efficiency predicted fill peak widths shapes"
    found = {name: getattr(report, name) for name in [*names.split(), "again"]}
    return found | {f"closed by {name}": share for name, share in report.closed_by.items()}


def bucket_of_report(report: PlanReport, k: int) -> dict[str, float | None]:
    found = dataclasses.asdict(report.buckets[k])
    del found["predicted"]
    return without_none(found)


def without_none(values: dict) -> dict:
    """None as not a number, which ``close`` can compare."""
    return {name: math.nan if value is None else value for name, value in values.items()}


def close(values: dict) -> object:
    """Equal up to rounding; None is equal to None only."""
    return pytest.approx(values, rel=1e-9, abs=1e-12, nan_ok=True)
