"""The model of a curve: one trend for all length buckets, and an offset for each.

    loss_k(t) = f(t) + b_k + d_k x(t) + g_k(length_k(t) - its bucket's mean) + error

f is a cubic B-spline in log(step + 100), with one step regressor for each epoch edge and restart
(without it, memorisation would look like unexplained variance). The offsets b_k sum to zero under
the data set's weight shares, so that f is the mix-adjusted curve. g_k is what length does inside a
bucket, where steps hold neighbours in length: a line, a square or a cube, since loss bends with
length, one for all buckets or one for each. BIC chooses, and whether offsets drift by x, linear on
the clock of f. A slope for each bucket is never taken for granted: where batches come in the order
of length, it can hardly be told from trend and offsets. All buckets are fitted jointly by weighted
least squares, with variances that are pooled over the run: a step's own variance depends on the
loss that it would weigh.

Assumption: errors of different rows are independent given trend and bucket. What they share within
a step is left over as *rest* (:mod:`dflash_lightning.diagnosis.variance`).
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dflash_lightning.diagnosis.design import POWERS, Design, Form, all_regressors
from dflash_lightning.diagnosis.pool import Steps
from dflash_lightning.diagnosis.run import Floats
from dflash_lightning.diagnosis.spline import even_knots


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted model.

    Args:
        design: Its regressors.
        coefficients: Float64 ``[P]``.
        covariance: Of the coefficients where the errors are the rows' alone, float64 ``[P, P]``.
        residuals: Of the bucket losses, 0 where there is none, float64 ``[T, K]``.
    """

    design: Design
    coefficients: Floats
    covariance: Floats
    residuals: Floats

    @property
    def trend(self) -> Floats:
        """The mix-adjusted curve, float64 ``[T]``."""
        common = self.design.common
        return common @ self.coefficients[: common.shape[1]]

    @property
    def fitted(self) -> Floats:
        """Losses of the buckets by the model, float64 ``[T, K]``."""
        design = self.design
        lengths = self.coefficients[design.offsets.stop :].reshape(design.slopes.shape[1], -1)
        bent = np.einsum("tkd,kd->tk", design.bent, design.slopes @ lengths)
        return self.trend[:, None] + self.offset + bent

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
        The fit, with what BIC prefers.
    """
    if knots is None:
        knots = even_knots(steps.step[0], steps.step[-1], steps=len(steps.step))
    design = all_regressors(steps, knots, extra)
    weights, losses = steps.precision, np.where(steps.precision > 0, steps.loss_k, 0.0)
    sums = Sums(*_normal(design, weights, losses), float((weights * losses**2).sum()))
    count = int((weights > 0).sum())

    def cost(form: Form) -> float:
        squares, used = sums.squares(design.columns(form))
        # Where next to nothing is left, what is left is rounding.
        squares = max(squares, 1e-12 * sums.total, 1e-300)
        return count * float(np.log(squares)) + used * float(np.log(count))

    form = min(_forms_of_length(steps), key=cost)
    if steps.num_buckets > 1:
        form = min(form, form._replace(drift=True), key=cost)
    columns, design = design.columns(form), design.shortened(form)
    covariance, coefficients = sums.solved(columns)
    fit = Fit(design, coefficients, covariance, losses)
    return replace(fit, residuals=np.where(weights > 0, losses - fit.fitted, 0.0))


def _forms_of_length(steps: Steps) -> list[Form]:
    """What length may do inside buckets, the simplest first."""
    if not steps.has_length:
        return [Form(drift=False, own=False, degree=0)]
    shared = [Form(drift=False, own=False, degree=power) for power in POWERS]
    return shared if steps.num_buckets == 1 else [*shared, *(f._replace(own=True) for f in shared)]


@dataclass(frozen=True, eq=False)
class Sums:
    """What weighted least squares need of the data: any fewer regressors are solved from it.

    Args:
        normal: Left side of the normal equations, float64 ``[P, P]``.
        right: Their right side, ``[P]``.
        total: Weighted sum of squared losses.
    """

    normal: Floats
    right: Floats
    total: float

    def solved(self, columns: Floats) -> tuple[Floats, Floats]:
        """Covariance ``[p, p]`` and coefficients for regressors made by ``columns [P, p]``."""
        normal = columns.T @ self.normal @ columns
        # Scaled to a unit diagonal, so that what cannot be told apart shows against rounding.
        scale = 1 / np.sqrt(np.maximum(np.diag(normal), 1e-300))
        inverse = np.linalg.pinv(normal * np.outer(scale, scale), rcond=1e-10, hermitian=True)
        covariance = inverse * np.outer(scale, scale)
        return covariance, covariance @ (columns.T @ self.right)

    def squares(self, columns: Floats) -> tuple[float, int]:
        """Weighted sum of squared residuals, and the coefficients used."""
        coefficients = self.solved(columns)[1]
        return self.total - float(coefficients @ (columns.T @ self.right)), len(coefficients)


def _normal(design: Design, weights: Floats, losses: Floats) -> tuple[Floats, Floats]:
    """Left and right side of the normal equations, block by block, with slopes for each bucket."""
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
