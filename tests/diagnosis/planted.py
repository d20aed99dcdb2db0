"""Faults to plant into a simulated run; sizes are in noise deviations of the healthy run."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from diagnosis.dealt import DataSet, Floats, Layout

SPREAD_STEPS = 100
DIVERGENCE_STEPS = 170
GROUP_STEPS = 50  # of length-ordered batches
GARBAGE_NATS = 10.0  # random tokens cost about the logarithm of the vocabulary, 12
GARBAGE_BATCH = 20  # rows of a batch, at most, for a garbage row to be noticed


@dataclass(frozen=True, eq=False, kw_only=True)
class Span:
    """Steps of a run and what one deviation is.

    Args:
        warmup: Steps of the warm-up.
        epoch_steps: Steps of an epoch.
        curve: The healthy curve in nats, ``[T]``.
        unit: One noise deviation in nats.
        size: Factor on the size of the fault.
    """

    warmup: int
    epoch_steps: int
    curve: Floats
    unit: float
    size: float

    @property
    def total(self) -> int:
        """Steps in all."""
        return self.curve.size

    @property
    def steps(self) -> Floats:
        """Step numbers, ``[T]``."""
        return np.arange(self.total, dtype=float)


@dataclass(frozen=True, eq=False, kw_only=True)
class Planted:
    """What a fault adds.

    Args:
        level: To the true curve, in nats, ``[T]``.
        shock: Standard deviation of a random shock that all rows of a step share, in nats, ``[T]``.
        scale: Factor on the deviation of the rows, ``[T]``.
        rows: Bad rows, each of which costs ``GARBAGE_NATS`` more in every epoch.
        bad_steps: Steps with one row whose loss is not finite.
        restarts: Steps before which the run was restarted.
    """

    level: Floats
    shock: Floats
    scale: Floats
    rows: tuple[int, ...] = ()
    bad_steps: tuple[int, ...] = ()
    restarts: tuple[int, ...] = ()


Plant = Callable[[Planted, Span, np.random.Generator], Planted]


def plant(
    name: str, span: Span, data: DataSet, layout: Layout, rng: np.random.Generator
) -> Planted:
    """What the fault adds to a run; nothing where the name is empty."""
    nothing = np.zeros(span.total)
    healthy = Planted(level=nothing, shock=nothing, scale=np.ones(span.total))
    if name == "garbage":
        few = np.array(layout.rows_per_batch) <= GARBAGE_BATCH
        return replace(healthy, rows=(int(rng.choice(np.flatnonzero(few[data.bucket]))),))
    return PLANTS[name](healthy, span, rng)


def in_spread(span: Span, rng: np.random.Generator) -> Floats:
    """1.0 in ``SPREAD_STEPS`` steps well inside the run, 0.0 elsewhere, ``[T]``."""
    first = rng.integers(span.warmup + SPREAD_STEPS, span.total - 2 * SPREAD_STEPS + 1)
    return ((span.steps >= first) & (span.steps < first + SPREAD_STEPS)).astype(float)


def _none(planted: Planted, span: Span, rng: np.random.Generator) -> Planted:
    return planted


def _step_spread(planted: Planted, span: Span, rng: np.random.Generator) -> Planted:
    """Doubles the deviation of the step's error: the shock has three times the noise's variance."""
    return replace(planted, shock=in_spread(span, rng) * np.sqrt(3) * span.unit * span.size)


def _row_spread(planted: Planted, span: Span, rng: np.random.Generator) -> Planted:
    return replace(planted, scale=1 + in_spread(span, rng) * span.size)


def _epoch_edges(planted: Planted, span: Span, rng: np.random.Generator) -> Planted:
    return replace(planted, level=-3 * span.unit * span.size * (span.steps // span.epoch_steps))


def _divergence(planted: Planted, span: Span, rng: np.random.Generator) -> Planted:
    """The curve stops falling and rises steadily to the end."""
    since = np.clip(span.steps - (span.total - DIVERGENCE_STEPS), 0, None)
    missed = span.curve[span.total - DIVERGENCE_STEPS] - span.curve
    rise = 12 * span.unit * span.size * since / DIVERGENCE_STEPS
    return replace(planted, level=np.where(since > 0, missed + rise, 0.0))


def _shift(planted: Planted, span: Span, rng: np.random.Generator) -> Planted:
    """From the first step after the update at the peak rate."""
    return replace(planted, level=3 * span.unit * span.size * (span.steps >= span.warmup))


def _restart(planted: Planted, span: Span, rng: np.random.Generator) -> Planted:
    at = (span.warmup + span.total) // 2
    return replace(planted, restarts=(int(at + rng.integers(-30, 31)),))


def _non_finite(planted: Planted, span: Span, rng: np.random.Generator) -> Planted:
    chosen = rng.choice(np.arange(span.warmup, span.total), 3, replace=False)
    return replace(planted, bad_steps=tuple(int(step) for step in np.sort(chosen)))


PLANTS: dict[str, Plant] = {
    "": _none,
    "length_ordered": _none,  # planted where steps are dealt
    "step_spread": _step_spread,
    "row_spread": _row_spread,
    "epoch_edges": _epoch_edges,
    "divergence": _divergence,
    "shift": _shift,
    "restart": _restart,
    "non_finite": _non_finite,
}
FAULTS = (*(name for name in PLANTS if name), "garbage")
