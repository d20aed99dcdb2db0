"""Who sees whom: the chunked masks and the whole forward against loops over every pair."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from drafter.batches import FEW, FULL, SEARCH, SLIDING, cases, close, inputs, pad, run
from hypothesis import given
from oracles import make_spec, naive_forward, random_drafter, visibility
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from dflash_lightning.drafter.chunked import Chunk, make_chunks


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


def test_chunks_take_one_read_from_the_device(monkeypatch: pytest.MonkeyPatch):
    reads = []

    def counted(name: str) -> Callable:
        own = getattr(Tensor, name)
        return lambda tensor: (reads.append(name), own(tensor))[1]

    for name in ("tolist", "item", "__int__", "__bool__", "__index__", "__float__"):
        monkeypatch.setattr(Tensor, name, counted(name))
    anchors, valid = pad([[*range(50)], [3, 7]], 50)
    chunks = make_chunks(anchors, valid, make_spec(), chunk_anchors=16, dtype=torch.float32)
    assert len(chunks) == 4
    assert reads == ["tolist"]


# -- the forward ----------------------------------------------------------------------------------


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
