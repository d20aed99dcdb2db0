"""Simulated runs: the ledger is that of their rows, and the truth is what they scatter by."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from diagnosis.case import Case
from diagnosis.dealt import draw_steps, make_rows
from diagnosis.planted import FAULTS
from diagnosis.simulate import (
    Run,
    Truth,
    same_plan,
    simulate,
    sorted_and_bucketed,
    true_difference,
)
from diagnosis.tallies import running_means, tally

from dflash_lightning.functional.step_statistics import StepStatistics

FEW_ROWS = (6, 5, 4, 3, 2, 2)
LATE = slice(100, None)


def pi_of(run: Run) -> np.ndarray:
    return run.bucket("weight") / run.column("weight")[:, None]


def expected_loss(run: Run, truth: Truth) -> np.ndarray:
    return truth.f + (pi_of(run) * truth.b).sum(1)


def error_of(run: Run, truth: Truth) -> np.ndarray:
    """Of the step loss, in noise deviations."""
    return (run.loss - expected_loss(run, truth)) / truth.unit


@pytest.mark.parametrize("order", ["bucketed", "random", "sorted"])
@pytest.mark.parametrize("deal", ["stratified", "aligned", "independent"])
def test_every_row_comes_once_an_epoch(order, deal):
    case = Case(seed=1, order=order, deal=deal, steps=50, warmup=10, window=deal == "aligned")
    rng = np.random.default_rng(0)
    data = make_rows(
        rng, case.layout, edges=case.edges, cv=0.5, sigma=1.0, lighter=0.5, lasting_share=0.5
    )
    rows, step = draw_steps(rng, data, case.layout, case.total)
    assert case.epoch_steps == 20
    for epoch in range(3):
        drawn = rows[step // 20 == epoch]
        np.testing.assert_array_equal(np.sort(drawn), np.arange(data.bucket.size))
    assert np.all(np.diff(step) >= 0)


def test_a_run_is_the_same_for_the_same_seed_only():
    again = [simulate(seed, steps=20, warmup=10)[0].loss for seed in (3, 3, 4)]
    np.testing.assert_array_equal(again[0], again[1])
    assert not np.any(again[0] == again[2])


def test_settings_that_no_case_has_are_refused():
    with pytest.raises(TypeError, match="famly"):
        simulate(0, famly="steep")


def test_the_columns_are_those_that_training_writes():
    rng = np.random.default_rng(0)
    statistics = StepStatistics((0, 8, 16, 32), rank=0, world_size=1)
    drawn, written = [], []
    for t in range(12):
        rows = rng.permutation(100)[: rng.integers(1, 9)]
        length = rng.integers(1, 33, rows.size)
        n, loss = rng.lognormal(size=rows.size), rng.normal(3, 1, rows.size)
        statistics.add(
            rows=torch.tensor(rows),
            lengths=torch.tensor(length),
            row_of_label=torch.arange(rows.size),
            weights=torch.tensor(n),
            losses=torch.tensor(loss),
            correct=torch.ones(rows.size, dtype=torch.bool),
            padded_tokens=1,
            anchors=1,
        )
        written.append(statistics.reduce(lambda own: own).read())
        bucket = np.searchsorted((8, 16), length)
        drawn.append((np.full(rows.size, t), bucket, rows, n * loss, n, np.log(length)))
    columns, buckets = tally(*map(np.concatenate, zip(*drawn, strict=True)), shape=(12, 3))
    for name, values in buckets.items():
        expected = np.array([step[f"{name}_k"] for step in written], float)
        np.testing.assert_allclose(values, expected, rtol=1e-9, err_msg=name)
    for name, values in columns.items():
        expected = np.array([step[name] for step in written], float)
        # Two rows that are the first of their bucket are equally far from their mean.
        late = 1 if name.startswith("top") else 0
        np.testing.assert_allclose(values[late:], expected[late:], rtol=1e-9, err_msg=name)


def test_a_bucket_is_held_against_its_earlier_steps():
    loss = np.array([[np.nan, 1.0], [4.0, 2.0], [np.nan, np.nan], [5.0, 1.0]])
    held = running_means(loss)
    np.testing.assert_allclose(held[:, 1], [1, 1, 1.1, 1.1])
    np.testing.assert_allclose(held[:, 0], [np.nan, 4, 4, 4])


@pytest.mark.parametrize("family", ["plain", "changing", "steep", "edges", "heavy"])
def test_the_step_loss_is_the_weighted_mean_of_bucket_losses(family):
    run, truth = simulate(2, family=family, deal="aligned")
    np.testing.assert_allclose(np.nansum(pi_of(run) * run.bucket("loss"), 1), run.loss)
    np.testing.assert_allclose(run.bucket("weight").sum(1), run.column("weight"))
    np.testing.assert_allclose(truth.b @ truth.share, 0, atol=1e-12)
    np.testing.assert_allclose(truth.share.sum(), 1)
    assert truth.rest == 0


@pytest.mark.parametrize(
    ("settings", "bias"),
    [
        ({"weight_cv": 0.0}, 0.0),
        ({}, 0.005),
        ({"ranks": 1, "lighter": 0.0}, 0.03),
        # With very uneven weights the jackknife of few rows is too large.
        ({"ranks": 1, "weight_cv": 1.0, "rows_per_batch": FEW_ROWS}, 0.12),
    ],
)
def test_noise_columns_have_the_true_variance_in_the_mean(settings, bias):
    ratios = []
    for seed in range(12):
        run, truth = simulate(seed, **settings)
        known = np.isfinite(run.bucket("noise"))
        square = pi_of(run) ** 2
        seen = (square * run.bucket("noise"))[known].sum()
        ratios.append(seen / (square * truth.bucket_noise)[known].sum())
    error = np.std(ratios) / math.sqrt(len(ratios))
    assert abs(np.mean(ratios) - 1 - bias) < 0.01 + 3.5 * error


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_cv": 1.0, "rows_per_batch": FEW_ROWS, "deal": "independent"},
        {"family": "changing", "deal": "aligned"},
        {"order": "random", "ranks": 1},
        {"fault": "row_spread"},
        {"fault": "step_spread"},
        {"shock": 0.7},
    ],
)
def test_losses_scatter_around_the_curve_by_the_true_variance(settings):
    found, expected = 0.0, 0.0
    for seed in range(12):
        run, truth = simulate(seed, slope=0.0, **settings)
        found += np.mean((run.loss - expected_loss(run, truth))[LATE] ** 2)
        expected += truth.noise + truth.rest
    assert found / expected == pytest.approx(1, abs=0.09)


def test_heavy_tails_have_the_same_variance_and_larger_extremes():
    runs = {name: [simulate(s, family=name) for s in range(8)] for name in ("plain", "heavy")}
    variance = {
        name: np.mean([np.var(error_of(*pair)[LATE]) for pair in pairs])
        for name, pairs in runs.items()
    }
    assert variance["heavy"] == pytest.approx(variance["plain"], rel=0.15)
    share = {
        name: np.max([run.column("top_share")[LATE].max() for run, _ in pairs])
        for name, pairs in runs.items()
    }
    assert share["heavy"] > 1.5 * share["plain"]


def test_stratified_steps_are_alike_and_aligned_ones_have_one_bucket():
    spread = {}
    for deal in ("stratified", "aligned", "independent"):
        run, truth = simulate(0, deal=deal)
        spread[deal] = math.sqrt(truth.mix)
        largest = pi_of(run).max(1)
        if deal == "aligned":
            assert np.mean(largest == 1) > 0.95
            assert 0 < np.mean(np.isnan(run.bucket("noise"))) < 1
        else:
            assert np.mean(largest == 1) < 0.05
    assert spread["stratified"] < 0.3 * spread["independent"]
    assert spread["independent"] == pytest.approx(spread["aligned"] / math.sqrt(8), rel=0.3)


def test_sort_windows_make_the_rows_of_a_batch_alike():
    lengths = {w: simulate(0, window=w, deal="aligned")[0].bucket("length") for w in (False, True)}
    assert np.nanstd(lengths[True][:, 5]) > 2 * np.nanstd(lengths[False][:, 5])


def test_families_fall_as_they_say():
    _, steep = simulate(0, family="steep")
    assert steep.f[0] == pytest.approx(9)
    assert steep.f[100] == pytest.approx(5)
    _, edges = simulate(0, family="edges")
    _, plain = simulate(0)
    np.testing.assert_allclose(edges.f - plain.f, -0.15 * (np.arange(600) // 200), atol=1e-12)
    _, changing = simulate(0, family="changing")
    gap = changing.b[:, 5] - changing.b[:, 0]
    assert gap[0] == pytest.approx(1.3 * 0.7)
    assert gap[-1] == pytest.approx(0.5 * 0.7, rel=0.01)
    assert np.ptp(np.diff(gap)[LATE] * (np.arange(600) + 100.5)[:-1][LATE]) < 1e-4


def test_the_rate_rises_to_its_peak_and_falls_as_a_cosine():
    run, _ = simulate(0)
    lr = run.column("lr")
    assert lr[0] == pytest.approx(6e-6)
    assert lr[99] == lr[100] == lr.max() == pytest.approx(6e-4)
    assert lr[350] == pytest.approx(3e-4)
    assert np.all(np.diff(lr)[101:] < 0)


def test_a_run_may_end_inside_its_warm_up():
    run, truth = simulate(0, warmup=400, steps=-90, planned_steps=4200)
    assert len(run) == 310
    assert run.header["total_steps"] == 4200
    assert run.column("lr")[-1] == pytest.approx(6e-4 * 310 / 400)
    assert truth.noise == pytest.approx(truth.step_noise.mean())


def test_long_buckets_of_one_row_have_no_noise_of_their_own():
    run, _ = simulate(0, ranks=1, rows_per_batch=(6, 4, 3, 2, 1, 1))
    last = run.bucket("rows")[:, 5]
    assert set(last) == {0, 1}
    assert np.all(np.isnan(run.bucket("noise")[:, 5]))
    np.testing.assert_array_equal(run.bucket("eff")[:, 5], last)
    # A row that is its bucket's first deviates from nothing; alone in a step, it pulls all of it.
    assert math.isnan(run.column("top_row")[np.flatnonzero(last)[0]])
    assert np.all(np.isnan(run.column("top_pull")[last == 1]))


# -- faults ---------------------------------------------------------------------------------------


def test_a_healthy_run_and_all_faults_have_the_columns_of_a_ledger():
    for fault in ("", *FAULTS):
        run, truth = simulate(1, fault=fault)
        assert truth.fault == fault
        assert len(run.columns) == 19
        assert run.column("skipped").any() == (fault == "non_finite")
        assert run.column("restart").any() == (fault == "restart")
        assert bool(truth.rows) == (fault == "garbage")


def test_spread_of_steps_doubles_for_a_hundred_steps():
    found = []
    for seed in range(12):
        run, truth = simulate(seed, fault="step_spread")
        assert truth.rest == pytest.approx(3 * truth.unit**2 * 100 / 500)
        steps = spread_steps(seed)
        found.append(
            (np.std(error_of(run, truth)[steps]), np.std(error_of(*simulate(seed))[steps]))
        )
    assert np.mean([a for a, _ in found]) == pytest.approx(2, rel=0.1)


def spread_steps(seed: int) -> np.ndarray:
    """Where the spread of rows is doubled, which is where that of steps is."""
    healthy, doubled = (simulate(seed, fault=fault)[1] for fault in ("", "row_spread"))
    steps = np.flatnonzero(doubled.step_noise > 2 * healthy.step_noise)
    assert steps.size == 100
    assert np.ptp(steps) == 99
    assert 200 <= steps[0] <= 400
    return steps


def test_spread_of_rows_shows_in_their_noise():
    steps = spread_steps(5)
    noise = {f: np.nansum(simulate(5, fault=f)[0].bucket("noise"), 1) for f in ("", "row_spread")}
    assert noise["row_spread"][steps].mean() == pytest.approx(4 * noise[""][steps].mean(), rel=0.02)
    assert np.array_equal(np.delete(noise["row_spread"], steps), np.delete(noise[""], steps))


@pytest.mark.parametrize("deal", ["stratified", "aligned"])
def test_length_ordered_batches_repeat_every_fifty_steps(deal):
    run, _ = simulate(0, fault="length_ordered", deal=deal)
    length = np.nanmean(run.bucket("length"), 1).reshape(-1, 50)
    assert np.all(np.diff(length.mean(0)) > -0.05)
    assert np.mean(length[:, 0]) < 6.5 < 8.3 < np.mean(length[:, -1])
    power = np.abs(np.fft.rfft(length.ravel() - length.mean())) ** 2
    assert np.argmax(power) == 12


def test_levels_move_by_noise_deviations():
    _, plain = simulate(0)
    t = np.arange(600)
    moved = {
        fault: (simulate(0, fault=fault)[1].f - plain.f) / plain.unit
        for fault in ("epoch_edges", "shift", "divergence")
    }
    np.testing.assert_allclose(moved["epoch_edges"], -3.0 * (t // 200), atol=1e-9)
    np.testing.assert_allclose(moved["shift"], 3.0 * (t >= 100), atol=1e-9)
    np.testing.assert_allclose(moved["divergence"][:431], 0, atol=1e-9)
    curve = simulate(0, fault="divergence")[1].f
    assert (curve[-1] - curve[430]) / plain.unit == pytest.approx(12 * 169 / 170)


def test_a_garbage_row_costs_ten_nats_once_an_epoch():
    run, truth = simulate(3, fault="garbage", ranks=1)
    healthy, _ = simulate(3, ranks=1)
    (row,) = truth.rows
    hit = np.flatnonzero(run.loss != healthy.loss)
    assert [int(t) // 200 for t in hit] == [0, 1, 2]
    assert np.all(run.column("top_row")[hit] == row)
    assert np.all(run.column("rows")[hit] <= 20)
    np.testing.assert_array_equal(healthy.loss != run.loss, np.isin(run.step, hit))


def test_steps_that_are_not_finite_are_skipped_and_name_their_row():
    run, _ = simulate(0, fault="non_finite")
    bad = np.flatnonzero(run.column("skipped"))
    assert bad.size == 3
    assert bad[0] >= 100
    assert np.all(np.isnan(run.loss[bad]))
    assert np.isfinite(np.delete(run.loss, bad)).all()
    assert np.all(run.column("top_share")[bad] == 1)
    unknown = np.isnan(run.bucket("loss")[bad]) & (run.bucket("rows")[bad] > 0)
    assert np.all(unknown.sum(1) == 1)


def test_a_restart_begins_a_process_with_its_own_header():
    run, _ = simulate(0, fault="restart")
    (at,) = np.flatnonzero(run.column("restart"))
    assert [first for first, _ in run.headers] == [0, at]


# -- pairs ----------------------------------------------------------------------------------------


def test_a_sorted_run_looks_smooth_and_shares_the_truth_of_the_bucketed_one():
    in_order, bucketed = sorted_and_bucketed(0, difference=0.05)
    for run, truth in (in_order, bucketed):
        np.testing.assert_allclose(truth.f[0], bucketed[1].f[0], atol=0.051)
        assert run.column("tokens_seen")[-1] == bucketed[0].column("tokens_seen")[-1]
    length = np.nanmean(in_order[0].bucket("length")[:200], 1)
    assert np.corrcoef(length[1:], length[:-1])[0, 1] > 0.97
    assert true_difference(in_order, bucketed) == pytest.approx(0.05, abs=0.01)
    errors = [error_of(*pair)[LATE] for pair in (in_order, bucketed)]
    assert abs(np.corrcoef(*errors)[0, 1]) < 0.15


def test_runs_of_one_plan_have_most_of_their_noise_in_common():
    first, second = same_plan(0, difference=0.02)
    np.testing.assert_array_equal(first[0].bucket("weight"), second[0].bucket("weight"))
    apart = first[0].loss - second[0].loss
    assert np.mean(apart) == pytest.approx(-0.02, abs=0.005)
    assert np.var(apart) < 0.5 * first[1].noise
    assert true_difference(first, second) == pytest.approx(-0.02)


# -- rows of a recording --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    """Skewed losses that fall with the weight."""
    rng = np.random.default_rng(0)
    length = rng.normal(6.5, 0.6, 4000)
    weight = np.exp(length / 3) * rng.lognormal(sigma=0.5, size=4000)
    loss = 1 + rng.gamma(2, 0.5, 4000) / weight**0.2 + 0.1 * length
    file = tmp_path_factory.mktemp("rows") / "row_losses.npz"
    np.savez(file, loss=loss, weight=weight, log_length=length)
    return file


def test_recorded_rows_scatter_by_the_variance_of_their_population(recording):
    found, noise, seen = [], [], []
    for seed in range(12):
        run, truth = simulate(seed, family="real", file=recording, slope=0.0)
        error = run.loss - expected_loss(run, truth)
        found.append(np.var(error[LATE]))
        noise.append(truth.noise)
        own = (pi_of(run) ** 2 * np.nan_to_num(run.bucket("noise"))).sum(1)
        seen.append(own[LATE].mean())
    assert np.mean(found) == pytest.approx(np.mean(noise), rel=0.1)
    assert np.mean(seen) == pytest.approx(np.mean(noise), rel=0.05)
    assert run.header["boundaries"][0] == 0
    assert np.all(np.diff(run.header["boundaries"]) > 0)
