"""Cubic B-splines: a smooth trend as a sum of local bumps.

Source: the recursion of Cox and de Boor (C. de Boor, A Practical Guide to Splines, 1978, chapter
IX), here for all points at once.
"""

import math

import numpy as np

from dflash_lightning.diagnosis.run import Floats, Ints

DEGREE = 3
SHIFT = 100  # steps; the clock of the trend is log(step + 100): fast at first, then slow
SPACING = 60  # steps between knots, about
FEWEST, MOST = 3, 60  # intervals between knots


def clock(step: Ints | Floats) -> Floats:
    """Time in which a loss curve falls about evenly, float64 ``[T]``."""
    return np.log(np.asarray(step, np.float64) + SHIFT)


def even_knots(first: float, last: float, *, steps: int) -> Floats:
    """Knots from the first to the last step, evenly spaced on the clock.

    Args:
        first: First step.
        last: Last step.
        steps: Steps in between that are known; a knot about every 60 of them.
    """
    intervals = min(max(math.ceil(steps / SPACING), FEWEST), MOST)
    start, end = clock(np.array([first, last]))
    return np.linspace(start, end, intervals + 1)


def spline_basis(at: Floats, knots: Floats) -> Floats:
    """Values of all cubic B-splines on the knots; each row sums to 1.

    Args:
        at: Points between the first and the last knot, float64 ``[T]``.
        knots: Strictly rising, float64 ``[I + 1]``.

    Returns:
        Float64 ``[T, I + 3]``, at most four of a row above zero.

    >>> spline_basis(np.array([0.0, 1.0]), np.array([0.0, 1.0])).round(3).tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    """
    ends = np.repeat(knots[[0, -1]], DEGREE)
    padded = np.concatenate([ends[:DEGREE], knots, ends[DEGREE:]])
    inside = np.clip(np.searchsorted(knots, at, side="right") - 1, 0, len(knots) - 2)
    left = inside + DEGREE
    values = np.ones((len(at), 1))
    for degree in range(1, DEGREE + 1):
        higher = np.zeros((len(at), degree + 1))
        for i in range(degree):
            start, end = padded[left - degree + 1 + i], padded[left + 1 + i]
            part = values[:, i] / (end - start)
            higher[:, i] += part * (end - at)
            higher[:, i + 1] += part * (at - start)
        values = higher
    basis = np.zeros((len(at), len(knots) - 1 + DEGREE))
    np.put_along_axis(basis, inside[:, None] + np.arange(DEGREE + 1), values, axis=1)
    return basis
