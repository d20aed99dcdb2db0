"""Runs whose truth is known, row by row as a trainer would have met them.

A row i of bucket k has the log length ``x_i``, the weight ``n_i`` and at step t the loss per weight

    y_i = f(t) + b_k(t) + slope (x_i - its bucket's mean) + shock(t) + deviation_i e_i

with ``e_i`` of variance 1, of which a lasting part is the row's own and the same every epoch. Rows
of one length differ in weight, and a row's deviation falls a little with its weight, as the mean
over more labels would.

What counts as noise: the errors ``e_i`` given the weights, and what the slope makes of the lengths
of rows that meet in a bucket, since that is what a jackknife over rows sees. At the default slope
the latter is a thousandth of the former. No part of it: a garbage row; what the slope makes of
batches that differ in length as a whole (sorted runs, sort windows), which ``length_k`` tells; and
that rows come once an epoch, so that their lasting part varies less between steps, by the fraction
of the bucket's rows that a step takes: nothing at the story's size, 1 to 2 percent of the noise of
an aligned deal in epochs of 200 steps.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from diagnosis.case import Case
from diagnosis.dealt import DataSet, Floats, Ints, draw_steps, make_rows, recorded_rows
from diagnosis.planted import GARBAGE_NATS, Planted, Span, plant
from diagnosis.tallies import tally

from dflash_lightning.diagnosis.run import Run


@dataclass(frozen=True, eq=False, kw_only=True)
class Truth:
    """What the diagnosis is to find; variances in nats^2, over the steps after the warm-up.

    Args:
        mix: Variance over steps of ``composition``.
        noise: Mean of ``step_noise``.
        rest: Mean over steps of the variance of a shock that all rows of a step share.
        unit: One noise deviation of the run without its fault, in nats.
        f: The curve, with faults that are no chance, ``[T]``.
        b: Offsets of the buckets, ``[T, K]``; their mean with ``share`` is 0.
        share: Share of the buckets in the weight of the data set, ``[K]``.
        composition: ``sum_k (pi_k - mean pi_k) b_k``, ``[T]``.
        step_noise: Variance of the loss of each step given its weights, ``[T]``.
        bucket_noise: The same of each bucket, 0 where it has no rows, ``[T, K]``.
        rows: Planted bad rows.
        fault: What was planted, or empty.
    """

    mix: float
    noise: float
    rest: float
    unit: float
    f: Floats
    b: Floats
    share: Floats
    composition: Floats
    step_noise: Floats
    bucket_noise: Floats
    rows: tuple[int, ...]
    fault: str

    @property
    def adjusted(self) -> Floats:
        """The mix-adjusted curve, ``[T]``."""
        return self.f + self.b @ self.share


def simulate(seed: int, **settings: Any) -> tuple[Run, Truth]:
    """A run and its truth; the settings are those of ``Case``, which refuses others."""
    return simulate_case(Case(seed=seed, **settings))


def simulate_case(case: Case) -> tuple[Run, Truth]:
    """A run and its truth."""
    of_data, of_deal, of_noise, of_own, of_fault = (
        np.random.default_rng([case.seed, part]) for part in range(5)
    )
    data = _data_set(case, of_data)
    rows, step = draw_steps(of_deal, data, case.layout, case.total)
    b = case.gaps(data)
    weight, from_errors, from_lengths = _variances(case, data, rows, step)
    pi = weight / weight.sum(1, keepdims=True)
    healthy = (pi**2 * (from_errors + from_lengths)).sum(1)
    unit = float(np.sqrt(healthy[case.first :].mean()))

    planted = _planted(case, data, unit, of_fault)
    f = case.curve + planted.level
    common = np.hypot(planted.shock, case.shock * unit)
    error = _errors(case, data, rows, of_noise, of_own)
    y = (f + common * of_fault.standard_normal(case.total))[step] + b[step, data.bucket[rows]]
    y += case.slope * data.longer[rows]
    y += data.deviation[rows] * (case.scale * planted.scale)[step] * error
    y += GARBAGE_NATS * case.fault_size * np.isin(rows, planted.rows)
    y[np.searchsorted(step, planted.bad_steps)] = np.nan
    run = _run(case, data, rows, step, y, planted, of_fault)

    bucket_noise = from_errors * planted.scale[:, None] ** 2 + from_lengths
    step_noise = (pi**2 * bucket_noise).sum(1)
    composition = ((pi - pi[case.first :].mean(0)) * b).sum(1)
    return run, Truth(
        mix=float(composition[case.first :].var()),
        noise=float(step_noise[case.first :].mean()),
        rest=float((common[case.first :] ** 2).mean()),
        unit=unit,
        f=f,
        b=b,
        share=data.share,
        composition=composition,
        step_noise=step_noise,
        bucket_noise=bucket_noise,
        rows=planted.rows,
        fault=case.fault,
    )


def sorted_and_bucketed(
    seed: int, difference: float = 0.0, **settings: Any
) -> tuple[tuple[Run, Truth], tuple[Run, Truth]]:
    """Two runs on the same rows: the same batches in length order every epoch, and bucketed.

    Args:
        seed: Of both.
        difference: Of the sorted run's curve above the other's, in nats.
        settings: Of both, as in ``Case``.
    """
    bucketed = Case(seed=seed, **settings)
    in_order = Case(
        seed=seed,
        order="sorted",
        group=bucketed.epoch_steps,
        own_noise=1.0,
        offset=difference,
        **settings,
    )
    return simulate_case(in_order), simulate_case(bucketed)


def same_plan(
    seed: int, difference: float = 0.0, own_noise: float = 0.4, **settings: Any
) -> tuple[tuple[Run, Truth], tuple[Run, Truth]]:
    """Two runs that draw the same rows at every step, with part of their noise in common.

    Args:
        seed: Of both.
        difference: Of the second run's curve above the first's, in nats.
        own_noise: Share of the passing variance of the second run's rows that is its own.
        settings: Of both, as in ``Case``.
    """
    first = Case(seed=seed, **settings)
    second = Case(seed=seed, own_noise=own_noise, offset=difference, **settings)
    return simulate_case(first), simulate_case(second)


def true_difference(a: tuple[Run, Truth], b: tuple[Run, Truth], part: float = 0.1) -> float:
    """Mix-adjusted loss of one run above the other's, over the last part of equally many tokens."""
    end = min(run.column("tokens_seen")[-1] for run, _ in (a, b))
    means = []
    for run, truth in (a, b):
        seen = run.column("tokens_seen")
        means.append(truth.adjusted[(seen > (1 - part) * end) & (seen <= end)].mean())
    return float(means[0] - means[1])


def _data_set(case: Case, rng: np.random.Generator) -> DataSet:
    """The rows of the case's family."""
    if case.family == "real":
        return recorded_rows(rng, case.layout, case.file)
    return make_rows(
        rng,
        case.layout,
        edges=case.edges,
        cv=case.weight_cv,
        sigma=case.sigma,
        lighter=case.lighter,
        lasting_share=case.lasting,
    )


def _variances(case: Case, data: DataSet, rows: Ints, step: Ints) -> tuple[Floats, Floats, Floats]:
    """Weight of each step's buckets, and the variance of their loss from errors and lengths.

    The errors of rows are independent, so the variance of ``sum n y / sum n`` is
    ``sum n^2 var / (sum n)^2``. Lengths count by how much they differ between rows that meet.
    """
    bucket, n = data.bucket[rows], data.n[rows]
    shape = case.total, case.num_buckets
    cell = step * case.num_buckets + bucket
    cells = case.total * case.num_buckets
    longer = data.longer[rows]
    count = np.bincount(cell, minlength=cells)
    within = longer - (np.bincount(cell, longer, cells) / np.maximum(count, 1))[cell]
    met = (count > 0).reshape(shape).sum(0)
    length_variance = np.bincount(bucket, within**2) / np.maximum(np.bincount(bucket) - met, 1)
    weight = np.bincount(cell, n, cells).reshape(shape)
    floor = np.where(weight > 0, weight, 1.0) ** 2
    errors = np.bincount(cell, (n * data.deviation[rows]) ** 2, cells).reshape(shape) / floor
    squares = np.bincount(cell, n**2, cells).reshape(shape) / floor
    return (
        weight,
        errors * case.scale[:, None] ** 2,
        squares * case.slope**2 * length_variance,
    )


def _planted(case: Case, data: DataSet, unit: float, rng: np.random.Generator) -> Planted:
    """What the case's fault adds."""
    span = Span(
        warmup=case.first,
        epoch_steps=case.epoch_steps,
        curve=case.curve,
        unit=unit,
        size=case.fault_size,
    )
    return plant(case.fault, span, data, case.layout, rng)


def _errors(
    case: Case, data: DataSet, rows: Ints, rng: np.random.Generator, own: np.random.Generator
) -> Floats:
    """An error of variance 1 for every visit of a row, ``[M]``."""
    passing = rng.standard_normal(rows.size)
    if case.own_noise:
        passing *= np.sqrt(1 - case.own_noise)
        passing += np.sqrt(case.own_noise) * own.standard_normal(rows.size)
    share = data.lasting_share
    error = np.sqrt(share) * data.lasting[rows] + np.sqrt(1 - share) * passing
    if case.family == "heavy":  # normal over the root of chi-squared: t of 3 degrees, over sqrt(3)
        error /= np.sqrt(rng.chisquare(3, rows.size))
    return error


def _run(
    case: Case,
    data: DataSet,
    rows: Ints,
    step: Ints,
    y: Floats,
    planted: Planted,
    rng: np.random.Generator,
) -> Run:
    """The ledger of the rows."""
    n, log_length = data.n[rows], data.log_length[rows]
    columns, buckets = tally(
        step,
        data.bucket[rows],
        rows,
        n * y,
        n,
        log_length,
        shape=(case.total, case.num_buckets),
    )
    t = np.arange(case.total)
    bad = ~np.isfinite(columns["loss"])
    norm = 2 * (1 + t / 50) ** -0.3 * np.exp(0.15 * rng.standard_normal(t.size))
    seconds = 1.5 + 0.05 * rng.random(t.size)
    columns |= {
        "epoch": (t // case.epoch_steps).astype(float),
        "time": 1.7e9 + np.cumsum(seconds),
        "seconds": seconds,
        "lr": case.lr,
        "grad_norm": np.where(bad, np.nan, norm),
        "skipped": bad.astype(float),
        "padded_tokens": np.rint(1.14 * columns["tokens"]),
        "anchors": np.rint(columns["weight"] / 3),
        "labels": np.rint(columns["weight"] * 1.8),
        "tokens_seen": np.cumsum(columns["tokens"]),
        "wait_seconds": 0.02 * seconds,
        "restart": np.isin(t, planted.restarts).astype(float),
    }
    header = {
        "format": 1,
        "boundaries": list(data.boundaries),
        "weight_share": data.share.tolist(),
        "row_share": data.row_share.tolist(),
        "warmup_steps": case.warmup,
        "total_steps": case.planned,
        "peak_lr": case.peak_lr,
        "world_size": case.ranks,
        "accumulate": 1,
        "order": case.order,
        "deal": case.deal,
        "plan": f"{case.seed}-{case.order}-{case.deal}-{case.ranks}-{case.layout.group}",
    }
    return Run(
        name=f"{case.family}-{case.seed}",
        kind="simulated",
        headers=tuple((at, header) for at in (0, *planted.restarts)),
        step=t,
        columns=columns,
        buckets=buckets,
    )
