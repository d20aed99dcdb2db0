"""What a batch costs, from how long steps took: the knee between linear and quadratic work.

A step takes ``c0 + c1 w`` seconds, ``w`` being the largest over ranks of the sum of
``padded (1 + width / knee)`` over the rank's batches. For each knee of a grid, ``c0`` and ``c1``
follow by least squares; the best knee has the smallest sum of squares S, and its 95 % interval are
the knees with ``S(knee) <= S(best) (1 + 3.84 / (n - 3))``, the profile likelihood's. It counts that
another knee may make another rank the slowest. An interval without an upper end says that the
timings show no quadratic work for certain.
"""

import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash_lightning.batching.buckets import Floats
from dflash_lightning.batching.plan import EpochPlan

LEAST_TIMINGS = 8
MOST_TIMINGS = 5000  # evenly chosen from more: the table of knees would not fit the memory
CHI2_95 = 3.84  # one degree of freedom
OUTLIER = 5.0  # robust deviations; a validation or a checkpoint inside a step is no measurement
KNEES = np.append(np.geomspace(10, 1e7, 600), np.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostFit:
    """A fitted cost model.

    Args:
        knee: Width in tokens at which quadratic work equals linear work; infinite without any.
        low: Lower end of its 95 % interval; 0 where any smaller knee fits as well.
        high: Upper end; may be infinite.
        seconds_per_token: Of linear work, for one padded token.
        seconds_per_step: What a step takes without any token.
        timings: Timings used.
        outliers: Timings left out, as too far from the fit.
        scatter: Standard deviation of the used timings from the fit, in seconds.
    """

    knee: float
    low: float
    high: float
    seconds_per_token: float
    seconds_per_step: float
    timings: int
    outliers: int
    scatter: float

    def to_dict(self) -> dict[str, float | None]:
        """The numbers; None where one is infinite."""
        values = dataclasses.asdict(self).items()
        return {name: value if math.isfinite(value) else None for name, value in values}

    def __str__(self) -> str:
        knee, low, high = (
            f"{value:,.0f}" if math.isfinite(value) else "infinite"
            for value in (self.knee, self.low, self.high)
        )
        return (
            f"cost_knee {knee} tokens, 95 % interval {low} .. {high}, from {self.timings:,} "
            f"timings ({self.outliers} outliers left out)\n"
            f"{1e6 * self.seconds_per_token:.2f} us a padded token, "
            f"{1e3 * self.seconds_per_step:.1f} ms a step, scatter {1e3 * self.scatter:.1f} ms"
        )


def fit_cost(padded: npt.ArrayLike, widths: npt.ArrayLike, seconds: npt.ArrayLike) -> CostFit:
    """Fit the cost model to timed batches.

    Args:
        padded: Padded tokens of each timed batch, ``[n]``.
        widths: Their widths in tokens, ``[n]``.
        seconds: How long each took, ``[n]``.

    Returns:
        The fit.

    Raises:
        ValueError: There are fewer than eight timings, they differ in number, a value is not
            finite, all batches are alike, or time does not rise with the work.

    >>> width = np.tile(np.arange(100, 1000, 50), 2)
    >>> rows = np.repeat([2, 3], 18)
    >>> fit = fit_cost(rows * width, width, 1e-6 * rows * width * (1 + width / 500) + 0.01)
    >>> 500 * 0.98 < fit.knee < 500 * 1.02, round(fit.seconds_per_step, 3)
    (True, 0.01)
    """
    linear, width, time = (np.asarray(values, np.float64) for values in (padded, widths, seconds))
    if not linear.shape == width.shape == time.shape or linear.ndim != 1:
        raise ValueError(
            "padded, widths and seconds must be flat and equally long, got shapes "
            f"{linear.shape}, {width.shape} and {time.shape}. Give one value per timing."
        )
    return _fit(linear[:, None], (linear * width)[:, None], time)


def fit_cost_of_steps(plan: EpochPlan, steps: npt.ArrayLike, seconds: npt.ArrayLike) -> CostFit:
    """Fit the cost model to timed optimizer steps, each as long as its slowest rank.

    Args:
        plan: The plan that was trained.
        steps: Steps of the plan, int ``[n]``.
        seconds: How long each took, ``[n]``.

    Returns:
        The fit.

    Raises:
        ValueError: As ``fit_cost``, or the plan lacks a step.
    """
    chosen = np.asarray(steps)
    if chosen.dtype.kind not in "iu":
        raise ValueError(f"steps must be integers, got dtype {chosen.dtype}. Count them from 0.")
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < plan.num_steps:
        raise ValueError(
            f"steps must lie in 0..{plan.num_steps - 1}, got {chosen.min()}..{chosen.max()}. Give "
            "the plan of the epoch that was timed."
        )
    linear, quadratic = rank_work(plan)
    time = np.asarray(seconds, np.float64)
    if chosen.shape != time.shape or chosen.ndim != 1:
        raise ValueError(
            "steps and seconds must be flat and equally long, got shapes "
            f"{chosen.shape} and {time.shape}. Give one value per timing."
        )
    return _fit(linear[chosen], quadratic[chosen], time)


def rank_work(plan: EpochPlan) -> tuple[Floats, Floats]:
    """Padded tokens, and these times width, of each rank in each step, ``[steps, ranks]``."""
    widths = plan.batching.padded(plan.longest)
    padded = widths * plan.batches.sizes
    shape = (plan.num_steps, plan.accumulate, plan.world_size)
    linear, quadratic = (w.reshape(shape).sum(1) for w in (padded, padded * widths))
    return linear.astype(np.float64), quadratic.astype(np.float64)


def read_timings(path: Path, columns: Sequence[str]) -> dict[str, Floats]:
    """Columns of a CSV file of timings, such as a run's ledger.

    Args:
        path: The file; lines that start with ``#`` are comments.
        columns: Names to read.

    Returns:
        The columns that are there, float64; lines with an empty one of them are left out.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A value is no number, or ``seconds`` is missing.
    """
    if not path.is_file():
        raise FileNotFoundError(f"timings must be a CSV file; there is none at {path}.")
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(line for line in file if not line.startswith("#"))
        names = [name for name in columns if name in (reader.fieldnames or ())]
        lines = [[line[name] for name in names] for line in reader]
    if "seconds" not in names:
        raise ValueError(
            f"timings {path} must have a column seconds, got {', '.join(reader.fieldnames or ())}. "
            "Give a ledger, or a CSV file with seconds, rows and width."
        )
    try:
        table = np.array([line for line in lines if all(line)], np.float64)
    except ValueError as error:
        raise ValueError(f"timings {path} must hold numbers: {error}.") from error
    return dict(zip(names, table.reshape(-1, len(names)).T, strict=True))


def _fit(linear: Floats, quadratic: Floats, seconds: Floats) -> CostFit:
    """Profile the knee over work ``[n, ranks]`` and seconds ``[n]``, without outliers."""
    finite = np.isfinite(seconds) & np.isfinite(linear).all(1) & np.isfinite(quadratic).all(1)
    if seconds.size < LEAST_TIMINGS or not finite.all():
        raise ValueError(
            f"timings must be {LEAST_TIMINGS} or more and finite, got {seconds.size} of which "
            f"{int(finite.sum())} finite. Time more steps."
        )
    if linear.max(1).min() <= 0:
        raise ValueError(
            f"timed steps must have padded tokens, got {linear.max(1).min():.0f} in step "
            f"{int(linear.max(1).argmin())}. Leave such steps out."
        )
    some = np.unique(np.linspace(0, seconds.size - 1, MOST_TIMINGS).astype(np.int64))
    linear, quadratic, seconds = linear[some], quadratic[some], seconds[some]
    work = np.stack([(linear + quadratic / knee).max(1) for knee in KNEES])
    if np.ptp(quadratic.max(1) / linear.max(1)) == 0 or (np.ptp(work, axis=1) == 0).any():
        raise ValueError(
            "timed steps must differ in padded tokens and in width; all "
            f"{seconds.size} are alike. Time steps of several buckets."
        )
    use = _not_outlying(work, seconds)
    work, time = work[:, use], seconds[use]
    fitted, c0, c1 = _line(work, time, np.ones(time.size))
    squares = ((time - fitted) ** 2).sum(1)
    squares[c1 <= 0] = np.inf  # more work in less time is no model
    best = int(squares.argmin())
    if c1[best] <= 0:
        raise ValueError(
            f"seconds must rise with the work; in these {time.size} timings they do not. Time the "
            "steps alone, without data loading, on one rank or with deal=aligned."
        )
    inside = np.flatnonzero(squares <= squares[best] * (1 + CHI2_95 / (time.size - 3)) + 1e-30)
    # The ends lie between knees of the grid: outwards, so that no knee inside is left out.
    low, high = max(inside[0] - 1, 0), min(inside[-1] + 1, KNEES.size - 1)
    return CostFit(
        knee=float(KNEES[best]),
        low=float(KNEES[low]) if low else 0.0,
        high=float(KNEES[high]),
        seconds_per_token=float(c1[best]),
        seconds_per_step=float(c0[best]),
        timings=time.size,
        outliers=seconds.size - time.size,
        scatter=math.sqrt(squares[best] / (time.size - 3)),
    )


def _not_outlying(work: Floats, seconds: Floats) -> npt.NDArray[np.bool_]:
    """Timings near the line of least absolute deviations, the best over a few knees."""
    some = work[:: KNEES.size // 20]
    weights = np.ones_like(some)
    for _ in range(30):  # reweighted least squares come to least absolute deviations
        rest = np.abs(seconds - _line(some, seconds, weights)[0])
        weights = 1 / np.maximum(rest, 1e-6 * np.median(seconds))
    rest = rest[rest.sum(1).argmin()]
    use = rest <= OUTLIER * max(1.4826 * float(np.median(rest)), 1e-6 * float(np.median(seconds)))
    return use if use.sum() >= LEAST_TIMINGS else np.ones(seconds.size, bool)


def _line(work: Floats, seconds: Floats, weights: Floats) -> tuple[Floats, Floats, Floats]:
    """Least-squares lines through work ``[knees, n]``: fitted seconds, intercepts and slopes."""
    weights = weights / weights.sum(-1, keepdims=True)
    at, mean = (work * weights).sum(1, keepdims=True), (seconds * weights).sum(-1, keepdims=True)
    centred = (work - at) * weights
    slope = (centred * (seconds - mean)).sum(1) / (centred * (work - at)).sum(1)
    start = np.broadcast_to(mean.ravel(), slope.shape) - slope * at[:, 0]
    return start[:, None] + slope[:, None] * work, start, slope
