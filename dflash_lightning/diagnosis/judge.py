"""The diagnosis: choose the steps, take their variance apart, look for causes, judge."""

from itertools import pairwise
from pathlib import Path

import numpy as np

from dflash_lightning.diagnosis import words
from dflash_lightning.diagnosis.causes import (
    Evidence,
    divergence,
    epoch_edge,
    non_finite,
    period,
    restart,
    spread,
)
from dflash_lightning.diagnosis.chance import chance_of
from dflash_lightning.diagnosis.compare import compare, pair
from dflash_lightning.diagnosis.ledger import read_run
from dflash_lightning.diagnosis.peak import learning_rate, warmup_end
from dflash_lightning.diagnosis.pool import pooled, usable
from dflash_lightning.diagnosis.result import Cause, Comparison, Curves, Diagnosis, Interval, Share
from dflash_lightning.diagnosis.run import Bools, Floats, Run
from dflash_lightning.diagnosis.sources import Sources, by_source
from dflash_lightning.diagnosis.tops import bad_rows, tops_of
from dflash_lightning.diagnosis.variance import Decomposition, decompose

ENOUGH = 40  # steps that can be taken apart
EARLY = 60  # steps at the beginning that are left out while the rate still rises
SETTLED = 80  # steps after the warm-up from which everything is judged
LAST = 50  # steps of the mix-adjusted value
REST, REST_ALARM, REST_WATCH = 0.1, 3.5, 2.5  # share; standard errors
SECTION, SECTIONS = 80, 12  # steps of a section of shares over time, at least; sections, at most
ALARMS = ("non_finite", "divergence")
LATE_ALARMS = ("learning_rate", "spread")
WATCHED = ("rows", "period")


def diagnose(
    run: str | Path | Run,
    baseline: str | Path | Run | None = None,
    *,
    sources: Sources | None = None,
) -> Diagnosis:
    """Say why the loss of a run jumps, and whether it is on track.

    Args:
        run: A run folder, its ``ledger.csv``, a ``metrics.csv``, a CSV file of step and loss, an
            offline W&B folder, a W&B run path, or what ``read_run`` returned.
        baseline: Another run to compare with.
        sources: What each step drew of each source; ``dflash_lightning.data.sources`` knows, where
            the store is at hand.

    Returns:
        The verdict with its reasons; prints as text, shows itself in a notebook.

    Raises:
        ValueError: A source cannot be read, or has no steps in common with the baseline's.
    """
    run = run if isinstance(run, Run) else read_run(run)
    other = baseline if isinstance(baseline, Run) or baseline is None else read_run(baseline)
    window = choose_window(run)
    found = [*non_finite(run), *restart(run)]
    if (window & usable(run)).sum() < ENOUGH:
        return _too_early(run, found, other)
    evidence = gather(run, window)
    causes, lacking = _causes(evidence, sources)
    comparison, spread_of, same_plan = _compared(run, other)
    chance = chance_of(evidence, other=spread_of, same_plan=same_plan)
    taken = evidence.taken
    causes = [*found, *causes]
    judged = is_settled(run)
    verdict, because = _verdict(taken, causes, judged=judged)
    missing = (*run.missing, *_missing(taken, run), *lacking)
    return Diagnosis(
        name=run.name,
        kind=run.kind,
        verdict=verdict,
        window=(int(taken.steps.step[0]), int(taken.steps.step[-1])),
        std=float(np.sqrt(taken.total)),
        shares=named_shares(taken),
        causes=tuple(causes),
        mix_adjusted=_last(taken),
        comparison=comparison,
        random=chance,
        missing=tuple(dict.fromkeys(missing)),
        reasons=words.reasons(run, taken, causes, chance, comparison),
        facts=words.facts(run, taken),
        state=words.state(run, warmup_end(run), judged=judged),
        remedy=words.remedy(run, taken, because, chance),
        curves=curves_of(run, evidence),
        because=because,
        baseline=None if other is None else (other.name, _curves_alone(other)),
    )


def choose_window(run: Run) -> Bools:
    """Steps to take apart: those after the warm-up, or, before it ends, all but the first."""
    end = warmup_end(run)
    if is_settled(run) and end is not None:
        return run.step >= end
    early = min(EARLY, len(run) // 5)
    return np.arange(len(run)) >= early


def is_settled(run: Run) -> bool:
    """Whether the warm-up is over for long enough to judge everything."""
    end = warmup_end(run) or 0
    return bool(len(run)) and int((run.step >= end).sum()) >= SETTLED and len(run) >= SETTLED


def gather(run: Run, window: Bools) -> Evidence:
    """Take the window apart and adjust the whole curve for its mix."""
    steps = pooled(run.take(window))
    taken = decompose(steps)
    whole = pooled(run)
    # Outside the window the offsets of its nearest step hold.
    nearest = np.clip(np.searchsorted(steps.step, whole.step), 0, len(steps.step) - 1)
    offset = np.zeros(whole.portion.shape)
    places = np.searchsorted(whole.active, steps.active)
    offset[:, places] = taken.fit.offset[nearest]
    adjusted = whole.loss - (whole.portion * offset).sum(1)
    return Evidence(run=run, taken=taken, adjusted=adjusted, adjusted_step=whole.step)


def _causes(evidence: Evidence, sources: Sources | None) -> tuple[list[Cause], list[str]]:
    """What moves the loss beside mix and noise, and what could not be asked."""
    taken = evidence.taken
    shifted, lacking = learning_rate(evidence.run, evidence.deviation, taken.inflation)
    tops = tops_of(evidence.run)
    causes = [
        *divergence(evidence),
        *shifted,
        *spread(evidence),
        *bad_rows(evidence, tops),
        *period(evidence),
        *epoch_edge(evidence),
        *by_source(evidence, sources),
    ]
    return causes, [lacking] if lacking else []


def _compared(run: Run, other: Run | None) -> tuple[Comparison | None, float | None, float | None]:
    """The comparison, the baseline's variance at a fixed mix, and that of paired differences."""
    if other is None:
        return None, None, None
    ends = [warmup_end(r) or 0 for r in (run, other) if is_settled(r)]
    comparison, taken, same_plan = compare(pair(run, other, start=max(ends, default=0)))
    return comparison, taken.parts[1] + taken.parts[2], same_plan


def named_shares(taken: Decomposition) -> dict[str, Share | None]:
    """The shares that can be told: of a bare curve none; of imputed noise only the mix."""
    mix, noise, rest = taken.shares
    if taken.steps.num_buckets == 1 and taken.confounded:
        return {"mix": None, "noise": None, "rest": None}
    if taken.confounded:
        return {"mix": mix, "noise": None, "rest": None}
    return {"mix": mix, "noise": noise, "rest": rest}


def _verdict(taken: Decomposition, causes: list[Cause], *, judged: bool) -> tuple[str, str]:
    """The verdict, and the cause that decides it: ``rest`` for what is unexplained, or none."""
    names = [cause.cause for cause in causes]
    rest = taken.shares[2]
    surprising = rest.share / rest.error if judged and not taken.confounded else 0.0
    alarming = [name for name in names if name in ALARMS or (judged and name in LATE_ALARMS)]
    if surprising > REST_ALARM and rest.share > REST:
        alarming.append("rest")
    if alarming:
        return "INVESTIGATE", alarming[0]
    watched = [name for name in names if name in WATCHED]
    if surprising > REST_WATCH:
        watched.append("rest")
    return ("WATCH", watched[0]) if watched else ("ON TRACK", "")


def _missing(taken: Decomposition, run: Run) -> list[str]:
    """What the numbers at hand cannot tell."""
    lines = []
    steps = taken.steps
    if taken.confounded:
        lines.append(
            "sampling noise and rest apart: the source knows no noise, or most steps hold lone "
            "rows of a bucket; the ledger, or more rows a step, would tell"
        )
    elif steps.imputed > 0.1:
        lines.append(
            f"how lone rows of a bucket would scatter ({100 * steps.imputed:.0f} % of the noise): "
            "their whole residual counts as noise; more rows a step would tell"
        )
    if run.num_buckets > steps.num_buckets:
        lines.append("buckets without rows in these steps are left out of the mix")
    return lines


def _last(taken: Decomposition) -> Interval:
    """Mean of the last 50 steps of the mix-adjusted curve."""
    fit = taken.fit
    mean = np.zeros(len(fit.coefficients))
    mean[: fit.design.offsets.start] = fit.design.common[-LAST:].mean(0)
    value = float(mean @ fit.coefficients)
    half = 1.96 * float(np.sqrt(fit.variance(mean[None])[0] * taken.inflation))
    return Interval(value, value - half, value + half)


def curves_of(run: Run, evidence: Evidence) -> Curves:
    """What the picture shows."""
    taken = evidence.taken
    kept = run.take(usable(run))
    first = int(np.searchsorted(kept.step, taken.steps.step[0]))
    triple = moving_triples(taken)
    edges = list(run.header.get("boundaries", ()))
    named = tuple(f"({a}, {b}]" for a, b in pairwise(edges))
    return Curves(
        step=kept.step.astype(np.float64),
        tokens=kept.column("tokens_seen"),
        loss=kept.loss,
        adjusted=evidence.adjusted,
        window=(first, first + len(taken.steps.step) - 1),
        trend=taken.fit.trend,
        noise=np.sqrt(taken.steps.expected_noise),
        bucket_names=named or tuple(f"bucket {k}" for k in range(run.num_buckets)),
        bucket_loss=kept.bucket("loss"),
        share_step=triple[0],
        shares=triple[1],
    )


def moving_triples(taken: Decomposition) -> tuple[Floats, Floats]:
    """Shares of sections of the window: their middle steps ``[M]``, and shares ``[M, 3]``."""
    count = min(max(len(taken.triple) // SECTION, 2), SECTIONS)
    sections = np.array_split(np.arange(len(taken.triple)), count)
    at = np.array([taken.steps.step[s].mean() for s in sections])
    parts = np.maximum([taken.triple[s].mean(0) for s in sections], 0.0)
    return at, parts / np.maximum(parts.sum(1, keepdims=True), 1e-300)


def _curves_alone(run: Run) -> Curves:
    """Curves of a baseline."""
    if (usable(run) & choose_window(run)).sum() < ENOUGH:
        return _bare_curves(run)
    return curves_of(run, gather(run, choose_window(run)))


def _bare_curves(run: Run) -> Curves:
    """Curves of a run that is too short to take apart."""
    kept = run.take(usable(run))
    none = np.empty(0)
    return Curves(
        step=kept.step.astype(np.float64),
        tokens=kept.column("tokens_seen"),
        loss=kept.loss,
        adjusted=kept.loss,
        window=(0, len(kept) - 1),
        trend=none,
        noise=none,
        bucket_names=(),
        bucket_loss=kept.bucket("loss"),
        share_step=none,
        shares=np.empty((0, 3)),
    )


def _too_early(run: Run, causes: list[Cause], other: Run | None) -> Diagnosis:
    """What can be said of a run with too few steps."""
    count = int(usable(run).sum())
    alarm = any(cause.cause in ALARMS for cause in causes)
    needed = f"it takes about {ENOUGH + EARLY} steps with a finite loss, there are {count}"
    missing = (*run.missing, f"{'all else, the comparison too' if other else 'all else'}: {needed}")
    first = int(run.step[0]) if len(run) else 0
    return Diagnosis(
        name=run.name,
        kind=run.kind,
        verdict="INVESTIGATE" if alarm else "WATCH",
        window=(first, int(run.step[-1]) if len(run) else 0),
        std=float(np.std(np.diff(run.loss[usable(run)])) / np.sqrt(2)) if count > 2 else 0.0,
        shares={"mix": None, "noise": None, "rest": None},
        causes=tuple(causes),
        mix_adjusted=None,
        comparison=None,
        random=None,
        missing=missing,
        reasons=(),
        facts={},
        state="Too early to judge.",
        remedy=words.does("non_finite") if alarm else "Let it train on, and ask again.",
        curves=_bare_curves(run),
        because="non_finite" if alarm else "",
        baseline=None if other is None else (other.name, _curves_alone(other)),
    )
