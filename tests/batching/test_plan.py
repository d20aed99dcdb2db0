"""The plan of an epoch: invariants over many settings, and slow twins of the cut."""

import copy
import dataclasses
import functools
import itertools
import pickle
import re

import numpy as np
import pytest
from batching.plans import (
    DEALS,
    FEW,
    LENGTHS,
    MANY,
    ORDERS,
    batches_of,
    batchings,
    cases,
    family,
    fewest_batches,
    fits,
    grid,
    members,
    padded_tokens,
    plan_of,
    plannable,
    plannable_cases,
    rounded,
    rows_of,
    steps_of,
    walk,
)
from hypothesis import given
from hypothesis import strategies as st

from dflash_lightning.batching import Batching, plan_epoch
from dflash_lightning.batching.epoch import CLOSED_BY, cut_batches

# Invariants


def check_plan(lengths, batching, arguments):
    """Every row once, within every limit, a row in every place; refused only if no plan exists."""
    if not plannable(lengths, batching, arguments):
        with pytest.raises(ValueError, match=r"world_size \* accumulate must"):
            plan_epoch(lengths, batching, **arguments)
        return
    plan = plan_epoch(lengths, batching, **arguments)
    batches = batches_of(plan)
    assert len(batches) == plan.num_steps * arguments["world_size"] * arguments["accumulate"]
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(batches)
    for place, batch in zip(grid(plan), batches, strict=True):
        longest = max(lengths[row] for row in batch)
        assert plan.width(*place) == rounded(longest, batching.pad_to)
        assert fits(len(batch), plan.width(*place), batching)
        assert plan.boundaries[plan.bucket(*place)] < longest
        assert longest <= plan.boundaries[plan.bucket(*place) + 1]


@MANY
@given(cases())
def test_a_plan_holds_every_row_once_within_every_limit_or_none_exists(case):
    check_plan(*case)


@MANY
@given(st.lists(st.integers(1, 60), min_size=2, max_size=12), st.data())
def test_a_plan_exists_for_few_rows_wherever_they_can_fill_every_place(lengths, data):
    places = data.draw(st.integers(len(lengths) // 2, len(lengths)))
    batching = data.draw(batchings(max(lengths)))
    check_plan(lengths, batching, {"seed": 0, "epoch": 0, "world_size": places, "accumulate": 1})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
@pytest.mark.parametrize("world_size", range(1, 10))
def test_every_rank_takes_equal_steps_and_no_row_is_lost(world_size, accumulate, order):
    lengths = [16 + 50_000 // (1 + (i * 67) % 700) for i in range(700)]
    deal = DEALS[(world_size + accumulate) % 3]
    batching = Batching(order=order, deal=deal, token_budget=60_032, max_rows=9, pad_to=64)
    plan = plan_of(lengths, batching, world_size=world_size, accumulate=accumulate)
    per_rank = [0] * world_size
    for step, rank, micro in grid(plan):
        per_rank[rank] += 1
        rows = plan.rows(step, rank, micro).size
        assert 0 < rows <= 9
        assert rows * plan.width(step, rank, micro) <= 60_032
    assert set(per_rank) == {plan.num_steps * accumulate}
    assert sorted(rows_of(steps_of(plan))) == list(range(700))


@FEW
@given(plannable_cases())
def test_efficiency_fill_and_peak_count_what_is_delivered(case):
    lengths, batching, arguments = case
    plan = plan_epoch(lengths, batching, **arguments)
    padded = padded_tokens(plan)
    report = plan.report()
    assert report.efficiency == pytest.approx(sum(lengths) / sum(padded))
    assert report.fill == pytest.approx(sum(padded) / batching.token_budget / len(padded))
    assert report.peak == pytest.approx(max(padded) / batching.token_budget)
    assert (report.rows, report.batches) == (len(lengths), len(padded))
    assert report.steps == plan.num_steps


@FEW
@given(plannable_cases())
def test_the_plan_is_a_pure_function_of_its_arguments(case):
    lengths, batching, arguments = case
    np.random.seed(1)  # noqa: NPY002 (the global state is what must not matter)
    first = plan_epoch(lengths, batching, **arguments)
    np.random.seed(2)  # noqa: NPY002
    plan_epoch(lengths, batching, **(arguments | {"epoch": 4}))
    second = plan_epoch(np.array(lengths, np.int64), copy.copy(batching), **arguments)
    assert batches_of(first) == batches_of(second)
    assert first.boundaries == second.boundaries
    assert first.fingerprint == second.fingerprint


@FEW
@given(plannable_cases())
def test_a_step_depends_on_the_product_of_ranks_and_accumulation_only(case):
    lengths, batching, arguments = case
    places = arguments["world_size"] * arguments["accumulate"]
    expected = batches_of(plan_epoch(lengths, batching, **arguments))
    for world_size in [size for size in range(1, places + 1) if places % size == 0]:
        layout = {"world_size": world_size, "accumulate": places // world_size}
        assert batches_of(plan_epoch(lengths, batching, **(arguments | layout))) == expected


def test_ranks_come_before_accumulated_batches_in_the_places_of_a_step():
    lengths, batching = [5] * 24, Batching(max_rows=1)
    one = plan_of(lengths, batching, world_size=6)
    other = plan_of(lengths, batching, world_size=2, accumulate=3)
    for step, rank, micro in grid(other):
        assert other.rows(step, rank, micro).tolist() == one.rows(step, micro * 2 + rank).tolist()


@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("order", ORDERS)
def test_another_layout_splits_few_batches_and_makes_no_others(order, deal):
    lengths = [10 + (i * 7) % 90 for i in range(400)]
    batching = Batching(order=order, deal=deal, token_budget=500, max_rows=8)
    one, eight = (members(plan_of(lengths, batching, world_size=w)) for w in (1, 8))
    assert len(one) % 8 != 0
    assert len(one - eight) <= -len(one) % 8
    assert all(any(part <= batch for batch in one) for part in eight)


# The cut


@MANY
@given(LENGTHS, st.data())
def test_batches_close_where_a_walk_closes_them_and_say_why(lengths, data):
    batching = data.draw(batchings(max(lengths)))
    middle = len(lengths) // 2
    runs = [run for run in ((0, middle), (middle, len(lengths))) if run[0] < run[1]]
    rows = np.arange(len(lengths), dtype=np.int32)
    ends = [end for _, end in runs]
    batches = cut_batches(rows, np.array(lengths, np.int32), ends, batching)
    offsets, reasons = [0], []
    for start, end in runs:
        for batch in walk(lengths[start:end], batching):
            offsets.append(offsets[-1] + len(batch))
            one_more = lengths[offsets[-2] : offsets[-1] + 1]
            width = rounded(max(one_more), batching.pad_to)
            reasons.append(
                "bucket end"
                if offsets[-1] == end
                else "max_rows"
                if len(one_more) > batching.max_rows
                else "token_budget"
                if len(one_more) * width > batching.token_budget
                else "cost_budget"
            )
    assert batches.rows.tolist() == rows.tolist()
    assert batches.offsets.tolist() == offsets
    assert [CLOSED_BY[i] for i in batches.closed_by] == reasons


@FEW
@given(LENGTHS, st.data())
def test_sorted_batches_are_those_of_a_walk_in_order_of_length(lengths, data):
    batching = data.draw(batchings(max(lengths), orders=("sorted",)))
    by_length = sorted(range(len(lengths)), key=lambda row: lengths[row])
    expected = walk([lengths[row] for row in by_length], batching)
    plan = plan_of(lengths, batching, epoch=data.draw(st.integers(0, 9)))
    assert members(plan) == {frozenset(by_length[i] for i in batch) for batch in expected}


@FEW
@given(plannable_cases(orders=("bucketed",)))
def test_a_bucketed_batch_comes_from_one_bucket_unless_rows_are_too_few_for_the_places(case):
    lengths, batching, arguments = case
    places = arguments["world_size"] * arguments["accumulate"]
    alone = plan_epoch(lengths, batching, **(arguments | {"world_size": 1, "accumulate": 1}))
    plan = plan_epoch(lengths, batching, **arguments)
    if rounded(alone.num_steps, places) > len(lengths):
        plan = alone
    for place in grid(plan):
        assert set(plan.row_buckets(plan.rows(*place)).tolist()) == {plan.bucket(*place)}


@FEW
@given(st.data())
def test_longest_first_makes_the_fewest_batches_of_all_ways(data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=7))
    cost = data.draw(st.sampled_from([None, 30.0, 60.0]))
    budget = max(lengths) + data.draw(st.integers(0, 20))
    batching = Batching(token_budget=budget, max_rows=3, cost_budget=cost, cost_knee=8.0)
    every = (1 << len(lengths)) - 1
    chosen = [[lengths[i] for i in range(len(lengths)) if s >> i & 1] for s in range(every + 1)]
    allowed = [fits(len(c), max(c, default=0), batching) for c in chosen]

    @functools.cache
    def fewest(rest: int) -> int:
        subsets = [s for s in range(1, rest + 1) if s & rest == s and allowed[s]]
        return 0 if rest == 0 else 1 + min(fewest(rest ^ s) for s in subsets)

    assert fewest(every) == fewest_batches(lengths, batching)


# Epochs


@pytest.mark.parametrize("order", ["bucketed", "random"])
@pytest.mark.parametrize("sort_window", [0, 32])
def test_batches_are_made_anew_each_epoch(order, sort_window):
    lengths = [5] * 64
    batching = Batching(order=order, max_rows=4, sort_window=sort_window)
    epochs = [members(plan_of(lengths, batching, epoch=epoch)) for epoch in range(6)]
    for earlier, later in itertools.pairwise(epochs):
        assert len(earlier & later) <= 1
    assert epochs[0] != members(plan_of(lengths, batching, seed=1))


@FEW
@given(plannable_cases(orders=("bucketed", "random")), st.integers(1, 1000))
def test_the_epoch_and_the_seed_both_make_another_plan(case, later):
    lengths, batching, arguments = case
    plans = [
        plan_epoch(lengths, batching, **(arguments | changed))
        for changed in ({}, {"epoch": 3 + later}, {"seed": arguments["seed"] + later})
    ]
    assert len({plan.boundaries for plan in plans}) == 1
    if plans[0].num_steps >= 24:  # 24! orders: no two alike by chance
        first, *others = (batches_of(plan) for plan in plans)
        assert first not in others
        assert others[0] != others[1]


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("deal", DEALS)
def test_sorted_batches_stay_and_only_their_order_changes(world_size, deal):
    lengths = [1 + (i * 37) % 101 for i in range(500)]
    batching = Batching(order="sorted", token_budget=700, deal=deal)
    first, second = (
        plan_of(lengths, batching, epoch=epoch, world_size=world_size) for epoch in (0, 1)
    )
    assert members(first) == members(second)
    assert batches_of(first) != batches_of(second)


@FEW
@given(plannable_cases(orders=("sorted",)), st.integers(0, 99))
def test_sorted_batches_are_the_same_in_every_epoch_and_layout_of_one_product(case, epoch):
    lengths, batching, arguments = case
    plans = [plan_epoch(lengths, batching, **(arguments | {"epoch": e})) for e in (3, epoch)]
    assert members(plans[0]) == members(plans[1])


@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("order", ["bucketed", "sorted"])
def test_the_order_of_batches_does_not_follow_length(order, deal):
    lengths = 16 + np.arange(4096) * 2032 // 4095
    batching = Batching(order=order, deal=deal, num_buckets=8, token_budget=8192, max_rows=16)
    plan = plan_of(lengths, batching)
    mean = np.array([lengths[batch].mean() for batch in batches_of(plan)])
    assert abs(np.corrcoef(mean[1:], mean[:-1])[0, 1]) < 0.15


# The object


def test_the_fingerprint_tells_apart_everything_a_plan_depends_on():
    lengths, batching = [4, 5, 6, 7, 8, 9], Batching(token_budget=20)
    changes = [
        {"token_budget": 21},
        {"order": "sorted"},
        {"num_buckets": 2},
        {"boundaries": (0, 7, 9)},
        {"boundaries": (0, 8, 9)},
        {"max_rows": 2},
        {"pad_to": 2},
        {"sort_window": 0},
        {"deal": "aligned"},
        {"cost_budget": 50.0},
        {"cost_knee": 50.0},
    ]
    others = [
        plan_of(lengths, batching),
        plan_of([4, 5, 6, 7, 9, 8], batching),
        plan_of([4, 5, 6, 7, 8, 9, 9], batching),
        plan_of(lengths, batching, seed=1),
        plan_of(lengths, batching, epoch=1),
        plan_of(lengths, batching, world_size=2),
        plan_of(lengths, batching, accumulate=2),
        *(plan_of(lengths, dataclasses.replace(batching, **change)) for change in changes),
    ]
    prints = [plan.fingerprint for plan in others]
    assert len(set(prints)) == len(prints)
    assert all(re.fullmatch("[0-9a-f]{16}", text) for text in prints)


def test_a_plan_survives_pickling_and_ignores_later_changes_to_the_lengths():
    lengths = np.array([4, 5, 6, 7, 8, 9], np.int32)
    plan = plan_of(lengths, Batching(token_budget=20), world_size=2)
    before = batches_of(plan)
    lengths[:] = 1
    assert plan.row_buckets([0, 5]).tolist() == [0, 5]
    again = pickle.loads(pickle.dumps(plan))
    assert batches_of(again) == before
    assert again.fingerprint == plan.fingerprint


def test_rows_are_int64_and_the_callers_own():
    plan = plan_of([4, 5, 6])
    rows = plan.rows(0, 0)
    rows[:] = 0
    left = plan.remaining(0)
    left[:] = 0
    assert rows.dtype == left.dtype == np.int64
    assert sorted(row for batch in batches_of(plan) for row in batch) == [0, 1, 2]


def test_the_arrays_of_a_plan_refuse_to_be_changed():
    whole = plan_of([4, 5, 6])
    for plan in (whole, whole.resume(0, world_size=2, accumulate=1)):
        parts = plan.batches
        for array in (plan.lengths, parts.rows, parts.offsets, parts.closed_by):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


def test_a_plan_takes_little_memory():
    plan = plan_of(np.full(10_000, 700))
    parts = plan.batches
    arrays = (plan.lengths, plan.longest, parts.rows, parts.offsets, parts.closed_by)
    assert sum(array.nbytes for array in arrays) <= 32 * 10_000


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((3, 0, 0), r"step must lie in 0\.\.2, got 3\. The plan has 3 steps"),
        ((-1, 0, 0), r"step must lie in 0\.\.2, got -1"),
        ((0, 2, 0), r"rank must lie in 0\.\.1, got 2.*world_size=2"),
        ((0, 0, 1), r"micro must lie in 0\.\.0, got 1.*accumulate=1"),
    ],
)
def test_a_place_outside_the_plan_is_refused(place, message):
    plan = plan_of([5] * 6, Batching(max_rows=1), world_size=2)
    for lookup in (plan.rows, plan.width, plan.bucket):
        with pytest.raises(ValueError, match=message):
            lookup(*place)


@pytest.mark.parametrize("name", ["heavy tail", "zipf", "two piles", "equal"])
@pytest.mark.parametrize("order", ORDERS)
def test_large_data_of_every_kind_are_delivered_once_within_all_limits(name, order):
    lengths = family(name)
    limits = {"token_budget": 16_384, "pad_to": 32, "cost_budget": 60_000.0}
    plan = plan_of(lengths, Batching(order=order, **limits), world_size=3, accumulate=2)
    assert np.array_equal(np.sort(plan.batches.rows), np.arange(lengths.size))
    sizes = plan.batches.sizes
    widths = plan.batching.padded(plan.longest)
    assert sizes.min() > 0
    assert sizes.max() <= 64
    assert (sizes * widths).max() <= 16_384
    assert (sizes * widths * (1 + widths / 4096)).max() <= 60_000
    assert sizes.size == plan.num_steps * 6
