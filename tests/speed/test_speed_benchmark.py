"""What training reaches against the plain way, as a table: ``pytest -m benchmark -s tests/speed``.

Every line is a ratio of two computations that take turns in this process, on one thread, with the
same inputs and the same results. Times are shown, not asserted: they are the machine's.
"""

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from speed.cases import (
    NARROW,
    SMOLLM2,
    Case,
    largest_gap,
    make_case,
    oracle_sums,
    own_sums,
    train,
)
from speed.lines import (
    all_hidden_states,
    chunked_loss,
    head_inputs,
    plain_formula,
    side_by_side,
)
from speed.live_bytes import peak_bytes
from speed.peer_step import peer_sums

from dflash_lightning.functional.head import ChunkedHead
from dflash_lightning.table import Table
from dflash_lightning.target import HFTarget

pytestmark = pytest.mark.benchmark

LABELS, WIDTH, VOCAB = 2048, 1024, 151_936


def line(name: str, reach: str, met: bool, measured: str, spread: str = "") -> tuple[str, ...]:
    return name, reach, measured, spread, "yes" if met else "NO"


def oracle_line() -> tuple[str, ...]:
    kinds = ("sliding_attention", "full_attention", "sliding_attention")
    sizes = {**NARROW, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 99}
    gap = max(
        largest_gap(make_case(sizes, rows=2, width=60, anchors=30, **more), oracle_sums)
        for more in ({"block_size": 8}, {"block_size": 5, "kinds": kinds, "window": 12})
    )
    return line("loss and gradients: gap to the slow oracle", "<= 1e-5", gap <= 1e-5, f"{gap:.1e}")


def step_line(name: str, least: float, case: Case) -> tuple[str, ...]:
    """The peers' step over ours, after loss, gradients and correct slots have agreed."""
    assert largest_gap(case, peer_sums) < 1e-5
    head = ChunkedHead()
    ratio = side_by_side(
        lambda: train(case, own_sums(case, head)), lambda: train(case, peer_sums(case))
    )
    spread = (
        f"{ratio.low:.2f} .. {ratio.high:.2f}; {ratio.seconds[1]:.1f} / {ratio.seconds[0]:.1f} s"
    )
    return line(name, f">= {least}x", ratio.median >= least, f"{ratio.median:.2f}x", spread)


def loss_line() -> tuple[str, ...]:
    before = 4 * WIDTH * (LABELS + VOCAB)
    plain, ours = (peak_of_loss(work) - before for work in (plain_formula, chunked_loss))
    name = f"peak of the loss, V {VOCAB:,}, {LABELS:,} labels, D {WIDTH:,}"
    sizes = f"{ours / 1e9:.2f} of {plain / 1e9:.2f} GB"
    return line(name, "<= 1/16", 16 * ours <= plain, f"1/{plain / ours:.0f}", sizes)


def peak_of_loss(work: Callable[..., None]) -> int:
    return peak_bytes(lambda: work(*head_inputs(LABELS, WIDTH, VOCAB)))


def feature_lines() -> list[tuple[str, ...]]:
    target = HFTarget("smollm2", dtype="float32").load()
    layer_ids = (1, 8, 14, 21, len(target.layers) - 3)
    ids = torch.randint(49_152, (8, 256), generator=torch.Generator().manual_seed(0))
    ours = partial(target.context_features, ids, layer_ids)
    plain = partial(all_hidden_states, target, ids, layer_ids)
    assert torch.equal(ours(), plain())
    ratio = side_by_side(plain, ours)
    memory = peak_bytes(ours), peak_bytes(plain)
    share = memory[0] / memory[1]
    spread = (
        f"{ratio.low:.3f} .. {ratio.high:.3f}; {ratio.seconds[1]:.1f} / {ratio.seconds[0]:.1f} s"
    )
    sizes = f"{memory[0] / 1e6:.0f} of {memory[1] / 1e6:.0f} MB"
    return [
        line(
            "features of SmolLM2, 8 x 256: time",
            "<= 0.75x",
            ratio.median <= 0.75,
            f"{ratio.median:.3f}x",
            spread,
        ),
        line("the same: memory", "<= 1/3", share <= 1 / 3, f"1/{1 / share:.1f}", sizes),
    ]


def test_what_training_reaches() -> None:
    rows = [oracle_line()]
    for width, anchors, least in ((1024, 256, 2.3), (2048, 512, 3.0)):
        case = make_case(NARROW, rows=1, width=width, anchors=anchors, block_size=16)
        rows.append(step_line(f"step, {width:,} tokens, {anchors} anchors", least, case))
    for block_size in (8, 16):
        case = make_case(SMOLLM2, rows=8, width=256, anchors=24, block_size=block_size)
        rows.append(step_line(f"step, SmolLM2's shapes, block {block_size}", 1.5, case))
    rows += [loss_line(), *feature_lines()]
    title = "against the dense-mask step of public trainers, and the plain way"
    table = Table(title, ("", "reach", "measured", "spread", "met"), rows, "lrrll")
    sys.stdout.write("\n" + table.text() + "\n")
    exact = [row for row in rows if "x" not in row[1]]
    assert all(row[-1] == "yes" for row in exact)
