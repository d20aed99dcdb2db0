"""Sizes of a drafter in closed form, and of a target from its configuration."""

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from dflash_lightning.drafter.config import DrafterSpec


def drafter_parameters(spec: DrafterSpec) -> int:
    """Weights of a drafter: fusion, layers, norms."""
    width = spec.hidden_size
    fusion = len(spec.target_layer_ids) * width * width
    norms = 2 * width + spec.num_layers * 2 * (width + spec.head_dim)
    return fusion + norms + spec.num_layers * layer_matrices(spec)


def layer_matrices(spec: DrafterSpec) -> int:
    """Weights in the matrices of one draft layer."""
    queries, keys = query_width(spec), key_width(spec)
    return spec.hidden_size * (2 * queries + 2 * keys + 3 * spec.intermediate_size)


def query_width(spec: DrafterSpec) -> int:
    """Width of all query heads together."""
    return spec.num_attention_heads * spec.head_dim


def key_width(spec: DrafterSpec) -> int:
    """Width of all key heads together."""
    return spec.num_key_value_heads * spec.head_dim


class TargetSizes(NamedTuple):
    """What memory and work of a target's forward depend on.

    Args:
        parameters: Of the text model with embedding and head; tied ones count once.
        layer_parameters: Of each decoder layer.
        layer_types: ``linear_attention``, ``sliding_attention`` or ``full_attention`` per layer.
        hidden_size: Width.
        intermediate_size: Width of the feed-forward part.
        vocab_size: Rows of the head.
        query_width: Of all query heads together.
        key_width: Of all key heads together.
        sliding_window: Of sliding layers, in tokens; None without.
        linear_heads: Value heads of a linear layer; 0 without.
        linear_key_width: Of all its key heads together.
        linear_head_dim: Width of one of its heads.
    """

    parameters: int
    layer_parameters: tuple[int, ...]
    layer_types: tuple[str, ...]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    query_width: int
    key_width: int
    sliding_window: int | None
    linear_heads: int
    linear_key_width: int
    linear_head_dim: int


def target_sizes(config: PretrainedConfig) -> TargetSizes:
    """Count the target's weights on a device without memory, and read its widths."""
    config = config.get_text_config()
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.get_decoder().layers]
    values: dict[str, Any] = config.to_dict()
    heads = values["num_attention_heads"]
    head_dim = values.get("head_dim") or values["hidden_size"] // heads
    return TargetSizes(
        parameters=sum(p.numel() for p in model.parameters()),
        layer_parameters=tuple(layers),
        layer_types=tuple(values.get("layer_types") or ["full_attention"] * len(layers)),
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        vocab_size=values["vocab_size"],
        query_width=heads * head_dim,
        key_width=(values.get("num_key_value_heads") or heads) * head_dim,
        sliding_window=values.get("sliding_window"),
        linear_heads=values.get("linear_num_value_heads", 0),
        linear_key_width=values.get("linear_num_key_heads", 0)
        * values.get("linear_key_head_dim", 0),
        linear_head_dim=max(
            values.get("linear_key_head_dim", 0), values.get("linear_value_head_dim", 0)
        ),
    )
