"""Who sees whom: one rule behind all attention backends.

A block slot at position p of a block anchored at a sees

* context token j iff ``j < a``: when decoding, the target has not run on the anchor yet. A sliding
  layer also needs ``p - j < window``.
* slots of its own block: all of them in a full layer, those up to itself in a sliding layer.
* nothing else: never another block, never padding. An empty anchor slot sees no context.

So a slot sees one range of context tokens and one range of slots, and four numbers say it all.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_lightning.drafter.config import DrafterSpec, LayerType
from dflash_lightning.functional.anchors import block_positions


class VisibleRanges(NamedTuple):
    """What each block slot sees: half-open ranges, empty where the end is not above the start.

    Args:
        start: First context token, int32 ``[B, N * K]``.
        end: Behind the last one, likewise.
        own_start: First slot of the row, likewise.
        own_end: Behind the last one, likewise.
    """

    start: Tensor
    end: Tensor
    own_start: Tensor
    own_end: Tensor


def visible_ranges(
    anchors: Tensor, anchor_valid: Tensor, spec: DrafterSpec, kind: LayerType
) -> VisibleRanges:
    """The rule of this module.

    Args:
        anchors: Positions, int64 ``[B, N]``.
        anchor_valid: Whether a slot holds a real anchor, bool ``[B, N]``.
        spec: The drafter.
        kind: Full or sliding.
    """
    size = spec.block_size
    position = block_positions(anchors, size)
    slot = torch.arange(anchors.shape[1] * size, device=anchors.device)
    slot = slot.view(-1, size).expand_as(position)
    end = torch.where(anchor_valid, anchors, 0)[..., None].expand_as(position)
    own_start = slot[..., :1].expand_as(position)
    if kind == "sliding_attention" and spec.sliding_window is not None:
        start = (position - spec.sliding_window + 1).clamp_min(0)
        own_end = slot + 1
    else:
        start = torch.zeros_like(position)
        own_end = own_start + size
    edges = start, end, own_start, own_end
    return VisibleRanges(*(edge.flatten(1).to(torch.int32) for edge in edges))


def within(key: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Whether an index lies in a half-open range; shapes as they broadcast.

    >>> import torch
    >>> within(torch.arange(4), torch.tensor(1), torch.tensor(3)).tolist()
    [False, True, True, False]
    """
    return (key >= start) & (key < end)
