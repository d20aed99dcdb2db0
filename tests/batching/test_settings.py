"""Settings: what is refused and how it is said, rounding, cost, and rows that fit a batch."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from batching.plans import FEW, MANY, ORDERS, efficiency, fits, plan_of, rounded
from hypothesis import given
from hypothesis import strategies as st

from dflash_lightning.batching import Batching, optimal_boundaries
from dflash_lightning.batching.buckets import best_boundaries, bucket_of
from dflash_lightning.batching.settings import checked_lengths

WIDTHS = st.lists(st.integers(1, 9000), min_size=1, max_size=20)
POSITIVE = st.floats(0.01, 1e9)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"order": "length"}, r"order must be one of bucketed, sorted, random, got 'length'; use"),
        ({"order": "length"}, r"use order='bucketed' if unsure\.$"),
        (
            {"deal": "fair"},
            r"deal must be one of stratified, aligned, independent, got 'fair'; use",
        ),
        ({"deal": None}, r"got None; use deal='stratified' if unsure\.$"),
        ({"num_buckets": 0}, r"num_buckets must be an integer in 1\.\.2147483647, got 0\. Change"),
        ({"token_budget": -5}, r"token_budget must be an integer in 1.*got -5"),
        ({"token_budget": 1e4}, r"token_budget must be an integer in 1.*got 10000\.0"),
        ({"token_budget": 2**31}, r"token_budget must be an integer in 1.*got 2147483648"),
        ({"max_rows": 0}, r"max_rows must be an integer in 1.*got 0"),
        ({"max_rows": None}, r"max_rows must be an integer in 1.*got None"),
        ({"pad_to": True}, r"pad_to must be an integer in 1.*got True"),
        ({"pad_to": 64, "token_budget": 63}, r"pad_to=64 and token_budget=63\. Lower pad_to or"),
        (
            {"sort_window": -1},
            r"sort_window must be an integer in 0\.\.2147483647, got -1\. Change",
        ),
        ({"sort_window": 2.5}, r"sort_window must be an integer in 0.*got 2\.5"),
        ({"sort_window": None}, r"sort_window must be an integer in 0.*got None"),
        (
            {"cost_budget": 0},
            r"cost_budget must be a finite number above 0, got 0\. Change cost_bu",
        ),
        ({"cost_budget": -1.5}, r"cost_budget must be a finite number above 0, got -1\.5"),
        ({"cost_budget": float("nan")}, r"cost_budget must be a finite number above 0, got nan"),
        ({"cost_budget": float("inf")}, r"cost_budget must be a finite number above 0, got inf"),
        ({"cost_budget": True}, r"cost_budget must be a finite number above 0, got True"),
        ({"cost_budget": "9"}, r"cost_budget must be a finite number above 0, got '9'"),
        (
            {"cost_knee": 0.0},
            r"cost_knee must be a finite number above 0, got 0\.0\. Change cost_k",
        ),
        ({"cost_knee": None}, r"cost_knee must be a finite number above 0, got None"),
        ({"boundaries": (1, 5)}, r"boundaries must start at 0 and rise strictly, got \(1, 5\)"),
        ({"boundaries": (0, 5, 5)}, r"boundaries must start at 0 and rise strictly, got \(0, 5, 5"),
        ({"boundaries": (0, 9, 5)}, r"boundaries must start at 0 and rise strictly, got \(0, 9, 5"),
        ({"boundaries": (0,)}, r"boundaries must be a list of two or more integers, got \[0\]"),
        ({"boundaries": (0, 1.5)}, r"boundaries must be a list of two or more integers, got \[0"),
    ],
)
def test_batching_refuses_nonsense_in_one_line(setting, message):
    with pytest.raises(ValueError, match=message) as caught:
        Batching(**setting)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([4, 0, -2], r"lengths must lie in 1\.\.2147483647, got 0 at row 1 \(2 such rows\)"),
        ([4, 2**31], r"lengths must lie in 1\.\.2147483647, got 2147483648 at row 1"),
        ([], r"lengths must be a flat, non-empty array of integers, got shape \(0,\)"),
        ([1.5], r"lengths must be a flat, non-empty array of integers, .* dtype float64"),
        ([True], r"lengths must be a flat, non-empty array of integers, .* dtype bool"),
        ([[3]], r"lengths must be a flat, non-empty array of integers, got shape \(1, 1\)"),
    ],
)
def test_lengths_that_are_no_token_counts_are_refused(lengths, message):
    limits = {"token_budget": 100, "max_rows": 4}
    for use in (
        plan_of,
        checked_lengths,
        lambda rows: bucket_of(rows, (0, 9)),
        lambda rows: optimal_boundaries(rows, 6, **limits),
    ):
        with pytest.raises(ValueError, match=message):
            use(lengths)


def test_checked_lengths_are_int32_and_not_copied_where_they_were():
    lengths = np.array([4, 5], np.int32)
    assert np.shares_memory(checked_lengths(lengths), lengths)
    for kind in (np.uint8, np.int64, np.uint64):
        assert checked_lengths(np.array([4, 5], kind)).dtype == np.int32
    assert checked_lengths([4, 2**31 - 1]).tolist() == [4, 2**31 - 1]


@pytest.mark.parametrize("order", ORDERS)
def test_boundaries_below_the_longest_row_are_refused(order):
    message = (
        r"boundaries must end at the longest row \(9 tokens\) or above, got 6; 2 rows are longer\. "
        r"Raise the last of boundaries to 9, or set boundaries to null\."
    )
    with pytest.raises(ValueError, match=message):
        plan_of([5, 8, 9], Batching(order=order, boundaries=(0, 6)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, r"seed must be an integer in 0\.\.9223372036854775807, got -1"),
        ({"epoch": -1}, r"epoch must be an integer in 0.*got -1"),
        ({"world_size": 0}, r"world_size must be an integer in 1.*got 0"),
        ({"accumulate": 0.5}, r"accumulate must be an integer in 1.*got 0\.5"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_of([5], **arguments)


@pytest.mark.parametrize("num_buckets", [0, 2.0, True])
def test_a_number_of_buckets_out_of_range_is_refused(num_buckets):
    with pytest.raises(ValueError, match=r"num_buckets must be an integer in 1\.\.2147483647"):
        optimal_boundaries([3], num_buckets, token_budget=9, max_rows=2)


def test_a_row_dearer_than_the_cost_budget_is_refused_before_the_first_step():
    message = (
        r"cost_budget must hold every row: 2 of 3 rows do not fit, the longest has 300 tokens "
        r"\(width 320 with pad_to=64\), got cost_budget=600\.0\. Raise cost_budget to 720, or "
        r"leave out longer rows \(max_length\)\."
    )
    batching = Batching(cost_budget=600, cost_knee=256, pad_to=64)  # 320 * (1 + 320 / 256) = 720
    for use in (plan_of, lambda lengths, b: best_boundaries(lengths, 2, b)):
        with pytest.raises(ValueError, match=message):
            use([100, 290, 300], batching)
    raised = dataclasses.replace(batching, cost_budget=720)
    assert plan_of([100, 290, 300], raised).num_steps == 3


def test_batching_is_frozen_hashable_and_takes_lists_and_numpy_numbers():
    batching = Batching(boundaries=[0, 4, np.int64(9)], max_rows=np.int32(8))
    assert batching == Batching(boundaries=(0, 4, 9), max_rows=8)
    assert hash(batching) == hash(Batching(boundaries=(0, 4, 9), max_rows=8))
    assert len(plan_of([3, 9], batching, epoch=np.int64(1)).fingerprint) == 16
    with pytest.raises(dataclasses.FrozenInstanceError):
        batching.max_rows = 3
    costly = Batching(sort_window=np.int64(2), cost_budget=np.float32(99), cost_knee=np.int32(8))
    assert costly == Batching(sort_window=2, cost_budget=99, cost_knee=8)
    assert [type(value) for value in (costly.cost_budget, costly.cost_knee)] == [float, float]
    assert type(costly.sort_window) is int


@FEW
@given(WIDTHS, st.sampled_from([1, 2, 7, 64, 4096]))
def test_widths_are_lengths_rounded_up_by_walking(lengths, pad_to):
    widths = Batching(pad_to=pad_to).padded(np.array(lengths, np.int32))
    assert widths.dtype == np.int64
    assert widths.tolist() == [rounded(length, pad_to) for length in lengths]


def test_a_row_at_the_knee_costs_twice_its_width():
    assert Batching(cost_knee=100).cost(np.array([[100, 1, 200]])).tolist() == [[200, 1.01, 600]]


@MANY
@given(WIDTHS, st.integers(1, 60_000), st.integers(1, 99), POSITIVE | st.none(), POSITIVE)
def test_no_more_rows_break_a_limit_and_one_more_would(widths, tokens, cap, budget, knee):
    batching = Batching(token_budget=tokens, max_rows=cap, cost_budget=budget, cost_knee=knee)
    widths.sort()
    most = batching.most_rows(np.array(widths)).tolist()
    assert most == sorted(most, reverse=True)
    for width, rows in zip(widths, most, strict=True):
        assert rows == 0 or fits(rows, width, batching)
        cost = (rows + 1) * width * (1 + Fraction(width) / Fraction(knee))
        breaks_cost = budget is not None and cost > Fraction(budget) * (1 - Fraction(1, 2**40))
        assert rows + 1 > cap or (rows + 1) * width > tokens or breaks_cost


@pytest.mark.parametrize(
    ("knee", "counts"), [(4096.0, [1, 2, 3, 7, 63]), (3.0, [1]), (7.7, [1]), (1e-3, [1])]
)
def test_a_cost_budget_of_exactly_some_rows_holds_these_rows(knee, counts):
    for width in (1, 13, 300, 4097):
        for rows in counts:
            cost = rows * float(Batching(cost_knee=knee).cost(np.array(width)))
            limits = {"token_budget": 10**6, "cost_budget": cost, "cost_knee": knee}
            assert Batching(**limits).most_rows(np.array([width])).tolist() == [rows]


def test_one_dear_row_lowers_the_number_of_rows_of_its_own_batch_only():
    lengths = [1000] + [10] * 99
    batching = Batching(order="sorted", token_budget=8000, cost_budget=2000, cost_knee=1000)
    plan = plan_of(lengths, batching)
    assert sorted(plan.batches.sizes.tolist()) == [1, 35, 64]
    assert efficiency(plan) == 1.0
