"""Anchors: where blocks start, which ids fill them, and which tokens they must predict."""

import math

import numpy as np
import torch
from torch import Tensor

VALIDATION = 0x76616C  # in place of (seed, epoch): validation anchors depend on the row only


def valid_anchors(loss_mask: np.ndarray) -> np.ndarray:
    """Positions at which a block may start: the token and the next one are supervised.

    >>> import numpy as np
    >>> valid_anchors(np.array([False, True, True, True, False, True])).tolist()
    [1, 2]
    """
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:])


def most_anchors(lengths: np.ndarray, *, rate: float, limit: int) -> np.ndarray:
    """What no row of a length can exceed in anchors, whatever is supervised in it.

    Args:
        lengths: Row lengths in tokens, integers ``[R]``.
        rate: Anchors per supervised token.
        limit: Most anchors of a row.

    Returns:
        Bounds, int64 ``[R]``.

    >>> import numpy as np
    >>> most_anchors(np.array([1, 2, 9, 5000]), rate=0.25, limit=512).tolist()
    [0, 1, 3, 512]
    """
    by_rate = np.ceil(rate * lengths).astype(np.int64)
    return np.minimum(np.minimum(by_rate, limit), lengths - 1)


def num_anchors(loss_mask: np.ndarray, *, rate: float, limit: int) -> int:
    """How many anchors a row has; arguments as ``draw_anchors``.

    >>> import numpy as np
    >>> num_anchors(np.array([False, True, True, True, False, True]), rate=0.5, limit=512)
    2
    """
    valid = int(np.count_nonzero(loss_mask[:-1] & loss_mask[1:]))
    return min(valid, limit, math.ceil(rate * int(np.count_nonzero(loss_mask))))


def draw_anchors(
    loss_mask: np.ndarray, *, rate: float, limit: int, key: tuple[int, ...]
) -> np.ndarray:
    """Draw a row's anchors without replacement.

    Args:
        loss_mask: True where a token is supervised, bool ``[T]``.
        rate: Anchors per supervised token.
        limit: Most anchors of a row.
        key: Non-negative numbers that alone decide the draw: ``(seed, epoch, row)`` or
            ``(VALIDATION, row)``.

    Returns:
        Sorted positions, int64 ``[min(valid, limit, ceil(rate * supervised))]``.

    >>> import numpy as np
    >>> answer = np.array([False, True, True, True, True])
    >>> draw_anchors(answer, rate=1.0, limit=512, key=(0, 0, 7)).tolist()
    [1, 2, 3]
    >>> len(draw_anchors(answer, rate=0.25, limit=512, key=(0, 0, 7)))
    1
    """
    valid = valid_anchors(loss_mask)
    count = num_anchors(loss_mask, rate=rate, limit=limit)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    return np.sort(generator.choice(valid, size=count, replace=False))


def label_counts(loss_mask: np.ndarray, anchors: np.ndarray, block_size: int) -> np.ndarray:
    """Labels behind each anchor: the supervised tokens that follow it without a gap, at most K - 1.

    Args:
        loss_mask: True where a token is supervised, bool ``[T]``.
        anchors: Positions, int64 ``[N]``.
        block_size: Tokens of a block, anchor included (K).

    Returns:
        Counts, int64 ``[N]``.

    >>> import numpy as np
    >>> mask = np.array([False, True, True, True, True, False, True])
    >>> label_counts(mask, np.array([1, 3]), block_size=8).tolist()
    [3, 1]
    """
    gaps = np.append(np.flatnonzero(~loss_mask), len(loss_mask))
    next_gap = gaps[np.searchsorted(gaps, anchors)]
    return np.minimum(next_gap - anchors - 1, block_size - 1)


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Position of every token of every block, the anchor first.

    Args:
        anchors: Positions, int64 ``[B, N]``.
        block_size: Tokens of a block, anchor included (K).

    Returns:
        Positions, int64 ``[B, N, K]``.

    >>> import torch
    >>> block_positions(torch.tensor([[4]]), block_size=3).tolist()
    [[[4, 5, 6]]]
    """
    return anchors[..., None] + torch.arange(block_size, device=anchors.device)


def block_ids(input_ids: Tensor, anchors: Tensor, *, block_size: int, mask_token_id: int) -> Tensor:
    """Ids of every block: the anchor's token, then mask tokens.

    Args:
        input_ids: Row ids, int64 ``[B, T]``.
        anchors: Positions, int64 ``[B, N]``.
        block_size: Tokens of a block, anchor included (K).
        mask_token_id: Id that fills the unknown slots.

    Returns:
        Ids, int64 ``[B, N, K]``.

    >>> import torch
    >>> block_ids(
    ...     torch.tensor([[7, 8, 9]]), torch.tensor([[1]]), block_size=3, mask_token_id=0
    ... ).tolist()
    [[[8, 0, 0]]]
    """
    ids = input_ids.new_full((*anchors.shape, block_size), mask_token_id)
    ids[..., 0] = input_ids.gather(1, anchors)
    return ids
