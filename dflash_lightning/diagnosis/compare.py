"""Two runs side by side: the difference of their mix-adjusted curves.

Direct standardisation (the same shares for both, those of the first run): each run's own fit is
asked for the same mean, over the last tenth of the tokens that both have seen. Two runs of one plan
and seed drew the same rows: there the steps are differenced first, and the rows' noise cancels.
"""

from dataclasses import dataclass

import numpy as np

from dflash_lightning.diagnosis.causes import step_length
from dflash_lightning.diagnosis.pool import pooled, usable
from dflash_lightning.diagnosis.result import Comparison
from dflash_lightning.diagnosis.run import Bools, Floats, Run
from dflash_lightning.diagnosis.statistics import (
    block_length,
    bootstrap_means,
    lag_correlation,
    student_quantile,
)
from dflash_lightning.diagnosis.variance import Decomposition, decompose

TENTH = 0.1
FEWEST = 8  # steps of the stretch that is compared
ORDERED = 0.5  # lag-1 correlation of length from which neighbouring steps are alike
ENOUGH = 40  # steps of a fit


@dataclass(frozen=True, eq=False)
class Pair:
    """Two runs up to the tokens that both have seen.

    Args:
        first: The run.
        second: The baseline.
        at: Tokens seen, or the step where tokens are not known.
        by_tokens: Which of the two.
    """

    first: Run
    second: Run
    at: float
    by_tokens: bool

    def stretch(self, run: Run) -> Bools:
        """The last tenth, at least eight steps, bool ``[T]``."""
        axis = _axis(run, by_tokens=self.by_tokens)
        chosen = axis > (1 - TENTH) * self.at
        chosen[-FEWEST:] = True
        return chosen


def _axis(run: Run, *, by_tokens: bool) -> Floats:
    return run.column("tokens_seen") if by_tokens else run.step.astype(np.float64)


def pair(first: Run, second: Run, *, start: int) -> Pair:
    """Cut two runs to what both have seen.

    Args:
        first: The run.
        second: The baseline.
        start: Step from which curves are fitted.

    Raises:
        ValueError: Too few steps lie within what both have seen.
    """
    first, second = (run.take(usable(run)) for run in (first, second))
    by_tokens = all(np.isfinite(r.column("tokens_seen")).all() for r in (first, second))
    ends = [float(_axis(run, by_tokens=by_tokens)[-1]) for run in (first, second)]
    cut = []
    for run in (first, second):
        inside = _axis(run, by_tokens=by_tokens) <= min(ends)
        late = inside & (run.step >= start)
        cut.append(run.take(late if late.sum() >= ENOUGH else inside))
        if len(cut[-1]) < ENOUGH:
            raise ValueError(
                f"a comparison needs {ENOUGH} steps of each run within what both have seen, "
                f"{run.name} has {len(cut[-1])}. Let the shorter run train on."
            )
    return Pair(cut[0], cut[1], min(ends), by_tokens)


def compare(runs: Pair) -> tuple[Comparison, Decomposition, float | None]:
    """Compare two runs.

    Returns:
        The comparison; the baseline's variance taken apart; and the variance of the steps'
        differences where both drew the same rows.
    """
    taken = [decompose(pooled(run)) for run in (runs.first, runs.second)]
    difference = same_rows_difference(runs)
    if difference is not None:
        value = float(difference.mean())
        error = float(bootstrap_means(difference[:, None]).std(ddof=1))
        # A tenth of a run is few blocks.
        times = student_quantile(len(difference) / block_length(len(difference)) - 1)
    else:
        share = taken[0].steps.share
        means = [
            _standardised(t, runs.stretch(run), _shares(t, taken[0], share))
            for t, run in zip(taken, (runs.first, runs.second), strict=True)
        ]
        value = means[0][0] - means[1][0]
        error, times = float(np.sqrt(means[0][1] + means[1][1])), 1.96
    low, high = value - times * error, value + times * error
    compared = Comparison(
        difference=value,
        low=low,
        high=high,
        at_tokens=runs.at if runs.by_tokens else None,
        at_step=int(runs.first.step[-1]),
        same_rows=difference is not None,
        says=_says(runs, taken, value, low, high),
    )
    spread = None if difference is None else float(difference.var(ddof=1))
    return compared, taken[1], spread


def _shares(taken: Decomposition, first: Decomposition, share: Floats) -> Floats:
    """The first run's shares, for the buckets that another run has rows of."""
    by_bucket = dict(zip(first.steps.active.tolist(), share.tolist(), strict=True))
    own = np.array([by_bucket.get(k, 0.0) for k in taken.steps.active.tolist()])
    return own / own.sum() if own.sum() > 0 else taken.steps.share


def _standardised(taken: Decomposition, chosen: Bools, share: Floats) -> tuple[float, float]:
    """Mean of the curve under given shares over a stretch, and its variance."""
    design = taken.fit.design
    regressors = design.mixed(np.broadcast_to(share, taken.steps.portion.shape))[chosen]
    regressors[:, design.offsets.stop :] = 0.0  # at the bucket's own length
    mean = regressors.mean(0, keepdims=True)
    variance = float(taken.fit.variance(mean)[0]) * taken.inflation
    return float(taken.fit.curve(mean)[0]), variance


def same_rows_difference(runs: Pair) -> Floats | None:
    """Step by step over the last tenth, where both drew the same rows; else None."""
    plans = [run.headers[0][1].get("plan") if run.headers else None for run in _both(runs)]
    steps = [run.step[runs.stretch(run)] for run in _both(runs)]
    if plans[0] is None or plans[0] != plans[1] or not np.array_equal(steps[0], steps[1]):
        return None
    rows = [run.column("rows")[runs.stretch(run)] for run in _both(runs)]
    if not np.array_equal(rows[0], rows[1]):
        return None
    first, second = (run.loss[runs.stretch(run)] for run in _both(runs))
    return first - second


def _both(runs: Pair) -> tuple[Run, Run]:
    return runs.first, runs.second


def _says(runs: Pair, taken: list[Decomposition], value: float, low: float, high: float) -> str:
    """The finding, and why a sorted baseline looks smooth."""
    where = f"at {runs.at / 1e6:,.3g} M tokens" if runs.by_tokens else f"at step {runs.at:,.0f}"
    if low <= 0 <= high:
        finding = "no difference beyond chance"
    else:
        finding = "the run is lower" if value < 0 else "the run is higher"
    line = f"{where}, mix adjusted, difference {value:+.3f} [{low:.3f}, {high:.3f}]: {finding}"
    return line + smoothness(runs.second, taken[1], taken[0])


def smoothness(baseline: Run, taken: Decomposition, own: Decomposition) -> str:
    """Why a sorted baseline looks smooth; empty where it is not sorted, or not smooth."""
    why = []
    length = step_length(baseline)
    alike = 0.0 if length is None else lag_correlation(length)
    if alike > ORDERED:
        why.append(f"neighbouring steps have the same length (lag-1 {alike:.2f})")
    if baseline.header.get("order") == "sorted":
        why.append("its batches never change")
    smoother = taken.total < own.total
    if not why:
        return ""
    return f". {baseline.name} {'looks smooth' if smoother else 'is sorted'}: {' and '.join(why)}"
