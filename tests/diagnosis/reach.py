"""How often the diagnosis is right, measured on simulated runs whose truth is known."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from diagnosis.case import DEALS, FAMILIES, Case
from diagnosis.simulate import Truth, same_plan, simulate_case, true_difference

from dflash_lightning.diagnosis import diagnose
from dflash_lightning.diagnosis.pool import pooled
from dflash_lightning.diagnosis.result import Share
from dflash_lightning.diagnosis.run import Run
from dflash_lightning.diagnosis.variance import decompose

SMALL_BATCHES = (20, 18, 16, 14, 12, 11)  # rows, in which one garbage row is to be found
FEW_ROWS = (6, 5, 4, 3, 2, 2)
LONE_ROWS = (6, 4, 3, 2, 1, 1)  # the long buckets have one row a batch
MOST_BAD_ROWS = 5
SHOCK = 0.7  # noise deviations
SEEDS = 10_000  # of each family: no two families see the same rows
CAUSES = {
    "step_spread": "spread",
    "row_spread": "spread",
    "length_ordered": "period",
    "epoch_edges": "epoch_edge",
    "divergence": "divergence",
    "shift": "learning_rate",
    "garbage": "rows",
}
NAMED_ALONE = tuple(CAUSES)[:5]  # faults beside which nothing else may be named
MIX_ERROR = dict.fromkeys(FAMILIES, 0.05) | {"changing": 0.08, "heavy": 0.12}


@dataclass(frozen=True, kw_only=True)
class Told:
    """The shares of a run beside the truth.

    Args:
        mix_error: Of mix / (mix + noise).
        rest_error: Of the rest's share, above zero where it is too large.
        covers: Whether the interval of the rest has its truth in it.
        half: Half of that interval.
        width: The same over its floor, 1.96 sqrt(2 / n) times the share of noise and rest.
    """

    mix_error: float
    rest_error: float
    covers: bool
    half: float
    width: float


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A diagnosis beside the truth.

    Args:
        case: The run's settings.
        verdict: Of the run.
        causes: Their names.
        has_row: Whether the planted row is among at most five that are called bad.
        missing: What could not be told.
        told: The shares; None where noise and rest are one number.
    """

    case: Case
    verdict: str
    causes: frozenset[str]
    has_row: bool
    missing: tuple[str, ...]
    told: Told | None

    @property
    def finds(self) -> bool:
        """Whether the planted cause is named."""
        return CAUSES[self.case.fault] in self.causes

    @property
    def invents(self) -> bool:
        """Whether a cause is named that is not there."""
        real = {CAUSES[self.case.fault]} if self.case.fault else set()
        return bool(self.causes - real - ({"epoch_edge"} if self.case.family == "edges" else set()))


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A comparison of two runs beside the truth, in noise deviations.

    Args:
        error: Of the difference.
        covers: Whether its interval has the truth in it.
        half: Half of that interval.
        same_rows: Whether the steps were differenced.
    """

    error: float
    covers: bool
    half: float
    same_rows: bool


def cases(family: str, ranks: Iterable[int], **settings: Any) -> list[Case]:
    """A case for every number of ranks and deal; with one rank, deals do not differ."""
    return [
        Case(seed=0, family=family, deal=deal, ranks=count, **settings)
        for count in ranks
        for deal in (DEALS if count > 1 else DEALS[:1])
    ]


def runs(of: Sequence[Case], count: int, first: int) -> list[Case]:
    """So many runs of the cases in turn, each with a seed of its own."""
    start = first + SEEDS * FAMILIES.index(of[0].family)
    return [replace(of[i % len(of)], seed=start + i) for i in range(count)]


def judged(case: Case) -> Judged:
    """Simulate a run and diagnose it."""
    run, truth = simulate_case(case)
    found = diagnose(run)
    rows = {row for cause in found.causes for row in cause.rows}
    return Judged(
        case=case,
        verdict=found.verdict,
        causes=frozenset(cause.cause for cause in found.causes),
        has_row=bool(truth.rows) and set(truth.rows) <= rows and len(rows) <= MOST_BAD_ROWS,
        missing=found.missing,
        told=_told(tuple(found.shares.values()), truth, found.window[1] - found.window[0] + 1),
    )


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
    part = mix.share / (mix.share + noise.share)
    true_part = truth.mix / (truth.mix + truth.noise)
    true_rest = truth.rest / (truth.mix + truth.noise + truth.rest)
    half = (rest.high - rest.low) / 2
    floor = 1.96 * float(np.sqrt(2 / steps)) * (noise.share + rest.share)
    return Told(
        mix_error=abs(part - true_part),
        rest_error=rest.share - true_rest,
        covers=rest.low <= true_rest <= rest.high,
        half=half,
        width=half / floor,
    )


def sorted_pair(case: Case, difference: float, *, in_order: bool = False) -> Compared:
    """A run whose batches are the same in every epoch, beside a bucketed one on the same rows.

    Args:
        case: The bucketed run.
        difference: Of the sorted run's curve above the other's, in nats.
        in_order: Whether the sorted batches come in the order of length in every epoch; they are
            shuffled otherwise, as ``order=sorted`` does.
    """
    group = case.epoch_steps if in_order else 0
    sorted_ = replace(case, order="sorted", group=group, own_noise=1.0, offset=difference)
    return _compared(simulate_case(sorted_), simulate_case(case))


def plan_pair(case: Case, difference: float) -> tuple[Compared, Compared]:
    """Two runs that drew the same rows: as they are, and as if their plans differed."""
    settings = {"family": case.family, "deal": case.deal, "ranks": case.ranks}
    first, second = same_plan(case.seed, difference, **settings)
    run, truth = first
    hidden = replace(run, headers=tuple((at, {**h, "plan": "another"}) for at, h in run.headers))
    return _compared(first, second), _compared((hidden, truth), second)


def _compared(first: tuple[Run, Truth], second: tuple[Run, Truth]) -> Compared:
    found, true = diagnose(first[0], second[0]).comparison, true_difference(first, second)
    assert found is not None
    unit = second[1].unit
    return Compared(
        error=abs(found.difference - true) / unit,
        covers=found.low <= true <= found.high,
        half=(found.high - found.low) / 2 / unit,
        same_rows=found.same_rows,
    )


def rate(values: Iterable[bool]) -> float:
    """Part that is true."""
    return float(np.mean(list(values)))


def reached(values: Iterable[float]) -> float:
    """What 95 % of the values do not exceed."""
    return float(np.quantile(list(values), 0.95))
