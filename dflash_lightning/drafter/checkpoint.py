"""The public file format of DFlash drafters: ``model.safetensors`` and ``config.json``.

Names and keys are those of the published ``DFlashDraftModel`` files: no embedding, no head, no
prefixes.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from dflash_lightning.drafter.config import DrafterSpec, read_rope
from dflash_lightning.drafter.model import Drafter

ARCHITECTURE = "DFlashDraftModel"


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
    kept = drafter.fc.weight.dtype if dtype is None else getattr(torch, dtype)
    weights = {
        name: w.detach().to("cpu", kept).contiguous() for name, w in drafter.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = public_config(drafter.spec, str(kept).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "README.md").write_text(_card(drafter.spec, folder.name, target, notes))


def export(ckpt: Path, folder: Path, *, dtype: Literal["float32", "bfloat16"] = "bfloat16") -> None:
    """Write the drafter of a training checkpoint in the public format.

    Args:
        ckpt: Checkpoint of ``fit``.
        folder: Made if needed; files of the same names are replaced.
        dtype: Dtype of the exported weights.
    """
    if not ckpt.is_file():
        raise FileNotFoundError(f"ckpt must be a checkpoint file of fit; {ckpt} is none.")
    saved = torch.load(ckpt, map_location="cpu", weights_only=True)
    if "dflash" not in saved:
        raise ValueError(f"ckpt must be a checkpoint of dflash-lightning fit; {ckpt} is none.")
    drafter = Drafter(DrafterSpec.from_dict(saved["dflash"]["spec"]))
    prefix = "drafter."
    weights = {
        k.removeprefix(prefix): v for k, v in saved["state_dict"].items() if k.startswith(prefix)
    }
    drafter.load_state_dict(weights)
    notes = f"Trained with dflash_lightning for {saved['global_step']} optimizer steps."
    export_drafter(drafter, folder, target=saved["dflash"]["target"], dtype=dtype, notes=notes)


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
    expected = {name: w.shape for name, w in drafter.state_dict().items()}
    missing, unexpected = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    misshapen = [n for n in expected.keys() & weights.keys() if weights[n].shape != expected[n]]
    if missing or unexpected or misshapen:
        raise ValueError(
            f"{folder}/model.safetensors does not hold the tensors its config.json describes: "
            "missing "
            f"{sorted(missing)}, unexpected {sorted(unexpected)}, other shape {sorted(misshapen)}."
        )
    drafter = drafter.to(dtype or weights["fc.weight"].dtype)
    drafter.load_state_dict(weights)
    return drafter


def public_config(spec: DrafterSpec, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of a drafter; RoPE stands in it for old and new readers alike."""
    sliding = "sliding_attention" in spec.layer_types
    rope = {"rope_theta": spec.rope_theta, **(spec.rope_scaling or {"rope_type": "default"})}
    return {
        "architectures": [ARCHITECTURE],
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
    own = config["dflash_config"]
    sizes: set[int] = {c["block_size"] for c in (config, own) if "block_size" in c}
    if len(sizes) != 1:
        raise ValueError(f"{folder}/config.json must give one block_size, got {sorted(sizes)}.")
    if config.get("attention_bias") or config.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"{folder}/config.json must have attention_bias false and hidden_act silu."
        )
    theta, scaling = read_rope(config)
    layers = config["num_hidden_layers"]
    kinds = tuple(config.get("layer_types") or ["full_attention"] * layers)
    return DrafterSpec(
        num_layers=layers,
        block_size=sizes.pop(),
        target_layer_ids=tuple(own["target_layer_ids"]),
        mask_token_id=own["mask_token_id"],
        layer_types=kinds,
        sliding_window=config.get("sliding_window") if "sliding_attention" in kinds else None,
        num_target_layers=config["num_target_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
    )


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
