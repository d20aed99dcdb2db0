"""The first weights: what comes from the target, what stays random, and what the first loss is."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracles import make_spec
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.drafter.start import init_from_target, init_random
from dflash_lightning.functional.anchors import block_ids, block_positions
from dflash_lightning.random_target import RandomTarget


def started(model_type: str, **dials) -> tuple[Drafter, RandomTarget, dict, int]:
    """A drafter started from a random target, its random start, and how many layers came along."""
    target = RandomTarget(model_type).load()
    with torch.no_grad():
        for name, weight in target.model.named_parameters():
            if weight.dim() == 1:  # norms away from one
                weight.copy_(1 + torch.arange(len(weight)) / 100 + len(name) / 1000)
    values = {"target_layer_ids": (0, 2), "mask_token_id": 5, "num_layers": 2} | dials
    drafter = Drafter(DrafterConfig(**values).for_target(target.config))
    init_random(drafter, seed=3)
    before = {k: v.clone() for k, v in drafter.state_dict().items()}
    taken = init_from_target(drafter, list(target.layers), target.norm_weight)
    return drafter, target, before, taken


HEAD_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_the_last_layers_and_half_the_norm_of_the_target_are_taken(model_type: str):
    drafter, target, before, taken = started(model_type)
    assert taken == 2
    assert torch.equal(drafter.norm.weight, target.norm_weight / 2)
    for layer, source in zip(drafter.layers, list(target.layers)[-2:], strict=True):
        ours, theirs = layer.state_dict(), source.state_dict()
        assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
        assert ours.keys() - theirs.keys() == (HEAD_NORMS if model_type == "llama" else set())
    assert torch.equal(drafter.hidden_norm.weight, before["hidden_norm.weight"])


def test_without_norms_per_head_queries_and_keys_keep_the_scale_they_have_in_the_target():
    target = RandomTarget("llama").load()
    for factor, layer in enumerate(target.layers, start=2):
        layer.self_attn.q_proj.weight *= 3 * factor
        layer.self_attn.k_proj.weight *= factor
    dials = DrafterConfig(num_layers=2, target_layer_ids=(0, 2), mask_token_id=5)
    drafter = Drafter(dials.for_target(target.config))
    init_random(drafter, seed=3)
    assert init_from_target(drafter, list(target.layers), target.norm_weight) == 2
    states = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    for layer, source in zip(drafter.draft_layers, list(target.layers)[-2:], strict=True):
        normed, attention = source.input_layernorm(states), layer.self_attn
        for name, norm in (("q_proj", attention.q_norm), ("k_proj", attention.k_norm)):
            theirs = source.self_attn.get_submodule(name)(normed).unflatten(1, (-1, 16))
            ours = norm(theirs)
            mean_square = theirs.square().mean().item()
            assert ours.square().mean().item() == pytest.approx(mean_square, rel=0.05)


def test_the_fusion_starts_as_the_mean_of_the_layers():
    drafter, _, _, _ = started("qwen3", target_layer_ids=(0, 1, 3))
    features = torch.randn(7, 3, 64)
    torch.testing.assert_close(drafter.fc(features.flatten(1)), features.mean(1))


def test_layers_of_another_shape_stay_random_and_so_does_the_final_norm():
    drafter, _, before, taken = started("qwen3", intermediate_size=96)
    assert taken == 0
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, before[name]) == (name != "fc.weight")


@pytest.mark.parametrize("dials", [{"num_attention_heads": 8}, {"head_dim": 8}])
def test_other_heads_leave_the_feed_forward_part_and_the_final_norm(dials: dict):
    drafter, target, before, taken = started("qwen3", **dials)
    assert taken == 2
    assert torch.equal(drafter.norm.weight, target.norm_weight / 2)
    for i, source in enumerate(list(target.layers)[-2:]):
        theirs = source.state_dict()
        for name, weight in drafter.layers[i].state_dict().items():
            attention = name.startswith(("self_attn", "input_layernorm"))
            expected = before[f"layers.{i}.{name}"] if attention else theirs[name]
            assert torch.equal(weight, expected)


def test_a_drafter_deeper_than_its_target_takes_all_its_layers():
    drafter, target, before, taken = started("qwen3", num_layers=6)
    assert taken == 4
    weights = [layer.mlp.up_proj.weight for layer in drafter.draft_layers]
    for ours, source in zip(weights[2:], target.layers, strict=True):
        assert torch.equal(ours, source.mlp.up_proj.weight)
    for i in (0, 1):
        assert torch.equal(weights[i], before[f"layers.{i}.mlp.up_proj.weight"])


def test_the_start_shares_no_memory_with_the_target():
    drafter, target, _, _ = started("qwen3")
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.zero_()
    assert target.norm_weight.abs().min() > 0
    assert target.layers[-1].mlp.up_proj.weight.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_stored_less_one_is_taken_for_what_it_does(dtype: torch.dtype):
    # Qwen3.5 and 3.6 multiply by 1 + weight
    target = RandomTarget("qwen3").load()
    decoder = target.model.get_decoder()
    factors = 1 + torch.arange(-32, 32) / 64
    decoder.norm, last = Qwen3_5RMSNorm(64).to(dtype), target.layers[-1]
    last.post_attention_layernorm = Qwen3_5RMSNorm(64).to(dtype)
    for norm in (decoder.norm, last.post_attention_layernorm):
        norm.weight.data.copy_(factors - 1)
    assert torch.equal(target.norm_weight.float(), factors)
    drafter = Drafter(DrafterConfig(num_layers=1, mask_token_id=5).for_target(target.config))
    init_from_target(drafter, list(target.layers), target.norm_weight)
    assert torch.equal(drafter.norm.weight, factors / 2)
    assert torch.equal(drafter.draft_layers[0].post_attention_layernorm.weight, factors)


def test_a_random_start_follows_its_seed_and_no_global_generator():
    weights = []
    for state, seed in ((0, 5), (1, 5), (1, 6)):
        torch.manual_seed(state)
        drafter = Drafter(make_spec())
        before = torch.get_rng_state()
        init_random(drafter, seed)
        assert torch.equal(torch.get_rng_state(), before)
        weights.append(torch.cat([w.flatten() for w in drafter.parameters() if w.dim() > 1]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    for name, weight in drafter.named_parameters():
        if weight.dim() == 1:
            assert (weight == (0.2 if name == "norm.weight" else 1)).all()
        else:
            assert weight.std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.2)


# -- the first loss -------------------------------------------------------------------------------


def first_loss(drafter: Drafter, target: RandomTarget) -> float:
    """Mean cross-entropy in nats over blocks of random tokens."""
    ids = torch.randint(6, 512, (16, 40), generator=torch.Generator().manual_seed(1))
    anchors = torch.arange(4, 36, 8).expand(16, -1)
    size = drafter.spec.block_size
    labels = ids[:, block_positions(anchors, size)[0]][:, :, 1:]
    features = target.context_features(ids, drafter.spec.target_layer_ids)
    blocks = target.embed(block_ids(ids, anchors, block_size=size, mask_token_id=5))
    with torch.no_grad():
        hidden = drafter(features, blocks, anchors, torch.ones_like(anchors, dtype=torch.bool))
    logits = hidden[:, :, 1:] @ target.head_weight.T
    return F.cross_entropy(logits.flatten(0, 2), labels.flatten()).item()


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize("dials", [{}, {"intermediate_size": 96}])
def test_a_random_start_knows_nothing_rather_than_wrong_things(model_type: str, dials: dict):
    target = RandomTarget(model_type).load()
    target.head_weight.mul_(20)  # rows as long as those of real tied heads, about 3
    dials = {
        "num_layers": 2,
        "block_size": 4,
        "target_layer_ids": (0, 2),
        "mask_token_id": 5,
    } | dials
    drafter = Drafter(DrafterConfig(**dials).for_target(target.config))
    init_random(drafter, seed=0)
    assert first_loss(drafter, target) < math.log(512) + 0.4
    if "intermediate_size" in dials:  # nothing but the fusion comes along
        assert init_from_target(drafter, list(target.layers), target.norm_weight) == 0
        assert first_loss(drafter, target) < math.log(512) + 0.4
