"""Attention of all blocks of a batch in one compiled kernel with block-sparse masks (flex).

All rows are packed behind each other, padded up to a *room* that holds any batch of a run::

    queries     [ slots of row 0 | of row 1 | ... | padding ]
    keys        [ tokens of row 0 | of row 1 | ... | padding | slots of row 0 | ... | padding ]

so that the kernel meets one shape, however rows and anchors are divided. Who sees whom is a matter
of a few index tensors, which are data to the kernel. Tiles of the mask that nobody sees cost
nothing; whole tiles of padding see themselves only.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_lightning.drafter.attention import KeyValue
from dflash_lightning.drafter.config import DrafterSpec, LayerType
from dflash_lightning.drafter.visibility import VisibleRanges, visible_ranges, within

TILE = 128  # queries and keys of a tile of the block mask; flex's own default

Kernel = Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]


class Room(NamedTuple):
    """Packed lengths that the kernel runs at, multiples of the tile.

    Args:
        context: Context tokens of all rows.
        slots: Block slots of all rows.
    """

    context: int
    slots: int


def room_for(context: int, slots: int) -> Room:
    """The smallest room.

    >>> room_for(1000, 1)
    Room(context=1024, slots=128)
    """
    return Room(*(max(-(-count // TILE), 1) * TILE for count in (context, slots)))


def grown(room: Room | None, context: int, slots: int) -> Room:
    """The room itself where it holds a batch, else the next that does on a short ladder.

    >>> grown(None, 1000, 1), grown(Room(1024, 128), 900, 300)
    (Room(context=1024, slots=128), Room(context=1024, slots=384))
    """
    old = room or Room(0, 0)
    sides = (
        have if have and count <= have else _rung(count)
        for have, count in zip(old, (context, slots), strict=True)
    )
    return Room(*sides)


def _rung(count: int) -> int:
    """Smallest of 1, 2, 3, 4, 6, 8, 12 ... tiles that holds a count."""
    tiles = max(-(-count // TILE), 1)
    power = 1 << (tiles - 1).bit_length()
    return TILE * (3 * power // 4 if power >= 4 and 4 * tiles <= 3 * power else power)


class FlexAttention:
    """The flex backend for one forward.

    Args:
        masks: Block mask per layer type.
        room: What the masks are made for.
        kernel: What attends.
    """

    def __init__(self, masks: dict[LayerType, BlockMask], room: Room, kernel: Kernel) -> None:
        self.masks, self.room, self.kernel = masks, room, kernel

    def attend(self, kind: LayerType, queries: Tensor, own: KeyValue, context: KeyValue) -> Tensor:
        """Attend as :class:`Attention` says."""
        batch, heads, slots, width = queries.shape
        packed = _packed((queries, self.room.slots))
        keys, values = (
            _packed((c, self.room.context), (o, self.room.slots))
            for c, o in zip(context, own, strict=True)
        )
        outputs = self.kernel(packed, keys, values, self.masks[kind])[0, :, : batch * slots]
        return outputs.view(heads, batch, slots, width).transpose(0, 1)


def _packed(*parts: tuple[Tensor, int]) -> Tensor:
    """All rows behind each other in one copy: ``[1, H, sum of lengths, head_dim]``.

    Args:
        parts: Keys or the like, ``[B, H, T, head_dim]``, and the length to fill up to with zeros.
    """
    rows = []
    for x, length in parts:
        batch, heads, tokens, width = x.shape
        rows += [*x, x.new_zeros(()).expand(heads, length - batch * tokens, width)]
    return torch.cat(rows, dim=1)[None]


def flex_masks(
    anchors: Tensor,
    anchor_valid: Tensor,
    spec: DrafterSpec,
    *,
    width: int,
    room: Room,
) -> dict[LayerType, BlockMask]:
    """A block mask per layer type, shared by the layers; reads nothing from the device.

    Args:
        anchors: Positions, int64 ``[B, N]``, sorted in each row.
        anchor_valid: Whether a slot holds a real anchor, bool ``[B, N]``.
        spec: The drafter.
        width: Context tokens of a row (T).
        room: Of which size.
    """
    return {
        kind: block_mask(
            packed_ranges(visible_ranges(anchors, anchor_valid, spec, kind), width, room), room
        )
        for kind in dict.fromkeys(spec.layer_types)
    }


def packed_ranges(ranges: VisibleRanges, width: int, room: Room) -> VisibleRanges:
    """What each packed query sees, in packed keys; queries of the padding see themselves.

    Args:
        ranges: Of the rows, ``[B, N * K]`` each.
        width: Context tokens of a row (T).
        room: Of which size.

    Returns:
        int32 ``[slots of the room]`` each.
    """
    batch, slots = ranges.end.shape
    row = torch.arange(batch, device=ranges.end.device)[:, None]
    context, own = row * width, room.context + row * slots
    pad = torch.arange(batch * slots, room.slots, device=row.device) + room.context
    nothing = torch.zeros_like(pad)
    edges = (
        (ranges.start + context, nothing),
        (ranges.end + context, nothing),
        (ranges.own_start + own, pad),
        (ranges.own_end + own, pad + 1),
    )
    return VisibleRanges(
        *(torch.cat([real.flatten(), rest]).to(torch.int32) for real, rest in edges)
    )


def block_mask(ranges: VisibleRanges, room: Room, tile: int = TILE) -> BlockMask:
    """The mask of packed ranges, with the tiles that anyone may see.

    A tile is listed by the smallest and largest key that its queries see, so where two rows meet in
    one tile of queries those between are listed too. Tiles that all its queries see in full need no
    look at the rule.

    Args:
        ranges: As :func:`packed_ranges` gives them.
        room: Of which size.
        tile: Queries and keys of a tile.
    """
    start, end, own_start, own_end = (edge.view(-1, tile) for edge in ranges)
    empty = start >= end
    first = start.masked_fill(empty, sum(room)).amin(1) // tile
    last = _up(end.masked_fill(empty, 0).amax(1), tile)
    own = own_start.amin(1) // tile, _up(own_end.amax(1), tile)
    key_tile = torch.arange(sum(room) // tile, device=start.device)
    listed = within(key_tile, first[:, None], last[:, None])
    listed = listed | within(key_tile, *(edge[:, None] for edge in own))
    full = within(key_tile, _up(start.amax(1), tile)[:, None], end.amin(1)[:, None] // tile)
    return BlockMask.from_kv_blocks(
        *_ordered(listed & ~full),
        *_ordered(full),
        BLOCK_SIZE=tile,
        mask_mod=_mask_mod(ranges),
        seq_lengths=(room.slots, sum(room)),
    )


def _mask_mod(ranges: VisibleRanges) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule for flex. It holds tensors only: numbers would be compiled in, one kernel each."""
    start, end, own_start, own_end = ranges

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        in_context = within(key, start[query], end[query])
        return in_context | within(key, own_start[query], own_end[query])

    return sees


def _up(count: Tensor, tile: int) -> Tensor:
    return (count + tile - 1) // tile


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and indices of chosen tiles as a block mask has them, from bool ``[Q, KV]``."""
    order = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: BlockMask) -> Tensor:
    return flex_attention(queries, keys, values, block_mask=mask, enable_gqa=True)


@functools.cache
def _compiled() -> Kernel:
    # a graph in one piece: past the limit of shapes flex would otherwise build all scores
    return torch.compile(_attend, fullgraph=True, dynamic=False)


def kernel_for(device: torch.device) -> Kernel:
    """What attends on a device; on a CPU slow, and without gradients."""
    return _compiled() if device.type == "cuda" else _attend


def compile_errors() -> tuple[type[Exception], ...]:
    """What a kernel raises that cannot be compiled, or once too often."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    # Inductor's and Triton's own errors arrive as TorchDynamoException
    return TorchDynamoException, FailOnRecompileLimitHit


def try_kernel(
    kernel: Kernel, spec: DrafterSpec, room: Room, *, device: torch.device, dtype: torch.dtype
) -> None:
    """Run the kernel once on zeros, and backward where gradients are on.

    Compilation then fails here or not at all. The backward kernel may need more shared memory than
    there is where the forward one fits (pytorch issue 198224: heads wider than 128 on sm_12x).
    """
    nobody = torch.empty(1, 0, dtype=torch.long, device=device)
    mask = flex_masks(nobody, nobody.bool(), spec, width=0, room=room)[spec.layer_types[0]]
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    queries, keys, values = (
        torch.zeros(
            1,
            count,
            length,
            spec.head_dim,
            dtype=dtype,
            device=device,
            requires_grad=torch.is_grad_enabled(),
        )
        for count, length in ((heads, room.slots), *[(kv_heads, sum(room))] * 2)
    )
    out = kernel(queries, keys, values, mask)
    if out.requires_grad:
        out.sum().backward()
