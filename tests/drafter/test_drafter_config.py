"""A drafter's configuration: what follows from the target, and every refusal by its text."""

import dataclasses
import json
import re

import pytest
from oracles import make_spec
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from dflash_lightning.drafter.config import (
    DrafterConfig,
    DrafterSpec,
    default_layer_ids,
    read_rope,
)

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def target_config(**changes) -> PretrainedConfig:
    """A Qwen3 of 12 layers whose special ids are 0, 1 and a list."""
    values = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
    }
    return Qwen3Config(**(values | changes))


def refused(text: str) -> pytest.RaisesExc:
    """A refusal in these words."""
    return pytest.raises(ValueError, match=re.escape(text))


# -- what follows from the target -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "depth", "ids"),
    [
        (5, 36, (1, 9, 17, 25, 33)),
        (5, 64, (1, 16, 31, 46, 61)),
        (1, 36, (18,)),
        (1, 5, (2,)),
        (2, 12, (1, 9)),
        (3, 28, (1, 13, 25)),
    ],
)
def test_default_ids_spread_from_the_second_to_the_third_from_last_layer(
    num_layers: int, depth: int, ids: tuple[int, ...]
):
    assert default_layer_ids(num_layers, depth) == ids


def test_default_ids_are_valid_for_every_target_that_is_deep_enough():
    for num_layers in range(2, 9):
        for depth in range(num_layers + 3, 100):
            ids = default_layer_ids(num_layers, depth)
            assert ids[0] == 1
            assert ids[-1] == depth - 3
            assert list(ids) == sorted(set(ids))


def test_sizes_that_are_not_given_are_the_targets():
    spec = DrafterConfig(num_layers=2, mask_token_id=999).for_target(target_config())
    assert dataclasses.asdict(spec) == {
        "num_layers": 2,
        "block_size": 16,
        "target_layer_ids": (1, 9),
        "mask_token_id": 999,
        "layer_types": (FULL, FULL),
        "sliding_window": None,
        "num_target_layers": 12,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "max_position_embeddings": 40_960,
        "vocab_size": 1000,
    }


def test_sizes_that_are_given_win():
    config = DrafterConfig(
        num_layers=3,
        block_size=8,
        target_layer_ids=(11, 0),
        mask_token_id=5,
        layer_types=(SLIDING, SLIDING, FULL),
        sliding_window=256,
        intermediate_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
    )
    spec = config.for_target(target_config())
    for field in dataclasses.fields(config):
        assert getattr(spec, field.name) == getattr(config, field.name)
    assert spec.hidden_size == 64


def test_a_target_without_head_dim_or_grouped_heads_is_completed():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=None, vocab_size=100)
    config.num_key_value_heads = None
    spec = DrafterConfig(num_layers=1, mask_token_id=5).for_target(config)
    assert (spec.head_dim, spec.num_key_value_heads) == (16, 4)


@pytest.mark.parametrize(("vocab_size", "mask"), [(151_936, 151_669), (248_320, 248_070)])
def test_the_mask_id_of_a_known_vocabulary_needs_not_be_given(vocab_size: int, mask: int):
    spec = DrafterConfig(num_layers=2).for_target(target_config(vocab_size=vocab_size))
    assert spec.mask_token_id == mask
    given = DrafterConfig(num_layers=2, mask_token_id=77)
    assert given.for_target(target_config(vocab_size=vocab_size)).mask_token_id == 77


def test_plain_types_hold_a_spec_and_give_it_back():
    spec = make_spec(rope_scaling=LLAMA3, layer_types=(SLIDING, FULL), sliding_window=8)
    assert DrafterSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize("cls", [DrafterConfig, DrafterSpec])
def test_configurations_cannot_be_changed(cls: type):
    config = make_spec() if cls is DrafterSpec else DrafterConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 4


def test_lists_do_as_well_as_tuples():
    config = DrafterConfig(
        num_layers=2, mask_token_id=5, target_layer_ids=[1, 3], layer_types=[FULL, FULL]
    )
    spec = config.for_target(target_config())
    assert (spec.target_layer_ids, spec.layer_types) == ((1, 3), (FULL, FULL))


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0."),
        ({"block_size": 1}, "block_size must be at least 2, got 1."),
        (
            {"num_layers": 3, "layer_types": (FULL, FULL)},
            "layer_types must name one type per layer (3), got 2.",
        ),
        (
            {"num_layers": 1, "layer_types": ("chunked_attention",)},
            "layer_types must be of full_attention, sliding_attention, got ['chunked_attention'].",
        ),
        (
            {"num_layers": 1, "layer_types": (SLIDING,)},
            "go together, got sliding_window=None and layer_types=['sliding_attention']",
        ),
        (
            {"num_layers": 1, "sliding_window": 64},
            "go together, got sliding_window=64 and layer_types=['full_attention'].",
        ),
        (
            {"num_layers": 1, "layer_types": (SLIDING,), "sliding_window": 0},
            "sliding_window must be at least 1, got 0.",
        ),
    ],
)
def test_dials_that_make_no_sense_are_refused_at_once(values: dict, text: str):
    with refused(text):
        DrafterConfig(**values)


@pytest.mark.parametrize("ids", [(1, 5, 5), (0, 12), (-1, 3), ()])
def test_layer_ids_that_repeat_or_do_not_exist_are_refused_with_the_valid_range(ids: tuple):
    with refused(
        "target_layer_ids must be distinct, at least one, and within 0..11 (the target has 12 "
        f"layers), got {list(ids)}."
    ):
        DrafterConfig(target_layer_ids=ids, mask_token_id=5).for_target(target_config())


@pytest.mark.parametrize(("num_layers", "depth"), [(5, 6), (2, 4), (2, 3), (3, 2)])
def test_a_target_too_shallow_for_the_default_ids_is_refused(num_layers: int, depth: int):
    with refused(
        f"a target of {depth} layers is too shallow for {num_layers} default target_layer_ids. "
        f"Give target_layer_ids within 0..{depth - 1}, or fewer num_layers."
    ):
        DrafterConfig(num_layers=num_layers, mask_token_id=5).for_target(
            target_config(num_hidden_layers=depth)
        )


def test_an_unknown_vocabulary_asks_for_the_mask_id():
    with refused("mask_token_id must be given: no safe id is known for a vocabulary of 1000."):
        DrafterConfig(num_layers=2).for_target(target_config())


@pytest.mark.parametrize("mask", [-1, 1000, 5000])
def test_a_mask_id_outside_the_targets_embedding_is_refused(mask: int):
    with refused(f"mask_token_id must be a row of the target's embedding (0..999), got {mask}."):
        DrafterConfig(num_layers=2, mask_token_id=mask).for_target(target_config())


@pytest.mark.parametrize(
    ("mask", "role"),
    [(0, "pad_token_id"), (1, "bos_token_id"), (2, "eos_token_id"), (7, "eos_token_id")],
)
def test_a_mask_id_that_means_something_else_is_refused(mask: int, role: str):
    # LM-05: the pad id, often the end of text, fills the masked slots without a word elsewhere
    with refused(f"mask_token_id must not be the target's {role}, got {mask}."):
        DrafterConfig(num_layers=2, mask_token_id=mask).for_target(target_config())


def test_heads_that_do_not_divide_are_refused():
    with refused("num_attention_heads (8) must be a multiple of num_key_value_heads (3)."):
        DrafterConfig(num_layers=2, mask_token_id=5, num_key_value_heads=3).for_target(
            target_config()
        )


# -- rotary settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_parameters": LLAMA3},
        {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_scaling": {"rope_theta": 5e5, **LLAMA3}, "rope_parameters": LLAMA3},
        {
            "rope_theta": 5e5,
            "rope_scaling": LLAMA3,
            "rope_parameters": {"rope_theta": 5e5, **LLAMA3},
        },
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_flat_and_nested_fields_say_the_same(config: dict):
    assert read_rope(config) == (5e5, LLAMA3)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 10_000},
        {"rope_theta": 10_000, "rope_scaling": None},
        {"rope_theta": 10_000, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 10_000, "rope_type": "default"}},
        {
            "rope_parameters": {
                "rope_theta": 10_000,
                "rope_type": "default",
                "mrope_section": [1, 1],
            }
        },
        {"rope_parameters": {"rope_theta": 10_000, "partial_rotary_factor": 0.25}},
    ],
)
def test_plain_rope_has_no_scaling_and_turns_whole_heads(config: dict):
    assert read_rope(config) == (10_000.0, None)


def test_the_old_name_of_the_type_is_read():
    linear = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_rope(linear) == (1e4, {"rope_type": "linear", "factor": 2.0})


def test_a_scaled_rope_does_not_pass_on_a_partial_rotation_that_is_not_applied():
    # EX-02: the field, copied into the drafter's file, would make servers rotate a quarter
    fields = {"rope_theta": 1e4, "type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}
    assert read_rope({"rope_parameters": fields}) == (1e4, {"rope_type": "linear", "factor": 2.0})


def test_reading_leaves_the_configuration_as_it_was():
    config = {"rope_parameters": {"rope_theta": 1e4, "type": "linear", "factor": 2.0}}
    before = json.dumps(config)
    read_rope(config)
    assert json.dumps(config) == before


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta must have one value, got rope_theta = 10000.0, rope_parameters.rope_theta",
        ),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "rope_scaling ({'rope_type': 'linear', 'factor': 2.0}) contradicts rope_parameters",
        ),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "contradicts rope_parameters ({'rope_type': 'linear', 'factor': 4.0}).",
        ),
        ({}, "the configuration must give rope_theta or rope_parameters.rope_theta."),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type must be one of default, linear, llama3, got 'yarn'.",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear"}},
            "rope_type linear needs factor, got ['rope_type'].",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_type llama3 needs low_freq_factor, high_freq_factor, original_max_position_embed",
        ),
    ],
)
def test_rotary_settings_that_contradict_or_are_not_implemented_are_refused(
    config: dict, text: str
):
    with refused(text):
        read_rope(config)


def test_a_targets_rotary_settings_reach_the_drafter():
    config = target_config(rope_parameters={"rope_theta": 5e5, **LLAMA3})
    spec = DrafterConfig(num_layers=2, mask_token_id=5).for_target(config)
    assert spec.rope_theta == 5e5
    assert {k: spec.rope_scaling[k] for k in LLAMA3} == LLAMA3
