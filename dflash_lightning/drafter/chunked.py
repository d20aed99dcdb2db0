"""Attention by chunks of anchors, for any device: scores of other blocks are never computed."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lightning.drafter.attention import KeyValue
from dflash_lightning.drafter.config import DrafterSpec, LayerType
from dflash_lightning.drafter.visibility import visible_ranges, within


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


class ChunkedAttention:
    """The sdpa backend for one forward.

    Args:
        chunks: As :func:`make_chunks` cuts them.
    """

    def __init__(self, chunks: list[Chunk]) -> None:
        self.chunks = chunks

    def attend(self, kind: LayerType, queries: Tensor, own: KeyValue, context: KeyValue) -> Tensor:
        """Attend as :class:`Attention` says."""
        if not self.chunks:  # no anchors: nothing is computed, and gradients of zero arrive
            return WholeAttention().attend(kind, queries, own, context)
        outputs = []
        for chunk in self.chunks:
            keys, values = (
                torch.cat([c[:, :, : chunk.context], o[:, :, chunk.slots]], dim=2)
                for c, o in zip(context, own, strict=True)
            )
            mask = chunk.masks[kind]
            outputs.append(masked_attention(queries[:, :, chunk.slots], keys, values, mask))
        return torch.cat(outputs, dim=2)


class WholeAttention:
    """Every slot sees all context and all slots: one block at the end of its context."""

    def attend(self, kind: LayerType, queries: Tensor, own: KeyValue, context: KeyValue) -> Tensor:  # noqa: ARG002
        """Attend as :class:`Attention` says; layers of any kind alike."""
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
        return F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)


def masked_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attend with an additive mask in a kernel that keeps no scores.

    On CUDA a mask leaves flash attention out, and the kernel that takes one in every dtype
    (memory-efficient) wants as many key heads as query heads
    (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``): with fewer, scores would be built
    in full. On a CPU the fused kernel takes both.

    Args:
        queries: ``[B, H, Q, head_dim]``.
        keys: ``[B, H_kv, T, head_dim]``.
        values: Likewise.
        mask: ``[B, 1, Q, T]``.

    Returns:
        ``[B, H, Q, head_dim]``.
    """
    if queries.is_cuda:
        groups = queries.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)


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
    if not count:
        return []
    step = count if 2 * count <= 3 * chunk_anchors else chunk_anchors
    parts = list(zip(anchors.split(step, 1), anchor_valid.split(step, 1), strict=True))
    # all at once: on a GPU every read waits for the device
    contexts = torch.stack([(part * valid).max() for part, valid in parts]).tolist()
    chunks = []
    for i, ((part, valid), context) in enumerate(zip(parts, contexts, strict=True)):
        masks = {
            kind: _additive(_visible(part, valid, context, spec, kind), dtype)
            for kind in dict.fromkeys(spec.layer_types)
        }
        start = i * step
        chunks.append(Chunk(slice(start * size, (start + part.shape[1]) * size), context, masks))
    return chunks


def _visible(
    anchors: Tensor, valid: Tensor, context: int, spec: DrafterSpec, kind: LayerType
) -> Tensor:
    """Who sees whom in one chunk, bool ``[B, n * K, context + n * K]``."""
    seen = visible_ranges(anchors, valid, spec, kind)
    start, end, own_start, own_end = (edge[..., None] for edge in seen)
    token = torch.arange(context, dtype=end.dtype, device=end.device)
    slot = torch.arange(end.shape[1], dtype=end.dtype, device=end.device)
    sees_own = within(slot, own_start, own_end)
    return torch.cat([within(token, start, end), sees_own], dim=-1)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, -torch.inf)[:, None]
