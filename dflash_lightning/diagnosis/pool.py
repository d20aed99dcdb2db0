"""Steps as the model sees them: bucket losses, and the variance that their rows explain.

The sampling variance of a bucket's loss is a ratio's: sum of weighted losses over sum of weights.
The ledger gives its delete-one-row jackknife estimate, ``noise_k`` (Quenouille 1956; Efron and
Stein 1981), and the number of rows that count, ``eff_k`` (Kish 1965). Their product is the variance
of one row; pooled over the steps, by degrees of freedom ``eff_k - 1``, it stands in where a step
has too few rows for an estimate of its own, and it sets the weights of the fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflash_lightning.diagnosis.run import Bools, Floats, Ints, Run
from dflash_lightning.diagnosis.statistics import moving_mean

FEW_DEGREES = 30  # of freedom; a bucket with fewer borrows its neighbour's variance


@dataclass(frozen=True, eq=False, kw_only=True)
class Steps:
    """A stretch of steps without skipped ones.

    Args:
        step: Int64 ``[T]``.
        loss: Of the step in nats, float64 ``[T]``.
        loss_k: Of the buckets, float64 ``[T, K]``, NaN where a step has no rows of a bucket.
        portion: Each bucket's part of the step's weight, float64 ``[T, K]``.
        share: Each bucket's part of the data set's weight, float64 ``[K]``.
        noise: Variance of ``loss_k`` from its rows, imputed where not known, float64 ``[T, K]``.
        own: Where ``noise`` is the step's own, bool ``[T, K]``.
        row_variance: Variance of one row in each bucket, float64 ``[K]``.
        degrees: Degrees of freedom behind each of them, float64 ``[K]``.
        precision: Weights of the fit, 0 where there is no loss, float64 ``[T, K]``.
        inner_length: Log length less its bucket's mean, float64 ``[T, K]``, 0 where not known.
        edges: Positions at which an epoch or a process begins, the first step left out.
        restarts: Those of them that are restarts.
        active: Buckets of the run that these columns are, int64 ``[K]``.
    """

    step: Ints
    loss: Floats
    loss_k: Floats
    portion: Floats
    share: Floats
    noise: Floats
    own: Bools
    row_variance: Floats
    degrees: Floats
    precision: Floats
    inner_length: Floats
    edges: tuple[int, ...]
    restarts: tuple[int, ...]
    active: Ints

    @property
    def num_buckets(self) -> int:
        """Buckets with rows."""
        return self.loss_k.shape[1]

    @property
    def has_length(self) -> bool:
        """Whether rows' lengths inside buckets differ between steps."""
        return bool(self.inner_length.any())

    @cached_property
    def step_noise(self) -> Floats:
        """Variance of the step's loss that its rows explain, float64 ``[T]``."""
        return (np.square(self.portion) * self.noise).sum(1)

    @cached_property
    def imputed(self) -> float:
        """Part of the noise that is imputed, from 0 to 1."""
        missing = (np.square(self.portion) * np.where(self.own, 0.0, self.noise)).sum()
        total = self.step_noise.sum()
        return float(missing / total) if total > 0 else 1.0

    @cached_property
    def pooled_noise(self) -> Floats:
        """The same from pooled variances alone, float64 ``[T]``."""
        variance = np.divide(1.0, self.precision, where=self.precision > 0, out=self.noise * 0)
        return (np.square(self.portion) * variance).sum(1)

    @cached_property
    def own_ratio(self) -> Floats:
        """The steps' own noise over the pooled, outliers cut at four medians; ``[T]``."""
        ratio = self.step_noise / self.pooled_noise
        return np.minimum(ratio, 4 * np.median(ratio))

    @cached_property
    def slow_ratio(self) -> Floats:
        """Mean of that over 51 steps: how the rows' spread changes along the run; ``[T]``."""
        return np.maximum(moving_mean(self.own_ratio, 51), 1e-6)

    @property
    def expected_noise(self) -> Floats:
        """Variance of the step's loss that its rows let expect, float64 ``[T]``.

        The pooled one at the spread of the time: a step's own would hide the very row that it
        contains.
        """
        return self.pooled_noise * self.slow_ratio


def usable(run: Run) -> Bools:
    """Steps with a finite loss, of a bucket too, that were not skipped: bool ``[T]``."""
    chosen = np.isfinite(run.loss) & ~(np.nan_to_num(run.column("skipped")) > 0)
    if run.num_buckets:
        weight = np.nan_to_num(run.bucket("weight"))
        chosen &= (np.isfinite(run.bucket("loss")) & (weight > 0)).any(1)
    return chosen


def pooled(run: Run) -> Steps:
    """Take the usable steps of a run, and pool the variance of rows over them.

    A run without buckets is one bucket whose noise is not known.
    """
    run = run.take(usable(run))
    loss_k, weight, eff, noise, length = _columns(run)
    seen = np.isfinite(loss_k) & (weight > 0)
    active = np.flatnonzero(seen.any(0))
    loss_k, weight, eff, noise, length = (
        x[:, active] for x in (loss_k, weight, eff, noise, length)
    )
    seen = seen[:, active]
    weight = np.where(seen, weight, 0.0)
    eff = np.where(seen & (eff > 0), eff, 1.0)
    own = seen & np.isfinite(noise)
    variance, degrees = _row_variance(noise, eff, own)
    if not own.any():
        variance[:] = _from_differences(run.loss) * np.median(eff)
    imputed = variance / eff
    portion = weight / weight.sum(1, keepdims=True)
    edges, restarts = _edges(run)
    return Steps(
        step=run.step,
        loss=run.loss,
        loss_k=loss_k,
        portion=portion,
        share=_share(run.header, weight, active),
        noise=np.where(own, noise, np.where(seen, imputed, 0.0)),
        own=own,
        row_variance=variance,
        degrees=degrees,
        precision=np.where(seen, 1 / np.maximum(imputed, 1e-300), 0.0),
        inner_length=_inner_length(length, eff, seen),
        edges=edges,
        restarts=restarts,
        active=active,
    )


def _columns(run: Run) -> tuple[Floats, ...]:
    """Loss, weight, effective rows, noise and length of the buckets, float64 ``[T, K]`` each."""
    names = ("loss", "weight", "eff", "noise", "length")
    if run.num_buckets:
        loss, weight, eff, noise, length = (run.bucket(name) for name in names)
        # A source without effective rows may still know the rows.
        eff = np.where(np.isfinite(eff), eff, run.bucket("rows"))
        return loss, weight, eff, noise, length
    loss = run.loss[:, None]
    return loss, np.ones_like(loss), np.ones_like(loss), loss * np.nan, loss * np.nan


def _row_variance(noise: Floats, eff: Floats, own: Bools) -> tuple[Floats, Floats]:
    """Variance of one row in each bucket, and its degrees of freedom, float64 ``[K]`` each."""
    free = np.where(own, np.maximum(eff - 1, 0.0), 0.0)
    degrees = free.sum(0)
    products = (free * np.where(own, noise * eff, 0.0)).sum(0)
    variance = products / np.maximum(degrees, 1e-300)
    rich = np.flatnonzero(degrees >= FEW_DEGREES)
    if len(rich):
        for k in np.flatnonzero(degrees < FEW_DEGREES):
            neighbour = rich[np.abs(rich - k).argmin()]
            variance[k], degrees[k] = variance[neighbour], degrees[neighbour]
    elif degrees.sum() > 0:
        variance[:], degrees[:] = products.sum() / degrees.sum(), degrees.sum()
    return np.maximum(variance, 1e-12), degrees


def _from_differences(loss: Floats) -> float:
    """Variance of a step around its neighbours, for curves without any row statistics."""
    second = loss[2:] - 2 * loss[1:-1] + loss[:-2]
    return max(float(np.square(second).mean()) / 6, 1e-12)


def _share(header: Mapping[str, object], weight: Floats, active: Ints) -> Floats:
    """Each bucket's part of the data set's weight; of these steps' where that is not known."""
    told = np.asarray(header.get("weight_share", []), np.float64)
    share = told[active] if len(told) > active.max() else np.zeros(1)
    share = share if share.sum() > 0 else weight.sum(0)
    return share / share.sum()


def _inner_length(length: Floats, eff: Floats, seen: Bools) -> Floats:
    known = seen & np.isfinite(length)
    weights = np.where(known, eff, 0.0)
    values = np.where(known, length, 0.0)
    mean = (weights * values).sum(0) / np.maximum(weights.sum(0), 1e-300)
    inner = np.where(known, values - mean, 0.0)
    return np.where(np.abs(inner) > 1e-6, inner, 0.0)


def _edges(run: Run) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions at which an epoch or a process begins, and those of processes."""

    def rises(name: str) -> Ints:
        return np.flatnonzero(np.diff(run.column(name)) > 0) + 1

    epochs, restarts = rises("epoch"), rises("restart")
    both = np.union1d(epochs, restarts)
    return tuple(both.tolist()), tuple(restarts.tolist())
