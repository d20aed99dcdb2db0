"""The learning-rate schedule: where it peaks, how it falls, where it ends."""

import itertools
import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lightning.functional.schedule import Schedule, schedule_factor

SCHEDULES = get_args(Schedule)
FALLING = ("cosine", "linear", "wsd")
SEARCH = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def curve(schedule: Schedule, *, warmup: int, total: int) -> list[float]:
    """Factors of all updates of a run."""
    return [
        schedule_factor(s, warmup_steps=warmup, total_steps=total, schedule=schedule)
        for s in range(total)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_is_half_way_at_update_50_of_100_and_peaks_at_100(schedule: Schedule):
    # LR-01: 6e-4 after 100 updates of warm-up, in a run of 1000 updates an epoch
    rates = [6e-4 * f for f in curve(schedule, warmup=100, total=2000)]
    assert rates[50 - 1] == pytest.approx(3e-4)
    assert rates[100 - 1] == 6e-4 == max(rates)
    assert all(earlier < later for earlier, later in itertools.pairwise(rates[:100]))


@pytest.mark.parametrize(
    ("schedule", "quarter", "half", "three_quarters"),
    [
        ("cosine", (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2),
        ("linear", 0.75, 0.5, 0.25),
        ("constant", 1.0, 1.0, 1.0),
        ("wsd", 1.0, 1.0, 1.0),
    ],
)
def test_a_schedule_falls_as_its_name_says(
    schedule: Schedule, quarter: float, half: float, three_quarters: float
):
    factors = curve(schedule, warmup=40, total=440)
    assert [factors[140], factors[240], factors[340]] == pytest.approx(
        [quarter, half, three_quarters]
    )


def test_wsd_falls_linearly_over_the_last_fifth():
    factors = curve("wsd", warmup=0, total=100)
    assert factors[:81] == pytest.approx([1.0] * 81)
    assert factors[80:] == pytest.approx([1 - i / 20 for i in range(20)])


@pytest.mark.parametrize("schedule", FALLING)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1000), (40, 1000), (400, 10_000)])
def test_the_last_update_is_small_and_not_wasted(schedule: Schedule, warmup: int, total: int):
    factors = curve(schedule, warmup=warmup, total=total)
    assert 0 < factors[-1] < 0.01
    after = schedule_factor(total, warmup_steps=warmup, total_steps=total, schedule=schedule)
    assert after == pytest.approx(0, abs=1e-12)


@SEARCH
@given(st.sampled_from(SCHEDULES), st.integers(0, 60), st.integers(1, 200))
def test_the_rate_rises_then_never_rises_again_and_never_jumps(
    schedule: Schedule, warmup: int, total: int
):
    factors = curve(schedule, warmup=warmup, total=total)
    assert all(0 < f <= 1 for f in factors)
    peak = min(max(warmup - 1, 0), total - 1)
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    # the steepest parts: warm-up, the middle of the cosine, the last fifth of wsd
    steepest = max(1 / max(warmup, 1), 5 / max(total - warmup, 1))
    steps = [abs(b - a) for a, b in itertools.pairwise(factors)]
    assert max(steps, default=0) <= steepest + 1e-9


def test_a_run_shorter_than_its_warmup_only_rises():
    assert curve("cosine", warmup=8, total=4) == [0.125, 0.25, 0.375, 0.5]


def test_without_warmup_the_first_update_is_at_the_peak():
    assert [curve(s, warmup=0, total=50)[0] for s in SCHEDULES] == [1.0] * 4
