"""The frozen target: which layer an id means, what runs, and what the trainer can see of it."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.module import DFlashModule
from dflash_lightning.random_target import RandomTarget
from dflash_lightning.target import (
    UNSUPPORTED,
    HFTarget,
    compute_dtype,
    load_tokenizer,
    tokenizer_fingerprint,
)

KINDS = pytest.mark.parametrize("kind", ["llama", "qwen3"])


def loaded(kind: str = "qwen3", **options: int) -> HFTarget:
    return RandomTarget(kind, **options).load()


def some_ids(rows: int = 3, length: int = 17, seed: int = 0) -> Tensor:
    return torch.randint(512, (rows, length), generator=torch.Generator().manual_seed(seed))


def run_counts(target: HFTarget) -> Counter:
    """Count the calls of every layer, the final norm and the head from now on."""
    calls = Counter()
    decoder = target.model.get_decoder()
    parts = {str(i): layer for i, layer in enumerate(decoder.layers)}
    parts |= {"norm": decoder.norm, "head": target.model.get_output_embeddings()}
    for name, part in parts.items():
        part.register_forward_hook(lambda *_, name=name: calls.update([name]))
    return calls


def with_config(folder: Path, copy: Path, **changes: object) -> Path:
    """A copy of a target folder with other settings in its ``config.json``."""
    shutil.copytree(folder, copy)
    file = copy / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return copy


# -- EX-01: context features -----------------------------------------------------------------------


@KINDS
def test_an_id_means_the_output_of_that_decoder_layer(kind: str) -> None:
    target, ids = loaded(kind), some_ids()
    with torch.no_grad():
        states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    found = target.context_features(ids, [0, 1, 3]).split(64, dim=-1)
    torch.testing.assert_close(found[0], states[0 + 1])
    torch.testing.assert_close(found[1], states[1 + 1])
    # Hugging Face norms the last entry of the tuple; the layer's own output is not normed.
    torch.testing.assert_close(target.model.get_decoder().norm(found[2]), states[3 + 1])
    assert not torch.allclose(found[2], states[3 + 1])


class AddsTenToThe(nn.Module):
    """Stand-in for a decoder layer: layer i adds 10^i."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.i = i

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        return hidden_states + 10**self.i


@pytest.mark.parametrize(
    ("layer_ids", "expected"),
    [((1, 3, 5), (11, 1111, 111_111)), ((0,), (1,)), ((5, 0), (111_111, 1))],
)
def test_features_stand_in_the_order_of_the_ids(layer_ids: tuple, expected: tuple) -> None:
    target = loaded(num_layers=8)
    decoder = target.model.get_decoder()
    decoder.layers = nn.ModuleList(map(AddsTenToThe, range(8)))
    nn.init.zeros_(decoder.embed_tokens.weight)
    features = target.context_features(some_ids(2, 3), layer_ids)
    assert features.shape == (2, 3, 64 * len(layer_ids))
    assert features[..., ::64].unique(dim=0).unique(dim=1).flatten().tolist() == list(expected)


@KINDS
@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_nothing_above_the_last_wanted_layer_runs(kind: str, last: int) -> None:
    target = loaded(kind)
    target.context_features(some_ids(), [3])  # a deeper request before must not linger
    calls = run_counts(target)
    target.context_features(some_ids(), sorted({0, last}))
    assert calls == {str(i): 1 for i in range(last + 1)}


@KINDS
def test_the_cut_model_leaves_the_whole_one_as_it_was(kind: str) -> None:
    target, ids = loaded(kind), some_ids()
    weights = {name: w.clone() for name, w in target.model.state_dict().items()}
    names = [name for name, _ in target.model.named_modules()]
    with torch.no_grad():
        before = target.model(input_ids=ids).logits
        fresh = {last: loaded(kind).context_features(ids, [last]) for last in range(4)}
        for last in (1, 3, 0, 2, 0):
            assert torch.equal(target.context_features(ids, [last]), fresh[last])
            assert torch.equal(target.model(input_ids=ids).logits, before)
    assert [name for name, _ in target.model.named_modules()] == names
    assert target.model.state_dict().keys() == weights.keys()
    assert all(torch.equal(w, weights[name]) for name, w in target.model.state_dict().items())
    assert not any(layer._forward_hooks for layer in target.layers)


@KINDS
def test_padding_and_batch_mates_change_nothing(kind: str) -> None:
    target, ids = loaded(kind), some_ids(3, 12)
    together = target.context_features(ids, [1, 2])
    for row, length in ((0, 5), (1, 12), (2, 1)):
        alone = target.context_features(ids[row : row + 1, :length], [1, 2])[0]
        torch.testing.assert_close(together[row, :length], alone)


def test_features_keep_the_targets_own_dtype_under_autocast() -> None:
    target, ids = loaded(), some_ids()
    plain = target.context_features(ids, [0, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(target.context_features(ids, [0, 2]), plain)
    assert plain.dtype == torch.float32
    assert not plain.requires_grad


# -- verification ----------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("cuts", [(16,), (5, 16), (1, 2, 9, 10, 16)])
def test_verifying_piece_by_piece_equals_one_full_forward(kind: str, cuts: tuple) -> None:
    target, ids = loaded(kind), some_ids(1, 16)
    with torch.no_grad():
        whole = target.model(input_ids=ids).logits
    features = target.context_features(ids, [1, 2])
    cache, start = DynamicCache(), 0
    for stop in cuts:
        logits, seen = target.verify(ids[:, start:stop], cache, [1, 2])
        torch.testing.assert_close(logits, whole[:, start:stop])
        torch.testing.assert_close(seen, features[:, start:stop])
        assert cache.get_seq_length() == stop
        start = stop


def test_rejected_tokens_can_be_cropped_from_the_cache() -> None:
    target, ids, wrong = loaded(), some_ids(1, 12), some_ids(1, 12, seed=1)
    cache = DynamicCache()
    target.verify(torch.cat([ids[:, :8], wrong[:, 8:]], dim=1), cache, [])
    cache.crop(-4)
    logits, seen = target.verify(ids[:, 8:], cache, [])
    with torch.no_grad():
        torch.testing.assert_close(logits, target.model(input_ids=ids).logits[:, 8:])
    assert seen.shape == (1, 4, 0)


# -- head and embedding ----------------------------------------------------------------------------


def test_a_tied_head_is_the_embedding(target_folder) -> None:
    names = load_file(target_folder / "model.safetensors").keys()
    assert "lm_head.weight" not in names
    target = HFTarget(str(target_folder), "float32").load()
    every_id = torch.arange(272)
    assert torch.equal(target.head_weight, target.embed(every_id))
    assert target.head_weight.shape == (272, 64)


def test_a_head_that_is_missing_and_not_tied_is_refused(tmp_path, target_folder) -> None:
    folder = with_config(target_folder, tmp_path / "untied", tie_word_embeddings=False)
    with pytest.raises(
        ValueError, match=r"lacks the tensors \['lm_head.weight'\].*the complete mo"
    ):
        HFTarget(str(folder), "float32").load()


def test_a_layer_that_is_missing_is_refused(tmp_path, target_folder) -> None:
    folder = with_config(target_folder, tmp_path / "holed")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks the tensors \['model.layers.2.mlp.up_proj.weight'"
    ):
        HFTarget(str(folder), "float32").load()


class BiasedHead(RandomTarget):
    """A target whose head is not just a matrix."""

    def _read_model(self, *args: object) -> nn.Module:
        model = super()._read_model(*args)
        model.lm_head = nn.Linear(64, 512, bias=True)
        return model


def test_a_head_with_a_bias_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"must have a linear output head without bias, got Linear"
    ):
        BiasedHead().load()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_setting_that_the_drafters_head_cannot_follow_is_refused_by_name(
    tmp_path, target_folder, name: str
) -> None:
    folder = with_config(target_folder, tmp_path / "odd", **{name: 30.0})
    with pytest.raises(
        ValueError, match=rf"target {folder} sets {name}, which .* Use a target wit"
    ):
        _ = HFTarget(str(folder)).config
    neutral = with_config(target_folder, tmp_path / "neutral", **{name: 1.0})
    assert HFTarget(str(neutral)).config.hidden_size == 64


# -- loading ---------------------------------------------------------------------------------------


def test_nothing_is_read_before_it_is_needed(target_folder) -> None:
    target = HFTarget("/nowhere/at/all")
    assert not target.is_loaded
    with pytest.raises(RuntimeError, match=r"HFTarget\.load\(\) must run before"):
        _ = target.model
    with pytest.raises(ValueError, match=r"target path must be a folder or hub model .*'/nowhere/"):
        _ = target.config
    there = HFTarget(str(target_folder))
    assert there.config.num_hidden_layers == 4
    assert not there.is_loaded


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_refused(tmp_path, target_folder, missing: str) -> None:
    folder = with_config(target_folder, tmp_path / "broken")
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=rf"target path must be a folder in .*read '{folder}'"):
        HFTarget(str(folder)).load()


def test_an_architecture_that_nobody_knows_is_refused(tmp_path, target_folder) -> None:
    folder = with_config(target_folder, tmp_path / "alien", model_type="alien")
    with pytest.raises(ValueError, match=rf"^target path must be .*read '{folder}'"):
        _ = HFTarget(str(folder)).config


def test_loading_twice_keeps_the_weights_that_are_there() -> None:
    target = loaded()
    model = target.model
    assert target.load().model is model
    assert target.is_loaded


def test_the_target_is_frozen_and_in_eval_mode(target_folder) -> None:
    for target in (HFTarget(str(target_folder)).load(), loaded("llama")):
        assert not target.model.training
        assert not any(p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_dtype_that_was_asked_for(target_folder, dtype: str) -> None:
    target = HFTarget(str(target_folder), dtype).load()
    wanted = getattr(torch, dtype)
    assert {p.dtype for p in target.model.parameters()} == {wanted}
    assert target.context_features(some_ids(1, 3) % 272, [0]).dtype == wanted


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "avx2": True}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_takes_bfloat16_only_where_the_processor_has_it(
    monkeypatch, capabilities: dict, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert compute_dtype("auto", torch.device("cpu")) == expected
    assert compute_dtype("float16", torch.device("cpu")) == torch.float16


# -- fingerprints ----------------------------------------------------------------------------------


def test_the_fingerprint_is_the_same_in_float32_and_bfloat16(target_folder) -> None:
    found = {HFTarget(str(target_folder), d).load().fingerprint for d in ("float32", "bfloat16")}
    assert len(found) == 1


def test_the_fingerprint_does_not_depend_on_the_folder(tmp_path, target_folder) -> None:
    target = HFTarget(str(target_folder), "float32").load()
    target.model.save_pretrained(tmp_path / "copy")
    copy = HFTarget(str(tmp_path / "copy"), "float32").load()
    assert copy.fingerprint == target.fingerprint


def test_other_weights_or_another_configuration_give_another_fingerprint(
    tmp_path, target_folder
) -> None:
    targets = [HFTarget(str(target_folder), "float32")]
    changed = with_config(target_folder, tmp_path / "eps", rms_norm_eps=1e-5)
    targets.append(HFTarget(str(changed), "float32"))
    trained = with_config(target_folder, tmp_path / "trained")
    weights = load_file(trained / "model.safetensors")
    weights["model.layers.3.self_attn.o_proj.weight"] *= 1.02  # as little as a fine-tuning
    save_file(weights, trained / "model.safetensors", metadata={"format": "pt"})
    targets.append(HFTarget(str(trained), "float32"))
    targets += [RandomTarget(seed=0), RandomTarget(seed=1), RandomTarget("llama", seed=0)]
    assert len({t.load().fingerprint for t in targets}) == len(targets)
    assert RandomTarget(seed=1).load().fingerprint == targets[4].fingerprint


def test_a_tokenizers_fingerprint_follows_its_template(target_folder, tokenizer) -> None:
    target = HFTarget(str(target_folder))
    assert target.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    other = load_tokenizer(str(target_folder))
    assert tokenizer_fingerprint(other) == target.tokenizer_fingerprint
    other.chat_template += " "
    assert tokenizer_fingerprint(other) != target.tokenizer_fingerprint


# -- promise 9: a tool, not a part -----------------------------------------------------------------


def test_the_trainer_cannot_see_the_target(target_folder) -> None:
    target = HFTarget(str(target_folder), "float32")
    drafter = DrafterConfig(num_layers=1, block_size=4, target_layer_ids=(0, 2), mask_token_id=3)
    module = DFlashModule(target, drafter)
    target.load()
    drafters = sum(p.numel() for p in module.drafter.parameters())
    assert sum(p.numel() for p in module.parameters()) == drafters
    assert {name.split(".")[0] for name in module.state_dict()} == {"drafter"}
    assert not any("target" in name for name, _ in module.named_modules())
    theirs = {p.data_ptr() for p in target.model.parameters()}
    assert not theirs & {p.data_ptr() for p in module.parameters()}
    module.to(torch.float64)
    module.train()
    assert target.head_weight.dtype == torch.float32
    assert not target.model.training


def test_random_weights_are_a_function_of_the_seed_and_draw_from_no_global_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = loaded(seed=7)
    assert torch.equal(torch.rand(3), expected)
    again = loaded(seed=7)
    assert all(map(torch.equal, one.model.parameters(), again.model.parameters()))
    other = loaded(seed=8)
    assert not torch.equal(one.head_weight, other.head_weight)
    whole = AutoModelForCausalLM.from_config(one.config)
    assert type(whole) is type(one.model)
