"""The picture of a diagnosis: what the loss does, what chance allows, and where the rest is.

Colours mean the same in all panels: blue what the length mix does, grey what sampling noise does,
red what is unexplained or wrong.
"""

from pathlib import Path
from typing import Any

import numpy as np

from dflash_lightning.diagnosis.panels import (
    FAINT,
    INK,
    SMALL,
    beside,
    draw_buckets,
    draw_residuals,
    draw_runs,
    draw_shares,
    limit,
    residuals_of,
    set_title,
    short,
)
from dflash_lightning.diagnosis.result import Curves, Diagnosis
from dflash_lightning.diagnosis.text import COLOURS, NAMES, RANGES, VERDICT_COLOURS, percents
from dflash_lightning.diagnosis.thin import POINTS, block_means, extremes
from dflash_lightning.figure import check_plot, empty_figure, write_figure

LOSS = "#74a9d8"  # blue: it holds the mix
DOTS = 1500  # steps that are shown one by one


def plot(diagnosis: Diagnosis, path: Path | None = None) -> Any:
    """Draw a diagnosis.

    Args:
        diagnosis: What to draw.
        path: The picture to write, with the folder it goes to; None writes none.

    Returns:
        The figure of matplotlib.

    Raises:
        ValueError: matplotlib is not installed, or the ending of the path names no format.
    """
    if path is not None:
        check_plot(path)
    panels = _panels(diagnosis)
    height = 8 if len(panels) > 1 else 4.6
    figure = empty_figure("a plot" if path is None else f"plot {path}", 12, height)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    layouts = {1: [[0]], 2: [[0], [1]], 3: [[0, 0], [1, 2]], 4: [[0, 1], [2, 3]]}
    for place, axes in figure.subplot_mosaic(layouts[len(panels)]).items():
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=SMALL)
        panels[place](axes, diagnosis)
    _draw_head(figure, diagnosis)
    if path is not None:
        write_figure(figure, path)
    return figure


def _panels(diagnosis: Diagnosis) -> list[Any]:
    """What there is to draw, one to four functions."""
    curves = diagnosis.curves
    panels = [_draw_loss]
    if curves.bucket_names and len(curves.step):
        panels.append(draw_buckets)
    if diagnosis.shares["mix"] is not None and len(curves.share_step):
        panels.append(draw_shares)
    if diagnosis.baseline is not None:
        panels.append(draw_runs)
    elif len(residuals_of(curves)) > 1:
        panels.append(draw_residuals)
    return panels


def _draw_head(figure: Any, diagnosis: Diagnosis) -> None:
    """Run and verdict on the left, shares on the right."""
    figure.suptitle(
        f"{short(diagnosis.name, 48)}:  {diagnosis.verdict}",
        x=0.012,
        ha="left",
        fontsize=14,
        fontweight="bold",
        color=VERDICT_COLOURS[diagnosis.verdict],
    )
    known = [
        f"{percents(share.share)} % {NAMES[key]}"
        for key, share in diagnosis.shares.items()
        if share is not None
    ]
    shown = ", ".join(known) or f"deviation from step to step {diagnosis.std:.3f} nats"
    height = figure.get_figheight()
    figure.text(0.988, 1 - 0.14 / height, shown, ha="right", va="top", fontsize=10.5, color=INK)


def _draw_loss(axes: Any, diagnosis: Diagnosis) -> None:
    """Loss, its mix-adjusted curve and the noise around it."""
    curves = diagnosis.curves
    first, last = curves.window
    inside = slice(first, last + 1)
    title = "Loss, and what chance allows" if len(curves.trend) else "Loss"
    set_title(axes, title, "step", "loss (nats)")
    axes.plot(*extremes(curves.step, curves.loss), color=LOSS, linewidth=0.9, label="loss")
    if len(curves.trend):
        _draw_curve(axes, curves, is_adjusted=diagnosis.shares["mix"] is not None)
    limit(axes, curves.loss[inside], curves.loss)
    if first > 0:
        start, end = curves.step[0], curves.step[first]
        axes.axvspan(start, end, color="#f3f3f3", zorder=0)
        if end - start > 0.1 * (curves.step[-1] - start):
            at = ((start + end) / 2, 0.5)
            where = axes.get_xaxis_transform()
            axes.text(*at, "left out", transform=where, ha="center", fontsize=SMALL, color=FAINT)
    axes.margins(x=0.01)
    _draw_causes(axes, diagnosis)
    axes.legend(loc="best", fontsize=SMALL, markerscale=2.5, edgecolor="none", framealpha=0.6)


def _draw_curve(axes: Any, curves: Curves, *, is_adjusted: bool) -> None:
    """The smooth curve, the noise around it below the loss, and the steps at a fixed mix."""
    inside = slice(curves.window[0], curves.window[1] + 1)
    name = "mix-adjusted curve" if is_adjusted else "its curve"
    if is_adjusted:
        every = -(-len(curves.trend) // DOTS)
        dots = curves.step[inside][::every], curves.adjusted[inside][::every]
        axes.plot(*dots, ".", color=INK, ms=2, alpha=0.6, zorder=3, label="mix-adjusted loss")
    x, trend, noise = map(block_means, (curves.step[inside], curves.trend, curves.noise))
    axes.plot(x, trend, color=INK, linewidth=2, zorder=3, label=name)
    if not np.isfinite(noise).any():
        return
    named = f"{'noise: ' if is_adjusted else ''}1 and 2 deviations"
    for times, alpha, label in ((2, 0.22, named), (1, 0.3, "_")):
        band = axes.fill_between(x, trend - times * noise, trend + times * noise, label=label)
        band.set(color=FAINT, alpha=alpha, linewidth=0)
        # The loss of very many steps is an area, through which nothing below it is seen.
        band.set_zorder(1 if len(curves.step) <= POINTS else 2.5)


def _draw_causes(axes: Any, diagnosis: Diagnosis) -> None:
    """One line per cause below the curve, with its steps."""
    causes = [cause for cause in diagnosis.causes if cause.steps]
    if not causes:
        return
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom - 0.055 * (len(causes) + 0.5) * (top - bottom), top)
    for i, cause in enumerate(causes):
        y = 0.04 + 0.05 * i
        whole = cause.cause in RANGES
        axes.plot(
            cause.steps,
            [y] * len(cause.steps),
            "-" if whole else "|",
            color=COLOURS["rest"],
            linewidth=3,
            solid_capstyle="butt",
            markersize=8,
            markeredgewidth=1.5,
            transform=axes.get_xaxis_transform(),
        )
        beside(axes, cause.cause.replace("_", " "), y, COLOURS["rest"])
