"""What a diagnosis finds: plain values, in the words of ``to_dict()``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dflash_lightning.diagnosis.run import Floats


class Interval(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


class Share(NamedTuple):
    """A part of the variance with its 95 % interval, as fractions; and its standard error."""

    share: float
    low: float
    high: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One thing that moves the loss.

    Args:
        cause: ``rows``, ``epoch_edge``, ``learning_rate``, ``spread``, ``period``, ``divergence``,
            ``non_finite``, ``restart``, or ``source`` where the store is at hand.
        steps: First and last step that it concerns, or the steps themselves where they are few.
        rows: Row numbers in the store, the worst first; empty where rows are not the cause.
        share: Part of the variance that it explains; None where that is no question.
        says: What is seen, in one line.
    """

    cause: str
    steps: tuple[int, ...]
    rows: tuple[int, ...] = ()
    share: float | None = None
    says: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The mix-adjusted difference of two runs, first less second.

    Args:
        difference: In nats.
        low: Lower end of the 95 % interval.
        high: Upper end.
        at_tokens: Real tokens that both had seen; None where compared by steps.
        at_step: Step of the first run there.
        same_rows: Whether both drew the same rows, so that noise cancels.
        says: The finding in words.
    """

    difference: float
    low: float
    high: float
    at_tokens: float | None
    at_step: int
    same_rows: bool
    says: str


@dataclass(frozen=True, kw_only=True)
class Chance:
    """Whether it is just randomness: five questions.

    Args:
        lag1: Correlation of neighbouring standardised residuals.
        lag1_band: What chance allows, +- this.
        ljung_box: Q over ten lags.
        p_value: Of Q against chi-squared with ten degrees of freedom.
        outside: Part of the steps beyond two deviations; 0.0455 is expected.
        noticed: The smallest rest, as a share, that would have been noticed in 80 % of cases; None
            where noise and rest are one number.
        delta: Half width in nats to which a curve should be readable.
        average_adjusted: Steps to average for it, mix adjusted.
        average_raw: The same without adjusting.
        apart_delta: Difference of two runs to tell apart, nats.
        apart_steps: Steps needed for it (95 %, 80 %), mix adjusted.
        apart_same_plan: The same for two runs that draw the same rows; None without such a run.
        changes: What a change would make of the deviation from step to step, in words: nats.
    """

    lag1: float
    lag1_band: float
    ljung_box: float
    p_value: float
    outside: float
    noticed: float | None
    delta: float
    average_adjusted: int
    average_raw: int
    apart_delta: float
    apart_steps: int
    apart_same_plan: int | None
    changes: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "memory": {
                "lag1": self.lag1,
                "band": self.lag1_band,
                "q": self.ljung_box,
                "p": self.p_value,
                "outside": self.outside,
                "expected": 0.0455,
            },
            "power": {"rest": self.noticed},
            "smoothing": {
                "delta": self.delta,
                "steps": self.average_adjusted,
                "raw_steps": self.average_raw,
            },
            "apart": {
                "delta": self.apart_delta,
                "steps": self.apart_steps,
                "same_plan_steps": self.apart_same_plan,
            },
            "change": dict(self.changes),
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class Curves:
    """What the picture shows of a run; float64 ``[T]`` unless said otherwise.

    Args:
        step: Steps of the whole run.
        tokens: Real tokens seen; NaN where not known.
        loss: Loss of the step.
        adjusted: The same under the data set's mix.
        window: The steps that were taken apart, first and last position.
        trend: Mix-adjusted curve inside the window, ``[W]``.
        noise: Deviation that the rows explain, inside the window, ``[W]``.
        bucket_names: ``(0, 770]`` and so on; empty without buckets.
        bucket_loss: Of each bucket, ``[T, K]``.
        share_step: Steps at which shares over time stand, ``[M]``.
        shares: Mix, noise and rest there, ``[M, 3]``.
    """

    step: Floats
    tokens: Floats
    loss: Floats
    adjusted: Floats
    window: tuple[int, int]
    trend: Floats
    noise: Floats
    bucket_names: tuple[str, ...]
    bucket_loss: Floats
    share_step: Floats
    shares: Floats


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Diagnosis:
    """Why the loss of a run jumps; prints as text, and as HTML in notebooks.

    Args:
        name: Of the run.
        kind: What it was read from.
        verdict: ``ON TRACK``, ``WATCH`` or ``INVESTIGATE``.
        window: First and last step that were taken apart.
        std: Deviation of the loss from step to step in nats, the trend left out.
        shares: ``mix``, ``noise``, ``rest``; None where the source cannot tell them.
        causes: What was found beside chance.
        mix_adjusted: Mean of the last 50 steps of the mix-adjusted curve; None with too few steps.
        comparison: With a baseline.
        random: The five questions; None with too few steps.
        missing: What the source could not tell, and what would supply it.
        reasons: What is seen, what it means, how to tell, what to change.
        facts: Lines that the report prints beside the shares, by share name.
        state: Where the run is in its schedule, one line; may be empty.
        remedy: The cheapest change, one line; may be empty.
        curves: For the picture.
        because: What decided a verdict other than ON TRACK: the name of a cause, or ``rest``.
        baseline: Name and curves of the baseline.
    """

    name: str
    kind: str
    verdict: str
    window: tuple[int, int]
    std: float
    shares: dict[str, Share | None]
    causes: tuple[Cause, ...]
    mix_adjusted: Interval | None
    comparison: Comparison | None
    random: Chance | None
    missing: tuple[str, ...]
    reasons: tuple[str, ...]
    facts: dict[str, str]
    state: str
    remedy: str
    curves: Curves
    because: str = ""
    baseline: tuple[str, Curves] | None = None

    def __repr__(self) -> str:
        from dflash_lightning.diagnosis.text import text

        return text(self)

    def _repr_html_(self) -> str:
        from dflash_lightning.diagnosis.text import html

        return html(self)

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw loss, noise, buckets and shares, and the baseline where there is one.

        Args:
            path: The picture to write, with the folder it goes to; its ending names the format.

        Returns:
            The figure of matplotlib, which a notebook shows.

        Raises:
            ValueError: matplotlib is not installed, or the ending of the path names no format.
        """
        from dflash_lightning.diagnosis.plot import plot

        return plot(self, None if path is None else Path(path))

    def to_dict(self) -> dict[str, Any]:
        """Plain types, the keys of ``--json``."""
        shares = {
            name: None
            if part is None
            else {"share": part.share, "low": part.low, "high": part.high}
            for name, part in self.shares.items()
        }
        comparison = self.comparison
        return {
            "run": self.name,
            "source": self.kind,
            "verdict": self.verdict,
            "window": list(self.window),
            "std": self.std,
            "shares": shares,
            "causes": [
                {
                    "cause": c.cause,
                    "steps": list(c.steps),
                    "rows": list(c.rows),
                    "share": c.share,
                    "says": c.says,
                }
                for c in self.causes
            ],
            "mix_adjusted": None if self.mix_adjusted is None else self.mix_adjusted._asdict(),
            "comparison": None
            if comparison is None
            else {
                "difference": comparison.difference,
                "low": comparison.low,
                "high": comparison.high,
                "at_tokens": comparison.at_tokens,
                "at_step": comparison.at_step,
                "same_rows": comparison.same_rows,
                "says": comparison.says,
            },
            "random": None if self.random is None else self.random.to_dict(),
            "missing": list(self.missing),
            "reasons": list(self.reasons),
        }
