"""Draws runs side by side on the tokens axis: ``python draw_orders.py OUT.png RUN...``

The README's picture of the four orders is made with it.
"""

import sys
from pathlib import Path

import numpy as np

from dflash_lightning.diagnosis import Diagnosis, diagnose
from dflash_lightning.figure import empty_figure, write_figure

LOSS, INK, BAND = "#74a9d8", "#222222", "#999999"
VERDICTS = {"ON TRACK": "#228833", "WATCH": "#b8860b", "INVESTIGATE": "#cc3311"}


def draw(runs: list[Diagnosis], path: Path) -> None:
    """One panel per run, all with the same axes."""
    figure = empty_figure(str(path), 3.3 * len(runs), 4.4)
    all_axes = np.atleast_1d(figure.subplots(1, len(runs), sharex=True, sharey=True))
    for axes, run in zip(all_axes, runs, strict=True):
        draw_run(axes, run)
    inside = [run.curves.loss[run.curves.window[0] :] for run in runs]
    low, high = np.quantile(np.concatenate(inside), [0.001, 0.998])
    all_axes[0].set_ylim(low - 0.3, high + 0.5)
    all_axes[0].set_ylabel("loss (nats)")
    all_axes[0].legend(frameon=False, fontsize=8, loc="lower left", markerscale=3)
    write_figure(figure, path)


def draw_run(axes, run: Diagnosis) -> None:
    """Loss, mix-adjusted loss, its curve, and two noise deviations around it."""
    curves = run.curves
    first, last = curves.window
    tokens = curves.tokens / 1e3
    inside = slice(first, last + 1)
    axes.plot(tokens, curves.loss, color=LOSS, linewidth=0.8, label="loss")
    axes.plot(tokens[inside], curves.adjusted[inside], ".", color=INK, ms=2, label="mix adjusted")
    axes.plot(tokens[inside], curves.trend, color=INK, linewidth=1.6, label="its curve")
    low, high = curves.trend - 2 * curves.noise, curves.trend + 2 * curves.noise
    axes.fill_between(tokens[inside], low, high, color=BAND, alpha=0.3, linewidth=0, label="noise")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("thousand tokens")
    axes.set_title(run.name, fontsize=11, fontweight="bold", pad=32)
    parts = ", ".join(
        f"{name} {100 * share.share:.0f} %" for name, share in run.shares.items() if share
    )
    note = {"transform": axes.transAxes, "ha": "center", "va": "bottom"}
    axes.text(0.5, 1.06, run.verdict, color=VERDICTS[run.verdict], fontsize=10, **note)
    axes.text(0.5, 1.01, f"deviation {run.std:.2f}: {parts}", fontsize=8.5, color=INK, **note)


if __name__ == "__main__":
    draw([diagnose(run) for run in sys.argv[2:]], Path(sys.argv[1]))
