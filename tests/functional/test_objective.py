"""The weights of the objective, its settings, and ratios of weighted losses."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import dpace_by_loops
from torch import Tensor

from dflash_lightning.functional.head import ChunkedHead
from dflash_lightning.functional.objective import (
    check_objective,
    decay_gamma,
    dpace_label_weights,
    dpace_weights,
    position_weights,
    untrained_dpace_weights,
)

SEARCH = settings(max_examples=100, deadline=None, derandomize=True, database=None)
BLOCK = st.lists(st.tuples(st.floats(1e-30, 1.0), st.booleans()), min_size=1, max_size=15)
ALPHA = st.sampled_from([0.0, 0.3, 0.5, 1.0])


def constant(cross_entropy: float, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and labels with the same cross-entropy at every slot: log(1 + e^x)."""
    hidden = torch.full((count, 1), math.log(math.expm1(cross_entropy)))
    return hidden, torch.tensor([[0.0], [1.0]]), torch.zeros(count, dtype=torch.int64)


# -- fixed decay ----------------------------------------------------------------------------------


def test_position_weights_decay_from_one():
    expected = [1.0, math.exp(-1 / 7), math.exp(-2 / 7)]
    assert position_weights(4, 7.0).tolist() == pytest.approx(expected)
    # peers.md 2.4: gamma 7 and block 16 give a total of 6.63, 58 % of it on the first five slots
    weights = position_weights(16, 7.0)
    assert weights.sum().item() == pytest.approx(6.63, abs=0.005)
    assert (weights[:5].sum() / weights.sum()).item() == pytest.approx(0.58, abs=0.005)


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (32, 7.0)])
def test_decay_follows_the_block_size(block_size: int, gamma: float):
    assert decay_gamma(block_size) == gamma


# -- D-PACE ---------------------------------------------------------------------------------------


@SEARCH
@given(BLOCK, ALPHA)
def test_dpace_weights_are_those_of_the_loops(block: list[tuple[float, bool]], alpha: float):
    probs, valid = map(list, zip(*block, strict=True))
    losses = -torch.tensor([probs], dtype=torch.float64).log()
    found = dpace_weights(losses.float(), torch.tensor([valid]), alpha)
    assert found.dtype == torch.float32
    expected = dpace_by_loops(probs, valid, alpha)
    assert found[0].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_blocks_do_not_mix():
    losses = torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    valid = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.7
    together = dpace_weights(losses, valid, 0.5)
    for n in range(5):
        assert torch.equal(together[n], dpace_weights(losses[n : n + 1], valid[n : n + 1], 0.5)[0])


def test_a_sure_drafter_weighs_slots_by_what_follows_and_a_blind_one_by_halves():
    whole = torch.ones(1, 15, dtype=torch.bool)
    # peers.md 2.4: q -> 1 gives B - j, 120 in all; q -> 0 at alpha 1/2 about 2^(1 - j), 2 in all
    sure = dpace_weights(torch.zeros(1, 15), whole, 0.5)[0]
    assert sure.tolist() == list(range(15, 0, -1))
    assert sure.sum() == 120
    blind = dpace_weights(torch.full((1, 15), 1e4), whole, 0.5)[0]
    assert blind.tolist() == pytest.approx([2 ** (1 - j) - 2**-15 for j in range(1, 16)])
    assert dpace_weights(torch.full((1, 15), 1e4), whole, 1.0)[0].tolist() == sure.tolist()


def test_before_training_the_drafter_is_taken_for_one_that_knows_nothing():
    # q = 1/2 of two words, alpha 0: P = 1/2, 1/4, so 3/4 and 1/4
    assert untrained_dpace_weights(3, 0.0, 2).tolist() == pytest.approx([0.75, 0.25])
    assert untrained_dpace_weights(16, 0.5, 151_936)[0].item() == pytest.approx(1, abs=1e-3)


def test_no_gradient_flows_through_the_weights():
    losses = torch.rand(2, 3, requires_grad=True)
    assert not dpace_weights(losses, torch.ones(2, 3, dtype=torch.bool), 0.5).requires_grad
    flat = losses.flatten()
    slots = torch.tensor([1, 2, 3, 5, 6, 7])
    found = dpace_label_weights(flat, slots, num_blocks=2, block_size=4, alpha=0.5)
    assert not found.requires_grad


@SEARCH
@given(st.lists(BLOCK, min_size=1, max_size=4), ALPHA)
def test_weights_of_labels_are_those_of_their_slots(
    blocks: list[list[tuple[float, bool]]], alpha: float
):
    size = 1 + max(map(len, blocks))
    slots, losses, expected = [], [], []
    for n, block in enumerate(blocks):
        probs, valid = map(list, zip(*block, strict=True))
        weights = dpace_by_loops(probs, valid, alpha)
        for k, (prob, counts) in enumerate(block, start=1):
            if counts:
                slots.append(n * size + k)
                losses.append(-math.log(prob))
                expected.append(weights[k - 1])
    found = dpace_label_weights(
        torch.tensor(losses),
        torch.tensor(slots, dtype=torch.int64),
        num_blocks=len(blocks) + 1,  # an empty slot
        block_size=size,
        alpha=alpha,
    )
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-12)


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        ("ce", "decay", None, 0.5),
        ("argmax", "decay", 4.0, 0.5),
        ("kl", "decay", None, 0.5),
        ("ce", "dpace", None, 0.0),
        ("argmax", "dpace", None, 1.0),
    ],
)
def test_settings_that_fit_together_pass(settings: tuple):
    check_objective(*settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("mse", "decay", None, 0.5), "goal must be ce, argmax or kl and weighting must be decay"),
        (("ce", "flat", None, 0.5), "decay or dpace, got ce and flat."),
        (("kl", "dpace", None, 0.5), "weighting must be decay with goal kl, got dpace"),
        (("ce", "dpace", 7.0, 0.5), "null with weighting dpace, which does not read it, got 7.0."),
        (("ce", "decay", 0.0, 0.5), "loss_decay_gamma must be positive"),
        (("ce", "dpace", None, 1.1), "dpace_alpha must be in [0, 1]"),
        (("ce", "dpace", None, -0.1), "dpace_alpha must be in [0, 1]"),
        (("ce", "dpace", None, math.nan), "dpace_alpha must be in [0, 1]"),
        (("ce", "decay", None, 0.3), "0.5 with weighting decay, which does not read it, got 0.3."),
    ],
)
def test_settings_that_would_not_be_honoured_are_refused(settings: tuple, text: str):
    with pytest.raises(ValueError, match=re.escape(text)):
        check_objective(*settings)


# -- ratios ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [4.0, 7.0])
def test_a_weighted_mean_of_a_constant_is_the_constant_whatever_the_decay(gamma: float):
    # LM-09: cross-entropy 2.0 everywhere, block 16; over the count it would read 0.59 and 0.88
    weights = position_weights(16, gamma).repeat(3)
    losses = ChunkedHead(8 * 10)(*constant(2.0, 45)).losses
    assert ((weights * losses).sum() / weights.sum()).item() == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("parts", [[1000], [100, 900], [900, 100], [250, 250, 250, 250]])
def test_sums_of_micro_batches_give_one_ratio_and_one_gradient(parts: list[int]):
    # LM-08: 100 tokens at 0.5 and 900 at 0.3 are 0.32 in all, not 0.40
    (low, head, labels), (high, _, _) = constant(0.3, 900), constant(0.5, 100)
    hidden = torch.cat([high, low]).requires_grad_()
    labels = torch.zeros(1000, dtype=torch.int64)
    chunked, weights = ChunkedHead(), torch.ones(1000)
    pieces = zip(hidden.split(parts), labels.split(parts), weights.split(parts), strict=True)
    total = sum((w * chunked(h, head, y).losses).sum() for h, y, w in pieces)
    (total / weights.sum()).backward()
    assert (total / weights.sum()).item() == pytest.approx(0.32, rel=1e-5)
    # by hand: d log(1 + e^x) / dx = 1 - e^-CE
    expected = torch.cat([torch.full((n, 1), -math.expm1(-c)) for n, c in ((100, 0.5), (900, 0.3))])
    torch.testing.assert_close(hidden.grad, expected / 1000, rtol=1e-5, atol=0)
