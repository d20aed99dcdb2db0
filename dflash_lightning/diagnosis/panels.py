"""The panels of the picture beside the loss: buckets, shares, two runs, residuals."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_lightning.diagnosis.result import Chance, Curves, Diagnosis, Share
from dflash_lightning.diagnosis.run import Floats
from dflash_lightning.diagnosis.statistics import moving_mean
from dflash_lightning.diagnosis.text import COLOURS, NAMES, percents
from dflash_lightning.diagnosis.thin import block_means, extremes, robust_limits, spaced

INK, FAINT = "#222222", "#777777"
SHORTEST, BETWEEN, LONGEST = (232, 165, 40), (196, 64, 96), (44, 30, 104)  # buckets, by length
RUNS = (("#1f4e8c", "#8fb8de"), ("#992266", "#dfa3c4"))  # dark and light, of a run and a baseline
SMALL = 8.5  # points
SMOOTH = 50  # steps on each side, at most, over which a bucket's curve is averaged
BINS = np.linspace(-4.5, 4.5, 37)  # of standardised residuals


def draw_buckets(axes: Any, diagnosis: Diagnosis) -> None:
    """One smoothed curve per bucket, named where it ends."""
    curves = diagnosis.curves
    set_title(axes, "One curve per length bucket (tokens), smoothed", "step", "loss (nats)")
    colours, ends, late = _ramp(len(curves.bucket_names)), [], []
    for k, colour in enumerate(colours):
        known = np.flatnonzero(np.isfinite(curves.bucket_loss[:, k]))
        smooth = moving_mean(curves.bucket_loss[known, k], 2 * min(len(known) // 25, SMOOTH) + 1)
        axes.plot(block_means(curves.step[known]), block_means(smooth), color=colour, linewidth=1.5)
        ends.append(float(smooth[-1]) if len(known) else np.nan)
        late.append(smooth[known >= curves.window[0]])
    together = np.concatenate(late)
    limit(axes, together, together)
    axes.set_xlim(*_padded(curves.step))
    _label_ends(axes, ends, curves.bucket_names, colours)


def _ramp(count: int) -> list[tuple[float, float, float]]:
    """Colours from light to dark, which print and colour-blind eyes tell apart."""
    at = np.linspace(0, 2, max(count, 2))[:count]
    ends = np.array([SHORTEST, BETWEEN, LONGEST]) / 255
    channels = [np.interp(at, [0, 1, 2], ends[:, channel]) for channel in range(3)]
    return [(float(r), float(g), float(b)) for r, g, b in zip(*channels, strict=True)]


def _label_ends(
    axes: Any, ends: Sequence[float], names: Sequence[str], colours: Sequence[Any]
) -> None:
    """Names at the right of the axes, at the height of what they name."""
    low, high = axes.get_ylim()
    heights = (np.asarray(ends) - low) / (high - low)
    shown = np.flatnonzero(np.isfinite(heights))
    lines = max((name.count("\n") for name in names), default=0) + 1
    gap = 0.052 * lines
    places = spaced(np.clip(heights[shown], gap / 2, 1 - gap / 2), gap)
    for i, y in zip(shown.tolist(), places, strict=True):
        beside(axes, names[i], y, colours[i])


def beside(axes: Any, words: str, height: float, colour: Any) -> None:
    """Words at the right of the axes, at a fraction of their height."""
    at = (1.01, height)
    axes.annotate(words, at, xycoords="axes fraction", va="center", fontsize=SMALL, color=colour)


def draw_shares(axes: Any, diagnosis: Diagnosis) -> None:
    """Shares over time as areas, and over the whole window in words."""
    curves, shares = diagnosis.curves, diagnosis.shares
    set_title(axes, f"What makes steps deviate by {diagnosis.std:.3f} nats", "step", "share (%)")
    parts = np.clip(np.nan_to_num(curves.shares), 0, None)
    parts = 100 * parts / np.maximum(parts.sum(1, keepdims=True), 1e-12)
    names = [_share_label(NAMES[key], share) for key, share in shares.items()]
    if shares["noise"] is None and shares["rest"] is None:
        parts = np.stack([parts[:, 0], parts[:, 1:].sum(1)], axis=1)
        names = [names[0], "noise and rest"]
    first, last = diagnosis.window
    x = np.concatenate([[first], curves.share_step, [last]])
    stacked = np.concatenate([parts[:1], parts, parts[-1:]])
    colours = list(COLOURS.values())
    axes.stackplot(x, stacked.T, colors=colours[: len(names)], alpha=0.85, linewidth=0)
    axes.set_ylim(0, 100)
    axes.set_xlim(*_padded(curves.step))
    dark = [colours[0], "#666666", colours[2]]  # grey words need more ink than grey areas
    _label_ends(axes, (stacked.cumsum(1) - stacked / 2)[-1].tolist(), names, dark)


def _share_label(name: str, share: Share | None) -> str:
    if share is None:
        return name
    low, high = percents(share.low), percents(share.high)
    return f"{name}\n{percents(share.share)} % ({low} to {high})"


def _padded(step: Floats) -> tuple[float, float]:
    """Limits that the panel of the loss has, too."""
    margin = 0.01 * (step[-1] - step[0])
    return step[0] - margin, step[-1] + margin


def draw_runs(axes: Any, diagnosis: Diagnosis) -> None:
    """Both runs at equal tokens, or steps where tokens are not known."""
    assert diagnosis.baseline is not None
    runs = (diagnosis.name, diagnosis.curves), diagnosis.baseline
    by_tokens = all(np.isfinite(curves.tokens).any() for _, curves in runs)
    most = max(float(np.nanmax(curves.tokens)) for _, curves in runs) if by_tokens else 1.0
    unit, named = (
        (1e9, "real tokens (billions)") if most >= 2e9 else (1e6, "real tokens (millions)")
    )
    set_title(axes, _against(diagnosis), named if by_tokens else "step", "loss (nats)")
    lines = []
    for (name, curves), (dark, light) in zip(runs, RUNS, strict=True):
        x = curves.tokens / unit if by_tokens else curves.step
        axes.plot(*extremes(x, curves.loss), color=light, linewidth=0.8)
        lines.append((*_mix_curve(x, curves), short(name, 30), dark))
    for x, y, name, dark in lines:
        axes.plot(x, y, color=dark, linewidth=2, label=name)
    limit(
        axes,
        np.concatenate([c.loss[c.window[0] : c.window[1] + 1] for _, c in runs]),
        np.concatenate([c.loss for _, c in runs]),
    )
    if diagnosis.comparison is not None:
        tokens, step = diagnosis.comparison.at_tokens, diagnosis.comparison.at_step
        _mark(axes, step if tokens is None else tokens / unit, "compared up to here")
    axes.margins(x=0.01)
    axes.legend(
        loc="best",
        fontsize=SMALL,
        edgecolor="none",
        framealpha=0.6,
        title="thin: loss, thick: mix-adjusted",
        title_fontsize=SMALL,
        alignment="left",
    )


def _mark(axes: Any, at: float, words: str) -> None:
    """A line across, with words at its foot."""
    axes.axvline(at, color=FAINT, linewidth=1, linestyle=":")
    axes.annotate(
        words,
        (at, 0.02),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        fontsize=SMALL,
        color=FAINT,
    )


def _against(diagnosis: Diagnosis) -> str:
    """The difference in words."""
    assert diagnosis.baseline is not None
    own, other = short(diagnosis.name, 16), short(diagnosis.baseline[0], 16)
    found = diagnosis.comparison
    if found is None:
        return f"{own} beside {other}"
    return f"{own} less {other}: {found.difference:+.3f} [{found.low:.3f}, {found.high:.3f}] nats"


def _mix_curve(x: Floats, curves: Curves) -> tuple[Floats, Floats]:
    """The smooth curve of a run; of the loss itself where there are too few steps for another."""
    if len(curves.trend):
        first, last = curves.window
        return block_means(x[first : last + 1]), block_means(curves.trend)
    known = np.isfinite(curves.loss)
    return block_means(x[known]), block_means(moving_mean(curves.loss[known], 9))


def residuals_of(curves: Curves) -> Floats:
    """Distance of each mix-adjusted step from its curve, in noise deviations."""
    first, last = curves.window
    if not len(curves.trend):
        return np.empty(0)
    z = (curves.adjusted[first : last + 1] - curves.trend) / curves.noise
    return z[np.isfinite(z)]


def draw_residuals(axes: Any, diagnosis: Diagnosis) -> None:
    """How the steps scatter, beside what the noise of their rows predicts."""
    z, shares = residuals_of(diagnosis.curves), diagnosis.shares
    if shares["mix"] is None:
        set_title(axes, "Steps around their curve", "deviations", "steps")
    else:
        set_title(axes, "Mix-adjusted steps around their curve", "noise deviations", "steps")
    counts, _ = np.histogram(np.clip(z, BINS[0], BINS[-1]), BINS)
    width = BINS[1] - BINS[0]
    centre = BINS[:-1] + width / 2
    # Red is what chance does not make: far more steps than the noise predicts.
    expected = len(z) * width * _normal(centre)
    excess = np.maximum(counts - expected, 0.0)
    excess[(excess < 3 * np.sqrt(expected) + 2) | (shares["rest"] is None)] = 0
    left = counts - excess
    axes.bar(centre, left, 0.92 * width, color=COLOURS["noise"], alpha=0.8)
    axes.bar(centre, excess, 0.92 * width, left, color=COLOURS["rest"], alpha=0.85)
    x = np.linspace(BINS[0], BINS[-1], 200)
    named = "normal distribution" if shares["noise"] is None else "what noise alone predicts"
    axes.plot(x, len(z) * width * _normal(x), color=INK, linewidth=2, label=named)
    axes.set_xlim(BINS[0], BINS[-1])
    axes.set_ylim(0, 1.2 * max(counts.max(), expected.max()))
    axes.legend(frameon=False, loc="upper left", fontsize=SMALL)
    if diagnosis.random is not None:
        _note_chance(axes, diagnosis.random)


def _normal(z: Floats) -> Floats:
    """Density of the normal distribution."""
    return np.exp(-np.square(z) / 2) / np.sqrt(2 * np.pi)


def _note_chance(axes: Any, chance: Chance) -> None:
    """Two of the five answers, in a corner."""
    words = (
        f"beyond 2: {percents(chance.outside)} % (chance: 5 %)\n"
        f"neighbours correlate: {round(chance.lag1, 2) + 0.0:.2f}\n"
        f"(chance: within {chance.lag1_band:.2f})"
    )
    note = axes.text(0.99, 0.98, words, transform=axes.transAxes, ha="right", va="top")
    note.set(fontsize=SMALL, color=INK, linespacing=1.4)


def set_title(axes: Any, title: str, x: str, y: str) -> None:
    """Title and names of the axes; steps are whole numbers."""
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    if x == "step":
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.xaxis.set_major_formatter("{x:,.0f}")


def limit(axes: Any, inside: Floats, whole: Floats) -> None:
    """Show what matters, without outliers."""
    limits = robust_limits(inside, whole)
    if limits is not None:
        axes.set_ylim(*limits)


def short(name: str, most: int) -> str:
    """The end of a name, in which matplotlib sees no formula."""
    name = name if len(name) <= most else f"...{name[3 - most :]}"
    return name.replace("$", r"\$")
