"""Anchors: where blocks start, which ids fill them, and which tokens they must predict."""

import math

import numpy as np
import torch
from torch import Tensor

VALIDATION = 0x76616C  # in place of (seed, epoch): validation anchors depend on the row only


def valid_anchors(loss_mask: np.ndarray, *, whole_block: int | None = None) -> np.ndarray:
    """Positions at which a block may start.

    Args:
        loss_mask: True where a token is supervised, bool ``[T]``.
        whole_block: None is the rule ``pair``: the token and the next one are supervised. A block
            size is the rule ``block``: the token is supervised and all of the block lies inside the
            row.

    >>> import numpy as np
    >>> mask = np.array([False, True, True, True, False, True])
    >>> valid_anchors(mask).tolist(), valid_anchors(mask, whole_block=3).tolist()
    ([1, 2], [1, 2, 3])
    """
    return np.flatnonzero(_starts(loss_mask, whole_block))


def _starts(loss_mask: np.ndarray, whole_block: int | None) -> np.ndarray:
    """Whether a block may start at a position, for the first of them."""
    if whole_block is None:
        return loss_mask[:-1] & loss_mask[1:]
    return loss_mask[: max(0, len(loss_mask) - whole_block + 1)]


def most_anchors(
    lengths: np.ndarray, *, rate: float, limit: int, whole_block: int | None = None
) -> np.ndarray:
    """What no row of a length can exceed in anchors, whatever is supervised in it.

    Args:
        lengths: Row lengths in tokens, integers ``[R]``.
        rate: Anchors per supervised token.
        limit: Most anchors of a row.
        whole_block: As in ``valid_anchors``.

    Returns:
        Bounds, int64 ``[R]``.

    >>> import numpy as np
    >>> most_anchors(np.array([1, 2, 9, 5000]), rate=0.25, limit=512).tolist()
    [0, 1, 3, 512]
    """
    by_rate = np.ceil(rate * lengths).astype(np.int64)
    by_length = lengths - (whole_block or 2) + 1  # a pair is a block of two
    return np.minimum(np.minimum(by_rate, limit), np.maximum(by_length, 0))


def num_anchors(
    loss_mask: np.ndarray, *, rate: float, limit: int, whole_block: int | None = None
) -> int:
    """How many anchors a row has; arguments as ``draw_anchors``.

    >>> import numpy as np
    >>> num_anchors(np.array([False, True, True, True, False, True]), rate=0.5, limit=512)
    2
    """
    valid = int(np.count_nonzero(_starts(loss_mask, whole_block)))
    return min(valid, limit, math.ceil(rate * int(np.count_nonzero(loss_mask))))


def draw_anchors(
    loss_mask: np.ndarray,
    *,
    rate: float,
    limit: int,
    key: tuple[int, ...],
    whole_block: int | None = None,
) -> np.ndarray:
    """Draw a row's anchors without replacement.

    Args:
        loss_mask: True where a token is supervised, bool ``[T]``.
        rate: Anchors per supervised token.
        limit: Most anchors of a row.
        key: Non-negative numbers that alone decide the draw: ``(seed, epoch, row)`` or
            ``(VALIDATION, row)``.
        whole_block: As in ``valid_anchors``.

    Returns:
        Sorted positions, int64 ``[min(valid, limit, ceil(rate * supervised))]``.

    >>> import numpy as np
    >>> answer = np.array([False, True, True, True, True])
    >>> draw_anchors(answer, rate=1.0, limit=512, key=(0, 0, 7)).tolist()
    [1, 2, 3]
    >>> len(draw_anchors(answer, rate=0.25, limit=512, key=(0, 0, 7)))
    1
    """
    valid = valid_anchors(loss_mask, whole_block=whole_block)
    count = num_anchors(loss_mask, rate=rate, limit=limit, whole_block=whole_block)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    return np.sort(generator.choice(valid, size=count, replace=False))


def labelled_slots(
    loss_mask: np.ndarray, anchors: np.ndarray, block_size: int, *, holes: bool = False
) -> np.ndarray:
    """Which slots of a row's blocks carry a label.

    Args:
        loss_mask: True where a token is supervised, bool ``[T]``.
        anchors: Positions, int64 ``[N]``.
        block_size: Tokens of a block, anchor included (K).
        holes: False ends the labels of a block at the first token that is not supervised, as a
            verifier would stop there; True takes them up again behind a gap.

    Returns:
        Bool ``[N, K]``; never the anchor's own slot.

    >>> import numpy as np
    >>> mask = np.array([False, True, True, False, True])
    >>> labelled_slots(mask, np.array([1]), block_size=5).tolist()
    [[False, True, False, False, False]]
    >>> labelled_slots(mask, np.array([1]), block_size=5, holes=True).tolist()
    [[False, True, False, True, False]]
    """
    beyond = np.zeros(block_size, dtype=bool)
    after = anchors[:, None] + np.arange(1, block_size)
    supervised = np.concatenate([loss_mask, beyond])[after]
    if not holes:
        supervised = np.logical_and.accumulate(supervised, axis=1)
    return np.concatenate([np.zeros((len(anchors), 1), dtype=bool), supervised], axis=1)


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


def predicting_positions(
    anchors: Tensor, label_slots: Tensor, *, block_size: int, width: int
) -> Tensor:
    """Where the target predicts each label: one position before it, at ``a + k - 1``.

    Args:
        anchors: Positions, int64 ``[B, N]``.
        label_slots: Flat index of each label into ``[B, N, K]``, int64 ``[M]``.
        block_size: Tokens of a block, anchor included (K).
        width: Tokens of a row (T).

    Returns:
        Flat index into ``[B, T]``, int64 ``[M]``.

    >>> import torch
    >>> anchors = torch.tensor([[2], [4]])  # labels: slot 1 of the first block, 3 of the second
    >>> predicting_positions(anchors, torch.tensor([1, 7]), block_size=4, width=10).tolist()
    [2, 16]
    """
    block, k = label_slots // block_size, label_slots % block_size
    row = block // anchors.shape[1]
    return row * width + anchors.flatten().index_select(0, block) + k - 1
