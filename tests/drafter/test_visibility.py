"""Who sees whom: the chunked masks and the whole forward against loops over every pair."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import make_spec, naive_forward, random_drafter, visibility
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from dflash_lightning.drafter.attention import Chunk, make_chunks
from dflash_lightning.drafter.model import Drafter

FULL, SLIDING = "full_attention", "sliding_attention"
SEARCH = settings(max_examples=120, deadline=None, derandomize=True, database=None)
FEW = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@st.composite
def cases(draw):
    """A drafter's shape and the anchors of a batch: sorted, filled up with empty slots."""
    size, width = draw(st.integers(2, 5)), draw(st.integers(1, 14))
    kinds = draw(st.sampled_from([(FULL,), (SLIDING,), (SLIDING, FULL), (FULL, SLIDING)]))
    window = draw(st.integers(size, 9)) if SLIDING in kinds else None
    spec = make_spec(
        block_size=size, layer_types=kinds, num_layers=len(kinds), sliding_window=window
    )
    rows = [
        sorted(row)
        for row in draw(
            st.lists(
                st.sets(st.integers(0, width - 1), max_size=min(width, 8)), min_size=1, max_size=3
            )
        )
    ]
    slots = max(map(len, rows)) + draw(st.integers(0, 3))
    place = draw(st.sampled_from([0, width - 1]))
    return spec, width, *pad(rows, slots, place), draw(st.integers(1, 5))


def pad(rows: list[list[int]], slots: int, place: int = 0) -> tuple[Tensor, Tensor]:
    """Anchors and their validity; empty slots stand at 0 in a batch, and may stand anywhere."""
    anchors = torch.tensor([row + [place] * (slots - len(row)) for row in rows])
    return anchors.long(), torch.arange(slots) < torch.tensor([[len(row)] for row in rows])


def unfold(chunks: list[Chunk], kind: str, batch: int, width: int, slots: int) -> Tensor:
    """The dense mask ``[B, N * K, width + N * K]`` that chunks stand for."""
    dense = torch.zeros(batch, slots, width + slots, dtype=torch.bool)
    for chunk in chunks:
        own = torch.arange(slots)[chunk.slots]
        keys = torch.cat([torch.arange(chunk.context), width + own])
        mask = chunk.masks[kind]
        assert mask.shape == (batch, 1, len(own), len(keys))
        assert set(mask.unique().tolist()) <= {0.0, -torch.inf}
        dense[:, own[:, None], keys] = mask[:, 0] == 0
    return dense


def inputs(spec, anchors: Tensor, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random context features and block embeddings."""
    generator = torch.Generator().manual_seed(seed)
    batch, count = anchors.shape
    features = len(spec.target_layer_ids) * spec.hidden_size
    return (
        torch.randn(batch, width, features, generator=generator),
        torch.randn(batch, count, spec.block_size, spec.hidden_size, generator=generator),
    )


# -- the masks ------------------------------------------------------------------------------------


@SEARCH
@given(cases())
def test_chunks_stand_for_the_visibility_rule(case):
    spec, width, anchors, valid, chunk_anchors = case
    chunks = make_chunks(anchors, valid, spec, chunk_anchors=chunk_anchors, dtype=torch.float32)
    slots = anchors.shape[1] * spec.block_size
    for kind in set(spec.layer_types):
        got = unfold(chunks, kind, len(anchors), width, slots)
        assert torch.equal(got, visibility(anchors, valid, width, spec, kind))


@SEARCH
@given(cases())
def test_chunks_cut_the_slots_without_gap_or_overlap_and_stay_small(case):
    spec, width, anchors, valid, chunk_anchors = case
    chunks = make_chunks(anchors, valid, spec, chunk_anchors=chunk_anchors, dtype=torch.float32)
    slots = range(anchors.shape[1] * spec.block_size)
    assert [s for chunk in chunks for s in slots[chunk.slots]] == list(slots)
    for chunk in chunks:
        assert 2 * len(slots[chunk.slots]) <= 3 * chunk_anchors * spec.block_size
        assert chunk.context <= width - 1
        assert chunk.masks.keys() == set(spec.layer_types)


@pytest.mark.parametrize(("count", "sizes"), [(16, [16]), (24, [24]), (25, [16, 9]), (0, [])])
def test_anchors_of_one_and_a_half_chunks_are_not_split(count: int, sizes: list[int]):
    anchors = torch.arange(count)[None]
    chunks = make_chunks(anchors, anchors >= 0, make_spec(), chunk_anchors=16, dtype=torch.float32)
    assert [(c.slots.stop - c.slots.start) // 4 for c in chunks] == sizes


def test_a_chunks_context_ends_at_its_largest_real_anchor_over_all_rows():
    anchors = torch.tensor([[2, 5, 9, 30], [1, 7, 99, 99]])
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    chunks = make_chunks(anchors, valid, make_spec(), chunk_anchors=2, dtype=torch.float32)
    assert [c.context for c in chunks] == [7, 30]


# -- the forward ----------------------------------------------------------------------------------


def run(forward: Callable, drafter: Drafter, case: tuple, seed: int = 9) -> tuple[Tensor, ...]:
    """Hidden states of real blocks, and the gradient of a random mixture of them, all in one."""
    features, embeddings, anchors, valid = case
    features, embeddings = (x.detach().clone().requires_grad_() for x in (features, embeddings))
    hidden = forward(features, embeddings, anchors, valid)
    probe = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed))
    wanted = [features, embeddings, *drafter.parameters()]
    gradients = torch.autograd.grad((hidden * probe)[valid].sum(), wanted)
    return hidden[valid].detach(), *gradients


def close(got: Tensor, expected: Tensor) -> bool:
    """Equal to 1e-5 of the norm; where the norm is nothing, equal."""
    return (got - expected).norm() <= 1e-5 * expected.norm()


@FEW
@given(cases())
def test_the_forward_and_its_gradients_equal_dense_attention_with_the_looped_mask(case):
    spec, width, anchors, valid, chunk_anchors = case
    drafter = random_drafter(spec, chunk_anchors=chunk_anchors)
    batch = (*inputs(spec, anchors, width), anchors, valid)
    ours = run(drafter, drafter, batch)
    naive = run(functools.partial(naive_forward, drafter), drafter, batch)
    assert all(close(a, b) for a, b in zip(ours, naive, strict=True))


@FEW
@given(cases())
def test_empty_slots_hold_finite_numbers(case):
    spec, width, anchors, valid, chunk_anchors = case
    drafter = random_drafter(spec, chunk_anchors=chunk_anchors)
    hidden = drafter(*inputs(spec, anchors, width), anchors, torch.zeros_like(valid))
    assert hidden.shape == (*anchors.shape, spec.block_size, spec.hidden_size)
    assert hidden.isfinite().all()


@pytest.mark.parametrize(("kind", "window"), [(FULL, None), (SLIDING, 4), (SLIDING, 7)])
def test_a_slot_depends_on_exactly_what_it_sees(kind: str, window: int | None):
    # one layer: whatever has a gradient was attended to, whatever has none was not
    spec = make_spec(num_layers=1, layer_types=(kind,), sliding_window=window)
    anchors, valid = pad([[3, 4, 9, 11], [6, 12]], 4)
    drafter, width = random_drafter(spec, chunk_anchors=2), 14
    features, embeddings = (x.requires_grad_() for x in inputs(spec, anchors, width))
    hidden = drafter(features, embeddings, anchors, valid)
    expected = visibility(anchors, valid, width, spec, kind)
    for b, n, k in itertools.product(range(2), range(4), range(4)):
        if not valid[b, n]:
            continue
        slopes = torch.autograd.grad(
            hidden[b, n, k].square().sum(), [features, embeddings], retain_graph=True
        )
        felt = [s.abs().amax(-1).flatten(1) > 0 for s in slopes]
        assert torch.cat([f[b] for f in felt]).tolist() == expected[b, n * 4 + k].tolist()
        assert not any(f[1 - b].any() for f in felt)


def test_a_block_never_feels_its_anchors_features_later_ones_or_other_blocks():
    # LM-01: block size 4, anchors 10 and 12, in two layers
    spec = make_spec()
    anchors, valid = pad([[10, 12]], 2)
    drafter = random_drafter(spec)
    features, embeddings = inputs(spec, anchors, 16)
    before = drafter(features, embeddings, anchors, valid)[0]

    def after(start: int, block: int | None = None) -> Tensor:
        changed, other = features.clone(), embeddings.clone()
        changed[:, start:] += 5
        if block is not None:
            other[:, block] += 5
        return drafter(changed, other, anchors, valid)[0]

    assert torch.equal(after(12), before)
    assert torch.equal(after(10)[0], before[0])
    assert not torch.equal(after(10)[1], before[1])
    assert torch.equal(after(12, block=1)[0], before[0])
    assert torch.equal(after(12, block=0)[1], before[1])


def test_a_row_alone_and_beside_a_longer_one_gives_the_same():
    # LM-04: a row of 40 tokens, alone and beside one of 400, with the same anchors
    spec = make_spec(layer_types=(FULL, SLIDING), sliding_window=8)
    drafter = random_drafter(spec, chunk_anchors=4)
    rows = [[5, 8, 20, 21, 33, 37], [3, 50, *range(200, 380, 9)]]
    anchors, valid = pad(rows, 23)
    features, embeddings = inputs(spec, anchors, 400)
    features[0, 40:] = 1e3  # what padding looks like to the target is anybody's guess
    own = torch.zeros_like(valid)
    own[0] = valid[0]
    hidden, *gradients = run(
        lambda *args: drafter(*args[:3], valid), drafter, (features, embeddings, anchors, own)
    )
    alone, *expected = run(
        drafter, drafter, (features[:1, :40], embeddings[:1, :6], anchors[:1, :6], valid[:1, :6])
    )
    assert close(hidden, alone)
    by_features, by_embeddings, *by_weights = gradients
    assert close(by_features[:1, :40], expected[0])
    assert by_features[0, 40:].abs().max() == by_features[1].abs().max() == 0
    assert close(by_embeddings[:1, :6], expected[1])
    assert all(close(a, b) for a, b in zip(by_weights, expected[2:], strict=True))


def test_pad_features_and_empty_slots_change_nothing():
    spec = make_spec()
    drafter = random_drafter(spec)
    anchors, valid = pad([[2, 7, 9], [4]], 5)
    features, embeddings = inputs(spec, anchors, 20)
    before = drafter(features, embeddings, anchors, valid)
    features[0, 12:], features[1, 6:] = -3e4, 3e4
    embeddings[~valid] = 1e3
    anchors[~valid] = 19
    assert torch.equal(drafter(features, embeddings, anchors, valid)[valid], before[valid])


def test_a_row_does_not_depend_on_its_place_in_the_batch():
    spec = make_spec()
    drafter = random_drafter(spec, chunk_anchors=2)
    anchors, valid = pad([[2, 7, 9], [4], [0, 1, 2, 3]], 4)
    features, embeddings = inputs(spec, anchors, 12)
    order = torch.tensor([2, 0, 1])
    forward = drafter(features, embeddings, anchors, valid)
    moved = drafter(features[order], embeddings[order], anchors[order], valid[order])
    torch.testing.assert_close(moved[valid[order]], forward[order][valid[order]])


def test_a_draft_layer_is_a_qwen3_layer_that_sees_the_context_and_its_whole_block():
    """Against transformers' own layer, which normalises what it attends to.

    A fused context of root mean square 1 passes that norm unchanged.
    """
    spec = make_spec(num_layers=1, layer_types=(FULL,), rms_norm_eps=1e-9)
    drafter = random_drafter(spec)
    layer = drafter.draft_layers[0]
    with torch.no_grad():
        for norm in (drafter.hidden_norm, layer.input_layernorm):
            norm.weight.fill_(1.0)
    config = Qwen3Config(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-9,
        rope_theta=10_000.0,
        attn_implementation="eager",
    )
    twin = Qwen3DecoderLayer(config, 0)
    twin.load_state_dict(layer.state_dict())
    anchors, valid = pad([[9]], 1)
    features, embeddings = inputs(spec, anchors, 9)
    states = torch.cat([drafter.hidden_norm(drafter.fc(features)), embeddings[:, 0]], dim=1)
    angles = Qwen3RotaryEmbedding(config)(states, torch.arange(13)[None])
    expected = twin(states, attention_mask=torch.zeros(1, 1, 13, 13), position_embeddings=angles)[
        :, 9:
    ]
    ours = drafter(features, embeddings, anchors, valid)[:, 0]
    torch.testing.assert_close(ours, drafter.norm(expected), rtol=1e-5, atol=1e-5)
