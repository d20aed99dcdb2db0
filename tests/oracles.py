"""Slow twins: what the fast code must equal, written as loops and plain formulas."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lightning.drafter.config import DrafterSpec, LayerType
from dflash_lightning.drafter.model import Drafter


def make_spec(**changes) -> DrafterSpec:
    """A tiny drafter, described in full."""
    values = {
        "num_layers": 2,
        "block_size": 4,
        "target_layer_ids": (0, 2),
        "mask_token_id": 3,
        "layer_types": ("full_attention", "full_attention"),
        "sliding_window": None,
        "num_target_layers": 4,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-3,  # large enough to be felt
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "vocab_size": 64,
    }
    return DrafterSpec(**(values | changes))


def random_drafter(spec: DrafterSpec, seed: int = 0, *, chunk_anchors: int = 16) -> Drafter:
    """Weights large enough that every path through the model is felt; norms are not at one."""
    drafter = Drafter(spec, chunk_anchors=chunk_anchors)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.dim() == 1 else noise / weight.shape[1] ** 0.5)
    return drafter


def labels_by_walking(loss_mask: list[bool], anchor: int, block_size: int) -> list[int]:
    """Slots of a block that carry a label: walk on from the anchor until the first gap."""
    slots = []
    for k in range(1, block_size):
        if anchor + k >= len(loss_mask) or not loss_mask[anchor + k]:
            break
        slots.append(k)
    return slots


def prefix_by_walking(correct: list[bool], label_valid: list[bool]) -> int:
    """Draft tokens kept: walk along the block until a token is wrong or has no label."""
    count = 0
    for right, valid in zip(correct, label_valid, strict=True):
        if not (right and valid):
            break
        count += 1
    return count


def plain_loss(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight times cross-entropy: the formula with all logits at once."""
    return (F.cross_entropy(hidden @ head.T, labels, reduction="none") * weights).sum()


def sees(
    anchors: list[int],
    valid: list[bool],
    query: tuple[int, int],
    key: int | tuple[int, int],
    *,
    sliding: bool,
    window: int | None,
) -> bool:
    """The visibility rule for one slot, ``query = (block, k)``, of one row.

    ``key`` is a context position, or a slot ``(block, k)``.
    """
    block, k = query
    if isinstance(key, tuple):
        same_block = key[0] == block
        return same_block and (key[1] <= k if sliding else True)
    if not valid[block] or key >= anchors[block]:
        return False
    return not sliding or anchors[block] + k - key < window


def visibility(
    anchors: Tensor, valid: Tensor, width: int, spec: DrafterSpec, kind: LayerType
) -> Tensor:
    """Who sees whom in full, bool ``[B, N * K, width + N * K]``: rows, slots and keys in loops."""
    batch, count = anchors.shape
    slots = [(n, k) for n in range(count) for k in range(spec.block_size)]
    keys = [*range(width), *slots]
    dense = torch.zeros(batch, len(slots), len(keys), dtype=torch.bool)
    rule = {"sliding": kind == "sliding_attention", "window": spec.sliding_window}
    for b in range(batch):
        row = anchors[b].tolist(), valid[b].tolist()
        for q, query in enumerate(slots):
            for i, key in enumerate(keys):
                dense[b, q, i] = sees(*row, query, key, **rule)
    return dense


def naive_forward(
    drafter: Drafter, features: Tensor, embeddings: Tensor, anchors: Tensor, valid: Tensor
) -> Tensor:
    """:meth:`Drafter.forward` with one dense mask and nothing but matrix products."""
    spec, weights = drafter.spec, dict(drafter.named_parameters())
    width, (batch, count, size, hidden) = features.shape[1], embeddings.shape
    positions = torch.cat(
        [
            torch.arange(width).expand(batch, -1),
            (anchors[:, :, None] + torch.arange(size)).reshape(batch, -1),
        ],
        dim=1,
    )
    fused = _norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], spec)
    x = embeddings.reshape(batch, count * size, hidden)
    for i, kind in enumerate(spec.layer_types):
        layer = {
            k.removeprefix(f"layers.{i}."): w
            for k, w in weights.items()
            if k.startswith(f"layers.{i}.")
        }
        mask = visibility(anchors, valid, width, spec, kind)
        x = x + _attend(layer, fused, x, positions, mask, spec)
        y = _norm(x, layer["post_attention_layernorm.weight"], spec)
        gate, up = (y @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T
    return _norm(x, weights["norm.weight"], spec).reshape(embeddings.shape)


def _norm(x: Tensor, weight: Tensor, spec: DrafterSpec) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt()


def _attend(
    layer: dict[str, Tensor],
    fused: Tensor,
    x: Tensor,
    positions: Tensor,
    mask: Tensor,
    spec: DrafterSpec,
) -> Tensor:
    """One head after the other over [context ; all blocks]."""
    width = fused.shape[1]
    block = _norm(x, layer["input_layernorm.weight"], spec)
    states = torch.cat([fused, block], dim=1)
    q = block @ layer["self_attn.q_proj.weight"].T
    k, v = (states @ layer[f"self_attn.{name}_proj.weight"].T for name in "kv")
    outputs = []
    for head in range(spec.num_attention_heads):
        of = head * spec.num_key_value_heads // spec.num_attention_heads
        own, shared = (slice(h * spec.head_dim, (h + 1) * spec.head_dim) for h in (head, of))
        query = _norm(q[..., own], layer["self_attn.q_norm.weight"], spec)
        key = _norm(k[..., shared], layer["self_attn.k_norm.weight"], spec)
        scores = _turn(query, positions[:, width:], spec) @ _turn(key, positions, spec).mT
        scores = scores / spec.head_dim**0.5
        outputs.append(scores.masked_fill(~mask, -math.inf).softmax(-1) @ v[..., shared])
    return torch.cat(outputs, dim=-1) @ layer["self_attn.o_proj.weight"].T


def _turn(x: Tensor, positions: Tensor, spec: DrafterSpec) -> Tensor:
    """Plain RoPE as a product of complex numbers, pairs ``(i, i + head_dim / 2)``."""
    half = spec.head_dim // 2
    angle = positions[..., None] * spec.rope_theta ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(()), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)
