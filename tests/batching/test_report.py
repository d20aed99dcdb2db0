"""The report of a plan: every number against a slow twin, warnings, text, HTML, plain types."""

import dataclasses
import json
import math
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
    plan_of,
    plannable,
    plannable_cases,
    steps_of,
)
from batching.report_oracle import (
    bucket_by_hand,
    bucket_by_walking,
    bucket_of_report,
    close,
    deal_by_hand,
    lag1_by_pairs,
    step_std_by_hand,
    whole_by_hand,
    whole_of,
)
from hypothesis import given
from hypothesis import strategies as st
from story import BOUNDARIES as STORY
from story import story_lengths

from dflash_lightning.batching import Batching, EpochPlan, plan_epoch
from dflash_lightning.batching.epoch import CLOSED_BY, Batches

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
    plan = next(plan for plan in plans if CLOSED_BY.index("split") not in plan.batches.closed_by)
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
