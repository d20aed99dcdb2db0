"""Anchors and labels: which positions may start a block, how they are drawn, what they predict."""

import itertools
import math
import random
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import labels_by_walking, labels_with_holes

from dflash_lightning.functional.anchors import (
    VALIDATION,
    block_ids,
    block_positions,
    draw_anchors,
    labelled_slots,
    most_anchors,
    num_anchors,
    predicting_positions,
    valid_anchors,
)

SEARCH = settings(max_examples=150, deadline=None, derandomize=True, database=None)
MASKS = st.lists(st.booleans(), min_size=1, max_size=60)


def answer(prompt: int, length: int, rest: int = 0) -> np.ndarray:
    """Loss mask of one answer between a prompt and what follows it."""
    return np.array([False] * prompt + [True] * length + [False] * rest)


def slots_of(
    mask: np.ndarray, anchors: Iterable[int], block_size: int, *, holes: bool = False
) -> list[list[int]]:
    """Slots with a label, block by block."""
    at = np.array(list(anchors), dtype=np.int64)
    labelled = labelled_slots(mask, at, block_size, holes=holes)
    assert labelled.shape == (len(at), block_size)
    return [np.flatnonzero(block).tolist() for block in labelled]


@SEARCH
@given(MASKS)
def test_an_anchor_and_its_next_token_are_supervised(mask: list[bool]):
    expected = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    assert valid_anchors(np.array(mask)).tolist() == expected


@SEARCH
@given(MASKS, st.integers(2, 20))
def test_by_the_rule_block_an_anchor_is_supervised_and_its_block_lies_in_the_row(
    mask: list[bool], block_size: int
):
    expected = [a for a in range(len(mask)) if mask[a] and a + block_size <= len(mask)]
    assert valid_anchors(np.array(mask), whole_block=block_size).tolist() == expected


@pytest.mark.parametrize("padding", [0, 1, 7])
def test_what_a_row_is_padded_with_makes_no_anchor(padding: int):
    mask = answer(3, 6, rest=padding)
    assert valid_anchors(mask).tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(("usable", "drawn"), [(0, 0), (1, 1), (2, 2), (600, 512)])
def test_all_usable_anchors_up_to_the_limit_are_drawn(usable: int, drawn: int):
    # LM-11: peers drew one less than there were, and none from a row with one
    mask = answer(5, usable + 1, rest=9)
    anchors = draw_anchors(mask, rate=1.0, limit=512, key=(0, 0, 0))
    assert len(anchors) == len(set(anchors.tolist())) == drawn
    assert set(anchors.tolist()) <= set(range(5, 5 + usable))


@pytest.mark.parametrize("mask", [[], [True], [False], [False] * 9, [True, False, True]])
def test_a_row_without_a_usable_anchor_gives_none(mask: list[bool]):
    anchors = draw_anchors(np.array(mask, dtype=bool), rate=1.0, limit=512, key=(0, 0, 0))
    assert anchors.shape == (0,)
    assert anchors.dtype == np.int64


@SEARCH
@given(
    MASKS,
    st.sampled_from([0.01, 0.25, 0.5, 1.0]),
    st.integers(1, 20),
    st.integers(0, 2**40),
    st.sampled_from([None, 2, 3, 8]),
)
def test_a_draw_is_sorted_usable_without_repeats_and_of_the_promised_size(
    mask: list[bool], rate: float, limit: int, seed: int, whole_block: int | None
):
    supervised = np.array(mask)
    dials = {"rate": rate, "limit": limit, "whole_block": whole_block}
    anchors = draw_anchors(supervised, **dials, key=(seed, 1, 2)).tolist()
    usable = valid_anchors(supervised, whole_block=whole_block).tolist()
    assert anchors == sorted(set(anchors))
    assert set(anchors) <= set(usable)
    assert len(anchors) == min(len(usable), limit, math.ceil(rate * sum(mask)))
    assert num_anchors(supervised, **dials) == len(anchors)
    assert len(anchors) <= most_anchors(np.array([len(mask)]), **dials)[0]
    # and nothing lower would do: a row whose every token is supervised reaches it
    whole = np.ones(len(mask), dtype=bool)
    assert num_anchors(whole, **dials) == most_anchors(np.array([len(mask)]), **dials)[0]


def test_every_usable_position_is_drawn_over_the_epochs():
    mask, seen = answer(4, 21, rest=3), []
    for epoch in range(60):
        seen += draw_anchors(mask, rate=0.25, limit=512, key=(0, epoch, 5)).tolist()
    counts = [seen.count(a) for a in range(4, 24)]
    # 60 draws of 6 out of 20: 18 each on average, the last position among them
    assert min(counts) >= 6
    assert max(counts) <= 32
    assert sum(counts) == 360


def test_a_draw_depends_on_its_key_and_not_on_any_global_generator():
    mask, draws = answer(2, 200), []
    for state in range(4):
        random.seed(state)
        np.random.seed(state)  # noqa: NPY002 - the global state is what must not matter
        torch.manual_seed(state)
        draws.append(draw_anchors(mask, rate=0.1, limit=512, key=(7, 3, 11)).tolist())
    assert draws == draws[:1] * 4


def test_a_draw_leaves_the_global_generators_alone():
    def states():
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002

    before = states()
    draw_anchors(answer(2, 200), rate=0.1, limit=512, key=(7, 3, 11))
    assert states() == before


def test_seed_epoch_and_row_each_change_the_draw_and_validation_has_its_own():
    mask = answer(2, 200)
    keys = [*itertools.product([0, 1], [0, 1], [0, 1]), (VALIDATION, 0), (VALIDATION, 1)]
    draws = {tuple(draw_anchors(mask, rate=0.1, limit=512, key=key)) for key in keys}
    assert len(draws) == len(keys)


def test_other_turns_of_a_row_do_not_reach_into_a_block():
    # LM-03: answer on positions 8..39, block 4, anchor 37 supervises slots 1 and 2 and not 3
    mask = answer(8, 32, rest=8)
    assert slots_of(mask, [37], 4) == [[1, 2]]
    assert labels_by_walking(mask.tolist(), 37, 4) == [1, 2]
    assert slots_of(mask, [8, 35, 36, 38], 4) == [[1, 2, 3], [1, 2, 3], [1, 2, 3], [1]]


def test_labels_stop_at_a_gap_even_where_supervision_goes_on():
    mask = np.array([False, True, True, True, False, True, True, True])
    assert slots_of(mask, [1, 2, 5, 6], 8) == [[1, 2], [1], [1, 2], [1]]


def test_with_holes_labels_go_on_behind_a_gap_but_not_behind_the_row():
    mask = np.array([False, True, True, True, False, True, True, True])
    assert slots_of(mask, [1, 2, 5, 6], 8, holes=True) == [
        [1, 2, 4, 5, 6],
        [1, 3, 4, 5],
        [1, 2],
        [1],
    ]
    assert slots_of(mask, [3], 3, holes=True) == [[2]]


def test_a_block_that_overruns_its_row_has_fewer_labels():
    assert slots_of(answer(0, 6), [0, 3, 4], 4) == [[1, 2, 3], [1, 2], [1]]


@SEARCH
@given(MASKS, st.integers(2, 20))
def test_labels_are_the_supervised_prefix_that_a_walk_finds(mask: list[bool], block_size: int):
    anchors = valid_anchors(np.array(mask))
    expected = [labels_by_walking(mask, int(a), block_size) for a in anchors]
    assert slots_of(np.array(mask), anchors, block_size) == expected
    assert all(1 <= len(n) < block_size for n in expected)


@SEARCH
@given(MASKS, st.integers(2, 20))
def test_labels_with_holes_are_all_supervised_tokens_of_a_block(mask: list[bool], block_size: int):
    anchors = range(len(mask))
    expected = [labels_with_holes(mask, a, block_size) for a in anchors]
    assert slots_of(np.array(mask), anchors, block_size, holes=True) == expected


@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_slot_k_of_a_block_stands_at_its_anchor_plus_k(block_size: int):
    anchors = torch.tensor([[3, 9], [0, 40]])
    positions = block_positions(anchors, block_size)
    for b, n, k in itertools.product(range(2), range(2), range(block_size)):
        assert positions[b, n, k] == anchors[b, n] + k


def test_a_block_holds_its_anchors_token_and_masks():
    ids = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    blocks = block_ids(ids, torch.tensor([[1, 3], [0, 2]]), block_size=3, mask_token_id=99)
    assert blocks.tolist() == [[[11, 99, 99], [13, 99, 99]], [[20, 99, 99], [22, 99, 99]]]


def test_the_target_predicts_the_token_of_a_slot_one_position_before_it():
    anchors = torch.tensor([[3, 9], [0, 40]])
    slots = torch.tensor(
        [1, 3, 6, 9, 15]
    )  # (row, block, k): (0,0,1) (0,0,3) (0,1,2) (1,0,1) (1,1,3)
    found = predicting_positions(anchors, slots, block_size=4, width=50)
    assert found.tolist() == [3, 5, 10, 50, 92]
    assert predicting_positions(anchors, slots[:0], block_size=4, width=50).shape == (0,)
