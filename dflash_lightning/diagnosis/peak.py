"""Whether the loss shifts where the learning rate peaks.

A regressor that rises from 0 to 1 at the peak, beside a trend whose knots are close enough there to
follow any smooth curve: its coefficient is the part of the shift that no smooth trend explains. Two
polynomials, one on either side, would call every steep healthy curve a shift. Where the curve bends
faster than its knots, shifts at other steps are as significant, and none is named.
"""

import numpy as np

from dflash_lightning.diagnosis.model import fit_curve
from dflash_lightning.diagnosis.pool import Steps, pooled, usable
from dflash_lightning.diagnosis.result import Cause
from dflash_lightning.diagnosis.run import Floats, Run
from dflash_lightning.diagnosis.spline import clock

NEEDED = 60  # steps on either side of the peak
NEAR, CLOSE, GROWTH = 50, 3, 1.3  # steps between knots at the peak; so many each side; then more
REACH = 600  # steps behind the peak that are looked at
RAMP = 4  # steps over which the shift comes
PLACEBOS = (-45, -30, -20, 20, 30, 45)  # steps from the peak at which no shift is expected
TIMES = 1.5  # as significant as any of these
ERRORS, NOISE = 4.0, 1.5  # standard errors and noise deviations that count


def warmup_end(run: Run) -> int | None:
    """The step at which the rate peaks, or will; None where neither rate nor header tells."""
    told = run.header.get("warmup_steps")
    rate = run.column("lr")
    known = np.flatnonzero(np.isfinite(rate))
    if len(known):
        at = known[rate[known].argmax()]
        rises = rate[at] > 1.02 * rate[known[0]]
        if (at < known[-1] and rate[known[-1]] < rate[at]) or not isinstance(told, int):
            return int(run.step[at]) if rises else 0
    return told if isinstance(told, int) else None


def learning_rate(run: Run, deviation: float, inflation: float) -> tuple[list[Cause], str]:
    """A shift at the peak of the rate.

    Args:
        run: The whole run.
        deviation: One noise deviation in nats.
        inflation: Variance of a step over what its rows explain, at least 1.

    Returns:
        The cause where there is one, and what was missing to ask; empty where nothing was.
    """
    peak = warmup_end(run)
    if peak is None:
        return [], "whether the loss shifts at the peak of the rate: log lr"
    run = run.take(usable(run) & (run.step <= peak + REACH))
    before, after = int((run.step < peak).sum()), int((run.step >= peak).sum())
    if min(before, after) < NEEDED:
        return [], (
            f"whether the loss shifts at the peak of the rate, step {peak:,}: it takes {NEEDED} "
            f"steps on either side, there are {before:,} and {after:,}"
        )
    steps = pooled(run)
    knots = _knots(float(run.step[0]), float(peak), float(run.step[-1]))
    (shift,), (error,) = _shifts(steps, knots, [peak])
    error *= float(np.sqrt(inflation))
    if shift <= max(ERRORS * error, NOISE * deviation) or _elsewhere(steps, knots, peak):
        return [], ""
    says = (
        f"the loss shifts up by {shift:.3f} +- {1.96 * error:.3f} nats at step {peak:,}, where the "
        "rate peaks"
    )
    return [Cause(cause="learning_rate", steps=(peak, peak + RAMP), says=says)], ""


def _shifts(steps: Steps, knots: Floats, at: list[int]) -> tuple[Floats, Floats]:
    """Shifts at some steps beside the trend, and their standard errors, ``[M]`` each."""
    ramps = np.clip((steps.step[:, None] - np.array(at)) / RAMP, 0.0, 1.0)
    fit = fit_curve(steps, knots, ramps)
    extra = fit.design.extra
    return fit.coefficients[extra], np.sqrt(np.diag(fit.covariance)[extra])


def _elsewhere(steps: Steps, knots: Floats, peak: int) -> bool:
    """Whether a shift beside the peak would do as well: then the trend bends too fast to tell."""
    for away in PLACEBOS:
        shifts, errors = _shifts(steps, knots, [peak, peak + away])
        at_peak, beside = np.abs(shifts / errors)
        if at_peak < TIMES * beside:
            return True
    return False


def _knots(first: float, peak: float, last: float) -> Floats:
    """Knots close together at the peak and farther apart away from it, on the clock."""
    near = NEAR * np.arange(1, CLOSE + 1)
    far = near[-1] + np.cumsum(NEAR * GROWTH ** np.arange(1, 40))
    away = np.concatenate([[0.0], near, far])
    at = np.concatenate([peak - away[:0:-1], peak + away])
    inside = at[(at > first + NEAR / 2) & (at < last - NEAR / 2)]
    return clock(np.concatenate([[first], inside, [last]]))
