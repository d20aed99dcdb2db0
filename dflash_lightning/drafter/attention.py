"""Rotary positions, and the attention layer of a drafter, whatever computes it."""

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_lightning.drafter.config import DrafterSpec, LayerType

KeyValue = tuple[Tensor, Tensor]


def inverse_frequencies(spec: DrafterSpec) -> Tensor:
    """Rotary frequencies in radians per token, float32 ``[head_dim / 2]``.

    Plain RoPE (arXiv 2104.09864), linear position interpolation (arXiv 2306.15595), or Llama 3.1's
    smooth rescaling of low frequencies.
    """
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = spec.rope_theta**-exponent
    scaling: dict[str, Any] = spec.rope_scaling or {"rope_type": "default"}
    if scaling["rope_type"] == "default":
        return frequencies
    slow = frequencies / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slow
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * slow


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate heads by position.

    Args:
        x: ``[B, H, T, head_dim]``.
        angles: Position times frequency, float32 ``[B or 1, T, head_dim / 2]``.
    """
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(Protocol):
    """How the block slots of one batch attend; made once for all layers."""

    def attend(self, kind: LayerType, queries: Tensor, own: KeyValue, context: KeyValue) -> Tensor:
        """Attend from block slots to their context and their own block.

        Args:
            kind: Type of the layer.
            queries: ``[B, H, N * K, head_dim]``.
            own: Keys and values of the block slots, ``[B, H_kv, N * K, head_dim]`` each.
            context: Those of the context, ``[B, H_kv, T, head_dim]`` each.

        Returns:
            ``[B, H, N * K, head_dim]``.
        """
        ...


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32.

    Args:
        width: Size of the last axis.
        eps: Added to the mean square.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; the dtype stays."""
        weight = self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class DraftAttention(nn.Module):
    """Attention of block slots over [context ; own block], with one projection for both.

    Args:
        spec: The drafter.
        kind: Full or sliding.
    """

    def __init__(self, spec: DrafterSpec, kind: LayerType) -> None:
        super().__init__()
        self.kind, self.head_dim = kind, spec.head_dim
        width, kv_width = (
            n * spec.head_dim for n in (spec.num_attention_heads, spec.num_key_value_heads)
        )
        self.q_proj = nn.Linear(spec.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, spec.hidden_size, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def keys_values(self, states: Tensor, angles: Tensor) -> KeyValue:
        """Keys and values of states ``[B, T, D]``: two ``[B, H_kv, T, head_dim]``."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(states))), angles)
        return keys, self._heads(self.v_proj(states))

    def forward(
        self, states: Tensor, angles: Tensor, context: KeyValue, attention: Attention
    ) -> Tensor:
        """Attend from block states.

        Args:
            states: ``[B, N * K, D]``.
            angles: Of the block positions, float32 ``[B, N * K, head_dim / 2]``.
            context: Keys and values of the context, ``[B, H_kv, T, head_dim]`` each.
            attention: Who sees whom, and how it is computed.
        """
        queries = rotate(self.q_norm(self._heads(self.q_proj(states))), angles)
        own = self.keys_values(states, angles)
        outputs = attention.attend(self.kind, queries, own, context)
        return self.o_proj(outputs.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
