"""The report of a plan: every number against a slow twin, warnings, text, HTML, plain types."""

import dataclasses
import html.parser
import itertools
import json
import math
import re
import xml.etree.ElementTree as ET
from collections import Counter
from fractions import Fraction
from statistics import fmean, pstdev

import numpy as np
import pytest
from batching.plans import (
    DEALS,
    FEW,
    LAYOUTS,
    ORDERS,
    batches_of,
    family,
    fits,
    plan_of,
    plannable,
    plannable_cases,
    rounded,
    steps_of,
)
from hypothesis import given
from hypothesis import strategies as st
from story import BOUNDARIES as STORY
from story import story_lengths

from dflash_lightning.batching import Batching, EpochPlan, plan_epoch
from dflash_lightning.batching.epoch import Batches, cut_epoch, random_stream
from dflash_lightning.batching.predict import predicted_padding
from dflash_lightning.batching.report import PlanReport

REASONS = ("token_budget", "max_rows", "cost_budget", "bucket end", "split")
PLAIN = (str, int, float, type(None))


# -- slow twins ------------------------------------------------------------------------------------


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


# -- the numbers -----------------------------------------------------------------------------------


@FEW
@given(plannable_cases())
def test_every_number_equals_a_walk_through_the_plan(case) -> None:
    lengths, batching, arguments = case
    plan = plan_epoch(lengths, batching, **arguments)
    report = plan.report()
    assert whole_of(report) == close(whole_by_hand(plan))
    assert report.deal == batching.deal
    assert dataclasses.asdict(report.deals[report.deal]) == close(
        deal_by_hand(plan, steps_of(plan))
    )
    assert report.waiting_linear == report.deals[batching.deal].waiting_linear
    assert report.waiting_quadratic == report.deals[batching.deal].waiting_quadratic
    assert report.step_std == report.deals[batching.deal].step_std
    assert [bucket_of_report(report, k) for k in range(plan.num_buckets)] == [
        close(bucket_by_hand(plan, k)) for k in range(plan.num_buckets)
    ]
    correlation = lag1_by_pairs(plan)
    assert correlation is None or report.lag1 == pytest.approx(correlation, abs=1e-9)


@FEW
@given(plannable_cases())
def test_shares_add_up_and_ratios_stay_in_their_range(case) -> None:
    lengths, batching, arguments = case
    report = plan_epoch(lengths, batching, **arguments).report()
    assert sum(report.closed_by.values()) == pytest.approx(1)
    assert sum(bucket.token_share for bucket in report.buckets) == pytest.approx(1)
    assert sum(bucket.rows for bucket in report.buckets) == report.rows == len(lengths)
    assert sum(bucket.batches for bucket in report.buckets) == report.batches
    assert 0 < report.efficiency <= 1
    assert 0 < report.fill <= report.peak <= 1
    assert 0 <= report.again <= 1
    assert -1 <= report.lag1 <= 1 + 1e-12
    assert report.widths <= report.shapes <= report.batches
    assert report.random_step_std >= 0
    places = report.batches // report.steps
    for deal in report.deals.values():
        assert 1 <= deal.waiting_linear <= places
        assert 1 <= deal.waiting_quadratic <= places
        assert deal.step_std >= 0


def test_numbers_of_a_plan_small_enough_to_work_out_by_hand() -> None:
    # Both rows of 4 tokens share a batch of width 4, the rows of 9 and of 10 have one each.
    batching = Batching(order="sorted", boundaries=(0, 4, 9, 10), token_budget=16, max_rows=2)
    report = plan_of([4, 10, 4, 9], batching).report()
    assert (report.rows, report.batches, report.steps) == (4, 3, 3)
    assert (report.tokens, report.padded_tokens) == (27, 27)
    assert report.fill == pytest.approx(27 / 48)
    assert report.peak == 10 / 16
    assert report.closed_by == {
        "token_budget": pytest.approx(1 / 3),
        "max_rows": pytest.approx(1 / 3),
        "cost_budget": 0,
        "bucket end": pytest.approx(1 / 3),
        "split": 0,
    }
    assert (report.widths, report.shapes, report.again) == (3, 3, 1.0)
    # Steps with mean losses of 0.0, 0.1 and 0.2 nats: the variance is 0.02 / 3.
    assert report.step_std == pytest.approx((0.02 / 3) ** 0.5)


@pytest.mark.parametrize("order", ["sorted", "random"])
def test_a_row_counts_in_its_own_bucket_where_batches_mix_buckets(order: str) -> None:
    # One batch of all rows, 10 wide: the short rows' own bucket pays for their padding.
    batching = Batching(order=order, boundaries=(0, 4, 9, 10), token_budget=40)
    report = plan_of([2, 10, 4, 9], batching).report()
    short, middle, long = report.buckets
    assert [bucket.rows for bucket in report.buckets] == [2, 1, 1]
    assert [bucket.batches for bucket in report.buckets] == [0, 0, 1]
    assert (short.efficiency, middle.efficiency, long.efficiency) == (6 / 20, 9 / 10, 10 / 10)
    assert (short.mean_length, short.token_share) == (3, 6 / 25)
    assert (short.batch_rows, short.batch_width) == (None, None)
    assert (long.batch_rows, long.batch_width) == (4, 10)
    assert [bucket.predicted for bucket in report.buckets] == [None] * 3


def test_a_bucket_without_rows_is_shown_as_empty() -> None:
    report = plan_of([3, 4, 4], Batching(boundaries=(0, 4, 9))).report()
    empty = report.buckets[1]
    assert (empty.rows, empty.batches, empty.token_share) == (0, 0, 0)
    assert {empty.mean_length, empty.batch_rows, empty.batch_width} == {None}
    assert {empty.efficiency, empty.predicted} == {None}
    (line,) = [line for line in repr(report).split("\n") if line.startswith("(4, 9]")]
    assert line.split()[2:] == ["0", "0.0%", "-", "-", "-", "-", "-"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pad_to", [1, 64])
def test_what_is_foretold_is_near_what_happens(order: str, pad_to: int) -> None:
    batching = Batching(order=order, pad_to=pad_to)
    report = plan_of(story_lengths(20_000), batching, world_size=8).report()
    assert report.predicted == pytest.approx(report.efficiency, abs=0.01)
    if order == "bucketed":
        for bucket in report.buckets:
            assert bucket.predicted == pytest.approx(bucket.efficiency, abs=0.03)


@pytest.mark.parametrize("longs", [4, 15, 16])
def test_what_is_foretold_is_never_above_1(longs: int) -> None:
    batching = Batching(num_buckets=1, token_budget=100, sort_window=2)
    report = plan_of([5] * 16 + [50] * longs, batching).report()
    assert 0 < report.predicted <= 1
    assert 0 < report.buckets[0].predicted <= 1


@pytest.mark.parametrize("kinds", [[7, 7, 7], [1, 1, 2], [3, 3, 4], [1, 2, 8]])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_lag_one_is_0_where_all_batches_are_equally_long(kinds: list[int], count: int) -> None:
    plan = plan_of(kinds * count, Batching(order="random", max_rows=3))
    alike = Batches(
        rows=np.arange(3 * count, dtype=np.int32),
        offsets=np.arange(count + 1) * 3,
        closed_by=np.zeros(count, np.uint8),
    )
    plan = dataclasses.replace(plan, batches=alike)
    assert lag1_by_pairs(plan) is None
    assert plan.report().lag1 == 0


def test_sorted_epochs_reunite_all_batch_mates_and_random_ones_hardly_any() -> None:
    lengths = family("log-normal", 5000)
    report = plan_of(lengths, Batching(order="sorted"), world_size=4).report()
    assert report.again == 1.0
    # A batch has about n rows, so a mate is met again with a chance of about n / 5000.
    mixed = plan_of(lengths, Batching(order="random"), world_size=4).report()
    assert 0 < mixed.again < 2 * mixed.rows / mixed.batches / 5000


# -- deals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_aligned_numbers_are_those_of_neighbours_in_length(world_size: int) -> None:
    # Every batch has another longest row, so there is one way to align them.
    lengths = np.arange(1, 161, dtype=np.int32) * 5
    reports = {}
    for deal in DEALS:
        batching = Batching(order="sorted", max_rows=4, deal=deal, boundaries=(0, 300, 600, 800))
        plan = plan_of(lengths, batching, world_size=world_size)
        rising = sorted(batches_of(plan), key=max)
        assert len(rising) == 40
        steps = [rising[at : at + world_size] for at in range(0, 40, world_size)]
        reports[deal] = plan.report()
        assert dataclasses.asdict(reports[deal].deals["aligned"]) == close(
            deal_by_hand(plan, steps)
        )
    # What is said of a deal does not depend on which one the plan follows.
    for deal in DEALS:
        numbers = dataclasses.asdict(reports[deal].deals["aligned"])
        assert numbers == close(dataclasses.asdict(reports["aligned"].deals["aligned"]))


@pytest.mark.parametrize("deal", DEALS)
def test_the_numbers_of_every_deal_lie_where_many_deals_of_the_same_batches_lie(deal: str) -> None:
    plans = (
        plan_of(
            story_lengths(3000)[less:],
            Batching(deal=deal, sort_window=8, boundaries=STORY),
            world_size=4,
        )
        for less in range(500)
    )
    plan = next(plan for plan in plans if REASONS.index("split") not in plan.batches.closed_by)
    batches = sorted(batches_of(plan), key=lambda batch: int(plan.lengths[batch].max()))
    steps = len(batches) // 4
    random = np.random.default_rng(0)
    found: dict[str, list[float]] = {"stratified": [], "aligned": [], "independent": []}
    for _ in range(8):
        mixed = random.permutation(len(batches))
        dealt = {
            "stratified": np.stack(
                [k * steps + random.permutation(steps) for k in range(4)], axis=1
            ),
            "aligned": np.arange(4 * steps).reshape(steps, 4),
            "independent": mixed.reshape(steps, 4),
        }
        for name, order in dealt.items():
            own = [[batches[k] for k in step] for step in order.tolist()]
            found[name].append(step_std_by_hand(plan, own))
    report = plan.report()
    for name, values in found.items():
        mean, spread = fmean(values), pstdev(values)
        assert abs(report.deals[name].step_std - mean) < 6 * spread + 0.02 * mean, name


@pytest.mark.parametrize("kind", ["log-normal", "heavy tail", "two piles", "uniform"])
@pytest.mark.parametrize("layout", [{"world_size": 2}, {"world_size": 4, "accumulate": 2}])
def test_stratified_steps_differ_less_than_aligned_ones(kind: str, layout: dict) -> None:
    places = math.prod(layout.values())
    for deal in DEALS:
        report = plan_of(family(kind), Batching(deal=deal), **layout).report()
        smooth, rough = (report.deals[name].step_std for name in ("stratified", "aligned"))
        assert smooth < (0.5 if places == 8 else 1.0) * rough
        waits, least = (report.deals[name].waiting_linear for name in ("stratified", "aligned"))
        assert 1 <= least <= waits + 1e-3


@pytest.mark.parametrize("kind", ["log-normal", "two piles", "uniform"])
@pytest.mark.parametrize("layout", [{"world_size": 2}, {"world_size": 8}])
def test_the_deviation_of_a_random_global_batch_is_that_of_a_simulation(
    kind: str, layout: dict
) -> None:
    lengths = family(kind)
    plan = plan_of(lengths, Batching(), **layout)
    loss = np.array([0.1 * bucket_by_walking(n, plan.boundaries) for n in lengths.tolist()])
    random = np.random.default_rng(0)
    rows = lengths.size // plan.num_steps
    drawn = random.integers(0, lengths.size, (2000, rows))
    means = (loss * lengths)[drawn].sum(1) / lengths[drawn].sum(1)
    assert plan.report().random_step_std == pytest.approx(means.std(), rel=0.1)


# -- warnings --------------------------------------------------------------------------------------

FILL = [
    (
        [600] * 100,
        {"token_budget": 1000},
        {},
        (
            "fill 0.60: 99% of the batches were closed by token_budget; rows are long for the "
            "budget: raise token_budget."
        ),
        {"token_budget": 6000},
    ),
    (
        [10] * 100,
        {"token_budget": 100, "max_rows": 4},
        {},
        (
            "fill 0.40: 96% of the batches were closed by max_rows; raise max_rows, or lower "
            "token_budget to what is used."
        ),
        {"max_rows": 10},
    ),
    (
        [10] * 100,
        {"token_budget": 100, "max_rows": 4},
        {},
        (
            "fill 0.40: 96% of the batches were closed by max_rows; raise max_rows, or lower "
            "token_budget to what is used."
        ),
        {"token_budget": 40},
    ),
    (
        [10] * 100,
        {"token_budget": 100, "cost_budget": 80, "cost_knee": 10},
        {},
        (
            "fill 0.40: 96% of the batches were closed by cost_budget; raise cost_budget, or lower "
            "token_budget to what is used."
        ),
        {"cost_budget": 200},
    ),
    (
        [10] * 100,
        {"token_budget": 100, "cost_budget": 80, "cost_knee": 10},
        {},
        (
            "fill 0.40: 96% of the batches were closed by cost_budget; raise cost_budget, or lower "
            "token_budget to what is used."
        ),
        {"token_budget": 40},
    ),
    (
        [10] * 7 + [12] * 5 + [14] * 6,
        {"token_budget": 126, "num_buckets": 3},
        {},
        "fill 0.57: 100% of the batches were closed by bucket end; lower num_buckets.",
        {"num_buckets": 1},
    ),
    (
        [10] * 10,
        {"token_budget": 100},
        {"world_size": 5},
        (
            "fill 0.20: 100% of the batches were closed by split; lower world_size or accumulate, "
            "or add rows."
        ),
        {"world_size": 1},
    ),
]


@pytest.mark.parametrize(("lengths", "settings", "layout", "text", "remedy"), FILL)
def test_low_fill_is_explained_by_what_closed_most_batches_and_the_remedy_helps(
    lengths: list[int], settings: dict, layout: dict, text: str, remedy: dict
) -> None:
    report = plan_of(lengths, Batching(**settings), **layout).report()
    assert [warning for warning in report.warnings if "fill" in warning] == [text]
    assert f"! {text}" in " ".join(repr(report).split())
    change = {name: value for name, value in remedy.items() if name != "world_size"}
    layout = layout | {name: value for name, value in remedy.items() if name == "world_size"}
    remedied = plan_of(lengths, Batching(**settings | change), **layout).report()
    assert remedied.fill >= 0.8
    assert not any("fill" in warning for warning in remedied.warnings)


def test_a_bucket_of_less_than_one_batch_is_named_with_two_ways_out() -> None:
    batching = Batching(boundaries=(0, 10, 20), token_budget=100)
    lengths = [10] * 50 + [20] * 4
    text = (
        "bucket (10, 20] holds 4 rows, less than one batch: lower num_buckets, or leave out one "
        "of its boundaries."
    )
    assert plan_of(lengths, batching).report().warnings == (text,)
    assert plan_of([*lengths, 20], batching).report().warnings == ()
    joined = dataclasses.replace(batching, boundaries=(0, 20))
    assert not any("less" in warning for warning in plan_of(lengths, joined).report().warnings)
    for order in ("sorted", "random"):  # whose batches do not end with a bucket
        mixed = plan_of(lengths, dataclasses.replace(batching, order=order)).report()
        assert not any("less than one batch" in warning for warning in mixed.warnings)


@pytest.mark.parametrize("longest", [65, 128, 129, 1000, 4096, 4097, 8192])
def test_more_than_64_widths_are_named_with_a_grid_that_leaves_64(longest: int) -> None:
    lengths = np.unique(np.linspace(1, longest, 400).astype(int))
    batching = Batching(token_budget=16384, max_rows=1)
    report = plan_of(lengths, batching).report()
    (text,) = [warning for warning in report.warnings if " widths, " in warning]
    pattern = (
        rf"{report.widths:,} widths, {report.shapes:,} shapes of rows x width: attention that is "
        r"compiled per shape would be compiled for each; for it, pad_to=(\d+) leaves at most 64 "
        r"widths\."
    )
    grid = int(re.fullmatch(pattern, text)[1])
    remedied = plan_of(lengths, dataclasses.replace(batching, pad_to=grid)).report()
    assert remedied.widths <= 64
    assert not any(" widths, " in warning for warning in remedied.warnings)


@pytest.mark.parametrize(("widths", "warned"), [(64, False), (65, True)])
def test_sixty_four_widths_are_not_too_many(widths: int, warned: bool) -> None:
    report = plan_of(range(1, widths + 1), Batching(max_rows=1)).report()
    assert report.widths == widths
    assert any(" widths, " in warning for warning in report.warnings) == warned


def test_batch_mates_that_always_meet_again_are_named() -> None:
    lengths = [10] * 400 + [20] * 400
    text = "again 1.00: most rows meet the same batch-mates every epoch; use order=bucketed."
    batching = Batching(order="sorted", token_budget=200)
    assert plan_of(lengths, batching).report().warnings == (text,)
    remedied = dataclasses.replace(batching, order="bucketed")
    assert plan_of(lengths, remedied).report().warnings == ()


def test_no_warning_advises_what_is_set_already() -> None:
    # Ten rows in buckets of one batch each: they meet again, though order is bucketed.
    report = plan_of(range(1, 11), Batching(max_rows=4)).report()
    assert report.again > 0.5
    assert not any("use order=bucketed" in warning for warning in report.warnings)


@pytest.mark.parametrize("order", ["bucketed", "random"])
def test_a_plan_without_fault_warns_of_nothing(order: str) -> None:
    lengths = family("uniform")
    batching = Batching(order=order, pad_to=64, max_rows=512, token_budget=16384)
    report = plan_of(lengths, batching, world_size=4).report()
    assert report.warnings == ()
    assert "!" not in repr(report)


# -- text, HTML, plain types -----------------------------------------------------------------------


def story_report(**settings: object) -> PlanReport:
    plan = plan_of(story_lengths(40_000), Batching(**settings), world_size=8)
    return plan.report()


@pytest.mark.parametrize("settings", [{}, {"order": "sorted"}, {"pad_to": 64, "num_buckets": 16}])
def test_a_report_fits_a_hundred_columns(settings: dict) -> None:
    lines = repr(story_report(**settings)).splitlines()
    long = [line for line in lines if len(line) > 100 and not line.startswith("! ")]
    assert long == []


@pytest.mark.parametrize("world_size", [1, 8])
def test_the_text_says_what_was_planned_and_every_number(world_size: int) -> None:
    plan = plan_of(story_lengths(40_000), Batching(), epoch=2, world_size=world_size, accumulate=2)
    report = plan.report()
    lines = repr(report).splitlines()
    ranks = {1: "1 rank", 8: "8 ranks"}[world_size]
    assert lines[0] == (
        f"Epoch 2: 40,000 rows in {report.batches:,} batches, {plan.num_steps:,} steps on {ranks} "
        "x 2 accumulated (6 buckets, sort_window=32)"
    )
    cells = {line.split()[0]: line.split()[1] for line in lines if line}
    assert cells["efficiency"] == f"{report.efficiency:.3f}"
    assert cells["predicted"] == f"{report.predicted:.3f}"
    assert cells["fill"] == f"{report.fill:.3f}"
    assert cells["peak"] == f"{report.peak:.3f}"
    assert cells["widths"] == f"{report.widths:,}"
    assert cells["lag-1"] == f"{report.lag1:.3f}"
    assert cells["again"] == f"{report.again:.4f}"
    named = {line.rsplit(maxsplit=3)[0]: line.split()[-3:] for line in lines if line.count(" ") > 5}
    for name, deal in report.deals.items():
        shown = name + " (this plan)" * (name == "stratified")
        numbers = (deal.waiting_linear, deal.waiting_quadratic)
        assert named[shown] == [*(f"{n:.3f}" for n in numbers), f"{deal.step_std:.4f}"]
    (at_random,) = [line for line in lines if line.startswith("a random global batch")]
    assert at_random.split()[-1] == f"{report.random_step_std:.4f}"
    rows = [line for line in lines if line.startswith("(")]
    assert len(rows) == len(report.buckets) == 6
    for line, bucket in zip(rows, report.buckets, strict=True):
        assert line.split() == [
            f"({bucket.low},",
            f"{bucket.high}]",
            f"{bucket.rows:,}",
            f"{100 * bucket.token_share:.1f}%",
            f"{bucket.mean_length:,.0f}",
            f"{bucket.batch_rows:.1f}",
            f"{bucket.batch_width:,.0f}",
            f"{bucket.efficiency:.3f}",
            f"{bucket.predicted:.3f}",
        ]


@pytest.mark.parametrize(("world_size", "shown"), [(1, 1), (2, 3)])
def test_deals_are_compared_only_where_a_step_has_several_batches(
    world_size: int, shown: int
) -> None:
    batching = Batching(deal="aligned", token_budget=2000)
    report = plan_of(range(1, 200), batching, world_size=world_size).report()
    assert set(report.deals) == set(DEALS)
    lines = [line for line in repr(report).splitlines() if line.startswith(DEALS)]
    assert len(lines) == shown
    assert sum(line.startswith("aligned (this plan)") for line in lines) == 1


@pytest.mark.parametrize("order", ["sorted", "random"])
def test_the_title_of_a_plan_without_buckets_names_its_order(order: str) -> None:
    report = plan_of([5, 6, 7], Batching(order=order)).report()
    assert repr(report).startswith("Epoch 0: 3 rows in 1 batch, 1 step on 1 rank (")
    assert report.title.endswith(f"({order})")


class Balance(html.parser.HTMLParser):
    """Counts tags, and refuses one that is closed out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter = Counter()

    def handle_starttag(self, tag, attrs) -> None:
        self.open.append(tag)
        self.seen[tag] += 1

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def test_the_html_is_well_formed_and_says_the_same_as_the_text() -> None:
    report = story_report()
    text = report._repr_html_()
    balance = Balance()
    balance.feed(text)
    assert balance.open == []
    assert balance.seen["table"] == 3
    root = ET.fromstring(f"<div>{text}</div>")
    cells = [[cell.text or "" for cell in row] for row in root.iter("tr")]
    expected = []
    for table in report.tables():
        expected += [list(table.headers)] if any(table.headers) else []
        expected += [list(row) for row in table.rows]
    assert cells == expected
    titles = [table.title for table in report.tables() if table.title]
    assert [caption.text for caption in root.iter("caption")] == titles
    assert titles[0] == report.title
    assert [note.text for note in root.iter("p")] == list(report.warnings)


def test_the_html_escapes_every_text() -> None:
    nasty = "<b>a & b</b>"
    report = dataclasses.replace(
        plan_of([5]).report(), title=nasty, warnings=(nasty,), closed_by={nasty: 1.0}
    )
    root = ET.fromstring(f"<div>{report._repr_html_()}</div>")
    assert root.find(".//b") is None
    assert [note.text for note in root.iter("p")] == [nasty]
    assert next(root.iter("caption")).text == nasty
    assert any(nasty in (cell.text or "") for cell in root.iter("td"))


def leaves(value: object) -> list[object]:
    """Everything in nested dicts, tuples and lists that is none of these, and every key."""
    if type(value) is dict:
        return [*value, *(leaf for part in value.values() for leaf in leaves(part))]
    if type(value) in (tuple, list):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


@FEW
@given(plannable_cases())
def test_a_report_is_plain_types_that_json_keeps(case) -> None:
    lengths, batching, arguments = case
    report = plan_epoch(lengths, batching, **arguments).report()
    numbers = report.to_dict()
    assert numbers.keys() == {field.name for field in dataclasses.fields(report)}
    assert {type(leaf) for leaf in leaves(numbers)} <= set(PLAIN)
    back = json.loads(json.dumps(numbers, allow_nan=False))
    assert back["efficiency"] == report.efficiency
    assert back["buckets"] == [dataclasses.asdict(bucket) for bucket in report.buckets]
    assert back["deals"].keys() == set(DEALS)
    assert back["deals"][report.deal]["step_std"] == report.step_std
    assert repr(report)


# -- what is left of an epoch ----------------------------------------------------------------------


@st.composite
def resumed_plans(draw) -> EpochPlan:
    """What is left of an epoch, once or twice, under layouts that a whole epoch could have, too."""
    lengths, batching, arguments = draw(plannable_cases())
    plan = plan_epoch(lengths, batching, **arguments)
    for _ in range(draw(st.integers(1, 2))):
        layout = draw(LAYOUTS.filter(lambda layout: plannable(lengths, batching, layout)))
        plan = plan.resume(draw(st.integers(0, max(plan.num_steps - 1, 0))), **layout)
    return plan


@FEW
@given(resumed_plans())
def test_the_report_of_a_rest_counts_the_remaining_rows_only(plan: EpochPlan) -> None:
    report = plan.report()
    assert report.rows == plan.remaining(0).size
    assert sum(bucket.rows for bucket in report.buckets) == report.rows
    assert whole_of(report) == close(whole_by_hand(plan))
    assert [bucket_of_report(report, k) for k in range(plan.num_buckets)] == [
        close(bucket_by_hand(plan, k)) for k in range(plan.num_buckets)
    ]
    own = dataclasses.asdict(report.deals[report.deal])
    assert own == close(deal_by_hand(plan, steps_of(plan)))
    assert json.dumps(report.to_dict(), allow_nan=False)
    assert "nan" not in repr(report)


def test_a_step_with_places_that_have_no_rows_is_reported() -> None:
    plan = plan_of([9] * 12, Batching(token_budget=10))
    rest = plan.resume(9, world_size=4, accumulate=1)
    assert sum(not batch for batch in batches_of(rest)) == 1
    report = rest.report()
    assert (report.rows, report.batches, report.steps) == (3, 3, 1)
    assert "3 rows in 3 batches, 1 step on 4 ranks" in repr(report)


def test_a_rest_is_reported_under_more_places_than_the_data_has_rows() -> None:
    rest = plan_of([5, 3, 4]).resume(0, world_size=4, accumulate=1)
    assert rest.report().rows == 3


def test_the_report_of_nothing_is_refused_in_one_line() -> None:
    plan = plan_of([5, 6, 7], Batching(max_rows=1), world_size=3)
    rest = plan.resume(1, world_size=2, accumulate=1)
    message = (
        r"a report needs rows, but this epoch is over: all its rows are delivered\. Report the "
        r"next epoch\.$"
    )
    with pytest.raises(ValueError, match=message) as caught:
        rest.report()
    assert "\n" not in str(caught.value)


def test_rows_too_few_for_the_places_are_named_as_longest_first() -> None:
    lengths = [10, 10, 10, 1, 1, 1, 1, 1]
    plan = plan_of(lengths, Batching(order="random", token_budget=10), seed=1, world_size=8)
    found = [p.report() for seed in range(20) if (p := few(lengths, seed)).batches.longest_first]
    assert found
    for report in found:
        assert report.title.endswith("(longest first)")
        assert any(w.startswith("rows are too few for 6 batches a step") for w in report.warnings)
    assert not plan.batches.longest_first or plan.report().title.endswith("(longest first)")


def few(lengths: list[int], seed: int) -> EpochPlan:
    """Six places for eight rows of which random order makes up to seven batches."""
    return plan_of(lengths, Batching(order="random", token_budget=10), seed=seed, world_size=6)
