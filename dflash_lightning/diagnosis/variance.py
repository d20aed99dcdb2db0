"""Where the variance of the step loss comes from: length mix, sampling noise, rest.

By the law of total variance, given what rows a step drew from which bucket:

* *mix*: variance of c(t) = sum_k (portion_k(t) - mean portion_k) b_k(t), what the buckets' offsets
  do to the loss as their portions change, less the mean of its own estimation variance;
* *noise*: mean of sum_k portion_k^2 noise_k, what the rows' own spread explains (ratio estimation,
  jackknife: :mod:`dflash_lightning.diagnosis.pool`);
  Where a step has too few rows of a bucket to tell, the squared residual of the bucket itself
  stands in, so that the loss of a lone row is noise, whatever its like would have been;
* *rest*: with e the residual of the step loss and u its regressors, the mean of
  e^2 - (noise - u' C u), because the fit eats exactly u' C u of the noise. Not the total less the
  other two: that adds the chance correlation of mix and noise.

Intervals: circular block bootstrap of the three per step, together, so that their correlation and
that of neighbouring steps count; estimate +- Student's t x the bootstrap's deviation, widened by
sqrt(n / (n - P)) for the fit. Assumption: blocks of 1.5 n^(1/3) steps are nearly independent; what
moves more slowly than about 50 steps is trend.
"""

from dataclasses import dataclass

import numpy as np

from dflash_lightning.diagnosis.model import Fit, fit_curve
from dflash_lightning.diagnosis.pool import Steps
from dflash_lightning.diagnosis.result import Share
from dflash_lightning.diagnosis.run import Floats
from dflash_lightning.diagnosis.statistics import block_length, bootstrap_means, student_quantile

MOSTLY = 0.5  # more imputed noise than this cannot be told from the rest


@dataclass(frozen=True, eq=False)
class Decomposition:
    """The variance of a stretch of steps, taken apart.

    Args:
        steps: The stretch.
        fit: The model of its losses.
        parts: Variance of mix, noise and rest in nats squared.
        shares: The same as fractions of their sum, with intervals.
        residual: Of the step loss, float64 ``[T]``.
        mix: c(t), what the mix adds to the step loss, float64 ``[T]``.
        eaten: u' C u, the part of the residual's variance that the fit took, float64 ``[T]``.
        triple: What each step adds to mix, noise and rest, float64 ``[T, 3]``.
    """

    steps: Steps
    fit: Fit
    parts: tuple[float, float, float]
    shares: tuple[Share, Share, Share]
    residual: Floats
    mix: Floats
    eaten: Floats
    triple: Floats

    @property
    def total(self) -> float:
        """Sum of the three parts, nats squared."""
        return sum(self.parts)

    @property
    def confounded(self) -> bool:
        """Whether noise and rest are one number, because most noise is imputed."""
        return self.steps.imputed > MOSTLY

    @property
    def inflation(self) -> float:
        """Variance of a step within its bucket mix, over what its rows explain; at least 1."""
        _, noise, rest = self.parts
        return 1 + max(rest, 0.0) / max(noise, 1e-12)


def decompose(steps: Steps) -> Decomposition:
    """Fit the losses and take their variance apart."""
    fit = fit_curve(steps)
    regressors = fit.design.mixed(steps.portion)
    residual = steps.loss - fit.curve(regressors)
    eaten = np.minimum(fit.variance(regressors), steps.pooled_noise)
    mix, mix_error = _mix(steps, fit)
    noise, rest = _noise_and_rest(steps, fit, np.square(residual) + eaten)
    triple = np.stack([np.square(mix) - mix_error, noise, rest], axis=1)
    parts = _parts(triple.mean(0))
    return Decomposition(
        steps=steps,
        fit=fit,
        parts=(float(parts[0]), float(parts[1]), float(parts[2])),
        shares=_shares(triple, parts / parts.sum(), used=len(fit.coefficients)),
        residual=residual,
        mix=mix,
        eaten=eaten,
        triple=triple,
    )


def _parts(means: Floats) -> Floats:
    """Variances from means of the triples ``[..., 3]``; a mix below zero is none."""
    mix = np.maximum(means[..., :1], 0.0)
    return np.concatenate([mix, means[..., 1:]], axis=-1)


def _mix(steps: Steps, fit: Fit) -> tuple[Floats, Floats]:
    """c(t) around its mean, and its estimation variance, float64 ``[T]`` each."""
    offsets = fit.design.offsets
    moved = steps.portion - steps.portion.mean(0)
    regressors = fit.design.mixed_offsets(moved)
    regressors -= regressors.mean(0)
    error = np.einsum("tz,tz->t", regressors @ fit.covariance[offsets, offsets], regressors)
    return regressors @ fit.coefficients[offsets], error


def _noise_and_rest(steps: Steps, fit: Fit, square: Floats) -> tuple[Floats, Floats]:
    """What each step adds to noise and rest, from its squared residual: float64 ``[T]`` each.

    A shock that all rows of a step share is in the residual of a lone row too, with the square of
    its portion; that part is counted back from the noise to the rest.
    """
    lone = (steps.precision > 0) & ~steps.own
    noise_k = np.where(steps.own, steps.noise, 0.0)
    for k in range(steps.num_buckets):
        if not lone[:, k].any():
            continue
        own_square = np.square(fit.residuals[:, k]) + fit.bucket_variance(k)
        noise_k[:, k] = np.where(lone[:, k], own_square, noise_k[:, k])
    portion = np.square(steps.portion)
    noise = (portion * noise_k).sum(1)
    shared = 0.0 if steps.imputed > MOSTLY else float((portion * lone).sum(1).mean())
    rest = (square - noise) / (1 - shared)
    return noise - shared * rest, rest


def _shares(triple: Floats, share: Floats, *, used: int) -> tuple[Share, Share, Share]:
    """Intervals of the three shares, where the fit used so many coefficients."""
    drawn = _parts(bootstrap_means(triple))
    drawn = drawn / drawn.sum(1, keepdims=True)
    count = len(triple)
    error = drawn.std(0, ddof=1) * np.sqrt(count / max(count - used, 1))
    times = student_quantile(count / block_length(count) - 1)
    shares = [
        Share(float(s), float(s - times * e), float(s + times * e), float(e))
        for s, e in zip(share, error, strict=True)
    ]
    return shares[0], shares[1], shares[2]
