"""The packed attention: its rule, its tiles, its shapes, and the drafter that attends with it.

Its kernel is compiled for CUDA only. Here it runs as torch's own dense twin, which knows the rule
but not the tiles; those are held against the rule tile by tile.
"""

import functools

import pytest
import torch
from drafter import packed
from drafter.batches import FEW, FULL, SEARCH, SLIDING, cases, close, inputs, pad, run
from drafter.packed import BOTH, with_flex
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import make_spec, naive_forward, random_drafter, visibility
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash_lightning.drafter.backends import Backends
from dflash_lightning.drafter.flex import (
    Room,
    block_mask,
    flex_masks,
    packed_ranges,
    room_for,
)
from dflash_lightning.drafter.visibility import visible_ranges

dense_twin = packed.dense_twin


# -- the rule --------------------------------------------------------------------------------------


def packed_rule(case: tuple, room: Room, kind: str) -> Tensor:
    """The looped rule, every row at its place: bool ``[slots, context + slots]`` of the room."""
    spec, width, anchors, valid, _ = case
    dense = torch.zeros(room.slots, sum(room), dtype=torch.bool)
    slots = anchors.shape[1] * spec.block_size
    for b, row in enumerate(visibility(anchors, valid, width, spec, kind)):
        own = slice(b * slots, (b + 1) * slots)
        dense[own, b * width : (b + 1) * width] = row[:, :width]
        dense[own, room.context + own.start : room.context + own.stop] = row[:, width:]
    for q in range(len(anchors) * slots, room.slots):
        dense[q, room.context + q] = True
    return dense


def evaluated(mask: BlockMask, room: Room) -> Tensor:
    """The rule that the kernel asks, for every pair."""
    none = torch.tensor(0)
    query, key = torch.arange(room.slots)[:, None], torch.arange(sum(room))
    return mask.mask_mod(none, none, query, key)


def tight(case: tuple, tile: int, more: int) -> Room:
    """A room of small tiles with some to spare."""
    spec, width, anchors, *_ = case
    used = len(anchors) * width, anchors.numel() * spec.block_size
    return Room(*((-(-count // tile) + more) * tile for count in used))


def small_mask(case: tuple, room: Room, kind: str, tile: int) -> BlockMask:
    spec, width, anchors, valid, _ = case
    ranges = visible_ranges(anchors, valid, spec, kind)
    return block_mask(packed_ranges(ranges, width, room), room, tile)


@SEARCH
@given(cases(), st.sampled_from([4, 8, 16]), st.integers(0, 2))
def test_the_kernel_asks_the_looped_rule(case, tile, more):
    room = tight(case, tile, more)
    for kind in set(case[0].layer_types):
        mask = small_mask(case, room, kind, tile)
        assert torch.equal(evaluated(mask, room), packed_rule(case, room, kind))


# -- the tiles -------------------------------------------------------------------------------------


def chosen(counts: Tensor, order: Tensor) -> Tensor:
    """Tiles of a list as bool ``[query tiles, key tiles]``."""
    dense = torch.zeros(order.shape[-2:], dtype=torch.bool)
    for q, count in enumerate(counts[0, 0].tolist()):
        dense[q, order[0, 0, q, :count].long()] = True
    return dense


def listed(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Tiles to look into, and tiles seen in full."""
    return (
        chosen(mask.kv_num_blocks, mask.kv_indices),
        chosen(mask.full_kv_num_blocks, mask.full_kv_indices),
    )


def by_tile(dense: Tensor, tile: int) -> Tensor:
    """``[query tiles, key tiles, tile * tile]``."""
    grid = dense.unflatten(1, (-1, tile)).unflatten(0, (-1, tile))
    return grid.transpose(1, 2).flatten(2)


@SEARCH
@given(cases(), st.sampled_from([4, 8, 16]), st.integers(0, 2))
def test_every_visible_pair_lies_in_a_listed_tile_and_few_others_are_listed(case, tile, more):
    room, slots = tight(case, tile, more), case[2].shape[1] * case[0].block_size
    for kind in set(case[0].layer_types):
        mask = small_mask(case, room, kind, tile)
        pairs = by_tile(packed_rule(case, room, kind), tile)
        partial, full = listed(mask)
        assert not (partial & full).any()
        assert not (pairs.any(-1) & ~(partial | full)).any()
        # full tiles are wholly visible, and all such tiles of context are full
        assert torch.equal(full, full & pairs.all(-1))
        assert not (partial & pairs.all(-1))[:, : room.context // tile].any()
        # the backward pass has the same lists
        assert torch.equal(chosen(mask.q_num_blocks, mask.q_indices), partial.mT)
        assert torch.equal(chosen(mask.full_q_num_blocks, mask.full_q_indices), full.mT)
        # a tile of no use is listed only where two rows meet, or where windows leave gaps
        useless = (partial & ~pairs.any(-1)).any(1).nonzero().flatten().tolist()
        meet = [q * tile // slots != ((q + 1) * tile - 1) // slots for q in useless]
        assert kind == SLIDING or all(meet)


@pytest.mark.parametrize(
    ("rows", "width", "count", "window"),
    [(16, 718, 180, None), (11, 4173, 512, None), (11, 4173, 512, 2048), (8, 256, 24, None)],
)
def test_useless_tiles_are_below_one_in_a_hundred_at_real_sizes(rows, width, count, window):
    kind = SLIDING if window else FULL
    spec = make_spec(block_size=16, layer_types=(kind,) * 2, sliding_window=window)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(rows, width, generator=generator).argsort(1)[:, :count]
    anchors = drawn.sort(1).values
    valid = torch.arange(count) < torch.randint(count // 2, count, (rows, 1), generator=generator)
    room = room_for(rows * width, rows * count * 16)
    ranges = packed_ranges(visible_ranges(anchors, valid, spec, kind), width, room)
    partial, full = listed(block_mask(ranges, room))
    # a tile is of use to a query whose range of context, or of slots, meets it
    first = torch.arange(partial.shape[1]) * 128
    start, end, own_start, own_end = (edge.view(-1, 128, 1) for edge in ranges)
    useful = torch.stack(
        [
            (((s < first + 128) & (e > first) & (s < e)) | ((a < first + 128) & (b > first))).any(0)
            for s, e, a, b in zip(start, end, own_start, own_end, strict=True)
        ]
    )
    every = partial | full
    assert not (useful & ~every).any()
    assert (every & ~useful).sum() <= 0.01 * every.sum()
    assert every.sum() <= 0.1 * every.numel()


def test_masks_are_made_without_reading_from_the_device():
    # tensors without data: whoever reads one fails
    anchors = torch.zeros(3, 40, dtype=torch.long, device="meta")
    masks = flex_masks(anchors, anchors.bool(), BOTH, width=100, room=Room(384, 512))
    assert masks.keys() == {FULL, SLIDING}
    assert masks[FULL].kv_indices.shape == (1, 1, 4, 7)
    assert masks[FULL].shape == (1, 1, 512, 896)


# -- the drafter -----------------------------------------------------------------------------------


@settings(FEW, max_examples=25)
@given(cases())
def test_the_forward_and_its_gradients_equal_those_of_sdpa_and_of_the_naive_forward(case):
    spec, width, anchors, valid, chunk_anchors = case
    drafter = random_drafter(spec, chunk_anchors=chunk_anchors)
    batch = (*inputs(spec, anchors, width), anchors, valid)
    packed = with_flex(drafter)
    ours = run(packed, packed, batch)
    chunked = run(drafter, drafter, batch)
    naive = run(functools.partial(naive_forward, drafter), drafter, batch)
    assert len(packed.attention_shapes) == 1
    assert all(close(a, b) for a, b in zip(ours, chunked, strict=True))
    assert all(close(a, b) for a, b in zip(ours, naive, strict=True))


@pytest.mark.parametrize("name", ["sdpa", "flex"])
def test_mixed_precision_stays_near_the_naive_forward_in_float32(name):
    # bfloat16 rounds to 1/256; over 119 cases the worst were 0.9 %, 3.3 % and 0.4 % off
    @settings(FEW, max_examples=12)
    @given(cases())
    def check(case):
        spec, width, anchors, valid, chunk_anchors = case
        assume(valid.any())
        drafter = random_drafter(spec, chunk_anchors=chunk_anchors)
        batch = (*inputs(spec, anchors, width), anchors, valid)
        expected, *slopes = run(functools.partial(naive_forward, drafter), drafter, batch)
        drafter.backends = Backends(spec, name, chunk_anchors)
        with torch.autocast("cpu", torch.bfloat16):
            hidden, *gradients = run(drafter, drafter, batch)
        got, exact = (torch.cat([g.flatten().float() for g in x]) for x in (gradients, slopes))
        assert (hidden - expected).norm() <= 0.02 * expected.norm()
        assert (got - exact).norm() <= 0.05 * exact.norm()
        assert abs(got @ exact / (exact @ exact) - 1) <= 0.01  # its scale

    check()


@pytest.mark.parametrize("mixed", [False, True])
def test_recomputed_layers_share_the_masks_and_give_the_same_bits(mixed: bool):
    drafter = with_flex(random_drafter(BOTH))
    anchors, valid = pad([[2, 7, 9], [4]], 5)
    batch = (*inputs(BOTH, anchors, 20), anchors, valid)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        kept = run(drafter, drafter, batch)
        drafter.checkpoint_layers = True
        recomputed = run(drafter, drafter, batch)
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


def test_empty_slots_and_padding_give_finite_numbers_and_gradients():
    drafter = with_flex(random_drafter(BOTH))
    anchors, valid = pad([[], []], 3)
    features, embeddings = (x.requires_grad_() for x in inputs(BOTH, anchors, 9))
    hidden = drafter(features, embeddings, anchors, valid)
    hidden.square().sum().backward()
    assert hidden.isfinite().all()
    assert embeddings.grad.isfinite().all()
    assert embeddings.grad.abs().amax((2, 3)).min() > 0
    assert not features.grad.any()


def test_a_batch_without_anchors_stays_connected():
    for drafter in (random_drafter(BOTH), with_flex(random_drafter(BOTH))):
        anchors = torch.zeros(1, 0, dtype=torch.long)
        hidden = drafter(*inputs(BOTH, anchors, 9), anchors, anchors.bool())
        assert hidden.shape == (1, 0, 4, 16)
        hidden.sum().backward()
        assert all(not p.grad.any() for p in drafter.parameters())
