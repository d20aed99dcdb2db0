"""Long series made short for a picture, and limits that outliers cannot move."""

import numpy as np

from dflash_lightning.diagnosis.run import Floats

POINTS = 3000  # of a curve; a panel of the picture is about 1,000 dots wide


def extremes(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The lowest and the highest point of each block, so that a line looks as the full one would.

    Args:
        x: Rising, float64 ``[T]``.
        y: Values, NaN where not known, float64 ``[T]``.

    Returns:
        Both at ``M <= 3000`` points, as they are where T is no more.
    """
    size = _block(len(x), POINTS // 2)
    if size == 1:
        return x, y
    blocks = _blocks(y, size)
    at = np.stack(
        [np.where(np.isnan(blocks), np.inf, sign * blocks).argmin(1) for sign in (1, -1)], axis=1
    )
    at = (np.sort(at, axis=1) + size * np.arange(len(blocks))[:, None]).ravel()
    return x[at], y[at]


def block_means(values: Floats) -> Floats:
    """Means of blocks of steps that leave NaN out; at most 3000 of them.

    Args:
        values: Float64 ``[T]`` or ``[T, K]``.

    Returns:
        ``[M]`` or ``[M, K]``; NaN where a block has no value.
    """
    size = _block(len(values), POINTS)
    if size == 1:
        return values
    blocks = _blocks(values, size)
    return _means(np.nansum(blocks, axis=1), np.isfinite(blocks).sum(1).astype(float))


def robust_limits(inside: Floats, whole: Floats) -> tuple[float, float] | None:
    """Limits of an axis: all but the outliers of what matters, and most of the rest.

    Args:
        inside: What matters, ``[W]``.
        whole: All values, ``[T]``; its highest fifth may leave the picture.

    Returns:
        Lower and upper limit; None where nothing is known.
    """
    inside, whole = (values[np.isfinite(values)] for values in (inside, whole))
    if not len(whole):
        return None
    inside = inside if len(inside) else whole
    low, high = np.quantile(inside, (0.02, 0.98))
    reach = 0.35 * (high - low)
    low, high = max(low - reach, inside.min()), min(high + reach, inside.max())
    low, high = min(low, np.quantile(whole, 0.02)), max(high, np.quantile(whole, 0.8))
    margin = 0.06 * (high - low) or 0.1
    return float(low - margin), float(high + margin)


def spaced(places: Floats, gap: float) -> Floats:
    """Places of labels, moved as little as keeps neighbours ``gap`` apart; ``[M]``.

    >>> spaced(np.array([0.9, 0.5, 0.52]), 0.1).round(3).tolist()
    [0.9, 0.46, 0.56]
    """
    order = np.argsort(places, kind="stable")
    lowered = places[order] - gap * np.arange(len(places))
    groups: list[list[float]] = []
    for value in lowered:  # the nearest rising series: pool those that fall (isotonic regression)
        groups.append([float(value)])
        while len(groups) > 1 and np.mean(groups[-1]) < np.mean(groups[-2]):
            last = groups.pop()
            groups[-1] += last
    even = np.array([np.mean(group) for group in groups for _ in group])
    result = np.empty(len(places))
    result[order] = even + gap * np.arange(len(places))
    return result


def _block(count: int, most: int) -> int:
    """Steps of a block, so that there are at most ``most`` blocks."""
    return max(1, -(-count // most))


def _blocks(values: Floats, size: int) -> Floats:
    """``[T, ...]`` as ``[M, size, ...]``, the last block filled up with NaN."""
    lacking = -len(values) % size
    filler = np.full((lacking, *values.shape[1:]), np.nan)
    return np.concatenate([values, filler]).reshape(-1, size, *values.shape[1:])


def _means(sums: Floats, counts: Floats) -> Floats:
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
