"""The first weights of a drafter: random ones, and what can be taken from the target."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dflash_lightning.drafter.model import Drafter, DraftLayer
from dflash_lightning.functional.norms import norm_factors

HEAD_NORMS = ("q_norm", "k_norm")


def init_random(drafter: Drafter, seed: int) -> None:
    """Normal weights of variance 1 / inputs, norms at one; the same for a seed on every rank.

    Layers then write more than the mask token's embedding holds: otherwise the embedding passes
    through, a tied head finds it again, and the first loss is several times log V. A final norm of
    a fifth keeps the first logits nearly flat; a smaller one takes long to grow.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                draws = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(draws * parameter.shape[1] ** -0.5)
        drafter.norm.weight.fill_(0.2)


def init_from_target(drafter: Drafter, target_layers: Sequence[nn.Module], norm: Tensor) -> int:
    """Start from the target: its last layers, half its final norm, and an averaging fusion.

    With head and embedding frozen a random start spends hundreds of steps on finding the scale of
    the target's final norm. Half of it, because the first guesses deserve less confidence than the
    target's. Call it after :func:`init_random`: what the target lacks keeps its random start. Where
    shapes differ in the attention alone, the feed-forward part is taken without it; attention
    alone is not taken. The final norm comes with the last feed-forward part, whose output it
    scales.

    Args:
        drafter: Changed in place.
        target_layers: The target's decoder layers.
        norm: Weight of the target's final norm, ``[D]``.

    Returns:
        How many draft layers were taken from the target, whole or without attention.
    """
    taken = [False]
    width, count = drafter.spec.hidden_size, len(drafter.spec.target_layer_ids)
    with torch.no_grad():
        drafter.fc.weight.copy_(torch.eye(width).repeat(1, count) / count)
        sources = list(target_layers)[-len(drafter.layers) :]
        for layer, source in zip(drafter.draft_layers[-len(sources) :], sources, strict=True):
            taken.append(_take(layer, source, "mlp", "post_attention_layernorm"))
            if taken[-1] and _take(layer, source, "self_attn", "input_layernorm"):
                _scale_queries_and_keys(layer, source)
        if taken[-1]:
            drafter.norm.weight.copy_(norm / 2)
    return sum(taken)


def _take(layer: DraftLayer, source: nn.Module, *parts: str) -> bool:
    """Copy parts of a layer, if all their shapes agree; the source may lack norms per head."""
    ours = {k: v for k, v in layer.state_dict().items() if k.startswith(parts)}
    theirs = {k: v for k, v in source.state_dict().items() if k in ours}
    missing = ours.keys() - theirs.keys() - {f"self_attn.{name}.weight" for name in HEAD_NORMS}
    if missing or any(v.shape != ours[k].shape for k, v in theirs.items()):
        return False
    for name, weight in theirs.items():
        is_norm = weight.dim() == 1
        module = source.get_submodule(name.removesuffix(".weight"))
        ours[name].copy_(norm_factors(module) if is_norm else weight)
    return True


def _scale_queries_and_keys(layer: DraftLayer, source: nn.Module) -> None:
    """Give the norms per head that the source lacks the scale its queries and keys have without.

    That is their root mean square for an input of unit variance. At one, attention would start
    flatter than the source's, and the norms' weights take thousands of steps to grow.
    """
    attention = layer.self_attn
    pairs = ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm))
    theirs = source.state_dict()
    for name, (projection, norm) in zip(HEAD_NORMS, pairs, strict=True):
        if f"self_attn.{name}.weight" not in theirs:
            variances = (projection.weight * layer.input_layernorm.weight).square().sum(1)
            norm.weight.fill_(variances.mean().sqrt())
