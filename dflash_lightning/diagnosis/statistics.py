"""Small statistics that NumPy lacks: quantiles, tail probabilities, a block bootstrap.

Sources: Student's t by the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5); the tail of
chi-squared with an even number of degrees of freedom in closed form (26.4.5); Fisher's g (R. A.
Fisher, Tests of significance in harmonic analysis, 1929), of which the first term of the exact sum
is taken, an upper bound; the circular block bootstrap (Politis and Romano, 1992), whose blocks keep
neighbouring steps together, so that what is correlated stays correlated.
"""

import math

import numpy as np

from dflash_lightning.diagnosis.run import Bools, Floats

DRAWS = 999
MAD = 1.4826  # median absolute deviation to standard deviation, of a normal distribution


def student_quantile(degrees: float) -> float:
    """The 97.5 % quantile of Student's t, for intervals of 95 %.

    >>> round(student_quantile(10), 3), round(student_quantile(1e9), 3)
    (2.228, 1.96)
    """
    z, d = 1.959964, max(degrees, 3.0)
    return (
        z
        + (z**3 + z) / (4 * d)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * d**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * d**3)
    )


def chi_squared_tail(x: float, degrees: int) -> float:
    """Probability that chi-squared exceeds x; ``degrees`` is even.

    >>> round(chi_squared_tail(18.307, 10), 4)
    0.05
    """
    half, term, total = x / 2, 1.0, 1.0
    for i in range(1, degrees // 2):
        term *= half / i
        total += term
    return math.exp(-half) * total


def block_length(n: int) -> int:
    """Steps of one block of the bootstrap, the order that is best for a variance.

    >>> block_length(500)
    12
    """
    return max(1, round(1.5 * n ** (1 / 3)))


def bootstrap_means(values: Floats, *, seed: int = 0) -> Floats:
    """Means of resampled series, whole blocks at a time.

    Args:
        values: One row per step, float64 ``[T, M]``.
        seed: Of the draws; equal input gives equal output.

    Returns:
        Means, float64 ``[999, M]``.
    """
    n, block = len(values), block_length(len(values))
    around = np.concatenate([values, values[: block - 1]])
    sums = np.cumsum(np.concatenate([np.zeros((1, values.shape[1])), around]), axis=0)
    blocks = sums[block:] - sums[:-block]
    drawn = np.random.default_rng(seed).integers(n, size=(DRAWS, math.ceil(n / block)))
    return blocks[drawn].mean(1) / block


def moving_mean(values: Floats, width: int) -> Floats:
    """Mean of a window of odd ``width`` around each step, shorter at the ends; ``[T]``.

    >>> moving_mean(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist()
    [1.5, 3.0, 3.0, 3.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    first, last = np.maximum(at - width // 2, 0), np.minimum(at + width // 2 + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def robust_spread(values: Floats) -> float:
    """Standard deviation from the median absolute deviation, which outliers cannot move."""
    return MAD * float(np.median(np.abs(values - np.median(values))))


def lag_correlation(values: Floats, lag: int = 1) -> float:
    """Correlation of a series with itself ``lag`` steps later; 0 where it does not vary."""
    centred = values - values.mean()
    total = float(centred @ centred)
    return float(centred[lag:] @ centred[:-lag]) / total if total > 0 else 0.0


def fisher_g(values: Floats, *, longest: float) -> tuple[float, float]:
    """The strongest period of a series, and how likely chance shows one as strong.

    Args:
        values: Float64 ``[T]``, evenly spaced.
        longest: Steps of the longest period to look at; what is slower is trend.

    Returns:
        Period in steps, and the probability, at most 1.
    """
    power = np.abs(np.fft.rfft(values - values.mean())[1:]) ** 2
    period = len(values) / np.arange(1, len(power) + 1)
    power, period = power[period <= longest], period[period <= longest]
    if not len(power) or power.sum() == 0:
        return math.nan, 1.0
    best = int(power.argmax())
    g, m = float(power[best] / power.sum()), len(power)
    return float(period[best]), min(1.0, m * (1 - g) ** (m - 1))


def runs_of(flags: Bools) -> list[tuple[int, int]]:
    """First and last position of every stretch of True.

    >>> runs_of(np.array([True, True, False, True]))
    [(0, 1), (3, 3)]
    """
    edges = np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    return [(int(a), int(b)) for a, b in zip(starts, ends, strict=True)]
