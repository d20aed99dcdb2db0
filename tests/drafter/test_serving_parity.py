"""Training equals serving: one block decoded at an anchor is that block of the parallel forward."""

import functools

import pytest
import torch
from oracles import make_spec, random_drafter
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dflash_lightning.drafter.attention import inverse_frequencies, rotate
from dflash_lightning.drafter.config import DrafterConfig, read_rope
from dflash_lightning.drafter.model import DraftCache, Drafter
from dflash_lightning.functional.anchors import block_ids
from dflash_lightning.random_target import RandomTarget
from dflash_lightning.target import HFTarget

FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = {
    "full": {"layer_types": (FULL, FULL, FULL)},
    "sliding": {"layer_types": (SLIDING, SLIDING, SLIDING), "sliding_window": 9},
    "mixed": {"layer_types": (SLIDING, FULL, SLIDING), "sliding_window": 13},
}
ROPE = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
WIDTH, BLOCK, MASK = 60, 5, 511


@functools.cache
def target(model_type: str) -> HFTarget:
    return RandomTarget(model_type).load()


@functools.cache
def drafter(model_type: str, layers: str) -> Drafter:
    """For a random target; its norms are not at one."""
    config = DrafterConfig(
        num_layers=3,
        block_size=BLOCK,
        target_layer_ids=(0, 1, 3),
        mask_token_id=MASK,
        **LAYERS[layers],
    )
    return random_drafter(config.for_target(target(model_type).config), chunk_anchors=3).eval()


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, anchors and their validity: row 1 is shorter and has fewer anchors."""
    ids = torch.randint(MASK, (2, WIDTH), generator=torch.Generator().manual_seed(1))
    ids[1, 31:] = 0
    anchors = torch.zeros(2, 20, dtype=torch.int64)
    anchors[0] = torch.tensor([0, 1, 2, *range(7, 58, 3)])
    anchors[1, :7] = torch.tensor([1, 5, 8, 9, 13, 22, 30])
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[1, 7:] = False
    return ids, anchors, valid


# -- one rule for training and serving ------------------------------------------------------------


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@torch.no_grad()
def test_a_block_of_the_training_forward_is_the_block_decoded_at_its_anchor(
    model_type: str, layers: str
):
    big, small = target(model_type), drafter(model_type, layers)
    ids, anchors, valid = rows()
    features = big.context_features(ids, small.spec.target_layer_ids)
    blocks = big.embed(block_ids(ids, anchors, block_size=BLOCK, mask_token_id=MASK))
    trained = small(features, blocks, anchors, valid)
    for b, n in valid.nonzero().tolist():
        a = int(anchors[b, n])
        served = small.draft_block(features[b : b + 1, :a], blocks[b : b + 1, n])
        assert (trained[b, n] - served[0]).abs().max() < 1e-5


@pytest.mark.parametrize("layers", LAYERS)
@torch.no_grad()
def test_a_server_that_has_seen_only_the_tokens_before_the_anchor_drafts_the_same(layers: str):
    # the target's own features of the prefix, not a slice of the whole row's
    big, small = target("qwen3"), drafter("qwen3", layers)
    ids, anchors, valid = rows()
    features = big.context_features(ids, small.spec.target_layer_ids)
    blocks = big.embed(block_ids(ids, anchors, block_size=BLOCK, mask_token_id=MASK))
    trained = small(features, blocks, anchors, valid)
    for n in (1, 4, 11, 19):
        a = int(anchors[0, n])
        known = big.context_features(ids[:1, :a], small.spec.target_layer_ids)
        served = small.draft_block(known, blocks[:1, n])
        assert (trained[0, n] - served[0]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", [FULL, SLIDING])
@torch.no_grad()
def test_a_wrong_anchor_would_show(kind: str):
    # the parity above has teeth: one token of context more or less moves the block by far more
    window = 8 if kind == SLIDING else None
    small = random_drafter(make_spec(layer_types=(kind, kind), sliding_window=window))
    features, block = torch.randn(1, 12, 32), torch.randn(1, 4, 16)
    right = small.draft_block(features[:, :10], block)
    for a in (9, 11):
        assert (small.draft_block(features[:, :a], block) - right).abs().max() > 1e-3


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("pieces", [[24], [1] * 24, [7, 1, 16], [0, 23, 1, 0]])
@torch.no_grad()
def test_a_cache_filled_in_pieces_equals_one_filled_at_once(layers: str, pieces: list[int]):
    small = drafter("qwen3", layers)
    features = torch.randn(1, 24, 192, generator=torch.Generator().manual_seed(0))
    block = torch.randn(1, BLOCK, 64, generator=torch.Generator().manual_seed(1))
    whole, grown = DraftCache(), DraftCache()
    small.extend(whole, features)
    assert grown.length == 0
    for part in features.split(pieces, dim=1):
        small.extend(grown, part)
    assert grown.length == whole.length == 24
    torch.testing.assert_close(grown.layers, whole.layers)
    difference = small.draft(grown, block) - small.draft(whole, block)
    assert difference.abs().max() < 1e-5


@torch.no_grad()
def test_drafting_leaves_the_cache_as_it_was():
    small, cache = drafter("qwen3", "mixed"), DraftCache()
    small.extend(cache, torch.randn(1, 10, 192))
    block = torch.randn(1, BLOCK, 64)
    first = small.draft(cache, block)
    assert cache.length == 10
    assert torch.equal(small.draft(cache, block), first)


# -- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_positions_stay_exact_in_any_dtype_of_the_weights(dtype: torch.dtype):
    # a frequency rounded to bf16 is off by up to 2^-9: two radians at position 1000
    spec = make_spec()
    cast = random_drafter(spec).to(dtype)
    assert torch.equal(cast.inverse_frequencies, inverse_frequencies(spec))
    assert {p.dtype for p in cast.parameters()} == {dtype}


@torch.no_grad()
def test_bfloat16_serving_stays_near_float32_training_far_into_the_context():
    spec = make_spec(head_dim=16)
    exact, served = random_drafter(spec), random_drafter(spec)
    for layer in [*exact.draft_layers, *served.draft_layers]:
        layer.self_attn.q_norm.weight *= 6  # attention sharp enough to feel where a token stands
    served.to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 1500, 32, generator=generator).bfloat16()
    block = torch.randn(1, 4, 16, generator=generator).bfloat16()
    expected = exact.draft_block(features.float(), block.float())
    difference = served.draft_block(features, block).float() - expected
    assert difference.norm() < 0.04 * expected.norm()  # 0.015; 0.14 with frequencies in bf16


@torch.no_grad()
def test_mixed_precision_training_stays_near_float32_training():
    spec = make_spec(layer_types=(FULL, SLIDING), sliding_window=9)
    small, (_, anchors, valid) = random_drafter(spec), rows()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, WIDTH, 32, generator=generator)
    blocks = torch.randn(2, 20, 4, 16, generator=generator)
    exact = small(features, blocks, anchors, valid)[valid]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = small(features.bfloat16(), blocks.bfloat16(), anchors, valid)[valid]
    assert mixed.dtype == torch.float32
    assert (mixed - exact).norm() < 0.03 * exact.norm()


# -- rotary positions -----------------------------------------------------------------------------


def rope_config(kind: str, head_dim: int, theta: float) -> PretrainedConfig:
    """A target's configuration as transformers 5 holds it."""
    family = LlamaConfig if kind == "llama3" else Qwen3Config
    parameters = {"rope_type": "default", **ROPE[kind], "rope_theta": theta}
    return family(head_dim=head_dim, max_position_embeddings=512, rope_parameters=parameters)


@pytest.mark.parametrize("kind", ROPE)
@pytest.mark.parametrize(("head_dim", "theta"), [(16, 1e4), (64, 5e5), (128, 1e7)])
def test_frequencies_equal_those_of_transformers(kind: str, head_dim: int, theta: float):
    config = rope_config(kind, head_dim, theta)
    if kind == "default":
        expected, factor = Qwen3RotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    rope_theta, rope_scaling = read_rope(config.to_dict())
    spec = make_spec(head_dim=head_dim, rope_theta=rope_theta, rope_scaling=rope_scaling)
    torch.testing.assert_close(inverse_frequencies(spec), expected, rtol=1e-6, atol=0)
    assert factor == 1.0


def test_scalings_differ_where_they_should():
    plain, linear, llama3 = (
        inverse_frequencies(make_spec(head_dim=64, rope_scaling=ROPE[kind] or None))
        for kind in ROPE
    )
    torch.testing.assert_close(linear, plain / 4)
    # Llama 3 keeps what turns often within the original context and slows what hardly turns
    assert llama3[0] == plain[0]
    torch.testing.assert_close(llama3[-1], plain[-1] / 8)
    assert ((llama3 <= plain) & (llama3 >= plain / 8)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_that_of_transformers(dtype: torch.dtype):
    config = rope_config("default", 16, 1e4)
    q, k = torch.randn(2, 2, 3, 7, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.tensor([[0, 1, 2, 40, 41, 42, 511], [5, 6, 7, 8, 300, 301, 302]])
    expected = apply_rotary_pos_emb(q, k, *Qwen3RotaryEmbedding(config)(q, positions))
    angles = positions[..., None].float() * inverse_frequencies(
        make_spec(head_dim=16, rope_theta=1e4)
    )
    ours = rotate(q, angles), rotate(k, angles)
    # float32: one unit in the last place of a frequency, at position 511
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)
    assert ours[0].dtype == dtype


def test_only_the_distance_between_two_positions_counts():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator)
    frequencies = inverse_frequencies(make_spec())

    def score(at: float, of: float) -> float:
        turned = (
            rotate(x, torch.tensor([[p]])[..., None] * frequencies) for x, p in ((q, at), (k, of))
        )
        return float(torch.sum(next(turned) * next(turned)))

    assert score(3.0, 9.0) == pytest.approx(score(103.0, 109.0), abs=1e-4)
    assert score(3.0, 9.0) != pytest.approx(score(3.0, 10.0), abs=1e-2)
