"""Buckets: every edge, the expected padding row by row, and the best of all sets of edges."""

import itertools

import numpy as np
import pytest
from batching.batch_oracle import SHORT_LISTS, histogram, true_mean_batch
from batching.plans import (
    FAMILIES,
    FEW,
    LENGTHS,
    MANY,
    batchings,
    efficiency,
    family,
    plan_of,
)
from hypothesis import given
from hypothesis import strategies as st
from story import BOUNDARIES as STORY
from story import story_lengths

from dflash_lightning.batching import Batching, optimal_boundaries
from dflash_lightning.batching.buckets import (
    MOST_CELLS,
    _best_cuts,
    _expected_padding,
    _padding_table,
    best_boundaries,
    bucket_of,
)

LIMITS = {"token_budget": 16_384, "max_rows": 64}


def expected_padding(widths: list[int], counts: list[int], batching: Batching) -> float:
    """Padded tokens of a bucket where the row that did not fit opens the next batch."""
    rows, padded = true_mean_batch(widths, counts, batching)
    return sum(counts) * padded / rows


def all_paddings(widths, counts, num_buckets, batching, padding) -> dict[tuple[int, ...], float]:
    """Padding under every set of edges that makes so many buckets, none of them empty."""
    size = len(widths)
    one = {
        (a, b): padding(widths[a:b], counts[a:b], batching)
        for a, b in itertools.combinations(range(size + 1), 2)
    }
    return {
        tuple(widths[b - 1] for b in cuts): sum(
            one[pair] for pair in itertools.pairwise((0, *cuts, size))
        )
        for cuts in itertools.combinations(range(1, size), min(num_buckets, size) - 1)
    }


# The expected padding, and the least of it


@FEW
@given(SHORT_LISTS, st.data())
def test_the_expected_padding_of_every_bucket_is_that_of_a_walk_from_row_to_row(lengths, data):
    batching = data.draw(batchings(max(lengths), orders=("bucketed",)))
    widths, counts = histogram(lengths, batching)
    raw = (np.array(values, np.int64).tobytes() for values in (widths, counts))
    edges, table = _padding_table(*raw, batching)
    assert edges.tolist() == list(range(len(widths) + 1))
    for a, b in itertools.product(range(len(widths) + 1), repeat=2):
        expected = expected_padding(widths[a:b], counts[a:b], batching) if a < b else np.inf
        assert table[a, b] == pytest.approx(expected, rel=1e-9)


@FEW
@given(SHORT_LISTS, st.integers(1, 9), st.data())
def test_no_other_edges_have_less_expected_padding(lengths, num_buckets, data):
    batching = data.draw(batchings(max(lengths), orders=("bucketed",)))
    widths, counts = histogram(lengths, batching)
    paddings = all_paddings(widths, counts, num_buckets, batching, expected_padding)
    edges = best_boundaries(lengths, num_buckets, batching)
    assert edges[0] == 0
    assert edges[-1] == max(lengths)
    assert paddings[edges[1:-1]] <= min(paddings.values()) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("widths", "counts", "limits"),
    [
        ([100, 3000, 3400], [90, 5, 5], {"token_budget": 13_600}),
        ([100, 120, 3280, 3340, 3400], [60, 10, 10, 10, 10], {"token_budget": 16_384}),
        ([20, 30, 600, 700], [80, 10, 5, 5], {"token_budget": 1400, "max_rows": 50}),
        ([10, 20, 30, 40, 50, 60, 70], [30, 20, 15, 12, 10, 8, 5], {"token_budget": 300}),
        ([10, 20, 40, 80, 160], [60, 25, 9, 4, 2], {"token_budget": 400, "max_rows": 16}),
        ([10, 20, 300], [40, 40, 20], {"token_budget": 9000, "cost_budget": 2600.0}),
    ],
)
@pytest.mark.parametrize("num_buckets", [2, 3])
def test_no_other_edges_are_better_where_long_rows_that_did_not_fit_open_batches(
    widths, counts, limits, num_buckets
):
    batching = Batching(**limits, cost_knee=100)
    paddings = all_paddings(widths, counts, num_buckets, batching, expected_padding)
    edges = best_boundaries(np.repeat(widths, counts), num_buckets, batching)
    assert paddings[edges[1:-1]] <= min(paddings.values()) * (1 + 1e-9)


def test_two_buckets_tell_two_piles_apart():
    lengths = np.repeat([100, 3000, 3400], [1800, 100, 100])
    limits = {"token_budget": 13_600, "sort_window": 0}
    own = plan_of(lengths, Batching(**limits, num_buckets=2))
    apart = plan_of(lengths, Batching(**limits, boundaries=(0, 100, 3400)))
    assert efficiency(apart) > 0.95
    assert efficiency(own) > 0.95


@pytest.mark.parametrize("name", ["log-normal", "heavy tail", "uniform", "story"])
@pytest.mark.parametrize("cap", [8, 64])
def test_cells_of_large_data_lose_less_than_a_five_hundredth(name, cap):
    lengths = story_lengths(60_000) if name == "story" else family(name, 60_000)
    widest = {8: 450, 64: 420}[cap]  # an exact table of more widths takes long
    lengths = np.maximum(lengths.astype(np.int64) * widest // lengths.max(), 1)
    widths, counts = np.unique(lengths, return_counts=True)
    assert widths.size > 1.15 * MOST_CELLS
    batching = Batching(token_budget=6 * widest, max_rows=cap)
    most = batching.most_rows(widths)
    table = _expected_padding(counts.astype(np.float64), widths.astype(np.float64), most)
    for num_buckets in (2, 6, 16):
        cuts = widths.searchsorted(best_boundaries(lengths, num_buckets, batching), "right")
        best = _best_cuts(table, num_buckets, np.arange(widths.size + 1))
        coarse, exact = (
            sum(table[pair] for pair in itertools.pairwise(edges)) for edges in (cuts, best)
        )
        assert cuts.size == num_buckets + 1
        assert exact <= coarse <= 1.002 * exact


def equal_mass(lengths: np.ndarray, num_buckets: int) -> tuple[int, ...]:
    """Edges between which lie equally many tokens, the custom of the field."""
    rising = np.sort(lengths)
    mass = np.cumsum(rising, dtype=np.float64)
    shares = mass[-1] * np.arange(1, num_buckets) / num_buckets
    edges = {int(rising[i]) for i in mass.searchsorted(shares)} | {int(rising[-1])}
    return (0, *sorted(edges))


@pytest.mark.parametrize("name", [*FAMILIES, "story"])
@pytest.mark.parametrize("num_buckets", [2, 6, 16])
@pytest.mark.parametrize("extra", [{}, {"pad_to": 64}, {"cost_budget": 30_000.0}])
def test_the_best_edges_pad_less_than_edges_of_equal_token_mass(name, num_buckets, extra):
    lengths = story_lengths(20_000) if name == "story" else family(name)
    limits = {**LIMITS, "sort_window": 0, **extra}
    best = plan_of(lengths, Batching(num_buckets=num_buckets, **limits))
    custom = plan_of(lengths, Batching(boundaries=equal_mass(lengths, num_buckets), **limits))
    assert efficiency(best) >= efficiency(custom) - 0.002


def test_more_buckets_pad_less():
    plans = [
        plan_of(family("log-normal"), Batching(num_buckets=k, sort_window=0, **LIMITS))
        for k in (1, 2, 4, 8, 16, 32)
    ]
    assert all(efficiency(less) < efficiency(more) for less, more in itertools.pairwise(plans))


# The edges


@MANY
@given(LENGTHS, st.integers(1, 12), st.data())
def test_buckets_cover_all_lengths_are_as_many_as_asked_and_none_is_empty(
    lengths, num_buckets, data
):
    batching = data.draw(batchings(max(lengths)))
    edges = best_boundaries(lengths, num_buckets, batching)
    assert edges[0] == 0
    assert edges[-1] == max(lengths)
    assert all(low < high for low, high in itertools.pairwise(edges))
    assert all(edge % batching.pad_to == 0 for edge in edges[:-1])
    assert len(edges) - 1 == min(num_buckets, len(histogram(lengths, batching)[0]))
    for low, high in itertools.pairwise(edges):
        assert any(low < length <= high for length in lengths)


@pytest.mark.parametrize(
    ("lengths", "num_buckets", "edges"),
    [
        (range(1, 7), 6, (0, 1, 2, 3, 4, 5, 6)),
        ([1, 1, 1, 8, 9], 3, (0, 1, 8, 9)),
        ([2, 9], 6, (0, 2, 9)),
        ([9, 2, 9], 1, (0, 9)),
        ([7] * 40, 6, (0, 7)),
        ([3], 2, (0, 3)),
    ],
)
def test_data_of_few_lengths_get_a_bucket_for_each(lengths, num_buckets, edges):
    assert optimal_boundaries(lengths, num_buckets, token_budget=100, max_rows=4) == edges


def test_edges_lie_on_the_grid_but_for_the_longest_row():
    limits = {"token_budget": 1000, "max_rows": 4, "pad_to": 64}
    assert optimal_boundaries([5, 60, 70, 130, 200], 9, **limits) == (0, 64, 128, 192, 200)
    # 60 and 64 have one width, and no edge may lie between them.
    assert optimal_boundaries([60, 60, 64, 64, 130], 9, **limits) == (0, 64, 130)


@FEW
@given(LENGTHS, st.randoms(), st.data())
def test_edges_follow_from_lengths_and_limits_alone(lengths, random, data):
    batching = data.draw(batchings(max(lengths)))
    edges = best_boundaries(lengths, 4, batching)
    other = Batching(
        boundaries=(0, 9999),
        sort_window=5,
        **{name: getattr(batching, name) for name in ("token_budget", "max_rows", "pad_to")},
        cost_budget=batching.cost_budget,
        cost_knee=batching.cost_knee,
    )
    shuffled = random.sample(lengths, len(lengths))
    assert best_boundaries(np.array(shuffled, np.int64), 4, other) == edges
    if batching.cost_budget is None:
        limits = {name: getattr(batching, name) for name in ("token_budget", "max_rows", "pad_to")}
        assert optimal_boundaries(lengths, 4, **limits) == edges


def test_edges_follow_from_every_limit():
    lengths = family("log-normal")
    plain = {"token_budget": 49_152, "max_rows": 64}
    others = [
        best_boundaries(lengths, 4, Batching(**(plain | changed)))
        for changed in (
            {},
            {"token_budget": 16_384},
            {"max_rows": 8},
            {"pad_to": 256},
            {"cost_budget": 30_000.0},
            {"cost_budget": 30_000.0, "cost_knee": 60_000.0},
        )
    ]
    assert len(set(others)) == len(others)


@FEW
@given(st.lists(st.integers(1, 8192), min_size=1, max_size=50))
def test_every_length_lies_between_the_edges_of_its_bucket(lengths):
    for length, bucket in zip(lengths, bucket_of(lengths, STORY).tolist(), strict=True):
        assert STORY[bucket] < length <= STORY[bucket + 1]


def test_a_length_above_the_last_edge_has_no_bucket():
    with pytest.raises(ValueError, match=r"got 8192; 1 rows are longer\. Raise the last of boun"):
        bucket_of([8193, 5], STORY)
