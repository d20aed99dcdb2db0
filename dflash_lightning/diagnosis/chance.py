"""Is it just randomness? Five numbers beside the shares.

With V = noise + rest, the variance of a step at a fixed mix: memory (lag-1 correlation; the
portmanteau of Ljung and Box, 1978), power (what would have been noticed: 2.8 standard errors, 80 %
power at 5 %), smoothing (4 V / delta^2 steps give a mean within +- delta), telling two runs apart
(7.85 = (1.96 + 0.84)^2), and what a change would give (variance scales with 1 / rows).
"""

from collections.abc import Mapping

import numpy as np

from dflash_lightning.diagnosis.causes import Evidence
from dflash_lightning.diagnosis.result import Chance
from dflash_lightning.diagnosis.statistics import chi_squared_tail, lag_correlation
from dflash_lightning.diagnosis.variance import Decomposition

LAGS = 10
POWER = 2.8  # standard errors
APART = 7.85  # (1.96 + 0.84)^2
TWICE = "twice the rows a step"


def chance_of(
    evidence: Evidence, *, other: float | None = None, same_plan: float | None = None
) -> Chance:
    """Answer the five questions.

    Args:
        evidence: Of the run.
        other: Variance of a baseline's step at a fixed mix, nats squared; None: as this run's.
        same_plan: Variance of the difference of two runs that draw the same rows.
    """
    taken, z = evidence.taken, evidence.z
    mix, noise, rest = taken.parts
    variance = noise + rest
    rho = [lag_correlation(z, lag) for lag in range(1, min(LAGS, len(z) - 1) + 1)]
    q = len(z) * (len(z) + 2) * sum(r * r / (len(z) - h) for h, r in enumerate(rho, 1))
    delta = trend_of_a_tenth(evidence)
    apart = APART * (variance + (variance if other is None else other))
    return Chance(
        lag1=rho[0],
        lag1_band=2 / float(np.sqrt(len(z))),
        ljung_box=q,
        p_value=chi_squared_tail(q, LAGS),
        outside=float((np.abs(z) > 2).mean()),
        noticed=None if taken.confounded else POWER * taken.shares[2].error,
        delta=delta,
        average_adjusted=_steps(4 * variance, delta),
        average_raw=_steps(4 * (variance + mix), delta),
        apart_delta=delta,
        apart_steps=_steps(apart, delta),
        apart_same_plan=None if same_plan is None else _steps(APART * same_plan, delta),
        changes=_changes(taken, evidence.run.header),
    )


def _steps(variance: float, delta: float) -> int:
    return max(1, int(np.ceil(variance / delta**2)))


def trend_of_a_tenth(evidence: Evidence) -> float:
    """How far the mix-adjusted curve moved over the last tenth of the run, nats."""
    curve = evidence.taken.fit.trend
    back = min(max(len(evidence.run) // 10, 1), len(curve) - 1)
    moved = abs(float(curve[-1] - curve[-1 - back]))
    return max(moved, 1e-3)


def _changes(taken: Decomposition, header: Mapping[str, object]) -> dict[str, float]:
    """Predicted deviation from step to step under what one could change."""
    mix, noise, rest = taken.parts
    fixed = noise + rest
    changes = {"now": mix + fixed}
    if not taken.confounded:
        changes[TWICE] = mix + fixed / 2
    dealt = stratified_mix(taken, header)
    if dealt is not None and dealt < mix:
        changes["batching.deal=stratified"] = dealt + fixed
    return {name: float(np.sqrt(variance)) for name, variance in changes.items()}


def stratified_mix(taken: Decomposition, header: Mapping[str, object]) -> float | None:
    """Mix variance that the same run would have with stratified steps; None where not known.

    The plan's report says what the step deviation under each deal would be if bucket means lay an
    equal gap apart; the ratio of two deals hardly depends on the gaps.
    """
    deals, deal = header.get("deals"), header.get("deal")
    if not isinstance(deals, Mapping) or not isinstance(deal, str):
        return None
    if not deals.get(deal) or deals.get("stratified") is None:
        return None
    return taken.parts[0] * (float(deals["stratified"]) / float(deals[deal])) ** 2
