"""Padding foretold from the lengths alone, beside what plans of several epochs then do."""

import random

import numpy as np
import pytest
from batching.batch_oracle import SHORT_LISTS, histogram, true_mean_batch
from batching.plans import FAMILIES, FEW, efficiency, family, fits, plan_of
from hypothesis import given
from hypothesis import strategies as st
from story import story_lengths

from dflash_lightning.batching import Batching
from dflash_lightning.batching.buckets import mean_batches
from dflash_lightning.batching.predict import predicted_padding

TOKENS = {"token_budget": 16_384}
COST = {"cost_budget": 60_000.0, "cost_knee": 2048.0}


def foretold(lengths: np.ndarray, batching: Batching, boundaries: tuple[int, ...]) -> float:
    """Efficiency foretold."""
    padded = predicted_padding(lengths, batching, boundaries).sum()
    return float(lengths.sum(dtype=np.int64) / padded)


def mean_batch(
    widths: list[int] | np.ndarray, counts: list[int] | np.ndarray, batching: Batching
) -> tuple[float, float]:
    """Mean rows and padded tokens of a batch of the bucket that holds all widths."""
    own = np.asarray(widths, np.float64)
    below = np.concatenate([[0.0], np.cumsum(counts)])
    most = batching.most_rows(np.asarray(widths))
    rows, padded = mean_batches(below, own, most, np.zeros(1, np.int64), own.size)
    return float(rows[0]), float(padded[0])


def simulated_batch(widths: list[int], counts: list[int], batching: Batching) -> list[float]:
    """Mean rows and padded tokens of 30,000 batches of rows drawn one by one."""
    drawn = iter(random.Random(0).choices(widths, counts, k=1_000_000))
    sums, width = [0, 0], next(drawn)
    for _ in range(30_000):
        rows = 1
        while fits(rows + 1, max(width, other := next(drawn)), batching):
            rows, width = rows + 1, max(width, other)
        sums = [sums[0] + rows, sums[1] + rows * width]
        width = other
    return [total / 30_000 for total in sums]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        {"sort_window": 0},
        {"sort_window": 32},
        {"sort_window": 64},
        {"sort_window": 0, "num_buckets": 2},
        {"sort_window": 0, "num_buckets": 16},
        {"pad_to": 64},
        {"sort_window": 0, "pad_to": 64},
        {"sort_window": 32, **COST},
        {"sort_window": 0, **COST},
        {"order": "random"},
        {"order": "random", "pad_to": 64, **COST},
        {"order": "sorted"},
        {"order": "sorted", "pad_to": 64, **COST},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_plans_pad_as_foretold(name, settings):
    lengths, batching = family(name, 40_000), Batching(**TOKENS, **settings)
    plans = [plan_of(lengths, batching, epoch=epoch) for epoch in range(2)]
    realised = np.mean([efficiency(plan) for plan in plans])
    assert foretold(lengths, batching, plans[0].boundaries) == pytest.approx(realised, abs=0.006)


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"num_buckets": 6, "sort_window": 0}, 0.879),
        ({"num_buckets": 8, "sort_window": 0}, 0.904),
        ({"num_buckets": 16, "sort_window": 0}, 0.947),
        ({"sort_window": 32}, 0.987),
        ({"sort_window": 64}, 0.993),
        ({"pad_to": 64}, 0.97),
    ],
)
def test_the_storys_lengths_are_padded_as_little_as_promised(settings, least):
    lengths, batching = story_lengths(), Batching(**settings)
    plan = plan_of(lengths, batching, world_size=8)
    assert efficiency(plan) >= least
    assert foretold(lengths, batching, plan.boundaries) == pytest.approx(
        efficiency(plan), abs=0.006
    )


def test_a_prediction_has_a_number_for_every_bucket_also_an_empty_one():
    lengths = np.array([7] * 40 + [9] * 24, np.int32)
    batching = Batching(boundaries=(0, 5, 8, 9, 20), max_rows=8)
    padded = predicted_padding(lengths, batching, batching.boundaries)
    assert padded.dtype == np.float64
    assert padded.tolist() == [0, 280, 216, 0]


@pytest.mark.parametrize("order", ["sorted", "random"])
def test_a_prediction_without_buckets_is_one_number(order):
    lengths = np.array([7] * 40 + [9] * 24, np.int32)
    for boundaries in ((0, 9), (0, 7, 9)):
        padded = predicted_padding(lengths, Batching(order=order, max_rows=1), boundaries)
        assert padded.tolist() == [40 * 7 + 24 * 9]


@pytest.mark.parametrize("pad_to", [1, 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_in_order_of_length_pad_exactly_as_foretold(name, pad_to):
    batching = Batching(order="sorted", pad_to=pad_to, **TOKENS)
    plan = plan_of(family(name), batching)
    assert foretold(plan.lengths, batching, plan.boundaries) == pytest.approx(efficiency(plan))


@pytest.mark.parametrize(
    ("widths", "counts", "limits"),
    [
        ([3, 4, 9], [5, 3, 2], {"token_budget": 20}),
        ([100, 300], [9, 1], {"token_budget": 650}),
        ([10, 20, 30, 40], [4, 3, 2, 1], {"token_budget": 170, "max_rows": 6}),
        ([7], [5], {"token_budget": 50}),
        ([10, 50, 100], [6, 3, 1], {"token_budget": 900, "cost_budget": 500.0, "cost_knee": 64.0}),
    ],
)
def test_the_mean_batch_is_that_of_a_long_simulation(widths, counts, limits):
    batching = Batching(**limits)
    found = mean_batch(np.array(widths), np.array(counts), batching)
    assert found == pytest.approx(true_mean_batch(widths, counts, batching), rel=1e-9)
    assert found == pytest.approx(simulated_batch(widths, counts, batching), rel=0.01)


@pytest.mark.parametrize(
    ("widths", "counts", "limits"),
    [
        ([20, 4000], [97, 3], {"token_budget": 8192}),
        ([20, 600], [97, 3], {"token_budget": 1300}),
        ([20, 300, 700], [90, 5, 5], {"token_budget": 1500}),
        ([20, 4096], [98, 2], {"token_budget": 49_152}),
    ],
)
def test_the_mean_batch_is_right_where_rare_rows_are_far_longer_than_the_others(
    widths, counts, limits
):
    batching = Batching(**limits)
    rows, padded = mean_batch(np.array(widths), np.array(counts), batching)
    true_rows, true_padded = true_mean_batch(widths, counts, batching)
    tokens = np.dot(widths, counts) / sum(counts)
    assert tokens * rows / padded == pytest.approx(tokens * true_rows / true_padded, abs=1e-9)
    assert rows == pytest.approx(true_rows, rel=1e-9)


@FEW
@given(SHORT_LISTS, st.integers(0, 90), st.integers(1, 12), st.sampled_from([1, 16]))
def test_the_mean_batch_is_that_of_a_walk_from_row_to_row(lengths, spare, max_rows, pad_to):
    batching = Batching(token_budget=64 + spare, max_rows=max_rows, pad_to=pad_to)
    widths, counts = histogram(lengths, batching)
    found = mean_batch(np.array(widths), np.array(counts), batching)
    assert found == pytest.approx(true_mean_batch(widths, counts, batching), rel=1e-9)
