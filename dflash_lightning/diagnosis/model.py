"""The model of a curve: one trend for all length buckets, and an offset for each.

    loss_k(t) = f(t) + b_k + d_k x(t) + beta_k (length_k(t) - its bucket's mean) + error

f is a cubic B-spline in log(step + 100), with one step regressor for each epoch edge and restart
(without it, memorisation would look like unexplained variance); x is linear on the same clock, and
kept where BIC wants it. Batches differ in length inside a bucket too, most of all where steps hold
neighbours in length; loss bends with length, so each bucket has a slope of its own. The offsets sum
to zero under the data set's weight shares, so that f is the mix-adjusted curve. All buckets are
fitted jointly by weighted least squares, with variances that are pooled over the run: a step's own
variance depends on the loss that it would weigh.

Assumption: errors of different rows are independent given trend and bucket. What they share within
a step is left over as *rest* (:mod:`dflash_lightning.diagnosis.variance`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflash_lightning.diagnosis.pool import Steps
from dflash_lightning.diagnosis.run import Floats
from dflash_lightning.diagnosis.spline import clock, even_knots, spline_basis

MOST_EDGES = 20  # more share one coefficient: each of them would take few steps to itself
CLEARANCE = 8  # steps that an edge needs on either side


@dataclass(frozen=True, eq=False)
class Design:
    """Regressors of the bucket losses; ``P`` = a + z coefficients.

    Args:
        common: Regressors that all buckets of a step share, float64 ``[T, a]``: the trend, then
            the edges, then what was added.
        own: Regressors that differ between buckets, float64 ``[T, K, z]``: offsets, their drift
            where there is one, lengths inside the buckets.
        edges: Columns of ``common`` that are edges.
        edges_at: Positions of these edges.
        extra: Columns of ``common`` that were added.
        offsets: Columns of ``own`` that make ``b_k(t)``.
    """

    common: Floats
    own: Floats
    edges: slice
    edges_at: tuple[int, ...]
    extra: slice
    offsets: slice

    def mixed(self, portion: Floats) -> Floats:
        """Regressors of a mixture of buckets, by portions ``[T, K]``: float64 ``[T, P]``."""
        return np.hstack([self.common, np.einsum("tk,tkz->tz", portion, self.own)])


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
    def num_common(self) -> int:
        """Coefficients that all buckets share."""
        return self.design.common.shape[1]

    def curve(self, regressors: Floats) -> Floats:
        """Values at regressors ``[T, P]``."""
        return regressors @ self.coefficients

    def variance(self, regressors: Floats) -> Floats:
        """Estimation variance of the values at regressors ``[T, P]``: float64 ``[T]``."""
        return np.einsum("tp,tp->t", regressors @ self.covariance, regressors)

    def bucket_variance(self, k: int) -> Floats:
        """Estimation variance of a bucket's curve, float64 ``[T]``."""
        return self.variance(np.hstack([self.design.common, self.design.own[:, k]]))

    @cached_property
    def offset(self) -> Floats:
        """Each bucket's offset from the trend, ``b_k + d_k x(t)``: float64 ``[T, K]``."""
        offsets = self.design.offsets
        own = self.coefficients[self.num_common :]
        return self.design.own[:, :, offsets] @ own[offsets]


def fit_curve(steps: Steps, knots: Floats | None = None, extra: Floats | None = None) -> Fit:
    """Fit all bucket losses of a stretch of steps jointly.

    Args:
        steps: What is observed.
        knots: Of the trend, on its clock; by default one for about every 60 steps.
        extra: Further regressors that all buckets share, float64 ``[T, M]``.

    Returns:
        The fit, with drifting offsets where BIC prefers them.
    """
    if knots is None:
        knots = even_knots(steps.step[0], steps.step[-1], steps=len(steps.step))
    plain = _solve(steps, _design(steps, knots, extra, drift=False))
    if steps.num_buckets == 1:
        return plain
    drifting = _solve(steps, _design(steps, knots, extra, drift=True))
    count = int((steps.precision > 0).sum())
    gain = count * np.log(plain.squares / max(drifting.squares, 1e-300))
    return drifting if gain > (steps.num_buckets - 1) * np.log(count) else plain


def _design(steps: Steps, knots: Floats, extra: Floats | None, *, drift: bool) -> Design:
    time = clock(steps.step)
    trend = spline_basis(np.clip(time, knots[0], knots[-1]), knots)
    edges_at = told_apart(steps.edges, len(time))
    edges = edge_regressors(edges_at, len(time))
    parts = [trend, edges, np.empty((len(time), 0)) if extra is None else extra]
    contrast = _contrasts(steps.share)
    num_offsets = contrast.shape[1]
    own = [np.broadcast_to(contrast, (len(time), *contrast.shape))]
    if drift:
        x = 2 * (time - time[0]) / max(time[-1] - time[0], 1e-12) - 1
        own.append(x[:, None, None] * contrast)
        num_offsets *= 2
    if steps.has_length:
        own.append(steps.inner_length[:, :, None] * np.eye(steps.num_buckets))
    ends = np.cumsum([part.shape[1] for part in parts])
    return Design(
        common=np.hstack(parts),
        own=np.concatenate(own, axis=2),
        edges=slice(ends[0], ends[1]),
        edges_at=edges_at,
        extra=slice(ends[1], ends[2]),
        offsets=slice(0, num_offsets),
    )


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
    """Weighted least squares by the normal equations, whose blocks need no ``[T * K, P]``."""
    weights, losses = steps.precision, np.where(steps.precision > 0, steps.loss_k, 0.0)
    common, own = design.common, design.own
    flat = own.reshape(own.shape[0] * own.shape[1], own.shape[2])
    weighted = flat * weights.reshape(-1, 1)
    cross = common.T @ weighted.reshape(own.shape).sum(1)
    normal = np.block(
        [
            [common.T @ (common * weights.sum(1, keepdims=True)), cross],
            [cross.T, flat.T @ weighted],
        ]
    )
    right = np.concatenate([common.T @ (weights * losses).sum(1), weighted.T @ losses.reshape(-1)])
    # Scaled to a unit diagonal, so that what cannot be told apart shows against rounding.
    scale = 1 / np.sqrt(np.maximum(np.diag(normal), 1e-300))
    inverse = np.linalg.pinv(normal * np.outer(scale, scale), rcond=1e-10, hermitian=True)
    covariance = inverse * np.outer(scale, scale)
    coefficients = covariance @ right
    fitted = (common @ coefficients[: common.shape[1]])[:, None]
    fitted = fitted + own @ coefficients[common.shape[1] :]
    residuals = np.where(weights > 0, losses - fitted, 0.0)
    squares = float((weights * np.square(residuals)).sum())
    return Fit(design, coefficients, covariance, residuals, squares)
