"""Most bytes that a training step holds, counted on storages, beside what the sheet says.

Sizes may be those of real drafters: under :class:`FakeTensorMode` tensors have sizes but no
memory, and nothing is computed; the count is the same to the byte.
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from speed.live_bytes import LiveBytes
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask

from dflash_lightning.budget import BatchLoad, Setup
from dflash_lightning.drafter.attention import Attention
from dflash_lightning.drafter.backends import Backends
from dflash_lightning.drafter.chunked import Chunk, ChunkedAttention
from dflash_lightning.drafter.config import DrafterSpec
from dflash_lightning.drafter.flex import FlexAttention, flex_masks, room_for
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.functional.head import ChunkedHead
from dflash_lightning.target import HFTarget


class StepPeaks(NamedTuple):
    """Most bytes alive, beside weights, gradients and moments.

    Args:
        target: While the target runs.
        drafter: From then to the end of the backward pass.
    """

    target: int
    drafter: int


class EvenAnchors(Backends):
    """Attention for evenly spread anchors, whose values need not be known.

    Args:
        spec: The drafter.
        load: The batch.
        flex: Whether the packed backend attends.
    """

    def __init__(self, spec: DrafterSpec, load: BatchLoad, *, flex: bool) -> None:
        super().__init__(spec, "sdpa", load.chunk_anchors)
        self.load, self.flex = load, flex

    def prepare(
        self, anchors: Tensor, anchor_valid: Tensor, *, width: int, dtype: torch.dtype
    ) -> Attention:
        """As :meth:`Backends.prepare`."""
        if self.flex:
            room = room_for(self.load.tokens, self.load.slots * self.spec.block_size)
            masks = flex_masks(anchors, anchor_valid, self.spec, width=width, room=room)
            return FlexAttention(masks, room, packed_kernel)
        if not isinstance(anchors, FakeTensor):
            return super().prepare(anchors, anchor_valid, width=width, dtype=dtype)
        size, (batch, count) = self.spec.block_size, anchors.shape
        last = even_anchors(count, width)
        step = -(-count // self.load.chunks)
        chunks = []
        for start in range(0, count, step):
            stop = min(start + step, count)
            shape = (batch, 1, (stop - start) * size, last[stop - 1] + (stop - start) * size)
            masks = {kind: torch.zeros(shape, dtype=dtype) for kind in set(self.spec.layer_types)}
            chunks.append(Chunk(slice(start * size, stop * size), last[stop - 1], masks))
        return ChunkedAttention(chunks)


def packed_kernel(queries: Tensor, keys: Tensor, values: Tensor, mask: BlockMask) -> Tensor:
    """What flex keeps and gives back: output and log-sum-exp forward, three gradients backward."""
    return F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)


def even_anchors(count: int, width: int) -> list[int]:
    """Positions of a row's anchors, spread evenly up to the last but one token."""
    first = width // count
    return [first + round(i * (width - 2 - first) / max(count - 1, 1)) for i in range(count)]


class SizedTarget:
    """A target without layers: its outputs have the right sizes and nothing else.

    Args:
        spec: The drafter, which knows the target's sizes.
        dtype: Of the target.
    """

    def __init__(self, spec: DrafterSpec, dtype: torch.dtype) -> None:
        self.head_weight = torch.zeros(spec.vocab_size, spec.hidden_size, dtype=dtype)

    def context_features(self, ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
        """``[B, T]`` to ``[B, T, F]``."""
        return self._zeros(ids, len(layer_ids))

    def embed(self, ids: Tensor) -> Tensor:
        """``[...]`` to ``[..., D]``."""
        return self._zeros(ids, 1)

    def _zeros(self, ids: Tensor, layers: int) -> Tensor:
        width = layers * self.head_weight.shape[1]
        return torch.zeros(*ids.shape, width, dtype=self.head_weight.dtype)


def peaks_at_size(
    spec: DrafterSpec, load: BatchLoad, setup: Setup, *, fake: bool = True
) -> StepPeaks:
    """A step at the sizes of a real run, the target's layers left out.

    Args:
        spec: The drafter.
        load: The batch; every slot but the first of a block is labelled.
        setup: How the run trains.
        fake: Whether tensors are without memory.
    """
    with FakeTensorMode() if fake else contextlib.nullcontext():
        return step_peaks(SizedTarget(spec, dtype_of(setup.target_bytes)), spec, load, setup)


def dtype_of(size: int) -> torch.dtype:
    """Of so many bytes a number."""
    return torch.bfloat16 if size == 2 else torch.float32


def added_elsewhere(parameter: Tensor) -> None:
    """Drop a gradient, as if it were added to a buffer that has been there before.

    Under a dispatch mode autograd makes a new sum instead, which would be counted.
    """
    parameter.grad = None


def step_peaks(
    target: HFTarget | SizedTarget, spec: DrafterSpec, load: BatchLoad, setup: Setup
) -> StepPeaks:
    """Run target, drafter, head and backward on one batch.

    Args:
        target: The target.
        spec: The drafter.
        load: The batch; every slot but the first of a block is labelled.
        setup: How the run trains; goal and ranks are not read.
    """
    torch.manual_seed(0)
    drafter = Drafter(spec, checkpoint_layers=setup.activation_checkpointing)
    drafter.backends = EvenAnchors(spec, load, flex=setup.attention == "flex")
    for parameter in drafter.parameters():
        parameter.register_post_accumulate_grad_hook(added_elsewhere)
    count = load.slots // load.rows
    input_ids = torch.zeros(load.rows, load.width, dtype=torch.int64)
    ids = torch.zeros(load.rows, count, spec.block_size, dtype=torch.int64)
    anchors = torch.tensor(even_anchors(count, load.width)).expand(load.rows, count).contiguous()
    labelled = torch.arange(ids.numel()).view(-1, spec.block_size)[:, 1:].flatten()
    labels, valid = torch.zeros_like(labelled), torch.ones_like(anchors, dtype=torch.bool)
    head = ChunkedHead()
    for dtype in {torch.float32, target.head_weight.dtype}:  # there since an earlier step
        rows = min(head.rows(spec.vocab_size), len(labels))
        head.buffer(rows, spec.vocab_size, target.head_weight, dtype)
    with LiveBytes() as live:
        features = target.context_features(input_ids, spec.target_layer_ids)
        in_target, live.peak = live.peak, live.now
        with torch.autocast("cpu", torch.bfloat16, enabled=setup.compute_bytes == 2):
            hidden = drafter(features, target.embed(ids), anchors, valid)
            of_labels = hidden.flatten(0, 2).index_select(0, labelled)
            out = head(of_labels, target.head_weight, labels)
            del hidden, of_labels
        out.losses.sum().backward()
    return StepPeaks(in_target, live.peak)
