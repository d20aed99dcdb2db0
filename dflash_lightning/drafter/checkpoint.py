"""The public file format of DFlash drafters: ``model.safetensors`` and ``config.json``.

Names and keys are those of the published ``DFlashDraftModel`` files: no embedding, no head, no
prefixes.
"""

import json
import zipfile
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_lightning.drafter.config import DrafterSpec, read_rope, spec_differences
from dflash_lightning.drafter.model import Drafter

ARCHITECTURE = "DFlashDraftModel"
# Fields that have the same name in a config.json and in a DrafterSpec.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
)


def export_drafter(
    drafter: Drafter,
    folder: str | Path,
    *,
    target: str,
    dtype: Literal["float32", "bfloat16"] | None = None,
    notes: str = "",
) -> None:
    """Write a drafter that servers and :func:`load_drafter` read.

    Args:
        drafter: The trained drafter.
        folder: Made if needed; files of the same names are replaced.
        target: Name or path of the target, for the card.
        dtype: Dtype of the weights in the file; None keeps the drafter's.
        notes: Lines for the card: data, settings, measured tau.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    wanted: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
    weights = {
        name: w.detach().to("cpu", wanted or w.dtype).contiguous()
        for name, w in drafter.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    written = str(weights["fc.weight"].dtype).removeprefix("torch.")
    config = public_config(drafter.spec, written)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "README.md").write_text(_card(drafter.spec, folder.name, target, notes))


def export(ckpt: Path, folder: Path, *, dtype: Literal["float32", "bfloat16"] = "bfloat16") -> None:
    """Write the drafter of a training checkpoint in the public format.

    Args:
        ckpt: Checkpoint of ``fit``.
        folder: Made if needed; files of the same names are replaced.
        dtype: Dtype of the exported weights.
    """
    drafter, saved = _from_checkpoint(ckpt, "ckpt")
    notes = f"Trained with dflash_lightning for {saved['global_step']} optimizer steps."
    export_drafter(drafter, folder, target=saved["dflash"]["target"], dtype=dtype, notes=notes)


def load_weights(drafter: Drafter, path: Path) -> None:
    """Start a drafter from the weights of another of the same description.

    Args:
        drafter: Changed in place; keeps its dtype.
        path: An exported drafter's folder, or a checkpoint of ``fit``.

    Raises:
        ValueError: Path is neither, or describes another drafter.
    """
    if (path / "config.json").is_file():
        source = load_drafter(path)
    else:
        source, _ = _from_checkpoint(path, "model.init")
    differences = spec_differences(source.spec.to_dict(), drafter.spec.to_dict())
    if differences:
        raise ValueError(
            f"model.init must be a drafter like model.drafter; {path} differs in {differences}. "
            "Give its settings."
        )
    drafter.load_state_dict(source.state_dict())


def _from_checkpoint(path: Path, setting: str) -> tuple[Drafter, dict[str, Any]]:
    """The drafter of a training checkpoint, and the checkpoint."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{setting} must be a checkpoint file of fit; {path} is none.")
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if "dflash" not in saved:
        raise ValueError(f"{setting} must be a checkpoint of dflash-lightning fit; {path} is none.")
    drafter = Drafter(DrafterSpec.from_dict(saved["dflash"]["spec"]))
    prefix = "drafter."
    weights = {
        k.removeprefix(prefix): v for k, v in saved["state_dict"].items() if k.startswith(prefix)
    }
    _fill(drafter, weights, f"{path} does not hold the drafter that it describes")
    return drafter, saved


def load_drafter(folder: str | Path, dtype: torch.dtype | None = None) -> Drafter:
    """Read a drafter in the public format.

    Args:
        folder: With ``config.json`` and ``model.safetensors``.
        dtype: Of the weights in memory; None keeps the file's.

    Raises:
        FileNotFoundError: If the folder holds no drafter.
        ValueError: If the configuration is not a DFlash drafter's, or tensors are missing,
            unexpected or of another shape.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"drafter must be a folder with config.json and model.safetensors; {folder} is none."
        )
    drafter = Drafter(read_public_config(json.loads((folder / "config.json").read_text()), folder))
    weights = load_file(folder / "model.safetensors")
    _fill(
        drafter,
        weights,
        f"{folder}/model.safetensors does not hold the tensors its config.json describes",
    )
    return drafter if dtype is None else drafter.to(dtype)


def _fill(drafter: Drafter, weights: dict[str, Tensor], refusal: str) -> None:
    """Give a drafter exactly these weights, each in its own dtype."""
    expected = {name: w.shape for name, w in drafter.state_dict().items()}
    missing, unexpected = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    misshapen = [n for n in expected.keys() & weights.keys() if weights[n].shape != expected[n]]
    if missing or unexpected or misshapen:
        raise ValueError(
            f"{refusal}: missing {sorted(missing)}, unexpected {sorted(unexpected)}, other shape "
            f"{sorted(misshapen)}."
        )
    # copies: the file is mapped into memory and may be overwritten
    drafter.load_state_dict({name: w.clone() for name, w in weights.items()}, assign=True)


def public_config(spec: DrafterSpec, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of a drafter; RoPE stands in it for old and new readers alike."""
    sliding = "sliding_attention" in spec.layer_types
    rope = {"rope_theta": spec.rope_theta, **(spec.rope_scaling or {"rope_type": "default"})}
    return {
        "architectures": [ARCHITECTURE],
        # a generic loader then asks for this class instead of making a Qwen3 of random weights
        "auto_map": {"AutoModel": f"dflash.{ARCHITECTURE}"},
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "dflash_config": {
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.target_layer_ids),
        },
        "num_target_layers": spec.num_target_layers,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "layer_types": list(spec.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": spec.sliding_window,
        "max_window_layers": spec.num_layers,
        "rope_theta": spec.rope_theta,
        "rope_scaling": spec.rope_scaling,
        "rope_parameters": rope,
        "max_position_embeddings": spec.max_position_embeddings,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
    }


def read_public_config(config: dict[str, Any], folder: Path) -> DrafterSpec:
    """The drafter that a ``config.json`` describes.

    Raises:
        ValueError: If it describes something else, or says one thing in two ways.
    """
    if ARCHITECTURE not in config.get("architectures", []):
        raise ValueError(
            f"{folder}/config.json must name the architecture {ARCHITECTURE}, got "
            f"{config.get('architectures')}."
        )
    own = config.get("dflash_config") or {}
    layers = _only("num_hidden_layers", folder, config)
    kinds = tuple(config.get("layer_types") or ["full_attention"] * layers)
    _refuse_other_model(config, own, kinds, folder)
    theta, scaling = read_rope(config)
    return DrafterSpec(
        num_layers=layers,
        block_size=_only("block_size", folder, config, own),
        target_layer_ids=tuple(_only("target_layer_ids", folder, config, own)),
        mask_token_id=_only("mask_token_id", folder, config, own),
        layer_types=kinds,
        sliding_window=config.get("sliding_window") if "sliding_attention" in kinds else None,
        num_target_layers=_only("num_target_layers", folder, config, own),
        rope_theta=theta,
        rope_scaling=scaling,
        **{name: _only(name, folder, config) for name in SIZES},
    )


def _only(name: str, folder: Path, *places: dict[str, Any]) -> Any:
    """The one value under a name that may stand in several places."""
    values = [place[name] for place in places if name in place]
    if not values or any(value != values[0] for value in values):
        raise ValueError(f"{folder}/config.json must give one {name}, got {values}.")
    return values[0]


def _refuse_other_model(
    config: dict[str, Any], own: dict[str, Any], kinds: tuple[str, ...], folder: Path
) -> None:
    """Refuse what would load without a word and then compute something else."""
    rope = (config, config.get("rope_scaling") or {}, config.get("rope_parameters") or {})
    causal = own.get("causal", config.get("is_causal"))
    window = config.get("use_sliding_window") or own.get("use_swa")
    wrong = {
        "attention_bias must be false": bool(config.get("attention_bias")),
        "hidden_act must be silu": config.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor must be 1": any(
            place.get("partial_rotary_factor") not in (None, 1) for place in rope
        ),
        "is_causal or causal must not contradict layer_types (sliding layers are causal, full "
        "ones are not)": causal is not None
        and any(causal != (kind == "sliding_attention") for kind in kinds),
        "layer_types must say which layers slide": bool(window) and not config.get("layer_types"),
    }
    for rule, broken in wrong.items():
        if broken:
            raise ValueError(f"{folder}/config.json describes another model: {rule}.")


def _card(spec: DrafterSpec, name: str, target: str, notes: str) -> str:
    drafts = spec.block_size - 1
    method = json.dumps({"method": "dflash", "model": name, "num_speculative_tokens": drafts})
    return f"""# DFlash drafter for {target}

Proposes {drafts} tokens at once (block size {spec.block_size}, anchor included) for speculative
decoding with the target {target}, which verifies them; the output stays the target's.

vLLM: `vllm serve {target} --speculative-config '{method}'`

SGLang: `python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
--speculative-draft-model-path {name} --speculative-num-draft-tokens {spec.block_size}`

{notes}
"""
