"""The public file format: names and keys as published, bit-identical round trips, refusals."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from oracles import make_spec, random_drafter
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from dflash_lightning.drafter.checkpoint import export, export_drafter, load_drafter
from dflash_lightning.drafter.config import DrafterSpec
from dflash_lightning.drafter.model import Drafter

FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# The published layout, as peers.md section 3.1 lists it; not taken from our own writer.
LAYER_TENSORS = [
    *(f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o")),
    *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    *("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
]
CONFIG_KEYS = {
    *("architectures", "model_type", "auto_map", "block_size", "dflash_config"),
    *("num_target_layers", "num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("rope_theta", "rope_scaling", "max_position_embeddings", "vocab_size"),
    *("tie_word_embeddings", "dtype", "attention_bias"),
}


def mixed_spec(**changes) -> DrafterSpec:
    """EX-07: five layers, four of them with a window."""
    values = {"num_layers": 5, "layer_types": (SLIDING,) * 4 + (FULL,), "sliding_window": 2048}
    return make_spec(**(values | changes))


def exported(
    folder: Path, spec: DrafterSpec | None = None, dtype: torch.dtype = torch.float32
) -> Drafter:
    """Write a random drafter, and return it."""
    drafter = random_drafter(spec or make_spec()).to(dtype)
    export_drafter(drafter, folder, target="org/target")
    return drafter


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def edit_config(folder: Path, **changes) -> None:
    """Change top-level keys of a written config; None removes one."""
    config = config_of(folder) | changes
    text = json.dumps({k: v for k, v in config.items() if v is not None})
    (folder / "config.json").write_text(text)


def edit_weights(folder: Path, **changes: Tensor | None) -> None:
    """Change tensors of a written file; None removes one."""
    weights = load_file(folder / "model.safetensors") | {
        name.replace("__", "."): w for name, w in changes.items()
    }
    kept = {k: v.clone() for k, v in weights.items() if v is not None}
    save_file(kept, folder / "model.safetensors")


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Same names, dtypes and bits."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


def refused(text: str) -> pytest.RaisesExc:
    """A refusal in these words."""
    return pytest.raises(ValueError, match=re.escape(text))


# -- what is written ------------------------------------------------------------------------------


def test_tensor_names_are_the_published_ones_without_embedding_head_or_prefix(tmp_path: Path):
    exported(tmp_path)
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{i}.{name}" for i in (0, 1) for name in LAYER_TENSORS}
    assert load_file(tmp_path / "model.safetensors").keys() == expected
    assert len(expected) == 25


def test_tensor_shapes_follow_from_the_config(tmp_path: Path):
    exported(tmp_path)
    shapes = {k: tuple(v.shape) for k, v in load_file(tmp_path / "model.safetensors").items()}
    # width 16, two target layers, 4 query heads and 2 key heads of 8, feed-forward 24
    assert shapes["fc.weight"] == (16, 32)
    assert shapes["hidden_norm.weight"] == shapes["norm.weight"] == (16,)
    got = [shapes[f"layers.1.{name}"] for name in LAYER_TENSORS]
    attention = [(32, 16), (16, 16), (16, 16), (16, 32), (8,), (8,)]
    assert got == [*attention, (24, 16), (24, 16), (16, 24), (16,), (16,)]


def test_the_layers_load_into_transformers_own_qwen3_layers(tmp_path: Path):
    exported(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for i in (0, 1):
        layer = Qwen3DecoderLayer(AutoConfig.from_pretrained(tmp_path), i)
        prefix = f"layers.{i}."
        own = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
        layer.load_state_dict(own, strict=True)


@pytest.mark.parametrize("spec", [make_spec(), mixed_spec()], ids=["full", "mixed"])
def test_config_keys_are_the_published_ones(tmp_path: Path, spec: DrafterSpec):
    exported(tmp_path, spec)
    config = config_of(tmp_path)
    assert config.keys() >= CONFIG_KEYS
    # beside them: what transformers 5 reads, and a default of Qwen3
    assert config.keys() - CONFIG_KEYS == {"rope_parameters", "attention_dropout"}


def test_config_values_describe_the_drafter(tmp_path: Path):
    exported(tmp_path, mixed_spec(), torch.bfloat16)
    config = config_of(tmp_path)
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "dflash_config": {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [0, 2]},
        "num_target_layers": 4,
        "num_hidden_layers": 5,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-3,
        "layer_types": [SLIDING] * 4 + [FULL],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "max_position_embeddings": 512,  # EX-06: the target's limit
        "vocab_size": 64,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "dtype": "bfloat16",
    }
    assert {k: config[k] for k in expected} == expected
    # each server derives causality from the layer types; a second word could only contradict it
    assert not {"is_causal", "causal"} & (config.keys() | config["dflash_config"].keys())


def test_a_drafter_without_windows_says_so(tmp_path: Path):
    exported(tmp_path)
    config = config_of(tmp_path)
    assert config["layer_types"] == [FULL, FULL]
    assert (config["use_sliding_window"], config["sliding_window"]) == (False, None)


@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3], ids=["default", "linear", "llama3"])
def test_old_and_new_readers_of_rotary_settings_agree(tmp_path: Path, scaling: dict | None):
    # EX-02: transformers 4 reads the flat fields, transformers 5 the nested ones
    spec = make_spec(head_dim=32, rope_theta=5e5, rope_scaling=scaling)
    drafter = exported(tmp_path, spec)
    config = config_of(tmp_path)
    old = {k: v for k, v in config.items() if k != "rope_parameters"}
    new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    assert old["rope_theta"] == new["rope_parameters"]["rope_theta"] == 5e5
    for fields in (old, new, config):
        read = Qwen3Config(**copy.deepcopy(fields))  # it writes into what it is given
        kind = read.rope_parameters["rope_type"]
        assert kind == (scaling or {"rope_type": "default"})["rope_type"]
        if kind == "default":
            frequencies, _ = Qwen3RotaryEmbedding.compute_default_rope_parameters(read)
        else:
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](read, torch.device("cpu"))
        torch.testing.assert_close(drafter.inverse_frequencies, frequencies, rtol=1e-6, atol=0)
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert load_drafter(tmp_path).spec == spec


def test_the_card_names_both_counts_of_tokens(tmp_path: Path):
    # EX-05: block 16 drafts 15; vLLM counts the drafts, SGLang the block
    spec, folder = make_spec(block_size=16), tmp_path / "my-drafter"
    export_drafter(random_drafter(spec), folder, target="org/target", notes="tau 4.2 on chats")
    card = (folder / "README.md").read_text()
    assert '"num_speculative_tokens": 15' in card
    assert "--speculative-num-draft-tokens 16" in card
    assert card.count("org/target") >= 3
    assert card.count("my-drafter") == 2
    assert "tau 4.2 on chats" in card


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_asked_dtype_is_written_and_stated(tmp_path: Path, dtype: str):
    drafter = random_drafter(make_spec())
    export_drafter(drafter, tmp_path, target="t", dtype=dtype)
    weights = load_file(tmp_path / "model.safetensors")
    assert {str(w.dtype) for w in weights.values()} == {f"torch.{dtype}"}
    assert config_of(tmp_path)["dtype"] == dtype
    assert drafter.fc.weight.dtype == torch.float32
    rounded = {k: w.to(getattr(torch, dtype)) for k, w in drafter.state_dict().items()}
    assert same_bits(weights, rounded)


# -- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "spec", [make_spec(), mixed_spec(rope_scaling=LLAMA3)], ids=["full", "mixed"]
)
def test_load_then_export_is_bit_identical(tmp_path: Path, spec: DrafterSpec, dtype: torch.dtype):
    # EX-08
    drafter = exported(tmp_path / "a", spec, dtype)
    loaded = load_drafter(tmp_path / "a")
    assert loaded.spec == spec
    assert same_bits(loaded.state_dict(), drafter.state_dict())
    export_drafter(loaded, tmp_path / "b", target="org/target")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_file_of_mixed_dtypes_comes_back_as_it_was(tmp_path: Path):
    exported(tmp_path, dtype=torch.bfloat16)
    edit_weights(tmp_path, norm__weight=torch.linspace(0.9, 1.1, 16))
    before = load_file(tmp_path / "model.safetensors")
    export_drafter(load_drafter(tmp_path), tmp_path / "again", target="t")
    assert same_bits(load_file(tmp_path / "again" / "model.safetensors"), before)


def test_a_drafter_can_be_written_over_the_file_it_was_read_from(tmp_path: Path):
    exported(tmp_path)
    drafter = load_drafter(tmp_path)
    with torch.no_grad():
        drafter.fc.weight.add_(1)
    expected = {k: v.clone() for k, v in drafter.state_dict().items()}
    export_drafter(drafter, tmp_path, target="t")
    assert same_bits(drafter.state_dict(), expected)
    assert same_bits(load_file(tmp_path / "model.safetensors"), expected)


def test_a_loaded_drafter_does_not_depend_on_its_file_any_more(tmp_path: Path):
    # a file that is mapped into memory changes the weights when it is overwritten in place
    written = exported(tmp_path)
    loaded = load_drafter(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    assert same_bits(loaded.state_dict(), written.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_drafter_computes_what_the_written_one_does_and_can_be_trained(
    tmp_path: Path, dtype: torch.dtype
):
    drafter = exported(tmp_path, mixed_spec(sliding_window=6), dtype)
    loaded = load_drafter(tmp_path)
    features, block = torch.randn(1, 9, 32).to(dtype), torch.randn(1, 4, 16).to(dtype)
    out = loaded.draft_block(features, block)
    assert torch.equal(out, drafter.draft_block(features, block))
    out.sum().backward()
    assert all(p.grad is not None for p in loaded.parameters())


def test_the_dtype_in_memory_can_be_chosen(tmp_path: Path):
    exported(tmp_path, dtype=torch.bfloat16)
    loaded = load_drafter(tmp_path, torch.float32)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_a_file_as_others_publish_it_is_read(tmp_path: Path):
    # older: no block size in dflash_config, flat rotary fields; newer: both sizes nested
    drafter = exported(tmp_path)
    edit_config(
        tmp_path,
        rope_parameters=None,
        auto_map=None,
        use_sliding_window=None,
        layer_types=None,
        dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 2]},
        torch_dtype="float32",
    )
    assert load_drafter(tmp_path).spec == drafter.spec
    edit_config(
        tmp_path,
        block_size=None,
        num_target_layers=None,
        dflash_config={
            "block_size": 4,
            "num_target_layers": 4,
            "mask_token_id": 3,
            "target_layer_ids": [0, 2],
        },
    )
    assert load_drafter(tmp_path).spec == drafter.spec


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", None])
def test_a_folder_without_a_drafter_is_refused(tmp_path: Path, missing: str | None):
    folder = tmp_path / "drafter"
    if missing:
        exported(folder)
        (folder / missing).unlink()
    text = f"drafter must be a folder with config.json and model.safetensors; {folder} is none."
    with pytest.raises(FileNotFoundError, match=re.escape(text)):
        load_drafter(folder)


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path):
    # EX-04: one renamed, one of another shape; nothing is skipped
    exported(tmp_path)
    edit_weights(
        tmp_path,
        layers__0__mlp__up_proj__weight=None,
        layers__0__mlp__w3__weight=torch.zeros(24, 16),
        fc__weight=torch.zeros(16, 48),
    )
    with refused(
        f"{tmp_path}/model.safetensors does not hold the tensors its config.json describes: "
        "missing ['layers.0.mlp.up_proj.weight'], unexpected ['layers.0.mlp.w3.weight'], "
        "other shape ['fc.weight']."
    ):
        load_drafter(tmp_path)


def test_a_tensor_of_another_shape_alone_is_refused(tmp_path: Path):
    exported(tmp_path)
    edit_weights(tmp_path, layers__1__self_attn__q_norm__weight=torch.ones(16))
    with refused("missing [], unexpected [], other shape ['layers.1.self_attn.q_norm.weight']."):
        load_drafter(tmp_path)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "model.norm.weight"])
def test_embedding_head_and_prefixed_names_are_unexpected(tmp_path: Path, name: str):
    exported(tmp_path)
    edit_weights(tmp_path, **{name: torch.zeros(16)})
    with refused(f"missing [], unexpected ['{name}'], other shape []."):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            "must name the architecture DFlashDraftModel, got ['Qwen3ForCausalLM'].",
        ),
        ({"architectures": None}, "must name the architecture DFlashDraftModel, got None."),
        ({"block_size": 8}, "must give one block_size, got [8, 4]."),
        ({"num_target_layers": None}, "must give one num_target_layers, got []."),
        ({"dflash_config": None}, "must give one target_layer_ids, got []."),
        ({"head_dim": None}, "must give one head_dim, got []."),
        ({"attention_bias": True}, "describes another model: attention_bias must be false."),
        ({"hidden_act": "gelu"}, "describes another model: hidden_act must be silu."),
        ({"layer_types": [FULL]}, "layer_types must name one type per layer (5), got 1."),
        (
            {"layer_types": ["linear_attention"] * 5},
            "layer_types must be of full_attention, sliding_attention, got ['linear_attention',",
        ),
        (
            {"sliding_window": None},
            "sliding_window and a sliding_attention entry in layer_types go together",
        ),
        ({"layer_types": None}, "another model: layer_types must say which layers slide."),
        ({"is_causal": False}, "is_causal or causal must not contradict layer_types"),
        ({"is_causal": True}, "is_causal or causal must not contradict layer_types"),
        (
            {"rope_theta": 1e6},
            "rope_theta must have one value, got rope_theta = 1000000.0, rope_parameters.rope_th",
        ),
        (
            {"rope_scaling": LINEAR},
            "rope_scaling ({'rope_type': 'linear', 'factor': 4.0}) contradicts rope_parameters",
        ),
        ({"partial_rotary_factor": 0.25}, "another model: partial_rotary_factor must be 1."),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "another model: partial_rotary_factor must be 1.",
        ),
        ({"num_target_layers": 2}, "target_layer_ids must be distinct, at least one, and within"),
        ({"vocab_size": 3}, "mask_token_id must be a row of the target's embedding (0..2), got 3."),
    ],
)
def test_a_config_of_another_or_no_certain_model_is_refused(
    tmp_path: Path, changes: dict, text: str
):
    exported(tmp_path, mixed_spec())
    edit_config(tmp_path, **changes)
    with refused(text):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("nested", "text"),
    [
        ({"block_size": 8}, "must give one block_size, got [4, 8]."),
        ({"causal": False}, "is_causal or causal must not contradict layer_types"),
        ({"num_target_layers": 6}, "must give one num_target_layers, got [4, 6]."),
    ],
)
def test_nested_settings_that_contradict_are_refused(tmp_path: Path, nested: dict, text: str):
    exported(tmp_path, mixed_spec())
    edit_config(tmp_path, dflash_config=config_of(tmp_path)["dflash_config"] | nested)
    with refused(text):
        load_drafter(tmp_path)


def test_causality_that_agrees_with_the_layer_types_is_accepted(tmp_path: Path):
    for kinds, window, causal in (((FULL, FULL), None, False), ((SLIDING, SLIDING), 8, True)):
        exported(tmp_path, make_spec(layer_types=kinds, sliding_window=window))
        edit_config(tmp_path, is_causal=causal)
        assert load_drafter(tmp_path).spec.layer_types == kinds


# -- export of a training checkpoint --------------------------------------------------------------


def save_checkpoint(path: Path, drafter: Drafter, **changes) -> Path:
    """A checkpoint as ``fit`` writes it, reduced to what an export reads."""
    values = {
        "state_dict": {f"drafter.{k}": v for k, v in drafter.state_dict().items()},
        "dflash": {"spec": drafter.spec.to_dict(), "target": "org/target"},
        "global_step": 321,
        "optimizer_states": [{"state": {}}],
    }
    torch.save(values | changes, path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_becomes_a_public_drafter(tmp_path: Path, dtype: str):
    drafter = random_drafter(mixed_spec(rope_scaling=LINEAR))
    export(save_checkpoint(tmp_path / "last.ckpt", drafter), tmp_path / "out", dtype=dtype)
    loaded = load_drafter(tmp_path / "out")
    assert loaded.spec == drafter.spec
    expected = {k: v.to(getattr(torch, dtype)) for k, v in drafter.state_dict().items()}
    assert same_bits(loaded.state_dict(), expected)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "org/target" in card
    assert "321 optimizer steps" in card


def test_other_weights_in_a_checkpoint_stay_out_of_the_export(tmp_path: Path):
    drafter = random_drafter(make_spec())
    state = {f"drafter.{k}": v for k, v in drafter.state_dict().items()}
    state["val_metrics.sums"] = torch.zeros(7)
    export(save_checkpoint(tmp_path / "a.ckpt", drafter, state_dict=state), tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == drafter.state_dict().keys()


def test_a_checkpoint_without_all_drafter_weights_is_refused_and_writes_nothing(tmp_path: Path):
    drafter = random_drafter(make_spec())
    state = {f"drafter.{k}": v for k, v in drafter.state_dict().items() if k != "norm.weight"}
    path = save_checkpoint(tmp_path / "a.ckpt", drafter, state_dict=state)
    with refused(f"{path} does not hold the drafter that it describes: missing ['norm.weight']"):
        export(path, tmp_path / "out")
    empty = save_checkpoint(tmp_path / "b.ckpt", drafter, state_dict={})
    with refused(f"{empty} does not hold the drafter that it describes: missing ['fc.weight',"):
        export(empty, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint_of_fit_is_refused(tmp_path: Path):
    path = tmp_path / "a.ckpt"
    with refused(f"ckpt must be a checkpoint file of fit; {path} is none."):
        export(path, tmp_path / "out")
    path.write_text("not a checkpoint")
    with refused(f"ckpt must be a checkpoint file of fit; {path} is none."):
        export(path, tmp_path / "out")
    torch.save({"state_dict": {}}, path)
    with refused(f"ckpt must be a checkpoint of dflash-lightning fit; {path} is none."):
        export(path, tmp_path / "out")
