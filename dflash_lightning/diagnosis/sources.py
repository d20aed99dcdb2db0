"""Whether the loss follows the sources that a step drew.

The ledger does not know sources; the plan does, where the store is at hand. The residual of the
step loss is regressed on what the step drew of each source, after all that the model explains has
been taken out of both (Frisch and Waugh, 1933). The rows' own spread contains what sources differ
by, so this is a part of the sampling noise that gets a name, not of the rest.
"""

from dataclasses import dataclass

import numpy as np

from dflash_lightning.diagnosis.causes import Evidence
from dflash_lightning.diagnosis.result import Cause
from dflash_lightning.diagnosis.run import Floats, Ints

MOST, LEAST = 12, 0.01  # sources that are told apart; part of the data that one needs
FOUND = 4.5  # normal deviations of the test
NOTABLE = 0.1  # share of the variance


@dataclass(frozen=True, eq=False)
class Sources:
    """What each step drew of each source.

    Args:
        names: Of the sources.
        step: Steps, int64 ``[T]``, rising.
        portion: Part of the step's supervised tokens, float64 ``[T, G]``.
    """

    names: tuple[str, ...]
    step: Ints
    portion: Floats


def by_source(evidence: Evidence, sources: Sources | None) -> list[Cause]:
    """Which sources a step drew moves its loss."""
    if sources is None:
        return []
    taken = evidence.taken
    known = np.isin(taken.steps.step, sources.step)
    portion = sources.portion[np.searchsorted(sources.step, taken.steps.step[known])]
    mean = portion.mean(0)
    largest = np.argsort(-mean)[:MOST]
    chosen = largest[mean[largest] >= LEAST]
    if len(chosen) < 2 or known.sum() < 10 * len(chosen):
        return []
    scale = 1 / np.sqrt(taken.steps.pooled_noise[known] * taken.inflation)
    drawn, known_by = portion[:, chosen] - mean[chosen], taken.fit.design.mixed(taken.steps.portion)
    drawn = _without(drawn * scale[:, None], known_by[known] * scale[:, None])
    residual = taken.residual[known] * scale
    effect, _, rank, _ = np.linalg.lstsq(drawn, residual, rcond=1e-6)
    moved = drawn @ effect
    if _deviations(float(moved @ moved), int(rank)) < FOUND:
        return []
    explained = float(np.mean(np.square(moved) / scale**2)) * (1 - rank / (moved @ moved))
    share = explained / taken.total
    if share < NOTABLE:
        return []
    level = effect - effect @ mean[chosen] / mean[chosen].sum()
    low, high = int(level.argmin()), int(level.argmax())
    names = [sources.names[i] for i in chosen]
    says = (
        f"the loss follows which sources a step drew: about {level[low]:+.2f} nats in "
        f"{names[low]}, {level[high]:+.2f} in {names[high]}; part of the sampling noise"
    )
    at = int(taken.steps.step[0]), int(taken.steps.step[-1])
    return [Cause(cause="source", steps=at, share=float(share), says=says)]


def _without(values: Floats, regressors: Floats) -> Floats:
    """What is left of columns when regressors have explained theirs."""
    return values - regressors @ np.linalg.lstsq(regressors, values, rcond=1e-10)[0]


def _deviations(square: float, degrees: int) -> float:
    """Chi-squared as a normal deviate (Wilson and Hilferty, 1931)."""
    if degrees == 0:
        return 0.0
    spread = 2 / (9 * degrees)
    return ((square / degrees) ** (1 / 3) - (1 - spread)) / float(np.sqrt(spread))
