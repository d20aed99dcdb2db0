"""How often the diagnosis is right, measured on simulated runs whose truth is known."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from diagnosis.case import DEALS, Case
from diagnosis.simulate import (
    Truth,
    same_plan,
    simulate_case,
    sorted_and_bucketed,
    true_difference,
)

from dflash_lightning.diagnosis import Diagnosis, Run, diagnose
from dflash_lightning.diagnosis.pool import pooled
from dflash_lightning.diagnosis.result import Share
from dflash_lightning.diagnosis.variance import decompose

SMALL_BATCHES = (20, 18, 16, 14, 12, 11)  # rows, in which one garbage row is to be found
FEW_ROWS = (6, 5, 4, 3, 2, 2)
LONE_ROWS = (6, 4, 3, 2, 1, 1)  # the long buckets have one row a batch
SHOCK = 0.7  # noise deviations
MIX_BOUNDS = {"changing": 0.08, "heavy": 0.12}  # 0.05 in the other families
SHOULD = {
    "step_spread": "spread",
    "row_spread": "spread",
    "length_ordered": "period",
    "epoch_edges": "epoch_edge",
    "divergence": "divergence",
}


@dataclass(frozen=True, kw_only=True)
class Told:
    """How the shares of a run compare with the truth.

    Args:
        mix_error: Of mix / (mix + noise), from 0 to 1.
        rest_error: Of the rest's share, with its sign.
        covers: Whether the interval of the rest has its truth in it.
        width: Half width of that interval over 1.96 sqrt(2 / n) times the share of noise and rest.
    """

    mix_error: float
    rest_error: float
    covers: bool
    width: float


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a diagnosis says of a run.

    Args:
        case: The run's settings.
        verdict: Of the run.
        causes: Their names.
        rows: Rows that are called bad.
        has_bad_row: Whether these are at most five, and the planted one is among them.
        missing: What could not be told.
        told: The shares; None where noise and rest are one number.
    """

    case: Case
    verdict: str
    causes: frozenset[str]
    rows: tuple[int, ...]
    has_bad_row: bool
    missing: tuple[str, ...]
    told: Told | None

    @property
    def invented(self) -> frozenset[str]:
        """Causes that are not there; a family with drops at epoch edges has these."""
        real = {"epoch_edge"} if self.case.family == "edges" else set()
        if self.case.fault:
            real.add(SHOULD[self.case.fault])
        return self.causes - real


@dataclass(frozen=True, kw_only=True)
class Compared:
    """How the comparison of two runs agrees with the truth; in noise deviations.

    Args:
        error: Of the difference.
        covers: Whether its interval has the truth in it.
        half: Half the interval.
        same_rows: Whether steps were differenced.
    """

    error: float
    covers: bool
    half: float
    same_rows: bool


def cases(family: str, ranks: Iterable[int], **settings: object) -> list[Case]:
    """A case for every deal and number of ranks; with one rank, deals do not differ."""
    return [
        Case(seed=0, family=family, deal=deal, ranks=count, **settings)
        for count in ranks
        for deal in (DEALS if count > 1 else DEALS[:1])
    ]


def seeded(chosen: Sequence[Case], count: int, first: int) -> list[Case]:
    """So many runs of the cases in turn, each with a seed of its own."""
    return [replace(chosen[i % len(chosen)], seed=first + i) for i in range(count)]


def judged(case: Case) -> Judged:
    """Simulate a run and diagnose it."""
    run, truth = simulate_case(case)
    found = diagnose(run)
    rows = tuple(row for cause in found.causes for row in cause.rows)
    return Judged(
        case=case,
        verdict=found.verdict,
        causes=frozenset(cause.cause for cause in found.causes),
        rows=rows,
        has_bad_row=len(rows) <= 5 and set(truth.rows) <= set(rows) and bool(truth.rows),
        missing=found.missing,
        told=_told(shares_of(found), truth, found.window[1] - found.window[0] + 1),
    )


def shares_of(found: Diagnosis) -> tuple[Share | None, ...]:
    """Mix, noise and rest."""
    return found.shares["mix"], found.shares["noise"], found.shares["rest"]


def told(case: Case) -> Told:
    """Simulate a run and take the variance of its steps after the warm-up apart."""
    run, truth = simulate_case(case)
    window = run.step >= case.first
    found = _told(decompose(pooled(run.take(window))).shares, truth, int(window.sum()))
    assert found is not None
    return found


def _told(shares: Sequence[Share | None], truth: Truth, steps: int) -> Told | None:
    mix, noise, rest = shares
    if mix is None or noise is None or rest is None:
        return None
    true_rest = truth.rest / (truth.mix + truth.noise + truth.rest)
    floor = 1.96 * np.sqrt(2 / steps) * (noise.share + rest.share)
    return Told(
        mix_error=abs(
            mix.share / (mix.share + noise.share) - truth.mix / (truth.mix + truth.noise)
        ),
        rest_error=rest.share - true_rest,
        covers=rest.low <= true_rest <= rest.high,
        width=float((rest.high - rest.low) / 2 / floor),
    )


def compared(
    first: tuple[Run, Truth], second: tuple[Run, Truth], *, hide_plan: bool = False
) -> Compared:
    """Diagnose a run beside a baseline; with a hidden plan, as if they had drawn other rows."""
    run, truth = first
    if hide_plan:
        run = replace(run, headers=tuple((at, {**h, "plan": "another"}) for at, h in run.headers))
    found = diagnose(run, second[0]).comparison
    assert found is not None
    true = true_difference(first, second)
    return Compared(
        error=abs(found.difference - true) / truth.unit,
        covers=found.low <= true <= found.high,
        half=(found.high - found.low) / 2 / truth.unit,
        same_rows=found.same_rows,
    )


def sorted_pair(case: Case, difference: float) -> Compared:
    """A sorted run beside a bucketed one on the same rows."""
    return compared(*sorted_and_bucketed(case.seed, difference, **_settings(case)))


def plan_pair(case: Case, difference: float) -> tuple[Compared, Compared]:
    """Two runs of one plan, with their steps differenced and as if they were of two plans."""
    pair = same_plan(case.seed, difference, **_settings(case))
    return compared(*pair), compared(*pair, hide_plan=True)


def _settings(case: Case) -> dict[str, object]:
    """What a pair of runs has in common."""
    names = ("family", "deal", "ranks", "steps", "warmup")
    return {name: value for name, value in vars(case).items() if name in names}


def rate(values: Iterable[bool]) -> float:
    """Part that is true."""
    return float(np.mean(list(values)))


def quantile(values: Iterable[float], part: float = 0.95) -> float:
    """The value that the part of them does not exceed."""
    return float(np.quantile(list(values), part))
