"""Error rates of the diagnosis; ``pytest -m benchmark -s tests/diagnosis`` has them in full.

Seeds are fixed: bounds leave room for the numbers of runs, and a broken estimator is beyond them.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from diagnosis.case import FAMILIES, Case
from diagnosis.reach import (
    FEW_ROWS,
    LONE_ROWS,
    MIX_ERROR,
    NAMED_ALONE,
    SHOCK,
    SMALL_BATCHES,
    Judged,
    cases,
    judged,
    plan_pair,
    rate,
    reached,
    runs,
    sorted_pair,
    told,
)
from diagnosis.simulate import simulate_case

from dflash_lightning.diagnosis import diagnose
from dflash_lightning.diagnosis.pool import pooled
from dflash_lightning.diagnosis.variance import decompose

RANKS = (1, 8)


@functools.cache
def healthy(family: str) -> tuple[Judged, ...]:
    return tuple(judged(case) for case in runs(cases(family, RANKS), 40, 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_shares_of_healthy_runs_are_near_the_truth(family: str) -> None:
    found = [run.told for run in healthy(family) if run.told]
    assert len(found) == 40
    assert reached(run.mix_error for run in found) <= MIX_ERROR[family]
    assert abs(np.mean([run.rest_error for run in found])) <= 0.04
    assert rate(run.covers for run in found) >= 0.85
    assert 0.8 <= np.median([run.width for run in found]) <= 1.4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shock_that_all_rows_share_is_rest(family: str) -> None:
    found = [told(case) for case in runs(cases(family, RANKS, shock=SHOCK), 24, 1000)]
    assert reached(run.mix_error for run in found) <= MIX_ERROR[family] + 0.02
    assert abs(np.mean([run.rest_error for run in found])) <= 0.05
    assert rate(run.covers for run in found) >= 0.8


def test_150_steps_tell_as_much_as_they_can() -> None:
    of = [case for family in FAMILIES for case in runs(cases(family, RANKS, steps=150), 8, 2000)]
    found = [told(case) for case in of]
    assert rate(run.covers for run in found) >= 0.85
    assert 0.8 <= np.median([run.width for run in found]) <= 1.4


def test_the_mix_of_few_steps_is_not_made_of_the_errors_of_its_offsets() -> None:
    """Without their part, it is twice the truth."""
    found, true = [], []
    few = Case(seed=0, ranks=1, steps=60, sigma=1.5, rows_per_batch=FEW_ROWS)
    for case in runs([few], 60, 2500):
        run, truth = simulate_case(case)
        found.append(decompose(pooled(run.take(run.step >= 100))).parts[0])
        true.append(truth.mix)
    assert 0.5 < np.mean(found) / np.mean(true) < 1.4


def test_healthy_runs_are_on_track_and_nothing_is_invented() -> None:
    found = [run for family in FAMILIES for run in healthy(family)]
    assert rate(run.verdict == "INVESTIGATE" for run in found) <= 0.01
    assert rate(run.verdict != "ON TRACK" for run in found) <= 0.1
    assert rate(run.invents for run in found) <= 0.05
    assert all("epoch_edge" in run.causes for run in healthy("edges") if run.case.ranks == 8)


@pytest.mark.parametrize("fault", NAMED_ALONE)
def test_a_fault_is_named_and_nothing_else(fault: str) -> None:
    of = [case for x in FAMILIES for case in runs(cases(x, RANKS, fault=fault), 6, 3000)]
    found = [judged(case) for case in of]
    assert rate(run.finds for run in found) >= 0.95
    assert rate(run.finds and not run.invents for run in found) >= 0.9


def test_a_shift_at_the_peak_of_the_rate_is_found_on_flat_and_steep_curves() -> None:
    for family in ("plain", "steep"):
        found = [judged(case) for case in runs(cases(family, RANKS, fault="shift"), 16, 4000)]
        assert rate(run.finds for run in found) >= 0.9
        assert {run.verdict for run in found if run.finds} == {"INVESTIGATE"}
    assert not any("learning_rate" in run.causes for family in FAMILIES for run in healthy(family))


@pytest.mark.parametrize(("middle", "width", "depth"), [(120, 10, 3), (70, 5, 2), (60, 8, 3)])
def test_a_fall_too_fast_for_the_trend_is_no_shift(middle: int, width: int, depth: int) -> None:
    for case in runs([Case(seed=0)], 4, 4500):
        run, _ = simulate_case(case)
        fall = -depth / (1 + np.exp((middle - run.step) / width))
        columns = {**run.columns, "loss": run.loss + fall}
        buckets = {**run.buckets, "loss": run.bucket("loss") + fall[:, None]}
        found = diagnose(replace(run, columns=columns, buckets=buckets))
        assert "learning_rate" not in [cause.cause for cause in found.causes]


def test_a_garbage_row_is_named_among_few() -> None:
    of = cases("plain", (1,), fault="garbage", rows_per_batch=SMALL_BATCHES)
    found = [judged(case) for case in runs(of, 24, 5000)]
    assert rate(run.has_row for run in found) >= 0.9
    assert {run.verdict for run in found if run.has_row} == {"WATCH"}


def test_few_rows_of_uneven_weight_raise_no_alarm() -> None:
    of = cases("plain", (1, 2), weight_cv=1.0, rows_per_batch=FEW_ROWS, lighter=0.0)
    found = [judged(case) for case in runs(of, 40, 6000)]
    assert rate(run.told.covers for run in found if run.told) >= 0.85
    assert sum(run.verdict == "INVESTIGATE" for run in found) <= 1


@pytest.mark.parametrize(("steps", "warmup"), [(150, 100), (-200, 400)])
def test_where_long_rows_are_alone_it_is_said_what_is_missing(steps: int, warmup: int) -> None:
    lone = Case(seed=0, ranks=1, rows_per_batch=LONE_ROWS, steps=steps, warmup=warmup)
    for family in ("plain", "steep", "heavy"):
        found = [judged(case) for case in runs([replace(lone, family=family)], 12, 7000)]
        assert rate(run.verdict != "INVESTIGATE" for run in found) >= 0.9
        assert all(any("noise and rest apart" in x for x in run.missing) for run in found)
        assert all(run.told is None for run in found)


def test_a_sorted_run_is_compared_at_the_same_mix() -> None:
    of = [case for x in ("plain", "changing", "real") for case in runs(cases(x, RANKS), 16, 8000)]
    found = [sorted_pair(case, 0.05) for case in of]
    assert rate(pair.covers for pair in found) >= 0.9
    assert reached(pair.error for pair in found) <= 0.5
    assert max(pair.half for pair in found) <= 0.5


def test_batches_in_the_order_of_length_are_a_period_and_a_mix() -> None:
    in_order = Case(seed=0, order="sorted", group=200)
    found = [judged(case) for case in runs([in_order], 12, 8100)]
    assert {run.causes - {"rows"} for run in found} == {frozenset({"period"})}
    shares = [run.told for run in found if run.told]
    assert reached(run.mix_error for run in shares) <= 0.05
    assert rate(run.covers for run in shares) >= 0.8
    pairs = [sorted_pair(case, 0.05, in_order=True) for case in runs([Case(seed=0)], 12, 8200)]
    assert rate(pair.covers for pair in pairs) >= 0.75
    assert max(pair.half for pair in pairs) <= 2


def test_two_runs_of_one_plan_are_compared_step_by_step() -> None:
    found = [plan_pair(case, 0.02) for case in runs(cases("plain", RANKS), 20, 9000)]
    assert all(paired.same_rows and not apart.same_rows for paired, apart in found)
    assert rate(paired.covers for paired, _ in found) >= 0.9
    assert np.median([apart.half / paired.half for paired, apart in found]) >= 2.5
