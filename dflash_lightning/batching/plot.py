"""The picture of a comparison: where the padding is, and what more buckets would give."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_lightning.batching.buckets import Floats, Ints
from dflash_lightning.batching.compare import Comparison
from dflash_lightning.batching.plan import EpochPlan, plan_epoch
from dflash_lightning.batching.settings import Batching
from dflash_lightning.figure import check_plot, empty_figure, write_figure

BINS = 128
INK, REAL, PADDING, PLAIN = "#333333", "#4477aa", "#cc3311", "#ee9988"


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Draw tokens by row length with boundaries and padding, and efficiency by number of buckets.

    Args:
        comparison: What to draw.
        path: The picture to write, with the folder it goes to.

    Raises:
        ValueError: As ``check_plot``.
    """
    check_plot(path)
    figure = empty_figure(f"plot {path}", 12, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
    _draw_tokens(left, comparison)
    _draw_efficiency(right, comparison)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


def _draw_tokens(axes: Any, comparison: Comparison) -> None:
    """Real tokens by row length; on top of them the padding of these rows."""
    plan, report = comparison.plan, comparison.own
    edges = np.linspace(0, plan.boundaries[-1], BINS + 1)
    width = edges[1] - edges[0]
    at = edges[:-1] + width / 2

    def millions(tokens: npt.NDArray[np.integer]) -> Floats:
        return np.histogram(plan.lengths, edges, weights=tokens)[0] / 1e6

    real = millions(plan.lengths)
    axes.bar(at, real, width, color=REAL, label="real")
    plain = replace(plan.batching, order="bucketed", sort_window=0)
    if plan.batching != plain:
        padding = millions(_row_padding(_same_rows(plan, plain)))
        share = padding.sum() / (padding.sum() + real.sum())
        label = f"padding, unsorted buckets: {share:.1%}"
        axes.bar(at, padding, width, bottom=real, color=PLAIN, label=label)
    own, label = millions(_row_padding(plan)), f"padding, this plan: {1 - report.efficiency:.1%}"
    axes.bar(at, own, width, bottom=real, color=PADDING, label=label)
    for edge in plan.boundaries[1:-1]:
        axes.axvline(edge, color=INK, linewidth=0.8, linestyle="--")
        axes.annotate(
            f"{edge:,}",
            (edge, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, -2),
            textcoords="offset points",
            rotation=90,
            va="top",
            fontsize=8,
            color=INK,
        )
    axes.set(
        xlabel="row length (tokens)",
        ylabel="million tokens of rows of this length",
        title=f"{report.rows:,} rows in {plan.num_buckets} buckets: where the padding is",
        xlim=(0, plan.boundaries[-1]),
    )
    axes.legend(frameon=False, loc="upper right")


def _same_rows(plan: EpochPlan, batching: Batching) -> EpochPlan:
    """The plan of the same epoch under other settings."""
    return plan_epoch(
        plan.lengths,
        batching,
        seed=plan.seed,
        epoch=plan.epoch,
        world_size=plan.world_size,
        accumulate=plan.accumulate,
    )


def _row_padding(plan: EpochPlan) -> Ints:
    """Padding of each row in tokens, int64 ``[rows]``."""
    width = np.empty(plan.lengths.size, np.int64)
    widths = plan.batching.padded(plan.longest)
    width[plan.batches.rows] = np.repeat(widths, plan.batches.sizes)
    return width - plan.lengths


def _draw_efficiency(axes: Any, comparison: Comparison) -> None:
    """Predicted efficiency by number of buckets, and what the plan has."""
    window = comparison.batching.sort_window
    for name, label, color, style in (
        ("windows", f"optimal boundaries, sort_window={window}", PADDING, "-"),
        ("optimal", "optimal boundaries, sort_window=0", REAL, "-"),
        ("equal_mass", "equal token mass, sort_window=0", "#999999", ":"),
    ):
        if name == "windows" and window == 0:
            continue
        curve = comparison.efficiency[name]
        axes.plot(list(curve), list(curve.values()), style, color=color, marker=".", label=label)
    axes.plot(
        comparison.plan.num_buckets,
        comparison.own.efficiency,
        "o",
        markersize=9,
        fillstyle="none",
        color=INK,
        label=f"this plan: {comparison.own.efficiency:.3f}",
    )
    axes.set(xlabel="buckets", ylabel="real / padded tokens", title="Efficiency against buckets")
    axes.set_ylim(top=1.005)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
