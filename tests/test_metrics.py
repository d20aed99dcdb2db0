"""Validation metrics by hand: blocks that are whole, cut short, with holes, or empty."""

import math

import pytest
import torch

from dflash_lightning.metrics import BlockMetrics

K = 4
# block 0: whole, right right wrong; 1: cut after slot 1, right; 2: hole at slot 2, right right;
# 3: without labels; 4: whole, all right
SLOTS = [1, 2, 3, 5, 9, 11, 17, 18, 19]
RIGHT = [True, True, False, True, True, True, True, True, True]
LOSSES = [1.0, 2.0, 3.0, 1.0, 2.0, 4.0, 0.5, 0.5, 1.0]
WEIGHTS = [1.0, 0.5, 0.25, 1.0, 1.0, 0.25, 1.0, 0.5, 0.25]


def update(metrics: BlockMetrics, part: slice, first: int, blocks: int) -> None:
    """Add some of the blocks, numbered from 0."""
    metrics.update(
        torch.tensor(LOSSES[part]),
        torch.tensor(WEIGHTS[part]),
        torch.tensor(RIGHT[part], dtype=torch.bool),
        torch.tensor(SLOTS[part], dtype=torch.int64) - K * first,
        blocks,
    )


@pytest.mark.parametrize("cut", [None, 3, 4])
def test_every_number_by_hand_however_blocks_are_batched(cut: int | None):
    metrics = BlockMetrics(K)
    if cut is None:
        update(metrics, slice(None), 0, 5)
    else:
        first = 1 if cut == 3 else 2
        update(metrics, slice(cut), 0, first)
        update(metrics, slice(cut, None), first, 5 - first)
    update(metrics, slice(0), 0, 1)  # a placeholder adds nothing
    values = {name: value.item() for name, value in metrics.compute().items()}
    # weighted: 1 + 1 + 0.75 + 1 + 2 + 1 + 0.5 + 0.25 + 0.25 over 5.75
    assert values.pop("loss") == pytest.approx(7.75 / 5.75)
    assert values.pop("cross_entropy") == pytest.approx(15 / 9)
    # whole blocks keep 2 and 3 of their drafts
    assert values.pop("est_tau") == pytest.approx(1 + 5 / 2)
    # all that have labels keep 2, 1, 1 and 3: the hole ends block 2 although slot 3 is right
    assert values.pop("est_tau_all") == pytest.approx(1 + 7 / 4)
    assert values.pop("cut_short") == pytest.approx(2 / 4)
    assert values.pop("accuracy/pos_01") == pytest.approx(1)
    assert values.pop("accuracy/pos_02") == pytest.approx(1)
    assert values.pop("accuracy/pos_03") == pytest.approx(2 / 3)
    assert values == {}


def test_without_labels_every_ratio_is_nan():
    metrics = BlockMetrics(K)
    update(metrics, slice(0), 0, 2)
    assert all(math.isnan(value) for value in metrics.compute().values())
