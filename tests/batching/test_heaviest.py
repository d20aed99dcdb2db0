"""The heaviest batches of a plan: against a walk over every batch, and wherever they stand."""

import time

import numpy as np
import pytest
from story import BOUNDARIES, story_lengths

from dflash_lightning import Batching, EpochPlan, plan_epoch
from dflash_lightning.batching.heaviest import heaviest


def walk(plan: EpochPlan, counts: np.ndarray) -> dict[str, list[tuple[tuple[int, ...], int]]]:
    """Weight of every batch, by reason: what decides, what decides among equals."""
    weights = {name: [] for name in ("longest rows", "most padded tokens", "most rows")}
    weights |= {"most anchors": [], "most labels": []}
    for step in range(plan.num_steps):
        for rank in range(plan.world_size):
            for micro in range(plan.accumulate):
                rows, width = plan.rows(step, rank, micro), plan.width(step, rank, micro)
                place, size = (step, rank, micro), len(rows)
                if not size:
                    continue
                found = [int(counts[row]) for row in rows]
                weights["longest rows"].append(((width, size * width), place))
                weights["most padded tokens"].append(((size * width,), place))
                weights["most rows"].append(((size, size * width), place))
                weights["most anchors"].append(((size * max(found),), place))
                weights["most labels"].append(((sum(found),), place))
    return weights


def check(plan: EpochPlan, most: np.ndarray, counts: np.ndarray) -> None:
    chosen = heaviest(plan, most, lambda rows: counts[rows])
    reasons = [name for heavy in chosen for name in heavy.reason.replace(" and ", ", ").split(", ")]
    expected = walk(plan, counts)
    assert sorted(reasons) == sorted(expected)
    assert len({heavy[1:] for heavy in chosen}) == len(chosen)
    for name, batches in expected.items():
        (place,) = [heavy[1:] for heavy in chosen if name in heavy.reason]
        assert dict((p, w) for w, p in batches)[place] == max(batches)[0]  # noqa: C402


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (3, 1), (2, 2)])
def test_the_heaviest_are_those_of_a_walk_over_all_batches(
    seed: int, world_size: int, accumulate: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 90, 300)
    batching = Batching(token_budget=400, max_rows=9, pad_to=[1, 8][seed % 2], num_buckets=3)
    layout = {"world_size": world_size, "accumulate": accumulate}
    plan = plan_epoch(lengths, batching, seed=seed, epoch=0, **layout)
    most = np.minimum(lengths - 1, 20)
    # What the lengths allow says little about the anchors of a row.
    check(plan, most, rng.integers(0, most + 1))
    check(plan, most, most)


def test_the_heaviest_of_a_plan_with_places_that_hold_no_rows() -> None:
    lengths = np.array([5, 9, 3, 7, 2])
    plan = plan_epoch(lengths, Batching(token_budget=9, max_rows=2), seed=0, epoch=0)
    rest = plan.resume(plan.num_steps - 1, world_size=4, accumulate=1)
    assert 0 in rest.batches.sizes
    check(rest, lengths - 1, lengths - 1)
    done = plan.resume(plan.num_steps, world_size=1, accumulate=1)
    assert heaviest(done, lengths, lambda rows: lengths[rows]) == []


def test_the_heaviest_batch_is_found_where_it_is_number_900_of_1000() -> None:
    # An order that lengths have no part in: a row stays where it is when it becomes longer.
    settings = {"order": "random", "deal": "independent", "boundaries": (0, 41), "max_rows": 1}
    batching = Batching(token_budget=64, **settings)
    lengths = np.full(1000, 40)
    plan = plan_epoch(lengths, batching, seed=3, epoch=0)
    lengths[plan.rows(899, 0)] = 41
    plan = plan_epoch(lengths, batching, seed=3, epoch=0)
    assert plan.width(899, 0) == 41
    chosen = heaviest(plan, lengths, lambda rows: lengths[rows])
    assert [tuple(batch[1:]) for batch in chosen] == [(899, 0, 0)]


def test_rows_are_read_only_until_no_batch_can_have_more_anchors() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 90, 2000)
    plan = plan_epoch(lengths, Batching(token_budget=400, max_rows=9), seed=0, epoch=0)
    most = lengths - 1
    read: list[int] = []

    def all_supervised(rows: np.ndarray) -> np.ndarray:
        read.extend(rows.tolist())
        return most[rows]

    heaviest(plan, most, all_supervised)
    assert len(read) <= 4 * 9
    read.clear()

    def hardly_any(rows: np.ndarray) -> np.ndarray:
        read.extend(rows.tolist())
        return np.minimum(most[rows], 1)

    heaviest(plan, most, hardly_any, read_rows=100)
    assert 50 < len(read) <= 100


@pytest.mark.slow
def test_the_heaviest_of_900_000_rows_are_found_in_less_than_two_seconds() -> None:
    lengths = story_lengths()
    batching = Batching(boundaries=BOUNDARIES, token_budget=49_152)
    plan = plan_epoch(lengths, batching, seed=0, epoch=0, world_size=8)
    most = np.minimum(-(-lengths // 4), 512)
    began = time.process_time()
    chosen = heaviest(plan, most, lambda rows: most[rows] // 2)
    assert time.process_time() - began < 2
    assert plan.width(*chosen[0][1:]) == 8192
