"""Slow twins: what the fast code must equal, written as loops and plain formulas."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def labels_with_holes(loss_mask: list[bool], anchor: int, block_size: int) -> list[int]:
    """Slots of a block that carry a label where labels go on behind a gap."""
    inside = range(1, min(block_size, len(loss_mask) - anchor))
    return [k for k in inside if loss_mask[anchor + k]]


def plain_losses(logits: Tensor, labels: Tensor, target_logits: Tensor | None, goal: str) -> Tensor:
    """Loss of every slot from all logits at once: ``[M, V]``, ``[M]`` and ``[M, V]`` to ``[M]``."""
    ours = logits.log_softmax(-1)
    if goal == "ce":
        return F.nll_loss(ours, labels, reduction="none")
    theirs = target_logits.log_softmax(-1)
    if goal == "argmax":
        return F.nll_loss(ours, theirs.argmax(-1), reduction="none")
    return (theirs.exp() * (theirs - ours)).sum(-1)


def dpace_by_loops(probs: list[float], valid: list[bool], alpha: float) -> list[float]:
    """D-PACE weights of one block, from the drafter's probability of each label."""
    weights = []
    for j, counts in enumerate(valid):
        weight = 0.0
        for m in range(j, len(probs)):
            reached = 1.0
            for i in range(m + 1):
                if valid[i]:
                    reached *= (1 - alpha) * probs[i] + alpha
            weight += reached if valid[m] else 0.0
        weights.append(weight if counts else 0.0)
    return weights


class StepRules(NamedTuple):
    """What decides labels and weights in :func:`plain_step`."""

    goal: str
    weighting: str
    gamma: float
    alpha: float
    holes: bool


def plain_step(
    drafter: Drafter,
    target: nn.Module,
    rows: list[tuple[list[int], list[bool], list[int]]],
    rules: StepRules,
) -> tuple[Tensor, list[float], list[float]]:
    """One batch by plain formulas: each row alone, unpadded, each label in its turn.

    Args:
        drafter: Its weights.
        target: The whole Hugging Face model, head included.
        rows: Ids, loss mask and anchors of each row.
        rules: Goal, weights and labels.

    Returns:
        Sum of weighted losses, differentiable; weights and losses of the labels in order.
    """
    total, weights, losses = torch.zeros(()), [], []
    for ids, mask, anchors in rows:
        if not anchors:
            continue
        hidden, logits = _one_row(drafter, target, ids, anchors)
        for n, anchor in enumerate(anchors):
            find = labels_with_holes if rules.holes else labels_by_walking
            of_block: dict[int, Tensor] = {}
            for k in find(mask, anchor, drafter.spec.block_size):
                label = torch.tensor([ids[anchor + k]])
                ours = (hidden[n, k] @ target.get_output_embeddings().weight.T)[None]
                theirs = logits[None, anchor + k - 1]
                of_block[k] = plain_losses(ours, label, theirs, rules.goal)[0]
            for k, weight in _block_weights(of_block, drafter.spec.block_size, rules).items():
                total = total + weight * of_block[k]
                weights.append(weight)
                losses.append(of_block[k].item())
    return total, weights, losses


def _one_row(
    drafter: Drafter, target: nn.Module, ids: list[int], anchors: list[int]
) -> tuple[Tensor, Tensor]:
    """Hidden states ``[N, K, D]`` of a row's blocks, and the target's logits ``[T, V]``."""
    spec = drafter.spec
    with torch.no_grad():
        out = target(input_ids=torch.tensor([ids]), output_hidden_states=True)
        features = torch.cat([out.hidden_states[i + 1] for i in spec.target_layer_ids], dim=-1)
        blocks = [[ids[a]] + [spec.mask_token_id] * (spec.block_size - 1) for a in anchors]
        embeddings = target.get_input_embeddings()(torch.tensor([blocks]))
    at = torch.tensor([anchors])
    hidden = naive_forward(drafter, features, embeddings, at, torch.ones_like(at, dtype=torch.bool))
    return hidden[0], out.logits[0]


def _block_weights(
    losses: dict[int, Tensor], block_size: int, rules: StepRules
) -> dict[int, float]:
    """Weight of each label of a block, by its slot."""
    if rules.weighting == "decay":
        return {k: math.exp(-(k - 1) / rules.gamma) for k in losses}
    slots = range(1, block_size)
    probs = [math.exp(-losses[k].item()) if k in losses else 0.0 for k in slots]
    found = dpace_by_loops(probs, [k in losses for k in slots], rules.alpha)
    return {k: found[k - 1] for k in losses}
