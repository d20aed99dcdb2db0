"""Comparisons, choices of the fit and sizes of rows, against numbers made by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosis.simulate import simulate
from diagnosis.write_ledger import run_on

from dflash_lightning.data.store import RowStore
from dflash_lightning.diagnosis import Run, diagnose, tops_of
from dflash_lightning.diagnosis.compare import compare, pair
from dflash_lightning.diagnosis.design import POWERS, Form, all_regressors
from dflash_lightning.diagnosis.model import fit_curve
from dflash_lightning.diagnosis.pool import Steps, pooled
from dflash_lightning.diagnosis.spline import even_knots

# -- two buckets ---------------------------------------------------------------------------------


def two_buckets(
    losses: tuple[float, float], portion: np.ndarray, plan: str, *, share: float = 0.75
) -> Run:
    """Steps of a constant loss in two buckets of ten and two rows, the first with some portion."""
    steps = len(portion)
    rng = np.random.default_rng(len(plan))
    loss_k = np.array(losses) + 1e-3 * rng.standard_normal((steps, 2))
    portion_k = np.stack([portion, 1 - portion], axis=1)
    header = {"weight_share": [share, 1 - share], "plan": plan}
    return Run(
        name=plan,
        kind="ledger",
        headers=((0, header),),
        step=np.arange(steps),
        columns={
            "loss": (portion_k * loss_k).sum(1),
            "rows": np.full(steps, 12.0),
            "tokens_seen": 1000.0 * np.arange(1, steps + 1),
            "top_row": np.arange(steps, dtype=float),
            "top_share": np.full(steps, 0.5),
            "top_pull": np.full(steps, 0.5),
        },
        buckets={
            "loss": loss_k,
            "weight": 100 * portion_k,
            "rows": np.full((steps, 2), (10.0, 2.0)),
            "noise": np.full((steps, 2), (0.1, 2.0)),
            "eff": np.full((steps, 2), (10.0, 2.0)),
            "length": np.full((steps, 2), (6.0, 8.0)),
        },
    )


def test_runs_are_compared_under_the_shares_of_the_first() -> None:
    rng = np.random.default_rng(0)
    first = two_buckets((2.0, 3.0), rng.uniform(0.4, 0.6, 80), "one")
    second = two_buckets((2.1, 3.3), rng.uniform(0.1, 0.3, 80), "other", share=0.5)
    found, _, _ = compare(pair(first, second, start=0))
    expected = (0.75 * 2.0 + 0.25 * 3.0) - (0.75 * 2.1 + 0.25 * 3.3)
    assert found.difference == pytest.approx(expected, abs=1e-3)
    assert found.low < expected < found.high
    raw = first.loss[-8:].mean() - second.loss[-8:].mean()
    assert abs(raw - expected) > 0.3
    back, _, _ = compare(pair(second, first, start=0))
    assert back.difference == pytest.approx(0.5 * (2.1 + 3.3) - 0.5 * (2.0 + 3.0), abs=1e-3)


def test_runs_of_one_plan_are_compared_by_the_differences_of_their_last_tenth() -> None:
    portion = np.random.default_rng(0).uniform(0.4, 0.6, 80)
    first = two_buckets((2.0, 3.0), portion, "one")
    apart = np.where(np.arange(80) >= 72, 0.25, 9.0) + 0.01 * (-1.0) ** np.arange(80)
    second = replace(first, columns={**first.columns, "loss": first.loss - apart})
    found, _, variance = compare(pair(first, second, start=0))
    assert found.same_rows
    assert found.difference == pytest.approx(0.25)
    assert variance == pytest.approx(0.01**2 * 8 / 7)
    assert found.low <= 0.25 <= found.high < 0.27


def test_a_run_is_cut_to_the_tokens_that_both_have_seen() -> None:
    portion = np.random.default_rng(0).uniform(0.4, 0.6, 80)
    first = two_buckets((2.0, 3.0), portion, "one")
    faster = two_buckets((2.0, 3.0), portion, "other")
    faster = replace(
        faster,
        columns={**faster.columns, "tokens_seen": 1.5 * faster.columns["tokens_seen"]},
    )
    runs = pair(first, faster, start=0)
    assert (len(runs.first), len(runs.second)) == (80, 53)
    assert runs.at == 80_000
    assert runs.first.step[runs.stretch(runs.first)].tolist() == list(range(72, 80))
    assert runs.second.step[runs.stretch(runs.second)].tolist() == list(range(45, 53))
    with pytest.raises(ValueError, match="a comparison needs 40 steps"):
        pair(first, faster.take(faster.step < 39), start=0)


def test_a_top_rows_size_is_its_pull_over_what_a_row_pulls() -> None:
    """A row has variance 1 in the first bucket, 4 in the other; one of ten, one of two pulls."""
    found = tops_of(two_buckets((2.0, 3.0), np.full(80, 0.6), "one"))
    assert found is not None
    usual = max(0.6 * np.sqrt(1.0) / 10, 0.4 * np.sqrt(4.0) / 2)
    assert found.size == pytest.approx(np.full(80, 0.5 / usual))
    alone = two_buckets((2.0, 3.0), np.full(80, 1.0), "one")
    columns = {name: values.copy() for name, values in alone.buckets.items()}
    for values in columns.values():
        values[:, 1] = np.nan
    found = tops_of(replace(alone, buckets=columns))
    assert found is not None
    assert found.size == pytest.approx(np.full(80, 0.5 * 10 / np.sqrt(1.0)))


# -- the form of the fit -------------------------------------------------------------------------


def cost(steps: Steps, form: Form) -> float:
    """BIC of a form by least squares on the explicit regressors of all bucket losses."""
    knots = even_knots(steps.step[0], steps.step[-1], steps=len(steps.step))
    design = all_regressors(steps, knots, None).shortened(form)
    seen = (steps.precision > 0).T
    alone = np.eye(steps.num_buckets)
    parts = [design.mixed(np.tile(one, (len(steps.step), 1))) for one in alone]
    root = np.sqrt(steps.precision.T[seen])
    rows, losses = np.stack(parts)[seen] * root[:, None], steps.loss_k.T[seen] * root
    left = losses - rows @ np.linalg.lstsq(rows, losses, rcond=1e-10)[0]
    return len(losses) * np.log(left @ left) + rows.shape[1] * np.log(len(losses))


@pytest.mark.parametrize(
    ("settings", "bend", "expected"),
    [
        ({}, 0.0, Form(drift=False, own=False, degree=1)),
        ({"family": "changing", "deal": "aligned"}, 0.0, Form(drift=True, own=False, degree=1)),
        ({"order": "sorted", "group": 100}, 0.0, Form(drift=False, own=False, degree=1)),
        ({"order": "sorted", "deal": "aligned"}, 6.0, Form(drift=False, own=True, degree=2)),
    ],
)
def test_the_fit_has_the_regressors_that_bic_prefers(
    settings: dict[str, Any], bend: float, expected: Form
) -> None:
    """The bend is a square of length in every other bucket."""
    run, _ = simulate(2, steps=200, **settings)
    steps = pooled(run.take(run.step >= 100))
    square = bend * steps.inner_length**2 * (np.arange(steps.num_buckets) % 2)
    steps = replace(steps, loss_k=steps.loss_k + square)
    design = fit_curve(steps).design
    found = Form(
        drift=design.clocks.shape[1] == 2,
        own=design.slopes.shape[1] > 1,
        degree=design.bent.shape[2],
    )
    assert found == expected
    forms = [Form(found.drift, own, degree) for own in (False, True) for degree in POWERS]
    costs = {form: cost(steps, form) for form in [*forms, found._replace(drift=not found.drift)]}
    assert min(costs, key=costs.get) == found


# -- sources that the ledger does not know -------------------------------------------------------


def test_sources_without_a_plan_are_sampling_noise_and_no_cause(store: RowStore) -> None:
    from_a = store.column("source") == store.meta["sources"].index("a")
    even = diagnose(run_on(store, epochs=30)).shares
    found = diagnose(run_on(store, epochs=30, harder=1.5 * from_a))
    assert (found.verdict, found.causes) == ("ON TRACK", ())
    mix, noise, rest = (found.shares[name] for name in ("mix", "noise", "rest"))
    assert noise.share > max(0.5, even["noise"].share)
    assert mix.share < 0.3
    assert rest.low < 0 < rest.high + 0.1
