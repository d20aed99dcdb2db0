"""Diagnoses made by hand, with curves that look like the story's runs; for texts and pictures."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from dflash_lightning.diagnosis.result import (
    Cause,
    Chance,
    Comparison,
    Curves,
    Diagnosis,
    Interval,
    Share,
)
from dflash_lightning.diagnosis.run import Floats

EDGES = (0, 770, 1216, 1728, 2432, 3296, 8192)
NAMES = tuple(f"({low}, {high}]" for low, high in pairwise(EDGES))
PORTION = np.array([0.09, 0.1, 0.17, 0.08, 0.22, 0.34])
OFFSET = np.array([-0.8, -0.46, -0.2, 0.0, 0.2, 0.36])


def falling(step: Floats, *, end: float = 2.4) -> Floats:
    """A curve from the logarithm of a vocabulary down to about ``end`` nats."""
    return end + (10.8 - end) * (1 + step / 25) ** -1.2 + 0.6 * np.exp(-step / 400)


def made_curves(
    seed: int, total: int, *, first: int, order: str = "bucketed", tokens: float = 29_000.0
) -> Curves:
    """Curves of a run: one bucket more than the others in each step, or all steps in length order.

    Args:
        seed: Of the noise.
        total: Steps.
        first: First step that was taken apart.
        order: ``bucketed`` or ``sorted``.
        tokens: Real tokens of a step.
    """
    rng = np.random.default_rng(seed)
    step = np.arange(total, dtype=float)
    drawn = rng.choice(6, total, p=PORTION)
    if order == "sorted":
        drawn = np.clip((np.arange(total) % 90) // 15, 0, 5)
    portion = 0.45 * PORTION + 0.55 * (drawn[:, None] == np.arange(6))
    deviation = 0.1 * np.sqrt((portion**2).sum(1) / 0.4)
    level = falling(step)
    error = deviation * rng.standard_normal(total)
    adjusted = level + OFFSET @ PORTION + error
    loss = adjusted + (portion - PORTION) @ OFFSET
    bucket_loss = level[:, None] + OFFSET + 0.12 * rng.standard_normal((total, 6))
    bucket_loss[portion < 0.04] = np.nan
    window = slice(first, total)
    moved = 0.06 * np.cumsum(rng.standard_normal((12, 3)), axis=0) / np.sqrt(12)
    shares = np.clip(np.array([0.71, 0.26, 0.03]) + moved, -0.02, None)
    return Curves(
        step=step,
        tokens=np.cumsum(tokens * (1 + 0.1 * rng.standard_normal(total))),
        loss=loss,
        adjusted=adjusted,
        window=(first, total - 1),
        trend=(level + OFFSET @ PORTION)[window],
        noise=deviation[window],
        bucket_names=NAMES,
        bucket_loss=bucket_loss,
        share_step=np.linspace(first + 25, total - 26, 12),
        shares=shares / shares.sum(1, keepdims=True),
    )


LATER = (
    "whether the loss shifts at the peak of the rate, step 600: it takes 60 steps on either side, "
    "there are 311 and 0"
)
REASONS = (
    (
        "The loss follows the length of the rows that a step drew (71 % of its variance). Means: "
        "steps differ in data, not in what was learned. Tell: the mix-adjusted curve does not jump "
        "with them. Do: read the mix-adjusted curve; smoother steps: batching.deal=stratified."
    ),
    (
        "The loss scatters as much as its rows do (26 % of its variance). Means: just randomness "
        "of sampling. Tell: the rest is small. Do: average 20 steps to read the curve to +-0.05."
    ),
)


def orange(total: int = 311) -> Diagnosis:
    """The story's run, bucketed, still warming up."""
    return Diagnosis(
        name="orange",
        kind="run folder",
        verdict="ON TRACK",
        window=(60, total - 1),
        std=0.203,
        shares={
            "mix": Share(0.712, 0.654, 0.771, 0.03),
            "noise": Share(0.262, 0.221, 0.303, 0.021),
            "rest": Share(0.026, -0.021, 0.073, 0.024),
        },
        causes=(),
        mix_adjusted=Interval(4.312, 4.291, 4.333),
        comparison=None,
        random=Chance(
            lag1=0.031,
            lag1_band=0.126,
            ljung_box=9.8,
            p_value=0.458,
            outside=0.048,
            noticed=0.067,
            delta=0.05,
            average_adjusted=20,
            average_raw=66,
            apart_delta=0.05,
            apart_steps=75,
            apart_same_plan=None,
            changes={
                "now": 0.203,
                "twice the rows a step": 0.189,
                "batching.deal=stratified": 0.113,
            },
        ),
        missing=(LATER,),
        reasons=REASONS,
        facts={
            "mix": "which buckets a step drew: 1.9 in (0, 770], 2.6 in (3296, 8192]",
            "noise": "about 5,100 labels a step; expected from the rows' own spread",
            "rest": "95 % interval -2 .. 7 %: nothing to explain",
        },
        state="Warm-up: step 310 of 4,200, rate 1.2e-5 of 6.0e-4; judged again once it ends.",
        remedy="Smoother steps without more padding: batching.deal=stratified (predicted standard "
        "deviation 0.113).",
        curves=made_curves(1, total, first=60),
    )


def against_purple() -> Diagnosis:
    """The same beside a run whose batches come in the order of their lengths."""
    run = orange()
    assert run.random is not None
    return replace(
        run,
        comparison=Comparison(
            difference=0.011,
            low=-0.032,
            high=0.054,
            at_tokens=7.9e6,
            at_step=272,
            same_rows=False,
            says="at 7.9 M tokens, mix adjusted, difference +0.011 [-0.032, 0.054]: no difference "
            "beyond chance. purple looks smooth: neighbouring steps have the same length (lag-1 "
            "0.97) and its batches never change",
        ),
        random=replace(run.random, apart_same_plan=24),
        baseline=("purple", made_curves(2, 270, first=60, order="sorted")),
    )


def troubled() -> Diagnosis:
    """A run with a bad row, a stretch of scatter, a restart and a loss that rises."""
    run = orange(900)
    curves, rng = run.curves, np.random.default_rng(5)
    shock = np.zeros(900)
    shock[300:400] = 0.25 * rng.standard_normal(100)
    shock[[120, 410, 700]] += 1.1
    rise = np.r_[np.zeros(760), 1.2 * np.linspace(0, 1, 140)]
    rest = np.array([0.03, 0.1, 0.03, 0.05, 0.75, 0.4, 0.05, 0.03, 0.04, 0.3, 0.03, 0.03])
    mix = 0.66 * (1 - rest)
    loss, adjusted = (values + shock + rise for values in (curves.loss, curves.adjusted))
    return replace(
        run,
        name="runs/2026-11-30/bad-data",
        verdict="INVESTIGATE",
        std=0.291,
        shares={
            "mix": Share(0.402, 0.333, 0.471, 0.035),
            "noise": Share(0.211, 0.180, 0.242, 0.016),
            "rest": Share(0.387, 0.291, 0.483, 0.049),
        },
        causes=(
            Cause(
                cause="rows",
                steps=(120, 410, 700),
                rows=(4711,),
                share=0.083,
                says="rows far beyond the others, likely bad data: row 4711 in 3 steps",
            ),
            Cause(
                cause="spread",
                steps=(300, 399),
                says="the loss scatters 4.1 times as much (variance) from step 300 to 399, and its "
                "rows do not explain it",
            ),
            Cause(
                cause="divergence",
                steps=(762, 899),
                says="the mix-adjusted loss has risen from 2.410 around step 762 to 3.480, "
                "12 noise deviations",
            ),
            Cause(
                cause="non_finite",
                steps=(555, 556),
                says="2 steps with a loss or gradient that is not finite; their updates are "
                "skipped",
            ),
            Cause(
                cause="restart",
                steps=(600,),
                says="1 restarts; the steps before each are as they would have been without it",
            ),
        ),
        missing=(),
        state="",
        facts={**run.facts, "rest": "95 % interval 29 .. 48 %: more than chance"},
        remedy="Lower optimizer.lr to half and resume from before step 762.",
        curves=replace(
            curves,
            loss=loss,
            adjusted=adjusted,
            trend=curves.trend + rise[60:],
            bucket_loss=curves.bucket_loss + rise[:, None],
            shares=np.stack([mix, 1 - mix - rest, rest], axis=1),
        ),
    )


def bare() -> Diagnosis:
    """A curve of another trainer: steps and losses, nothing else."""
    run = orange(500)
    assert run.random is not None
    unknown = np.full(500, np.nan)
    curves = replace(
        run.curves,
        tokens=unknown,
        adjusted=run.curves.loss,
        noise=np.full(440, 0.203),
        bucket_names=(),
        bucket_loss=np.empty((500, 0)),
        share_step=np.empty(0),
        shares=np.empty((0, 3)),
    )
    return replace(
        run,
        name="loss.csv",
        kind="curve of steps and losses",
        shares={"mix": None, "noise": None, "rest": None},
        mix_adjusted=None,
        random=replace(run.random, noticed=None, changes={"now": 0.203}),
        missing=("mix, noise and rest: the ledger.csv of a run folder would tell them",),
        reasons=(),
        facts={},
        state="",
        remedy="",
        curves=curves,
    )
