"""The estimators, each against a slow twin or by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from diagnosis.simulate import simulate

from dflash_lightning.diagnosis import Run, diagnose
from dflash_lightning.diagnosis.model import fit_curve
from dflash_lightning.diagnosis.pool import Steps, pooled
from dflash_lightning.diagnosis.spline import clock, even_knots, spline_basis
from dflash_lightning.diagnosis.statistics import (
    bootstrap_means,
    chi_squared_tail,
    fisher_g,
    moving_mean,
    runs_of,
    student_quantile,
)
from dflash_lightning.diagnosis.variance import decompose

# -- splines -------------------------------------------------------------------------------------


def bump(i: int, degree: int, at: float, knots: list[float]) -> float:
    """One B-spline by the recursion of Cox and de Boor, the last point in the last interval."""
    if degree == 0:
        last = at == knots[-1] and knots[i] < knots[i + 1] == knots[-1]
        return float(knots[i] <= at < knots[i + 1] or last)
    total = 0.0
    if knots[i + degree] > knots[i]:
        rise = (at - knots[i]) / (knots[i + degree] - knots[i])
        total += rise * bump(i, degree - 1, at, knots)
    if knots[i + degree + 1] > knots[i + 1]:
        fall = (knots[i + degree + 1] - at) / (knots[i + degree + 1] - knots[i + 1])
        total += fall * bump(i + 1, degree - 1, at, knots)
    return total


def test_splines_are_those_of_the_recursion() -> None:
    knots = np.array([0.0, 0.5, 0.8, 2.0])
    at = np.linspace(0, 2, 41)
    padded = [0.0] * 3 + knots.tolist() + [2.0] * 3
    expected = [[bump(i, 3, x, padded) for i in range(6)] for x in at.tolist()]
    basis = spline_basis(at, knots)
    assert basis == pytest.approx(np.array(expected), abs=1e-12)
    assert basis.sum(1) == pytest.approx(np.ones(41))
    assert (basis > 0).sum(1).max() == 4


def test_splines_hold_every_cubic() -> None:
    at = np.linspace(-1, 3, 100)
    basis = spline_basis(at, np.array([-1.0, 0.0, 0.3, 3.0]))
    cubic = 2 - at + 0.5 * at**2 - 0.7 * at**3
    held = basis @ np.linalg.lstsq(basis, cubic, rcond=None)[0]
    assert held == pytest.approx(cubic, abs=1e-9)


@pytest.mark.parametrize(("steps", "intervals"), [(100, 3), (600, 10), (100_000, 60)])
def test_there_is_a_knot_about_every_sixty_steps(steps: int, intervals: int) -> None:
    knots = even_knots(0, steps - 1, steps=steps)
    assert len(knots) == intervals + 1
    assert knots[[0, -1]] == pytest.approx(clock(np.array([0, steps - 1])))


# -- small statistics ----------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [5, 10, 20, 41, 200])
def test_the_quantile_leaves_a_fortieth_beyond(degrees: int) -> None:
    x = np.linspace(student_quantile(degrees), 400, 2_000_001)
    size = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    density = math.exp(size) / math.sqrt(degrees * math.pi)
    tail = np.trapezoid(density * (1 + x * x / degrees) ** (-(degrees + 1) / 2), x)
    assert tail == pytest.approx(0.025, rel=0.02)


@pytest.mark.parametrize("x", [0.5, 4.0, 18.3, 40.0])
def test_the_tail_of_chi_squared_is_its_integral(x: float) -> None:
    at = np.linspace(x, x + 200, 400_001)
    density = at**4 * np.exp(-at / 2) / (2**5 * math.gamma(5))
    assert chi_squared_tail(x, 10) == pytest.approx(np.trapezoid(density, at), rel=1e-4)


def test_blocks_keep_what_neighbours_share() -> None:
    """The mean of an AR(1) series deviates (1 + rho) / (1 - rho) times as much, in variance."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(40):
        series = np.zeros(600)
        for t in range(1, 600):
            series[t] = 0.5 * series[t - 1] + rng.standard_normal()
        found.append(bootstrap_means(series[:, None]).var(ddof=1))
    independent = 1 / (1 - 0.25) / 600
    assert 2.0 * independent < np.mean(found) < 3.2 * independent


def test_a_period_is_found_and_not_invented() -> None:
    rng = np.random.default_rng(1)
    noise = rng.standard_normal((400, 300))
    low = [fisher_g(x, longest=75)[1] for x in noise]
    assert np.mean(np.array(low) < 0.05) <= 0.08
    swing = np.sin(2 * np.pi * np.arange(300) / 12)
    period, chance = fisher_g(noise[0] + swing, longest=75)
    assert period == pytest.approx(12)
    assert chance < 1e-5
    assert fisher_g(np.sin(np.arange(300) / 40), longest=75)[0] <= 75  # slower is trend


def test_means_and_stretches_by_hand() -> None:
    assert moving_mean(np.array([1.0, 2.0, 9.0]), 3).tolist() == [1.5, 4.0, 5.5]
    assert runs_of(np.array([False, True, True, False, True])) == [(1, 2), (4, 4)]
    assert runs_of(np.zeros(3, bool)) == []


# -- the pool ------------------------------------------------------------------------------------


def small_run(**buckets: list[list[float]]) -> Run:
    """Three steps and two buckets."""
    values = {name: np.array(rows) for name, rows in buckets.items()}
    portion = values["weight"] / values["weight"].sum(1, keepdims=True)
    return Run(
        name="small",
        kind="ledger",
        step=np.arange(3),
        columns={"loss": (portion * np.nan_to_num(values["loss"])).sum(1)},
        buckets=values,
    )


def test_the_variance_of_a_row_is_pooled_by_degrees_of_freedom() -> None:
    nan = math.nan
    run = small_run(
        loss=[[2.0, 3.0], [2.5, 3.5], [2.2, nan]],
        weight=[[30.0, 10.0], [20.0, 20.0], [40.0, 0.0]],
        rows=[[40, 1], [20, 1], [31, 0]],
        noise=[[0.10, nan], [0.25, nan], [0.20, nan]],
        eff=[[40.0, 1.0], [20.0, 1.0], [31.0, 0.0]],
        length=[[5.0, 7.0], [5.2, 7.0], [5.1, nan]],
    )
    steps = pooled(run)
    row = (39 * 4.0 + 19 * 5.0 + 30 * 6.2) / 88
    # The second bucket has no degrees of freedom of its own: its neighbour's variance stands in.
    assert steps.row_variance == pytest.approx([row, row])
    assert steps.noise[:, 0].tolist() == [0.10, 0.25, 0.20]
    assert steps.noise[:, 1] == pytest.approx([row, row, 0.0])
    assert steps.precision[0] == pytest.approx([40 / row, 1 / row])
    assert steps.step_noise[0] == pytest.approx(0.75**2 * 0.10 + 0.25**2 * row)
    lone = 0.25**2 * row + 0.5**2 * row
    own = 0.75**2 * 0.10 + 0.5**2 * 0.25 + 0.20
    assert steps.imputed == pytest.approx(lone / (lone + own))
    assert steps.share == pytest.approx([0.75, 0.25])  # of these steps: there is no header


# -- the fit -------------------------------------------------------------------------------------


def explicit(steps: Steps) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Regressors ``[N, P]``, losses and roots of weights ``[N]`` of the bucket losses there are."""
    design = fit_curve(steps).design
    num_steps, num_buckets = steps.precision.shape
    parts = []
    for k in range(num_buckets):
        alone = np.zeros((num_steps, num_buckets))
        alone[:, k] = 1.0
        parts.append(design.mixed(alone))
    seen = (steps.precision > 0).T
    rows = np.stack(parts)[seen]
    return rows, steps.loss_k.T[seen], np.sqrt(steps.precision.T[seen])


@pytest.mark.parametrize(
    ("deal", "window", "slope"),
    [("stratified", False, 0.1), ("aligned", False, 0.1), ("aligned", True, 1.5)],
)
def test_the_fit_is_that_of_least_squares_on_all_regressors(
    deal: str, window: bool, slope: float
) -> None:
    run, _ = simulate(3, deal=deal, window=window, slope=slope, family="edges")
    steps = pooled(run.take(run.step >= 100))
    fit = fit_curve(steps)
    rows, losses, root = explicit(steps)
    expected, *_ = np.linalg.lstsq(rows * root[:, None], losses * root, rcond=1e-10)
    assert rows @ fit.coefficients == pytest.approx(rows @ expected, abs=1e-6)
    inverse = np.linalg.pinv((rows * root[:, None]).T @ (rows * root[:, None]), rcond=1e-13)
    at = fit.design.mixed(steps.portion)
    assert fit.variance(at) == pytest.approx(np.einsum("tp,pq,tq->t", at, inverse, at), rel=1e-3)
    shares = (fit.offset * steps.share).sum(1)
    assert shares == pytest.approx(np.zeros(len(shares)), abs=1e-9)
    assert np.einsum("tk,tk->t", steps.portion, fit.residuals) == pytest.approx(
        steps.loss - fit.curve(at), abs=1e-9
    )


def test_edges_are_steps_of_their_own_up_to_twenty_and_one_staircase_beyond() -> None:
    run, _ = simulate(0, steps=500)
    few = with_epochs(run, np.array([200, 204, 350, 596]))
    design = fit_curve(pooled(few)).design
    assert design.edges_at == (200, 350)  # of two too close the first; none at the very end
    many = with_epochs(run, np.arange(20, 590, 20))
    design = fit_curve(pooled(many)).design
    assert design.edges.stop - design.edges.start == 1
    assert design.common[:, design.edges].max() == len(design.edges_at) > 20


def with_epochs(run: Run, begins: np.ndarray) -> Run:
    epoch = np.searchsorted(begins, run.step, side="right").astype(float)
    return replace(run, columns={**run.columns, "epoch": epoch})


def test_buckets_without_rows_and_skipped_steps_are_left_out() -> None:
    run, _ = simulate(1)
    buckets = {name: values.copy() for name, values in run.buckets.items()}
    buckets["loss"][:, 2], buckets["weight"][:, 2] = np.nan, 0.0
    skipped = (run.step % 50 == 7).astype(float)
    columns = {**run.columns, "skipped": skipped}
    steps = pooled(replace(run, columns=columns, buckets=buckets))
    assert steps.active.tolist() == [0, 1, 3, 4, 5]
    assert len(steps.step) == len(run) - skipped.sum()
    assert steps.share.sum() == pytest.approx(1)


# -- the variance --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_per_batch", [None, (6, 4, 3, 2, 1, 1)])
def test_the_rest_of_healthy_runs_is_zero_on_average(rows_per_batch: tuple | None) -> None:
    settings = {"rows_per_batch": rows_per_batch, "weight_cv": 0.0, "lasting": 0.0, "slope": 0.0}
    taken = [healthy(seed, **settings) for seed in range(60)]
    rest = np.array([t.parts[2] / (t.parts[1] + t.parts[2]) for t in taken])
    assert abs(rest.mean()) < 4 * rest.std() / np.sqrt(len(rest))


def healthy(seed: int, **settings):
    run, _ = simulate(seed, **settings)
    return decompose(pooled(run.take(run.step >= 100)))


def test_lone_rows_are_noise_whatever_their_like_would_have_been() -> None:
    """Rows that stand alone and scatter twice as much as the others are no rest."""
    found = []
    for seed in range(30):
        run, _ = simulate(seed, rows_per_batch=(6, 4, 3, 2, 1, 1), deal="aligned", ranks=1)
        lone = run.bucket("rows") == 1
        more = np.random.default_rng(seed).normal(0, 1.0, run.bucket("loss").shape)
        extra = np.where(lone, more, 0.0)
        portion = run.bucket("weight") / run.bucket("weight").sum(1, keepdims=True)
        buckets = {**run.buckets, "loss": run.bucket("loss") + extra}
        columns = {**run.columns, "loss": run.loss + (portion * extra).sum(1)}
        odd = replace(run, columns=columns, buckets=buckets)
        share = decompose(pooled(odd.take(run.step >= 100))).shares[2]
        found.append(share.low <= 0)
    assert np.mean(found) > 0.9


def test_a_shock_that_all_rows_share_is_rest() -> None:
    shares, truths = [], []
    for seed in range(30):
        run, truth = simulate(seed, shock=1.0)
        shares.append(decompose(pooled(run.take(run.step >= 100))).shares[2].share)
        truths.append(truth.rest / (truth.mix + truth.noise + truth.rest))
    assert np.mean(shares) == pytest.approx(np.mean(truths), abs=0.03)


# -- curves of other trainers --------------------------------------------------------------------


def bare(run: Run) -> Run:
    return replace(run, kind="CSV of a loss", columns={"loss": run.loss}, buckets={}, headers=())


def test_a_bare_curve_has_no_shares_and_says_why() -> None:
    found = diagnose(bare(simulate(2)[0]))
    assert found.shares == {"mix": None, "noise": None, "rest": None}
    assert any("sampling noise and rest apart" in line for line in found.missing)
    assert found.verdict == "ON TRACK"
    assert found.random is not None
    assert found.random.noticed is None


@pytest.mark.parametrize("fault", ["divergence", "length_ordered", "step_spread"])
def test_what_a_bare_curve_shows_is_named(fault: str) -> None:
    named = {"divergence": "divergence", "length_ordered": "period", "step_spread": "spread"}
    found = diagnose(bare(simulate(4, fault=fault, deal="aligned", ranks=1)[0]))
    if fault == "step_spread":  # in one rank's noise and mix it drowns; in eight ranks' not
        found = diagnose(bare(simulate(4, fault=fault)[0]))
    assert named[fault] in [cause.cause for cause in found.causes]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", [np.zeros(200), np.full(200, 3.0), np.arange(200.0)])
def test_curves_without_any_noise_are_read_without_a_warning(loss: np.ndarray) -> None:
    run = Run(name="odd", kind="CSV", step=np.arange(200), columns={"loss": loss}, buckets={})
    assert diagnose(run).to_dict()["std"] == pytest.approx(0, abs=1e-3)
