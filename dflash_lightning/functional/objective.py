"""The objective's settings, and its weights: what each slot of a block counts."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from dflash_lightning.functional.head import Goal

Weighting = Literal["decay", "dpace"]

DECAY_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}  # DFlash (arXiv 2602.06036), appendix A.1
DPACE_ALPHA = 0.5  # D-PACE (arXiv 2605.18810)


def check_objective(
    goal: Goal, weighting: Weighting, loss_decay_gamma: float | None, dpace_alpha: float
) -> None:
    """Refuse settings of the objective that contradict each other.

    Raises:
        ValueError: A setting is out of range, or would not be honoured.
    """
    if goal not in get_args(Goal) or weighting not in get_args(Weighting):
        raise ValueError(
            "goal must be ce, argmax or kl and weighting must be decay or dpace, "
            f"got {goal} and {weighting}."
        )
    if goal == "kl" and weighting == "dpace":
        raise ValueError(
            "weighting must be decay with goal kl, got dpace, whose weights come from the "
            "probability of one token. Use goal argmax."
        )
    if loss_decay_gamma is not None and (weighting == "dpace" or loss_decay_gamma <= 0):
        raise ValueError(
            "loss_decay_gamma must be positive, and null with weighting dpace, which does not read "
            f"it, got {loss_decay_gamma}. Remove it, or use weighting decay."
        )
    if not 0 <= dpace_alpha <= 1 or (weighting == "decay" and dpace_alpha != DPACE_ALPHA):
        raise ValueError(
            f"dpace_alpha must be in [0, 1], and {DPACE_ALPHA} with weighting decay, which does "
            f"not read it, got {dpace_alpha}. Remove it, or use weighting dpace."
        )


def decay_gamma(block_size: int) -> float:
    """The paper's decay constant; between its block sizes the nearest one decides.

    >>> decay_gamma(16), decay_gamma(8), decay_gamma(6)
    (7.0, 4.0, 4.0)
    """
    return DECAY_GAMMA[min(DECAY_GAMMA, key=lambda size: abs(size - block_size))]


def position_weights(block_size: int, gamma: float) -> Tensor:
    """Weight of draft token k = 1 .. K-1: ``exp(-(k - 1) / gamma)`` (DFlash, appendix A.1).

    Args:
        block_size: Tokens of a block, anchor included (K).
        gamma: Decay constant in tokens.

    Returns:
        Weights, float32 ``[K - 1]``.

    >>> position_weights(4, gamma=1.0)
    tensor([1.0000, 0.3679, 0.1353])
    """
    return torch.exp(-torch.arange(block_size - 1) / gamma)


def dpace_weights(losses: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """Weight of each slot by how far drafting is likely to get (D-PACE, arXiv 2605.18810).

    With the drafter's probability of the label, ``q = exp(-loss)``, smoothed to
    ``s = (1 - alpha) q + alpha``, the chance that slot m is reached and right is
    ``P_m = s_1 ... s_m``, and slot j weighs what it takes part in: the sum of ``P_m`` over m >= j.
    A slot without a label is no factor of a product and no term of a sum.

    Args:
        losses: Cross-entropy of each slot in nats, ``[blocks, slots]``; no gradient flows into it.
        valid: Whether a slot has a label, bool ``[blocks, slots]``.
        alpha: Floor of ``s``, 0 .. 1; at 1 every label counts those that follow it, and itself.

    Returns:
        Weights, float32 ``[blocks, slots]``, zero without a label.

    >>> even = torch.full((1, 3), 0.5).log().neg()  # probability 1/2: s = 3/4
    >>> dpace_weights(even, torch.tensor([[True, True, True]]), alpha=0.5)
    tensor([[1.7344, 0.9844, 0.4219]])
    >>> dpace_weights(even, torch.tensor([[True, False, True]]), alpha=0.5)
    tensor([[1.3125, 0.0000, 0.5625]])
    """
    smooth = (1 - alpha) * torch.exp(-losses.detach().float()) + alpha
    reached = torch.where(valid, smooth, 1.0).cumprod(1)
    # Not cumsum, which has no deterministic form on CUDA; a block is short.
    slots = valid.shape[1]
    pairs = torch.ones(slots, slots, dtype=torch.bool, device=valid.device).triu()
    pairs = pairs & valid[:, :, None] & valid[:, None, :]
    return torch.where(pairs, reached[:, None, :], 0.0).sum(2)


def untrained_dpace_weights(block_size: int, alpha: float, vocab_size: int) -> Tensor:
    """:func:`dpace_weights` of a whole block under a drafter that finds all tokens equally likely.

    Args:
        block_size: Tokens of a block, anchor included (K).
        alpha: Floor of the smoothed probability.
        vocab_size: Tokens to choose from.

    Returns:
        Weights, float32 ``[K - 1]``.

    >>> untrained_dpace_weights(4, alpha=0.5, vocab_size=10**9)
    tensor([0.8750, 0.3750, 0.1250])
    """
    losses = torch.full((1, block_size - 1), math.log(vocab_size))
    return dpace_weights(losses, torch.ones_like(losses, dtype=torch.bool), alpha)[0]


def dpace_label_weights(
    losses: Tensor, label_slots: Tensor, *, num_blocks: int, block_size: int, alpha: float
) -> Tensor:
    """:func:`dpace_weights` of M labelled slots.

    Args:
        losses: Cross-entropy of each label in nats, ``[M]``.
        label_slots: Flat index of each label into ``[blocks, K]``, int64 ``[M]``.
        num_blocks: Blocks, empty ones included.
        block_size: Tokens of a block, anchor included (K).
        alpha: Floor of the smoothed probability.

    Returns:
        Weights, float32 ``[M]``.

    >>> losses = torch.full((2,), 0.5).log().neg()
    >>> dpace_label_weights(losses, torch.tensor([5, 6]), num_blocks=2, block_size=4, alpha=0.5)
    tensor([1.3125, 0.5625])
    """
    size = num_blocks * block_size
    in_blocks = losses.new_zeros(size).index_copy(0, label_slots, losses.detach())
    valid = torch.zeros(size, dtype=torch.bool, device=losses.device)
    valid.index_fill_(0, label_slots, True)
    shape = (num_blocks, block_size)
    weights = dpace_weights(in_blocks.view(shape), valid.view(shape), alpha)
    return weights.flatten().index_select(0, label_slots)
