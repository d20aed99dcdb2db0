"""What moves a loss beside mix and noise: one test for each cause.

All tests look at standardised residuals, z = e / sqrt(expected variance), where the expected
variance is the pooled one times a slow mean of the steps' own over it: a step's own variance alone
would hide the very row that it contains. The bounds are far out on purpose: with five hundred steps
and eight questions, what is rare in one step is common in a run.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflash_lightning.diagnosis.result import Cause
from dflash_lightning.diagnosis.run import Bools, Floats, Ints, Run
from dflash_lightning.diagnosis.statistics import fisher_g, moving_mean, runs_of
from dflash_lightning.diagnosis.variance import Decomposition

EDGE_ERRORS = 3.5  # standard errors of a drop at epoch edges
WIDTH = 50  # steps of a window in which spread is judged
SPREAD, STRETCH = 2.0, 10  # times its median; for so many steps on end
CHANCE = 1e-5  # of a period
BLOCK = 25  # steps of a mean that shows divergence
RISE_ERRORS, RISE_NOISE, RISE_SHARE = 9.0, 2.4, 0.02
STILL_ERRORS, FAR = 2.5, 6.0  # rising by so many errors; or so many deviations above the lowest


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the tests look at.

    Args:
        run: The whole run.
        taken: The window's variance, taken apart.
        adjusted: Mix-adjusted loss of every usable step of the run, float64 ``[A]``.
        adjusted_step: Their steps, ``[A]``.
    """

    run: Run
    taken: Decomposition
    adjusted: Floats
    adjusted_step: Ints

    @cached_property
    def z(self) -> Floats:
        """Standardised residuals of the window, float64 ``[T]``."""
        taken = self.taken
        left = 1 - np.minimum(taken.eaten / taken.steps.pooled_noise, 0.9)
        return taken.residual / np.sqrt(taken.steps.expected_noise * left)

    @property
    def deviation(self) -> float:
        """One noise deviation in nats."""
        return float(np.sqrt(self.taken.parts[1]))


def epoch_edge(evidence: Evidence) -> list[Cause]:
    """The loss drops where an epoch begins: the data is being memorised."""
    taken = evidence.taken
    design, fit = taken.fit.design, taken.fit
    columns = np.arange(design.edges.start, design.edges.stop)
    if len(columns) == len(design.edges_at):  # restarts have columns of their own
        is_epoch = ~np.isin(design.edges_at, taken.steps.restarts)
        columns = columns[is_epoch]
    if not len(columns):
        return []
    mean = float(fit.coefficients[columns].mean())
    block = fit.covariance[np.ix_(columns, columns)]
    error = float(np.sqrt(block.mean() * taken.inflation))
    if mean >= -EDGE_ERRORS * error:
        return []
    at = tuple(int(taken.steps.step[i]) for i in design.edges_at)
    says = (
        f"the loss falls by {-mean:.3f} +- {1.96 * error:.3f} nats where an epoch begins: the same "
        "rows come again and are remembered"
    )
    return [Cause(cause="epoch_edge", steps=at[:20], says=says)]


def spread(evidence: Evidence) -> list[Cause]:
    """A stretch of steps that scatter more than the others."""
    steps = evidence.taken.steps
    if len(steps.step) < 2 * WIDTH:
        return []
    square = _window_mean(np.minimum(np.square(evidence.z), 9.0))
    square /= max(np.median(square), 1e-12)
    wide = square > SPREAD
    rows = _noisier(_window_mean(steps.own_ratio))
    found = []
    for flags, ratio, what in (
        (wide & ~rows, square, "and its rows do not explain it"),
        (rows, steps.own_ratio, "and its rows do: their own losses differ more"),
    ):
        first, last = max(runs_of(flags), key=lambda run: run[1] - run[0], default=(0, -1))
        if last - first + 1 >= STRETCH:
            times = float(ratio[first : last + 1].mean())
            at = int(steps.step[first]), int(steps.step[last])
            says = f"the loss scatters {times:.1f} times as much (variance) from step "
            says += f"{at[0]:,} to {at[1]:,}, {what}"
            found.append(Cause(cause="spread", steps=at, says=says))
    return found


def _window_mean(values: Floats) -> Floats:
    """Mean of the window around each step; at the ends, of the first and last whole window."""
    half, means = WIDTH // 2, moving_mean(values, WIDTH + 1)
    means[:half], means[-half:] = means[half], means[-half - 1]
    return means


def _noisier(own: Floats) -> Bools:
    """Windows with twice the own noise of both windows 100 steps away, bool ``[T]``."""
    away = 2 * WIDTH
    flags = np.zeros(len(own), bool)
    if len(own) > 2 * away:
        here = own[away:-away]
        flags[away:-away] = (here > 2 * own[: -2 * away]) & (here > 2 * own[2 * away :])
    return flags


def period(evidence: Evidence) -> list[Cause]:
    """The loss, or the length of batches, swings with a fixed period."""
    taken = evidence.taken
    steps = taken.steps
    longest = len(steps.step) / 4
    length, chance = fisher_g(taken.mix + taken.residual, longest=longest)
    of = "the loss"
    row_length = step_length(evidence.run.take(np.isin(evidence.run.step, steps.step)))
    if row_length is not None:
        other, its_chance = fisher_g(row_length, longest=longest)
        if its_chance < min(chance, CHANCE):
            length, chance, of = other, its_chance, "the length of the steps' rows"
    if chance >= CHANCE:
        return []
    gap = float(np.median(np.diff(steps.step)))
    says = (
        f"{of} swings with a period of {length * gap:.3g} steps: batches come in an order, not "
        "shuffled"
    )
    at = int(steps.step[0]), int(steps.step[-1])
    share = taken.parts[0] / taken.total if taken.steps.num_buckets > 1 else None
    return [Cause(cause="period", steps=at, share=share, says=says)]


def step_length(run: Run) -> Floats | None:
    """Mean log length of each step's rows by weight, float64 ``[T]``; None where not known."""
    weight, length = run.bucket("weight"), run.bucket("length")
    known = np.isfinite(length) & (np.nan_to_num(weight) > 0)
    if not known.any(1).all() or not run.num_buckets:
        return None
    weight = np.where(known, weight, 0.0)
    return (weight * np.where(known, length, 0.0)).sum(1) / weight.sum(1)


def divergence(evidence: Evidence) -> list[Cause]:
    """The mix-adjusted loss is far above its lowest, and does not come down."""
    blocks = len(evidence.adjusted) // BLOCK
    if blocks < 3:
        return []
    last_ones = evidence.adjusted[len(evidence.adjusted) - blocks * BLOCK :]
    means = last_ones.reshape(blocks, BLOCK).mean(1)
    lowest = int(means.argmin())
    rise, slope = means[-1] - means[lowest], means[-1] - means[-2]
    noise = evidence.taken.parts[1]
    error = float(np.sqrt(2 * noise * evidence.taken.inflation / BLOCK))
    needed = max(
        RISE_ERRORS * np.sqrt(2 * noise / BLOCK),
        RISE_NOISE * np.sqrt(noise),
        RISE_SHARE * abs(means[lowest]),
    )
    rising = slope > STILL_ERRORS * error
    far = rise > FAR * np.sqrt(noise) and slope > -STILL_ERRORS * error
    if rise <= needed or not (rising or far):
        return []
    step = evidence.adjusted_step[len(evidence.adjusted) - blocks * BLOCK :]
    at = int(step[lowest * BLOCK]), int(step[-1])
    says = (
        f"the mix-adjusted loss has risen from {means[lowest]:.3f} around step {at[0]:,} to "
        f"{means[-1]:.3f}, {rise / np.sqrt(noise):.0f} noise deviations"
    )
    return [Cause(cause="divergence", steps=at, says=says)]


def non_finite(run: Run) -> list[Cause]:
    """Losses or gradients that were no numbers."""
    bad = ~np.isfinite(run.loss) | (np.nan_to_num(run.column("skipped")) > 0)
    norm = run.columns.get("grad_norm")
    if norm is not None and np.isfinite(norm).any():
        # An empty cell is no finding: only what was written as infinite.
        bad |= np.isinf(norm)
    if not bad.any():
        return []
    at = run.step[bad]
    says = f"{len(at):,} steps with a loss or gradient that is not finite"
    return [Cause(cause="non_finite", steps=tuple(int(x) for x in at[:20]), says=says)]


def restart(run: Run) -> list[Cause]:
    """Places where another process took the run up."""
    at = run.step[np.flatnonzero(np.diff(run.column("restart")) > 0) + 1]
    if not len(at):
        return []
    says = f"another process took the run up {len(at):,} time{'s' * (len(at) > 1)}"
    return [Cause(cause="restart", steps=tuple(int(x) for x in at[:20]), says=says)]
