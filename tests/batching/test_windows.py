"""Sort windows: rows of a shuffled bucket sorted piece by piece, drawn anew every epoch."""

import itertools

import numpy as np
import pytest
from batching.plans import FEW, LENGTHS, batches_of, batchings, efficiency, family, members, plan_of
from hypothesis import given
from hypothesis import strategies as st

from dflash_lightning.batching import Batching
from dflash_lightning.batching.buckets import best_boundaries, bucket_of
from dflash_lightning.batching.epoch import (
    WINDOWS_PER_BUCKET,
    cut_epoch,
    random_stream,
    windows_of,
)

LIMITS = {"token_budget": 16_384}


def runs_of(lengths, batching, boundaries, seed=0) -> list[list[list[int]]]:
    """Lengths in the order of the cut, bucket by bucket and window by window."""
    lengths = np.asarray(lengths, np.int32)
    cut = cut_epoch(lengths, batching, boundaries, random_stream(seed, 0), places=1)
    in_order = lengths[cut.rows]
    bucket = bucket_of(in_order, boundaries)
    windows = windows_of(lengths, batching, boundaries).tolist()
    runs = []
    for k, count in enumerate(windows):
        rows = in_order[bucket == k]
        # Window w holds rows ceil(w * rows / count) to ceil((w + 1) * rows / count) - 1.
        cuts = [-(-w * rows.size // count) for w in range(count + 1)] if count else [0, rows.size]
        runs.append([rows[a:b].tolist() for a, b in itertools.pairwise(cuts)])
    return runs


@FEW
@given(LENGTHS, st.integers(0, 2**40), st.data())
def test_rows_of_a_window_rise_or_fall_in_turn_and_windows_have_equal_rows(lengths, seed, data):
    batching = data.draw(batchings(max(lengths), orders=("bucketed",)))
    boundaries = best_boundaries(lengths, batching.num_buckets, batching)
    for windows in runs_of(lengths, batching, boundaries, seed):
        if len(windows) > 1:
            sizes = [len(window) for window in windows]
            assert max(sizes) - min(sizes) <= 1
            for at, window in enumerate(windows):
                assert window == sorted(window, reverse=at % 2 == 1)


def test_windows_of_a_large_bucket_rise_and_fall():
    lengths = family("log-normal")
    batching = Batching(**LIMITS)
    boundaries = best_boundaries(lengths, 6, batching)
    assert windows_of(lengths, batching, boundaries).min() >= WINDOWS_PER_BUCKET
    for windows in runs_of(lengths, batching, boundaries):
        for at, window in enumerate(windows):
            assert window == sorted(window, reverse=at % 2 == 1)


@FEW
@given(LENGTHS, st.data())
def test_a_window_is_at_most_an_eighth_of_its_bucket(lengths, data):
    batching = data.draw(batchings(max(lengths), orders=("bucketed",)))
    boundaries = best_boundaries(lengths, batching.num_buckets, batching)
    rows = np.bincount(bucket_of(lengths, boundaries))
    windows = windows_of(np.array(lengths, np.int32), batching, boundaries)
    assert windows.shape == rows.shape
    assert all(count == 0 or 8 <= count <= size for count, size in zip(windows, rows, strict=True))
    if batching.sort_window == 0:
        assert not windows.any()


@pytest.mark.parametrize(
    ("rows", "sort_window", "count"),
    [
        (6400, 0, 0),
        (6400, 1, 0),  # a window of one batch: nothing to choose from
        (6400, 2, 800),
        (6400, 32, 50),
        (6400, 200, 8),
        (6400, 10_000, 8),
        (64, 32, 8),
        (33, 32, 8),
        (32, 32, 0),  # an eighth is one batch
        (16, 32, 0),
        (1, 32, 0),
    ],
)
def test_a_window_holds_sort_window_batches_of_mean_size(rows, sort_window, count):
    lengths = np.arange(rows, dtype=np.int32) % 50 + 51
    batching = Batching(max_rows=4, sort_window=sort_window)
    assert windows_of(lengths, batching, (0, 100)).tolist() == [count]


def test_every_bucket_gets_windows_of_as_many_rows():
    lengths = np.repeat(np.array([10, 100], np.int32), [6400, 640])  # 8 and 4 rows a batch
    batching = Batching(token_budget=400, max_rows=8, sort_window=16, boundaries=(0, 10, 100))
    batches = 6400 / 8 + 640 / 4
    window = 16 * 7040 / batches
    expected = [round(6400 / window), max(8, round(640 / window))]
    assert windows_of(lengths, batching, (0, 10, 100)).tolist() == expected


def test_without_windows_no_run_of_rows_follows_length():
    lengths = np.arange(1, 4097)
    batching = Batching(max_rows=8, sort_window=0, num_buckets=1)
    rows = np.concatenate(batches_of(plan_of(lengths, batching)))
    assert abs(np.corrcoef(lengths[rows][1:], lengths[rows][:-1])[0, 1]) < 0.05


def test_wider_windows_pad_less():
    plans = [
        plan_of(family("log-normal", 60_000), Batching(**LIMITS, sort_window=window))
        for window in (0, 2, 8, 32, 128)
    ]
    assert all(efficiency(less) < efficiency(more) for less, more in itertools.pairwise(plans))
    assert efficiency(plans[3]) > 0.985


@pytest.mark.parametrize("name", ["log-normal", "heavy tail", "two piles", "uniform", "equal"])
@pytest.mark.parametrize("sort_window", [0, 2, 32, 1000])
def test_batch_mates_part_in_the_next_epoch(name, sort_window):
    batching = Batching(token_budget=16_384, max_rows=16, sort_window=sort_window)
    plans = [plan_of(family(name, 4000), batching, epoch=e, world_size=8) for e in range(3)]
    for plan, following in itertools.pairwise(plans):
        together = {pair for batch in batches_of(plan) for pair in pairs(batch)}
        again = {pair for batch in batches_of(following) for pair in pairs(batch)}
        assert len(together & again) < 0.1 * len(together)
        whole = {batch for batch in members(plan) if len(batch) > 2}
        assert len(whole & members(following)) <= 0.01 * len(whole) + 1


def pairs(batch: list[int]) -> itertools.combinations:
    """Pairs of batch-mates."""
    return itertools.combinations(sorted(batch), 2)


def test_which_rows_share_a_window_is_drawn_anew():
    lengths = np.repeat(np.arange(1, 101), 8)
    batching = Batching(max_rows=4, sort_window=10, num_buckets=1)
    first, second = (
        cut_epoch(lengths, batching, (0, 100), random_stream(0, epoch), places=1).rows
        for epoch in (0, 1)
    )
    count = int(windows_of(lengths, batching, (0, 100))[0])
    windows = [
        np.sort(rows[: lengths.size // count * count].reshape(count, -1))
        for rows in (first, second)
    ]
    shared = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(*windows, strict=True)]
    assert count == 20
    assert max(shared) < 0.4 * lengths.size / count
