"""Plans against faults that others met: the numbers are those of shared/field-cases.md."""

import dataclasses
import gc
import itertools
import tracemalloc

import numpy as np
import pytest
from batching.plans import (
    DEALS,
    ORDERS,
    batches_of,
    efficiency,
    family,
    grid,
    members,
    padded_tokens,
    plan_of,
    seconds,
    steps_of,
)
from story import BOUNDARIES as STORY
from story import story_lengths

from dflash_lightning.batching import Batching, plan_epoch

# Batches


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("settings", [{}, {"sort_window": 0}, {"deal": "aligned"}, {"pad_to": 64}])
def test_bs01_batches_do_not_come_in_order_of_length(settings, world_size):
    lengths = 16 + np.arange(4096) * 2032 // 4095
    batching = Batching(num_buckets=8, token_budget=8192, max_rows=16, **settings)
    plan = plan_of(lengths, batching, world_size=world_size)
    of_rank = [
        [lengths[plan.rows(step, rank)].mean() for step in range(plan.num_steps)]
        for rank in range(world_size)
    ]
    mean = np.array(of_rank)
    lag1 = np.corrcoef(mean[:, 1:].ravel(), mean[:, :-1].ravel())[0, 1]
    assert abs(lag1) < 0.15
    assert plan.report().lag1 == pytest.approx(lag1)


def test_bs01_batches_of_large_data_do_not_come_in_order_of_length():
    for settings in ({}, {"sort_window": 64}, {"sort_window": 0, "boundaries": STORY}):
        plan = plan_of(story_lengths(), Batching(**settings), world_size=8)
        mean = np.add.reduceat(plan.lengths[plan.batches.rows], plan.batches.offsets[:-1])
        mean = (mean / plan.batches.sizes).reshape(-1, 8)
        lag1 = np.corrcoef(mean[1:].ravel(), mean[:-1].ravel())[0, 1]
        assert abs(lag1) <= 0.03


@pytest.mark.parametrize("sort_window", [0, 32])
def test_bs02_batches_of_a_bucket_are_no_runs_of_neighbouring_lengths(sort_window):
    lengths = np.arange(1, 65)
    batching = Batching(num_buckets=1, max_rows=4, sort_window=sort_window)
    for epoch in range(10):
        batches = batches_of(plan_of(lengths, batching, epoch=epoch))
        assert list(map(len, batches)) == [4] * 16
        assert sum(max(batch) - min(batch) == 3 for batch in batches) <= 1
        assert np.mean([max(batch) - min(batch) for batch in batches]) > 15


@pytest.mark.parametrize("sort_window", [0, 1, 2, 32, 1000])
@pytest.mark.parametrize("lengths", [[5] * 64, [*range(1, 65)], [7, 8] * 32], ids=len)
def test_bs03_batches_have_other_members_every_epoch(lengths, sort_window):
    batching = Batching(boundaries=(0, 64), max_rows=4, sort_window=sort_window)
    epochs = [members(plan_of(lengths, batching, epoch=epoch)) for epoch in range(10)]
    for earlier, later in itertools.combinations(epochs, 2):
        assert len(earlier & later) <= 1
    assert epochs[0] == members(plan_of(lengths, batching, epoch=0))


def test_bs04_small_buckets_lose_no_row():
    lengths = [10] * 1 + [20] * 7 + [30] * 16
    plan = plan_of(lengths, Batching(boundaries=(0, 10, 20, 30), max_rows=4))
    assert sorted(map(len, batches_of(plan))) == [1, 3, 4, 4, 4, 4, 4]
    assert sorted(row for batch in batches_of(plan) for row in batch) == list(range(24))


@pytest.mark.parametrize("order", ORDERS)
def test_bs05_the_budget_counts_padding(order):
    lengths = [114, 73, 73, 40]
    for epoch in range(10):
        plan = plan_of(lengths, Batching(order=order, token_budget=300, num_buckets=1), epoch=epoch)
        assert [padded <= 300 for padded in padded_tokens(plan)] == [True, True]


@pytest.mark.parametrize("order", ORDERS)
def test_bs05_the_budget_counts_rounding(order):
    plan = plan_of([33] * 8, Batching(order=order, token_budget=256, pad_to=64))
    assert [plan.width(*place) for place in grid(plan)] == [64, 64]
    assert plan.report().peak == 1.0


@pytest.mark.parametrize("order", ORDERS)
def test_bs05_the_cost_budget_counts_rounding(order):
    # 64 * (1 + 64 / 64) = 128 a row; unrounded it would be 50.
    batching = Batching(order=order, cost_budget=256, cost_knee=64, pad_to=64)
    assert list(map(len, batches_of(plan_of([33] * 8, batching)))) == [2, 2, 2, 2]


def test_bs06_a_row_longer_than_the_budget_is_refused_before_the_first_step():
    message = (
        r"token_budget must hold every row: 1 of 2 rows do not fit, the longest has 201 tokens "
        r"\(width 201 with pad_to=1\), got token_budget=200\. Raise token_budget to 201, or "
        r"leave out longer rows \(max_length\)\."
    )
    with pytest.raises(ValueError, match=message):
        plan_of([50, 201], Batching(token_budget=200))
    assert plan_of([50, 201], Batching(token_budget=201)).num_steps == 2


def test_bs06_rounding_counts_for_a_row_longer_than_the_budget():
    message = r"2 of 3 rows do not fit, the longest has 198 tokens \(width 256 with pad_to=64\)"
    with pytest.raises(ValueError, match=message):
        plan_of([150, 195, 198], Batching(token_budget=200 + 50, pad_to=64))


def test_bs07_a_length_at_an_edge_belongs_to_the_bucket_below():
    batching = Batching(boundaries=(0, 64, 128), token_budget=128)
    plan = plan_of([64, 65, 128], batching)
    assert plan.row_buckets([0, 1, 2]).tolist() == [0, 1, 1]
    assert sorted(map(len, batches_of(plan))) == [1, 1, 1]
    with pytest.raises(ValueError, match=r"token_budget must hold every row: 1 of 4 rows"):
        plan_of([64, 65, 128, 129], batching)


def test_bs08_tiny_rows_meet_the_cap():
    plan = plan_of([2] * 5000, Batching(token_budget=8192))
    assert max(map(len, batches_of(plan))) == 64
    assert plan.num_steps == 79


def test_bs09_batches_far_below_the_budget_are_reported_with_what_closed_them():
    lengths = 28 + np.arange(10_000) % 5
    small, large = (
        plan_of(lengths, Batching(token_budget=budget, max_rows=16)).report()
        for budget in (1536, 3072)
    )
    assert small.batches == large.batches == 625
    assert large.fill < 0.2 < small.fill < 0.4
    for report in (small, large):
        assert report.closed_by["max_rows"] > 0.98
        assert any("max_rows" in warning for warning in report.warnings)
    free = [
        plan_of(lengths, Batching(token_budget=budget, max_rows=10_000)).report()
        for budget in (1536, 3072)
    ]
    assert free[1].batches == pytest.approx(free[0].batches / 2, rel=0.05)
    assert min(report.fill for report in free) > 0.95
    assert not any("max_rows" in warning for report in free for warning in report.warnings)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("deal", DEALS)
def test_bs10_order_and_members_change_with_the_epoch(deal, world_size):
    lengths = family("log-normal", 1000)
    batching = Batching(token_budget=16_384, max_rows=8, deal=deal)
    plans = [plan_of(lengths, batching, epoch=e, world_size=world_size) for e in (0, 1, 0)]
    first, second, again = plans
    assert batches_of(first) == batches_of(again)
    assert len(members(first) & members(second)) <= 3
    assert steps_of(first)[0] != steps_of(second)[0]


def test_bs12_the_stated_number_of_batches_is_the_number_delivered():
    plan = plan_of([10] * 5 + [20] * 5 + [30] * 5, Batching(boundaries=(0, 10, 20, 30), max_rows=4))
    report = plan.report()
    assert plan.num_steps == report.steps == report.batches == 6
    assert sorted(map(len, batches_of(plan))) == [1, 1, 1, 4, 4, 4]


# Several ranks


@pytest.mark.parametrize(
    ("rows", "world_size", "sizes"),
    [(40, 3, [2] * 4 + [4] * 8), (8, 8, [1] * 8), (9, 8, [1] * 7 + [2])],
)
def test_dd01_ranks_get_equal_numbers_of_batches(rows, world_size, sizes):
    batching = Batching(max_rows=4)
    plan = plan_of([7] * rows, batching, world_size=world_size)
    assert sorted(map(len, batches_of(plan))) == sizes
    assert plan.num_steps == len(sizes) // world_size


def test_dd01_too_few_rows_for_the_ranks_are_refused():
    message = (
        r"world_size \* accumulate must not exceed the number of rows \(2\), got world_size=4 and "
        r"accumulate=2, 8 batches a step\. Lower world_size or accumulate, or add rows\."
    )
    with pytest.raises(ValueError, match=message):
        plan_of([5, 5], world_size=4, accumulate=2)


def test_dd01_rows_that_cannot_share_a_batch_are_refused_if_they_leave_a_place_empty():
    message = (
        r"world_size \* accumulate must divide a number of batches the rows can make: 3 rows make "
        r"too many under token_budget=10, max_rows=64 and cost_budget=None, got world_size=2 and "
        r"accumulate=1, 2 batches a step\. Raise these limits, or lower world_size or accumulate\."
    )
    with pytest.raises(ValueError, match=message):
        plan_of([9, 9, 9], Batching(token_budget=10), world_size=2)


def test_dd01_seven_rows_in_six_buckets_fill_four_places():
    plan = plan_of([10, 20, 30, 40, 50, 60, 70], world_size=4)
    assert plan.num_steps == 1
    assert sorted(map(len, batches_of(plan))) == [1, 2, 2, 2]


def test_dd01_two_short_rows_share_a_batch_where_only_that_fills_every_place():
    for epoch, deal in itertools.product(range(20), DEALS):
        batching = Batching(order="random", token_budget=10, deal=deal)
        plan = plan_of([10, 1, 10, 1, 10], batching, epoch=epoch, world_size=2)
        assert sorted(map(sorted, batches_of(plan))) == [[0], [1, 3], [2], [4]]


def test_dd02_ranks_agree_whatever_their_global_random_state():
    shares = []
    for rank in range(3):
        np.random.seed(rank)  # noqa: NPY002 (each process starts with its own)
        plan = plan_of([5] * 48, Batching(max_rows=4), world_size=3)
        shares += [plan.rows(step, rank).tolist() for step in range(plan.num_steps)]
    assert len(shares) == 12
    assert sorted(row for batch in shares for row in batch) == list(range(48))


@pytest.mark.parametrize(("accumulate", "rows"), [(1, 20_000), (3, 20_000), (1, 600)])
def test_dd05_waiting_for_the_slowest_rank_is_reported_and_aligned_steps_wait_little(
    accumulate, rows
):
    waiting = {}
    for deal in DEALS:
        batching = Batching(token_budget=16_384, deal=deal)
        layout = {"world_size": 8, "accumulate": accumulate}
        plan = plan_of(family("log-normal", rows), batching, **layout)
        work = np.array(padded_tokens(plan)).reshape(plan.num_steps, accumulate, 8).sum(1)
        waiting[deal] = float((work.max(1) / work.mean(1)).mean())
        report = plan.report()
        assert report.waiting_linear == pytest.approx(waiting[deal])
        assert report.deals[deal].waiting_linear == report.waiting_linear
        assert report.waiting_quadratic >= 1
    assert 1 <= waiting["aligned"] < waiting["stratified"]
    if rows == 20_000:
        assert waiting["aligned"] < 1.04


def test_dd05_ranks_wait_as_little_as_promised_on_the_storys_lengths():
    waiting = {}
    for deal in ("stratified", "aligned"):
        plan = plan_of(story_lengths(), Batching(deal=deal), world_size=8)
        work = plan.batches.sizes * plan.batching.padded(plan.longest)
        work = work.reshape(-1, 8)
        waiting[deal] = float((work.max(1) / work.mean(1)).mean())
    assert waiting["stratified"] <= 1.07
    assert waiting["aligned"] <= 1.01


# Performance


@pytest.mark.parametrize("order", ORDERS)
def test_pf01_widths_lie_on_a_small_grid(order):
    lengths = [100 + 37 * i for i in range(30)] * 20  # 100 to 1173
    plan = plan_of(lengths, Batching(order=order, token_budget=8192, pad_to=256))
    widths = {plan.width(*place) for place in grid(plan)}
    assert widths <= {256, 512, 768, 1024, 1280}
    report = plan.report()
    assert report.widths == len(widths)
    assert report.shapes == len(
        {(plan.rows(*place).size, plan.width(*place)) for place in grid(plan)}
    )


def test_pf01_a_grid_of_64_leaves_few_widths_and_little_padding():
    plan = plan_of(story_lengths(), Batching(pad_to=64), world_size=8)
    assert np.unique(plan.batching.padded(plan.longest)).size <= 128
    assert efficiency(plan) >= 0.97


def test_pf04_a_plan_of_two_million_rows_holds_flat_arrays_of_few_bytes_a_row():
    rows = 2_000_000
    lengths = np.resize(family("log-normal"), rows)
    gc.collect()
    tracemalloc.start()
    plan = plan_of(lengths, Batching(boundaries=STORY), world_size=8)
    for use in (plan.fingerprint, plan.longest, plan.rows(0, 0), plan.width(0, 0)):
        del use
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held <= 32 * rows
    parts = [getattr(plan.batches, field.name) for field in dataclasses.fields(plan.batches)]
    arrays = [array for array in (*vars(plan).values(), *parts) if isinstance(array, np.ndarray)]
    assert len(arrays) == 5
    assert {(array.ndim, array.dtype.hasobject) for array in arrays} == {(1, False)}
    assert sum(array.nbytes for array in arrays) <= 32 * rows
    # A later part of the epoch is no larger.
    tracemalloc.start()
    rest = plan.resume(100, world_size=3, accumulate=1)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert rest.lengths is plan.lengths
    assert held <= 32 * rows


def test_pf05_planning_and_restarting_take_no_longer_than_a_few_sorts():
    lengths = story_lengths()
    batching = Batching()
    mixed = np.arange(lengths.size) * 2_654_435_761 % 2**32
    plan = plan_of(lengths, batching, world_size=8)
    measured = {
        "sort": seconds(lambda: np.argsort(mixed, kind="stable")),
        "plan": seconds(lambda: plan_of(lengths, batching, world_size=8)),
        "resume": seconds(lambda: plan.resume(plan.num_steps - 9, world_size=3, accumulate=1)),
        "look up": seconds(lambda: [plan.rows(s, 3) for s in range(1000)]),
    }
    ratios = {name: value / measured["sort"] for name, value in measured.items()}
    assert ratios["plan"] < 40
    assert ratios["resume"] < 1
    assert ratios["look up"] < 2


def test_pf05_the_best_boundaries_take_no_longer_than_a_few_matrix_products():
    lengths = story_lengths(200_000)
    # A budget that nothing else uses: the table is not yet known.
    budgets = itertools.count(50_000)
    square = np.arange(1_000_000.0).reshape(1000, 1000) / 1e6

    def work() -> None:
        plan_epoch(lengths, Batching(token_budget=next(budgets), num_buckets=16), seed=0, epoch=0)

    ratio = seconds(work, 2) / seconds(lambda: np.exp(np.sin(square)))
    assert ratio < 300
