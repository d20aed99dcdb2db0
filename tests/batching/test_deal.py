"""Steps: how batches are dealt, how the last step is filled, and plans pinned for later."""

import itertools

import numpy as np
import pytest
from batching.plans import DEALS, FEW, MANY, batches_of, family, plan_of, rounded, steps_of
from hypothesis import given
from hypothesis import strategies as st

from dflash_lightning.batching import Batching
from dflash_lightning.batching.epoch import (
    CLOSED_BY,
    Batches,
    cut_batches,
    deal_steps,
    fill_last_step,
    random_stream,
)

LONGEST = st.lists(st.integers(1, 40), min_size=1, max_size=120).map(
    lambda values: np.array(values, np.int32)
)
PLACES = st.integers(1, 12)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=60)


def deal(longest, kind, places, seed=0) -> tuple[list[list[int]], list[int]]:
    """Longest rows of the batches of every full step, and of the unfilled one."""
    order = deal_steps(longest, kind, random_stream(seed, 0), places=places)
    assert sorted(order.tolist()) == list(range(longest.size))
    full = longest.size // places * places
    return longest[order[:full]].reshape(-1, places).tolist(), longest[order[full:]].tolist()


def of_sizes(sizes: list[int]) -> Batches:
    """Batches of so many rows, numbered through."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    rows = np.arange(offsets[-1], dtype=np.int32)
    return Batches(rows, offsets, np.full(len(sizes), CLOSED_BY.index("max_rows"), np.uint8))


# Dealing


@MANY
@given(LONGEST, PLACES, st.integers(0, 2**40))
def test_stratified_steps_take_exactly_one_batch_of_each_length_stratum(longest, places, seed):
    steps, _ = deal(longest, "stratified", places, seed)
    ranked = [sorted(step) for step in steps]  # the k-th of every step is of stratum k
    for low, high in itertools.pairwise(range(places if steps else 0)):
        assert max(step[low] for step in ranked) <= min(step[high] for step in ranked)


@MANY
@given(LONGEST, PLACES, st.integers(0, 2**40))
def test_aligned_steps_are_runs_of_neighbours_in_length(longest, places, seed):
    steps, _ = deal(longest, "aligned", places, seed)
    for before, after in itertools.pairwise(sorted(steps, key=lambda step: (min(step), max(step)))):
        assert max(before) <= min(after)


@FEW
@given(LONGEST, PLACES, st.integers(0, 2**40))
def test_independent_steps_do_not_depend_on_length(longest, places, seed):
    orders = [
        deal_steps(lengths, "independent", random_stream(seed, 0), places=places).tolist()
        for lengths in (longest, np.ones_like(longest))
    ]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("kind", DEALS)
@pytest.mark.parametrize("places", [1, 3, 8])
def test_the_unfilled_step_is_dealt_like_the_others(kind, places):
    left = places - 1
    longest = np.arange(1, 100 * places + left + 1, dtype=np.int32)
    _, last = deal(longest, kind, places)
    assert len(last) == left
    if kind == "aligned" and left:
        assert sorted(last) == list(range(min(last), min(last) + left))
    if kind == "stratified":
        third = longest.size / 3
        bins = np.histogram(last, [0, third, 2 * third, 3 * third])[0]
        assert bins.max() - bins.min() <= 1


@pytest.mark.parametrize("kind", DEALS)
def test_steps_come_in_random_order(kind):
    longest = np.arange(8000, dtype=np.int32)
    steps = np.array(deal(longest, kind, 8)[0])
    mean = steps.mean(1)
    assert abs(np.corrcoef(mean[1:], mean[:-1])[0, 1]) < 0.1
    assert abs(np.corrcoef(mean, np.arange(mean.size))[0, 1]) < 0.1


@pytest.mark.parametrize("kind", DEALS)
def test_no_place_of_a_step_prefers_long_batches(kind):
    longest = np.arange(8000, dtype=np.int32)
    steps = np.array(deal(longest, kind, 8)[0])
    seat_of_longest = np.bincount(steps.argmax(1), minlength=8)
    seat_of_shortest = np.bincount(steps.argmin(1), minlength=8)
    for seats in (seat_of_longest, seat_of_shortest):
        assert 80 < seats.min() <= seats.max() < 170  # of 1000, in mean 125, deviation 10


def test_stratified_steps_are_drawn_from_their_strata_at_random():
    longest = np.arange(8000, dtype=np.int32)
    steps = np.sort(np.array(deal(longest, "stratified", 8)[0]), axis=1)
    between = np.corrcoef(steps.T)
    assert np.abs(between - np.eye(8)).max() < 0.15
    other = np.sort(np.array(deal(longest, "stratified", 8, seed=1)[0]), axis=1)
    assert not set(map(tuple, steps.tolist())) & set(map(tuple, other.tolist()))


@pytest.mark.parametrize("kind", DEALS)
def test_the_deal_of_a_plan_leaves_batches_as_they_were_cut(kind):
    batching = Batching(token_budget=16_384, deal=kind)
    plan = plan_of(family("log-normal", 4000), batching, world_size=4)
    other = plan_of(family("log-normal", 4000), Batching(token_budget=16_384), world_size=4)
    ours, theirs = (set(map(tuple, batches_of(p))) for p in (plan, other))
    assert len(ours - theirs) <= 2 * 4  # those at the end, some of them split


@pytest.mark.parametrize("world_size", [2, 8])
def test_plans_are_dealt_as_their_settings_say(world_size):
    lengths = family("log-normal", 8000)
    spread = {}
    for kind in DEALS:
        plan = plan_of(lengths, Batching(token_budget=16_384, deal=kind), world_size=world_size)
        longest = plan.longest[: -2 * world_size].reshape(-1, world_size)
        spread[kind] = float(np.ptp(np.log(longest), axis=1).mean())
    assert spread["aligned"] < 0.1 < spread["independent"] < spread["stratified"]


# The last step


def fewest_steps_with_a_row_for_every_place(sizes: list[int], places: int) -> int:
    """Full steps that the tail must take in, counted from the end; all if none will do."""
    full, left = divmod(len(sizes), places)
    for steps in range(min(1, full), full + 1):
        if sum(sizes[(full - steps) * places :]) >= (steps + (left > 0)) * places:
            return steps
    return full


@MANY
@given(SIZES, PLACES)
def test_the_last_step_is_filled_by_halving_batches_near_the_end(sizes, places):
    before = of_sizes(sizes)
    after = fill_last_step(before, places=places)
    assert after.rows.tolist() == before.rows.tolist()
    wanted = rounded(len(sizes), places)
    assert len(after) == after.closed_by.size == wanted
    empty = max(wanted - sum(sizes), 0)
    filled = after.offsets[: wanted + 1 - empty]
    assert after.offsets.tolist() == [*filled.tolist(), *[sum(sizes)] * empty]
    assert (np.diff(filled) > 0).all()
    assert set(before.offsets.tolist()) <= set(filled.tolist())
    if len(sizes) % places == 0:
        assert after.sizes.tolist() == sizes
        assert not (after.closed_by == CLOSED_BY.index("split")).any()
        return
    tail = fewest_steps_with_a_row_for_every_place(sizes, places)
    kept = (len(sizes) // places - tail) * places
    assert after.sizes[:kept].tolist() == sizes[:kept]
    whole = set(itertools.pairwise(before.offsets.tolist()))
    for pair, reason in zip(itertools.pairwise(filled.tolist()), after.closed_by, strict=False):
        assert CLOSED_BY[reason] == ("max_rows" if pair in whole else "split")


@MANY
@given(st.lists(st.integers(4, 9), min_size=1, max_size=60), PLACES)
def test_at_most_two_steps_are_touched_where_batches_have_two_rows_or_more(sizes, places):
    after = fill_last_step(of_sizes(sizes), places=places)
    kept = max(len(sizes) // places - 1, 0) * places
    assert after.sizes[:kept].tolist() == sizes[:kept]
    assert after.sizes.max() <= max(sizes)


@pytest.mark.parametrize(
    ("sizes", "places", "expected"),
    [
        ([8, 8, 8, 8, 8], 4, [4, 4, 4, 4, 4, 4, 8, 8]),
        ([4, 9, 4, 4, 4], 3, [4, 5, 4, 4, 4, 4]),
        ([5], 4, [2, 1, 1, 1]),
        ([2, 1], 4, [1, 1, 1, 0]),
        ([1, 1, 1, 1, 1], 4, [1, 1, 1, 1, 1, 0, 0, 0]),
        ([1, 1, 3, 3, 1, 1, 1], 2, [1, 1, 2, 1, 3, 1, 1, 1]),
    ],
)
def test_the_largest_batches_are_halved_first(sizes, places, expected):
    assert fill_last_step(of_sizes(sizes), places=places).sizes.tolist() == expected


def test_a_plan_splits_only_near_its_end():
    plan = plan_of(family("log-normal", 4000), Batching(token_budget=16_384), world_size=8)
    assert plan_of(plan.lengths, plan.batching).num_steps % 8 != 0
    split = np.flatnonzero(plan.batches.closed_by == CLOSED_BY.index("split"))
    assert split.size > 0
    assert split.min() >= len(plan.batches) - 2 * 8
    assert sorted(plan.remaining(0).tolist()) == list(range(4000))


def test_batches_are_taken_with_their_rows_and_reasons():
    lengths = np.array([5, 4, 3, 9, 2], np.int32)
    batches = cut_batches(np.arange(5, dtype=np.int32), lengths, [4, 5], Batching(token_budget=10))
    taken = batches.take(np.array([3, 0, 2]))
    assert taken.rows.tolist() == [4, 0, 1, 3]
    assert taken.offsets.tolist() == [0, 1, 3, 4]
    assert [CLOSED_BY[i] for i in taken.closed_by] == ["bucket end", "token_budget", "bucket end"]
    assert taken.longest(lengths).tolist() == [2, 5, 9]
    nothing = batches.take(np.array([], np.int64))
    assert len(nothing) == nothing.rows.size == nothing.longest(lengths).size == 0


# Pinned: as NumPy 2.4.6 gave it; Philox promises this stream to every release.

# 27 rows, lengths 1 to 11, sorted in 8 windows, batches of 2; 2 ranks accumulate 2.
PINNED = {
    "stratified": [
        [[0, 4], [20, 18], [1, 25], [19, 11]],
        [[23, 24], [16], [17, 13], [14, 12]],
        [[21], [9], [22], [2]],
        [[8, 7], [15, 3], [26, 6], [5, 10]],
    ],
    "aligned": [
        [[22, 2], [19, 11], [16], [5, 10]],
        [[1, 25], [26, 6], [14, 12], [15, 3]],
        [[0], [4], [23], [24]],
        [[20, 18], [8, 7], [17, 13], [21, 9]],
    ],
    "independent": [
        [[16], [20, 18], [19, 11], [1, 25]],
        [[22, 2], [15, 3], [17, 13], [21, 9]],
        [[8], [7], [5], [10]],
        [[0, 4], [26, 6], [23, 24], [14, 12]],
    ],
}
PINNED_LENGTHS = [(i * 7) % 11 + 1 for i in range(27)]


def pinned_plan(**settings):
    batching = Batching(max_rows=2, boundaries=(0, 11), **settings)
    return plan_of(PINNED_LENGTHS, batching, seed=7, epoch=2, world_size=2, accumulate=2)


@pytest.mark.parametrize("kind", DEALS)
def test_rows_behind_a_step_stay_nameable_in_later_releases(kind):
    plan = pinned_plan(deal=kind)
    assert steps_of(plan) == PINNED[kind]
    assert plan.rows(1, rank=1, micro=1).tolist() == PINNED[kind][1][3]


def test_rows_behind_a_step_of_random_and_sorted_order_stay_nameable_in_later_releases():
    plan = plan_of([3] * 8, Batching(order="random", max_rows=2), seed=7, epoch=2)
    assert batches_of(plan) == [[6, 7], [1, 5], [4, 0], [3, 2]]
    assert steps_of(pinned_plan(order="sorted")) == [
        [[13, 24], [16, 2], [3, 14], [12]],
        [[19, 5], [7, 18], [23], [6, 17]],
        [[10, 21], [22, 8], [1], [25]],
        [[9, 20], [4, 15], [26], [0, 11]],
    ]


def test_rows_behind_a_step_after_a_restart_stay_nameable_in_later_releases():
    rest = pinned_plan().resume(1, world_size=3, accumulate=1)
    assert steps_of(rest) == [
        [[8, 7], [22], [26, 6]],
        [[5, 10], [21], [17, 13]],
        [[23, 24], [2], [15, 3]],
        [[9], [14, 12], [16]],
    ]
