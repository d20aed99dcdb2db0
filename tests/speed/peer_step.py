"""A public trainer's step, from its documented semantics: one dense mask, all slots to the head.

SpecForge's, speculators' and TorchSpec's steps share this layout: queries are the N * K block
slots; keys and values are the T context tokens and all block slots; one mask ``[N * K, T + N * K]``
says who sees whom; the head runs on every slot, labelled or not, in checkpointed chunks of 128
blocks (SpecForge's ``objective_chunk_blocks``); accuracy is the argmax of the same logits.

Where there is a choice it is the faster one: norms are fused, the mask is additive and built once a
step, heads are not repeated, and the argmax is not made again with the recomputed logits.
"""

import torch
import torch.nn.functional as F
from speed.cases import Case
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dflash_lightning.drafter.config import DrafterSpec, LayerType

CHUNK_BLOCKS = 128


def peer_sums(case: Case) -> tuple[Tensor, Tensor]:
    """Sum of weight times cross-entropy, differentiable, and the number of correct slots."""
    hidden = peer_hidden(case)
    losses, correct = [], []
    for start in range(0, hidden.shape[1], CHUNK_BLOCKS):
        part = slice(start, start + CHUNK_BLOCKS)
        labels = case.dense_labels[:, part].flatten()
        loss, best = checkpoint(
            _chunk, hidden[:, part].flatten(0, 2), case.head, labels, use_reentrant=False
        )
        weights = case.dense_weights[:, part].flatten()
        losses.append((loss * weights).sum())
        correct.append(((best == labels) & (weights > 0)).sum())
    return torch.stack(losses).sum(), torch.stack(correct).sum()


def _chunk(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, head)
    loss = F.cross_entropy(logits, labels, reduction="none")
    with torch.no_grad():
        return loss, logits.argmax(dim=-1)


def peer_hidden(case: Case) -> Tensor:
    """Output-normed hidden states of all blocks, ``[B, N, K, D]``."""
    spec, weights = case.drafter.spec, dict(case.drafter.named_parameters())
    embeddings = case.embedded()
    batch, width = case.features.shape[:2]
    slots = case.anchors[..., None] + torch.arange(spec.block_size)
    positions = torch.cat([torch.arange(width).expand(batch, -1), slots.flatten(1)], dim=1)
    angles = positions[..., None] * case.drafter.inverse_frequencies
    turns = angles.cos()[:, None], angles.sin()[:, None]
    masks = {kind: dense_mask(case, kind) for kind in set(spec.layer_types)}
    fused = _norm(
        F.linear(case.features, weights["fc.weight"]), weights["hidden_norm.weight"], spec
    )
    x = embeddings.flatten(1, 2)
    for i, kind in enumerate(spec.layer_types):
        start = f"layers.{i}."
        layer = {k.removeprefix(start): w for k, w in weights.items() if k.startswith(start)}
        x = x + _attend(layer, fused, x, turns, masks[kind], spec)
        y = _norm(x, layer["post_attention_layernorm.weight"], spec)
        gate, up = (F.linear(y, layer[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, layer["mlp.down_proj.weight"])
    return _norm(x, weights["norm.weight"], spec).view(embeddings.shape)


def dense_mask(case: Case, kind: LayerType) -> Tensor:
    """Additive mask over context and all blocks, float32 ``[B, 1, N * K, T + N * K]``."""
    spec, width = case.drafter.spec, case.features.shape[1]
    size, count = spec.block_size, case.anchors.shape[1]
    anchor = case.anchors.repeat_interleave(size, dim=1)[..., None]
    slot, key = torch.arange(count * size), torch.arange(width)
    context = (key < anchor) & case.anchor_valid.repeat_interleave(size, dim=1)[..., None]
    own = slot[:, None] // size == slot // size
    if kind == "sliding_attention" and spec.sliding_window is not None:
        position = anchor + slot[:, None] % size
        context &= position - key < spec.sliding_window
        own &= slot <= slot[:, None]
    visible = torch.cat([context, own.expand(len(anchor), -1, -1)], dim=2)
    return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None]


def _attend(
    layer: dict[str, Tensor],
    fused: Tensor,
    x: Tensor,
    turns: tuple[Tensor, Tensor],
    mask: Tensor,
    spec: DrafterSpec,
) -> Tensor:
    block = _norm(x, layer["input_layernorm.weight"], spec)

    def heads(states: Tensor, name: str) -> Tensor:
        flat = F.linear(states, layer[f"self_attn.{name}_proj.weight"])
        return flat.unflatten(-1, (-1, spec.head_dim)).transpose(1, 2)

    keys, values = (torch.cat([heads(fused, name), heads(block, name)], dim=2) for name in "kv")
    keys = _turn(_norm(keys, layer["self_attn.k_norm.weight"], spec), turns)
    queries = _norm(heads(block, "q"), layer["self_attn.q_norm.weight"], spec)
    own = tuple(turn[:, :, fused.shape[1] :] for turn in turns)
    out = F.scaled_dot_product_attention(
        _turn(queries, (own[0], own[1])), keys, values, attn_mask=mask, enable_gqa=True
    )
    return F.linear(out.transpose(1, 2).flatten(2), layer["self_attn.o_proj.weight"])


def _norm(x: Tensor, weight: Tensor, spec: DrafterSpec) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, spec.rms_norm_eps)


def _turn(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turns
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
