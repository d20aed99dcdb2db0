"""The drafter: predicts all tokens of a block at once (DFlash, arXiv 2602.06036)."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash_lightning.drafter.attention import (
    Attention,
    DraftAttention,
    KeyValue,
    RMSNorm,
    inverse_frequencies,
)
from dflash_lightning.drafter.backends import AttentionChoice, Backends
from dflash_lightning.drafter.chunked import ChunkedAttention, WholeAttention, make_chunks
from dflash_lightning.drafter.config import DrafterSpec, LayerType
from dflash_lightning.drafter.flex import Room
from dflash_lightning.functional.anchors import block_positions


class SwiGLU(nn.Module):
    """Gated feed-forward part.

    Args:
        spec: The drafter.
    """

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., D]``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm layer: attention over context and own block, then the feed-forward part.

    Args:
        spec: The drafter.
        kind: Full or sliding.
    """

    def __init__(self, spec: DrafterSpec, kind: LayerType) -> None:
        super().__init__()
        self.self_attn = DraftAttention(spec, kind)
        self.mlp = SwiGLU(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def context(self, fused: Tensor, angles: Tensor) -> KeyValue:
        """Keys and values of the fused context ``[B, T, D]``."""
        return self.self_attn.keys_values(fused, angles)

    def forward(self, x: Tensor, angles: Tensor, context: KeyValue, attention: Attention) -> Tensor:
        """``[B, N * K, D]`` to the same; arguments as in :class:`DraftAttention`."""
        x = x + self.self_attn(self.input_layernorm(x), angles, context, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftCache:
    """Keys and values of the context, layer by layer, while decoding one row."""

    def __init__(self) -> None:
        self.layers: list[KeyValue] = []

    @property
    def length(self) -> int:
        """Context tokens held."""
        return self.layers[0][0].shape[2] if self.layers else 0


class Drafter(nn.Module):
    """Predicts the K - 1 tokens after an anchor from the target's features of everything before it.

    Embedding and head are the target's and not part of it.

    Args:
        spec: The drafter, complete; ``DrafterConfig(...).for_target(config)`` makes one.
        chunk_anchors: Anchors of a row that attend together on the sdpa path; 16 to 32 measured
            best.
        attention: What computes attention in training: ``flex`` is one compiled kernel for GPUs,
            ``sdpa`` runs anywhere, ``auto`` is flex on a GPU that has it and sdpa elsewhere.
            Decoding uses sdpa.
        checkpoint_layers: Keep only the inputs of each layer for the backward pass, which
            recomputes the rest.
    """

    inverse_frequencies: Tensor

    def __init__(
        self,
        spec: DrafterSpec,
        chunk_anchors: int = 16,
        *,
        attention: AttentionChoice = "auto",
        checkpoint_layers: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.backends = Backends(spec, attention, chunk_anchors)
        self.checkpoint_layers = checkpoint_layers
        features = len(spec.target_layer_ids) * spec.hidden_size
        self.fc = nn.Linear(features, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(spec, kind) for kind in spec.layer_types)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.register_buffer("inverse_frequencies", inverse_frequencies(spec), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Drafter":
        """Move or cast. The frequencies stay float32: a rounded one misplaces distant tokens."""
        super()._apply(fn, recurse)
        device = self.inverse_frequencies.device
        self.inverse_frequencies = inverse_frequencies(self.spec).to(device)
        return self

    @property
    def draft_layers(self) -> list[DraftLayer]:
        """The layers, typed."""
        return cast("list[DraftLayer]", list(self.layers))

    @property
    def attention_shapes(self) -> frozenset[Room]:
        """Shapes that the flex kernel was made for: one in a run."""
        return frozenset(self.backends.shapes)

    @property
    def attention_fallback(self) -> str | None:
        """Why sdpa took over from flex, in a line; None where it did not."""
        return self.backends.fallback

    def attention_on(self, device: torch.device) -> str:
        """What attends in training on a device, in words."""
        if self.backends.uses_flex(device):
            return "flex"
        failed = self.attention_fallback
        return "sdpa" if failed is None else f"sdpa, as flex does not compile ({failed})"

    def reserve(self, device: torch.device, context_tokens: int, anchors: int) -> None:
        """Make room for the heaviest batch of a run, so that flex meets one shape.

        Args:
            device: Where the drafter will be.
            context_tokens: Padded tokens of a batch, at most.
            anchors: Anchor slots of a batch, at most.

        Raises:
            ValueError: If ``flex`` is asked for by name where it cannot train.
        """
        self.backends.reserve(device, context_tokens, anchors)

    def forward(
        self,
        context_features: Tensor,
        block_embeddings: Tensor,
        anchors: Tensor,
        anchor_valid: Tensor,
    ) -> Tensor:
        """The training forward: all blocks of all rows in parallel.

        Args:
            context_features: Target features, ``[B, T, F]``.
            block_embeddings: Embeddings of [anchor, mask, mask, ...], ``[B, N, K, D]``.
            anchors: Positions, int64 ``[B, N]``, sorted in each row.
            anchor_valid: Whether a slot holds a real anchor, bool ``[B, N]``.

        Returns:
            Output-normed hidden states, ``[B, N, K, D]``; empty slots hold meaningless finite
            numbers.
        """
        shape = block_embeddings.shape
        positions = torch.arange(context_features.shape[1], device=anchors.device)[None]
        context = self._context(context_features, self._angles(positions))
        angles = self._angles(block_positions(anchors, shape[2]).flatten(1))
        attention = self.backends.prepare(
            anchors, anchor_valid, width=context_features.shape[1], dtype=context[0][0].dtype
        )
        x = self._blocks(block_embeddings.flatten(1, 2), angles, context, attention)
        return x.view(shape)

    def extend(self, cache: DraftCache, context_features: Tensor) -> None:
        """Append the features of new context tokens to a cache, ``[1, T, F]``."""
        start, count = cache.length, context_features.shape[1]
        positions = torch.arange(start, start + count, device=context_features.device)[None]
        new = self._context(context_features, self._angles(positions))
        if not cache.layers:
            cache.layers = new
            return
        cache.layers = [
            (torch.cat([k, new_k], dim=2), torch.cat([v, new_v], dim=2))
            for (k, v), (new_k, new_v) in zip(cache.layers, new, strict=True)
        ]

    def draft(self, cache: DraftCache, block_embeddings: Tensor) -> Tensor:
        """One block whose anchor follows the cached context: ``[1, K, D]`` to ``[1, K, D]``."""
        anchor = torch.tensor([[cache.length]], device=block_embeddings.device)
        angles = self._angles(block_positions(anchor, block_embeddings.shape[1]).flatten(1))
        attention: Attention = WholeAttention()
        if "sliding_attention" in self.spec.layer_types:
            valid = torch.ones_like(anchor, dtype=torch.bool)
            dtype = cache.layers[0][0].dtype
            chunks = make_chunks(anchor, valid, self.spec, chunk_anchors=1, dtype=dtype)
            attention = ChunkedAttention(chunks)
        return self._blocks(block_embeddings, angles, cache.layers, attention)

    def draft_block(self, context_features: Tensor, block_embeddings: Tensor) -> Tensor:
        """The serving forward in one call.

        Args:
            context_features: Target features of everything before the anchor, ``[1, S, F]``.
            block_embeddings: Embeddings of [anchor, mask, mask, ...], ``[1, K, D]``; the anchor
                stands at S.

        Returns:
            Output-normed hidden states, ``[1, K, D]``.
        """
        cache = DraftCache()
        self.extend(cache, context_features)
        return self.draft(cache, block_embeddings)

    def _angles(self, positions: Tensor) -> Tensor:
        return positions[..., None].float() * self.inverse_frequencies

    def _context(self, features: Tensor, angles: Tensor) -> list[KeyValue]:
        # Autocast rounds to its own dtype: a wider copy before would be made and kept for nothing.
        if not torch.is_autocast_enabled(features.device.type):
            features = features.to(self.fc.weight.dtype)
        fused = self.hidden_norm(self.fc(features))
        return [layer.context(fused, angles) for layer in self.draft_layers]

    def _blocks(
        self, x: Tensor, angles: Tensor, context: list[KeyValue], attention: Attention
    ) -> Tensor:
        x = x.to(self.fc.weight.dtype)  # the residuals' dtype, under autocast too
        recompute = self.checkpoint_layers and torch.is_grad_enabled()
        for layer, layer_context in zip(self.draft_layers, context, strict=True):
            if recompute:  # nothing in a layer is random
                x = checkpoint(
                    layer,
                    x,
                    angles,
                    layer_context,
                    attention,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                x = layer(x, angles, layer_context, attention)
        return self.norm(x)
