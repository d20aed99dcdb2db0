"""The model of a curve: one trend for all length buckets, and an offset for each.

    loss_k(t) = f(t) + b_k + d_k x(t) + g_k(length_k(t) - its bucket's mean) + error

f is a cubic B-spline in log(step + 100), with one step regressor for each epoch edge and restart
(without it, memorisation would look like unexplained variance). The offsets b_k sum to zero under
the data set's weight shares, so that f is the mix-adjusted curve. g_k is what length does inside a
bucket, where steps hold neighbours in length: a slope for each bucket. What BIC wants is added: x,
linear on the clock of f, for offsets that drift, and square and cube of the length, because loss
bends with length. All buckets are fitted jointly by weighted least squares, with variances that are
pooled over the run: a step's own variance depends on the loss that it would weigh.

Assumption: errors of different rows are independent given trend and bucket. What they share within
a step is left over as *rest* (:mod:`dflash_lightning.diagnosis.variance`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dflash_lightning.diagnosis.pool import Steps
from dflash_lightning.diagnosis.run import Floats
from dflash_lightning.diagnosis.spline import clock, even_knots, spline_basis

MOST_EDGES = 20  # more share one coefficient: each of them would take few steps to itself
DEGREES = 3  # of the length inside a bucket, at most
CLEARANCE = 8  # steps that an edge needs on either side


@dataclass(frozen=True, eq=False)
class Design:
    """Regressors of the bucket losses, in the order of the ``P`` coefficients.

    Those of offsets and lengths are kept by what they are made of: as a matrix of ``[T * K, P]``
    they would be zero nearly everywhere.

    Args:
        common: Regressors that all buckets of a step share, float64 ``[T, a]``: the trend, then
            the edges, then what was added.
        contrast: A basis of the offsets, float64 ``[K, K - 1]``.
        clocks: What multiplies the contrasts, float64 ``[T, c]``: 1, and x where offsets drift.
        bent: Powers of the length inside each bucket, float64 ``[T, K, d]``.
        edges: Columns of ``common`` that are edges.
        edges_at: Positions of these edges.
        extra: Columns of ``common`` that were added.
    """

    common: Floats
    contrast: Floats
    clocks: Floats
    bent: Floats
    edges: slice
    edges_at: tuple[int, ...]
    extra: slice

    @property
    def offsets(self) -> slice:
        """Coefficients that make ``b_k(t)``."""
        first = self.common.shape[1]
        return slice(first, first + self.clocks.shape[1] * self.contrast.shape[1])

    def mixed_offsets(self, portion: Floats) -> Floats:
        """Regressors of a mixture's offset alone, by portions ``[T, K]``: ``[T, c (K - 1)]``."""
        mixed = portion @ self.contrast
        return np.hstack([clock[:, None] * mixed for clock in self.clocks.T])

    def mixed(self, portion: Floats) -> Floats:
        """Regressors of a mixture of buckets, by portions ``[T, K]``: float64 ``[T, P]``."""
        bent = (portion[:, :, None] * self.bent).reshape(len(portion), -1)
        return np.hstack([self.common, self.mixed_offsets(portion), bent])


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted model.

    Args:
        design: Its regressors.
        coefficients: Float64 ``[P]``.
        covariance: Of the coefficients where the errors are the rows' alone, float64 ``[P, P]``.
        residuals: Of the bucket losses, 0 where there is none, float64 ``[T, K]``.
        squares: Their weighted sum of squares.
    """

    design: Design
    coefficients: Floats
    covariance: Floats
    residuals: Floats
    squares: float

    @property
    def trend(self) -> Floats:
        """The mix-adjusted curve, float64 ``[T]``."""
        common = self.design.common
        return common @ self.coefficients[: common.shape[1]]

    def curve(self, regressors: Floats) -> Floats:
        """Values at regressors ``[T, P]``."""
        return regressors @ self.coefficients

    def variance(self, regressors: Floats) -> Floats:
        """Estimation variance of the values at regressors ``[T, P]``: float64 ``[T]``."""
        return np.einsum("tp,tp->t", regressors @ self.covariance, regressors)

    def bucket_variance(self, k: int) -> Floats:
        """Estimation variance of a bucket's curve, float64 ``[T]``."""
        alone = np.zeros(self.residuals.shape)
        alone[:, k] = 1.0
        return self.variance(self.design.mixed(alone))

    @cached_property
    def offset(self) -> Floats:
        """Each bucket's offset from the trend, ``b_k + d_k x(t)``: float64 ``[T, K]``."""
        design = self.design
        by_clock = self.coefficients[design.offsets].reshape(design.clocks.shape[1], -1)
        return design.clocks @ by_clock @ design.contrast.T


def fit_curve(steps: Steps, knots: Floats | None = None, extra: Floats | None = None) -> Fit:
    """Fit all bucket losses of a stretch of steps jointly.

    Args:
        steps: What is observed.
        knots: Of the trend, on its clock; by default one for about every 60 steps.
        extra: Further regressors that all buckets share, float64 ``[T, M]``.

    Returns:
        The fit, with drifting offsets and bent lengths where BIC prefers them.
    """
    if knots is None:
        knots = even_knots(steps.step[0], steps.step[-1], steps=len(steps.step))
    fit = _solve(steps, _design(steps, knots, extra, drift=False, degree=1))
    drifts = False
    if steps.num_buckets > 1:
        drifting = _solve(steps, _design(steps, knots, extra, drift=True, degree=1))
        drifts = _is_better(steps, drifting, fit)
        fit = drifting if drifts else fit
    for degree in range(2, DEGREES + 1) if steps.has_length else ():
        bent = _solve(steps, _design(steps, knots, extra, drift=drifts, degree=degree))
        if not _is_better(steps, bent, fit):
            break
        fit = bent
    return fit


def _is_better(steps: Steps, longer: Fit, shorter: Fit) -> bool:
    """Whether more coefficients are worth it (Schwarz, 1978)."""
    count = int((steps.precision > 0).sum())
    more = len(longer.coefficients) - len(shorter.coefficients)
    gain = count * np.log(shorter.squares / max(longer.squares, 1e-300))
    return bool(gain > more * np.log(count))


def _design(
    steps: Steps, knots: Floats, extra: Floats | None, *, drift: bool, degree: int
) -> Design:
    time = clock(steps.step)
    trend = spline_basis(np.clip(time, knots[0], knots[-1]), knots)
    edges_at = told_apart(steps.edges, len(time))
    edges = edge_regressors(edges_at, len(time))
    parts = [trend, edges, np.empty((len(time), 0)) if extra is None else extra]
    ends = np.cumsum([part.shape[1] for part in parts])
    x = 2 * (time - time[0]) / max(time[-1] - time[0], 1e-12) - 1
    powers = range(1, degree + 1) if steps.has_length else ()
    return Design(
        common=np.hstack(parts),
        contrast=_contrasts(steps.share),
        clocks=np.stack([np.ones(len(time)), x] if drift else [np.ones(len(time))], axis=1),
        bent=np.stack([_bent(steps, power) for power in powers], axis=2)
        if powers
        else np.empty((*steps.precision.shape, 0)),
        edges=slice(ends[0], ends[1]),
        edges_at=edges_at,
        extra=slice(ends[1], ends[2]),
    )


def _bent(steps: Steps, power: int) -> Floats:
    """A power of the inner length of each bucket, around its mean: float64 ``[T, K]``."""
    values = steps.inner_length**power
    weights = steps.precision
    mean = (weights * values).sum(0) / np.maximum(weights.sum(0), 1e-300)
    known = steps.inner_length != 0
    return np.where(known, values - mean, 0.0)


def told_apart(edges: Sequence[int], length: int) -> tuple[int, ...]:
    """Edges with enough steps on either side; of two too close, the first stands for both."""
    apart: list[int] = []
    for edge in edges:
        if CLEARANCE <= edge <= length - CLEARANCE and edge - CLEARANCE >= (apart or [0])[-1]:
            apart.append(edge)
    return tuple(apart)


def edge_regressors(edges: Sequence[int], length: int) -> Floats:
    """One step up at each edge; where there are many, one staircase: float64 ``[T, J]``."""
    up = (np.arange(length)[:, None] >= np.array(edges, np.int64)).astype(np.float64)
    return up.sum(1, keepdims=True) if len(edges) > MOST_EDGES else up


def _contrasts(share: Floats) -> Floats:
    """A basis of the offsets whose sum under the shares is zero: float64 ``[K, K - 1]``."""
    return np.linalg.svd(share[None])[2][1:].T


def _solve(steps: Steps, design: Design) -> Fit:
    """Weighted least squares by the normal equations."""
    weights, losses = steps.precision, np.where(steps.precision > 0, steps.loss_k, 0.0)
    normal, right = _normal(design, weights, losses)
    # Scaled to a unit diagonal, so that what cannot be told apart shows against rounding.
    scale = 1 / np.sqrt(np.maximum(np.diag(normal), 1e-300))
    inverse = np.linalg.pinv(normal * np.outer(scale, scale), rcond=1e-10, hermitian=True)
    covariance = inverse * np.outer(scale, scale)
    fit = Fit(design, covariance @ right, covariance, losses, 0.0)
    by_power = fit.coefficients[design.offsets.stop :].reshape(steps.num_buckets, -1)
    fitted = fit.trend[:, None] + fit.offset + np.einsum("tkd,kd->tk", design.bent, by_power)
    residuals = np.where(weights > 0, losses - fitted, 0.0)
    return replace(fit, residuals=residuals, squares=float((weights * residuals**2).sum()))


def _normal(design: Design, weights: Floats, losses: Floats) -> tuple[Floats, Floats]:
    """Left and right side of the normal equations, block by block."""
    common, contrast, clocks, bent = design.common, design.contrast, design.clocks, design.bent
    num_buckets, degrees = bent.shape[1:]
    heavy = weights[:, :, None] * bent
    flat = heavy.reshape(len(heavy), -1)
    offsets = design.mixed_offsets(weights)
    # Of two offset columns: their contrasts meet in each bucket, under the product of their clocks.
    both = np.einsum("tc,td,tk->cdk", clocks, clocks, weights)
    among = np.einsum("ki,cdk,kj->cidj", contrast, both, contrast)
    of_length = np.einsum("ki,ckd->cikd", contrast, np.einsum("tc,tkd->ckd", clocks, heavy))
    lengths = np.zeros((num_buckets, degrees, num_buckets, degrees))
    for k in range(num_buckets):
        lengths[k, :, k] = bent[:, k].T @ heavy[:, k]
    n, m = offsets.shape[1], flat.shape[1]
    of_length = of_length.reshape(n, m)
    by_offset, by_length = common.T @ offsets, common.T @ flat
    normal = np.block(
        [
            [common.T @ (common * weights.sum(1, keepdims=True)), by_offset, by_length],
            [by_offset.T, among.reshape(n, n), of_length],
            [by_length.T, of_length.T, lengths.reshape(m, m)],
        ]
    )
    moment = weights * losses
    own = np.einsum("tc,tk,ki->ci", clocks, moment, contrast).reshape(-1)
    length = np.einsum("tkd,tk->kd", heavy, losses).reshape(-1)
    return normal, np.concatenate([common.T @ moment.sum(1), own, length])
