"""How much of a drafted block a verifier would keep."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor


def accepted_length(correct: Tensor, label_valid: Tensor) -> Tensor:
    """Count the leading draft tokens that are right, bonus token excluded.

    Args:
        correct: Whether draft token k is right, bool ``[..., K-1]``.
        label_valid: Whether draft token k has a label, bool ``[..., K-1]``.

    Returns:
        int64 ``[...]``; the first slot without a label ends the count and is no failure.

    >>> import torch
    >>> right = torch.tensor([[True, True, False], [True, True, True]])
    >>> accepted_length(right, torch.tensor([[True, True, True], [True, False, False]])).tolist()
    [2, 1]
    """
    return (correct & label_valid).long().cumprod(-1).sum(-1)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, draws: int = 2000
) -> tuple[float, float, float]:
    """Ratio of two sums and its 95 % interval by the bootstrap over rows (Efron 1979, percentile).

    Args:
        numerators: One number a row.
        denominators: One positive number a row.
        draws: Resampled data sets.

    Returns:
        Ratio, low, high.

    >>> ratio_interval([4.0, 4.0], [2.0, 2.0])
    (2.0, 2.0, 2.0)
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    drawn = np.random.Generator(np.random.Philox(0)).integers(len(top), size=(draws, len(top)))
    low, high = np.quantile(top[drawn].sum(1) / bottom[drawn].sum(1), [0.025, 0.975])
    return float(top.sum() / bottom.sum()), float(low), float(high)


def sample_acceptance(
    draft_probs: Tensor, target_probs: Tensor, draft_ids: Tensor, uniform: Tensor
) -> tuple[int, Tensor]:
    """Rejection sampling that keeps the target's distribution (Leviathan et al. 2023, algorithm 1).

    Args:
        draft_probs: The drafter's distributions, float ``[K-1, V]``.
        target_probs: The target's, float ``[K, V]``; the last one follows a fully accepted block.
        draft_ids: Drafted tokens, int64 ``[K-1]``.
        uniform: Uniform numbers, float ``[K-1]``.

    Returns:
        How many draft tokens are accepted, and the distribution ``[V]`` of the token after them.

    >>> import torch
    >>> p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    >>> sample_acceptance(torch.tensor([[1.0, 0.0]]), p, torch.tensor([0]), torch.tensor([0.3]))
    (0, tensor([0., 1.]))
    """
    picked = draft_ids[:, None]
    ratio = target_probs[:-1].gather(1, picked) / draft_probs.gather(1, picked).clamp_min(1e-30)
    accepted = int((uniform < ratio[:, 0]).long().cumprod(0).sum())
    if accepted == len(draft_ids):
        return accepted, target_probs[-1]
    left = (target_probs[accepted] - draft_probs[accepted]).clamp_min(0)
    return accepted, left / left.sum() if left.sum() > 0 else target_probs[accepted]
