"""Who sees whom, rotary positions, and the attention of a draft layer.

The visibility rule. A block slot at position p of a block anchored at a sees

* context token j iff ``j < a``: when decoding, the target has not run on the anchor yet. A sliding
  layer also needs ``p - j < window``.
* slots of its own block: all of them in a full layer, those up to itself in a sliding layer.
* nothing else: never another block, never padding.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_lightning.drafter.config import DrafterSpec, LayerType
from dflash_lightning.functional.anchors import block_positions

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


@dataclass(frozen=True)
class Chunk:
    """Neighbouring anchors of all rows that attend together.

    Args:
        slots: Which block tokens, a slice of ``N * K``.
        context: Context tokens that any of them sees; later ones are cut off.
        masks: Additive mask per layer type, ``[B, 1, slots, context + slots]``.
    """

    slots: slice
    context: int
    masks: dict[LayerType, Tensor]


def make_chunks(
    anchors: Tensor,
    anchor_valid: Tensor,
    spec: DrafterSpec,
    *,
    chunk_anchors: int,
    dtype: torch.dtype,
) -> list[Chunk]:
    """Cut sorted anchors into chunks, each with the mask that all layers of a type share.

    Other blocks are never visible, so no mask spans all of them. When the anchors fit one and a
    half chunks they are not split.

    Args:
        anchors: Positions, int64 ``[B, N]``, sorted in each row.
        anchor_valid: Whether a slot holds a real anchor, bool ``[B, N]``.
        spec: The drafter.
        chunk_anchors: Anchors of a row in one chunk.
        dtype: Dtype of the masks.
    """
    size, count = spec.block_size, anchors.shape[1]
    step = count if 2 * count <= 3 * chunk_anchors else chunk_anchors
    chunks = []
    for start in range(0, count, max(step, 1)):
        part = anchors[:, start : start + step]
        valid = anchor_valid[:, start : start + step]
        context = int((part * valid).max())
        masks = {
            kind: _additive(_visible(part, valid, context, spec, kind), dtype)
            for kind in dict.fromkeys(spec.layer_types)
        }
        chunks.append(Chunk(slice(start * size, (start + part.shape[1]) * size), context, masks))
    return chunks


def _visible(
    anchors: Tensor, valid: Tensor, context: int, spec: DrafterSpec, kind: LayerType
) -> Tensor:
    """The rule of this module for one chunk, bool ``[B, n * K, context + n * K]``."""
    size, device = spec.block_size, anchors.device
    batch, count = anchors.shape
    key = torch.arange(context, device=device)
    position = block_positions(anchors, size)[..., None]
    sees_context = ((key < anchors[..., None, None]) & valid[..., None, None]).expand(
        -1, -1, size, -1
    )
    slot = torch.arange(count * size, device=device)
    sees_block = slot[:, None] // size == slot // size
    if kind == "sliding_attention" and spec.sliding_window is not None:
        sees_context = sees_context & (position - key < spec.sliding_window)
        sees_block = sees_block & (slot <= slot[:, None])
    return torch.cat([sees_context.flatten(1, 2), sees_block.expand(batch, -1, -1)], dim=-1)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, -torch.inf)[:, None]


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
        self, states: Tensor, angles: Tensor, context: KeyValue, chunks: list[Chunk] | None
    ) -> Tensor:
        """Attend from block states.

        Args:
            states: ``[B, N * K, D]``.
            angles: Of the block positions, float32 ``[B, N * K, head_dim / 2]``.
            context: Keys and values of the context, ``[B, H_kv, T, head_dim]`` each.
            chunks: None where every slot sees all context and all slots: one block at the end of
                its context.
        """
        queries = rotate(self.q_norm(self._heads(self.q_proj(states))), angles)
        own = self.keys_values(states, angles)
        whole = [Chunk(slice(None), context[0].shape[2], {})]
        outputs = [
            F.scaled_dot_product_attention(
                queries[:, :, chunk.slots],
                *(
                    torch.cat([c[:, :, : chunk.context], o[:, :, chunk.slots]], dim=2)
                    for c, o in zip(context, own, strict=True)
                ),
                attn_mask=chunk.masks.get(self.kind),
                enable_gqa=True,
            )
            for chunk in chunks or whole
        ]
        return self.o_proj(torch.cat(outputs, dim=2).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
