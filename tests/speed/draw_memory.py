"""Draws what a step holds against anchors and batch size: ``python draw_memory.py OUT.png``

Points are counted on storages at the sizes of Qwen3-8B's drafter, without their memory; lines are
what `dflash-lightning plan` computes. It takes some minutes.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from speed.step_memory import peaks_at_size

from dflash_lightning.assets.known import known_config
from dflash_lightning.budget import BatchLoad, Setup, TargetSizes, memory, target_sizes
from dflash_lightning.drafter.config import DrafterConfig, DrafterSpec
from dflash_lightning.figure import empty_figure, write_figure

WIDTH = 2048  # tokens of a row
ROWS = {4: "#4a90c2", 8: "#e08a1e", 16: "#3a8f5c"}  # rows of a batch, and their colour
ANCHORS = (128, 768, 1408, 2048)  # of a batch
PANELS = {
    "float32, sdpa": Setup(target_bytes=4, compute_bytes=4, attention="sdpa", on_gpu=False),
    "bf16-mixed, flex": Setup(attention="flex"),
}


def draw(path: Path) -> None:
    """A panel per precision; the error of every point goes to the terminal."""
    config = known_config("Qwen/Qwen3-8B")
    sizes = target_sizes(config)
    spec = DrafterConfig(num_layers=5, target_layer_ids=(1, 9, 17, 25, 33)).for_target(config)
    figure = empty_figure(str(path), 10, 4.4)
    worst = []
    for axes, (title, setup) in zip(
        figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True
    ):
        for again in (False, True):
            here = replace(setup, activation_checkpointing=again)
            for rows in ROWS:
                worst += draw_batch(axes, sizes, spec, here, rows)
        dress(axes, title)
    figure.axes[0].set_ylabel("bytes of a step beside weights,\ngradients and moments (GB)")
    figure.axes[0].legend(frameon=False, fontsize=8.5, loc="upper left")
    write_figure(figure, path)
    sys.stdout.write(f"model / counted: {min(worst):.3f} to {max(worst):.3f}\n")


def draw_batch(
    axes: Any, sizes: TargetSizes, spec: DrafterSpec, setup: Setup, rows: int
) -> list[float]:
    """Line and points of one batch size; what the line says over each point."""

    def modelled(anchors: int) -> int:
        return memory(sizes, spec, load(anchors), setup).total("drafter")

    def load(anchors: int) -> BatchLoad:
        return BatchLoad(rows * WIDTH, rows, anchors, WIDTH)

    fine = np.arange(32, ANCHORS[-1] + 129, 32)
    again, colour = setup.activation_checkpointing, ROWS[rows]
    label = None if again else f"{rows * WIDTH:,} tokens"
    line = [modelled(int(n)) / 1e9 for n in fine]
    axes.plot(fine, line, "--" if again else "-", color=colour, label=label, linewidth=1.6)
    counted = [peaks_at_size(spec, load(n), setup).drafter for n in ANCHORS]
    axes.plot(
        ANCHORS,
        [count / 1e9 for count in counted],
        "o",
        color=colour,
        markersize=4.5,
        markeredgecolor="white",
    )
    found = [modelled(n) / count for n, count in zip(ANCHORS, counted, strict=True)]
    sys.stdout.write(f"{setup} {rows}: {np.round(found, 3)}\n")
    return found


def dress(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=11, fontweight="bold")
    axes.set_xlabel("anchors of a batch (blocks of 16)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.plot([], [], "k-", label="model: all layers kept")
    axes.plot([], [], "k--", label="model: layers recomputed")
    axes.plot([], [], "ko", markersize=4.5, label="counted")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
