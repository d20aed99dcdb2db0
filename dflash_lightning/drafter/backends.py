"""Which backend attends in the training forward: flex, or sdpa, or sdpa after flex has failed."""

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from dflash_lightning.drafter.attention import Attention
from dflash_lightning.drafter.chunked import ChunkedAttention, make_chunks
from dflash_lightning.drafter.config import DrafterSpec
from dflash_lightning.drafter.flex import (
    FlexAttention,
    Room,
    compile_errors,
    flex_masks,
    grown,
    kernel_for,
    room_for,
    try_kernel,
)

AttentionChoice = Literal["auto", "flex", "sdpa"]

FLEX_CAPABILITY = (8, 0)  # Ampere: the first whose tensor cores take bfloat16


class Backends:
    """Makes the attention of each batch.

    Args:
        spec: The drafter.
        choice: ``auto``, ``flex`` or ``sdpa``.
        chunk_anchors: Anchors of a row that attend together on the sdpa path.
    """

    def __init__(self, spec: DrafterSpec, choice: AttentionChoice, chunk_anchors: int) -> None:
        if choice not in get_args(AttentionChoice):
            raise ValueError(
                f"attention must be auto, flex or sdpa, got {choice}. auto is flex on a GPU."
            )
        self.spec, self.choice, self.chunk_anchors = spec, choice, chunk_anchors
        self.shapes: set[Room] = set()
        self.fallback: str | None = None
        self._room: Room | None = None
        self._tried: set[tuple[Room, torch.dtype, bool, bool]] = set()

    def uses_flex(self, device: torch.device) -> bool:
        """Whether flex attends on a device."""
        if self.choice == "auto":
            return self.fallback is None and has_flex(device)
        return self.choice == "flex"

    def reserve(self, device: torch.device, context_tokens: int, anchors: int) -> None:
        """Make room as :meth:`Drafter.reserve` says."""
        if self.uses_flex(device):
            _refuse_cpu(device)
            self._room = room_for(context_tokens, anchors * self.spec.block_size)

    def prepare(
        self, anchors: Tensor, anchor_valid: Tensor, *, width: int, dtype: torch.dtype
    ) -> Attention:
        """The attention of a batch, for all layers.

        Args:
            anchors: Positions, int64 ``[B, N]``, sorted in each row.
            anchor_valid: Whether a slot holds a real anchor, bool ``[B, N]``.
            width: Context tokens of a row (T).
            dtype: Of queries, keys and values.
        """
        if self.uses_flex(anchors.device):
            room = self._fit(anchors, width)
            if self._runs(room, anchors.device, dtype):
                masks = flex_masks(anchors, anchor_valid, self.spec, width=width, room=room)
                return FlexAttention(masks, room, kernel_for(anchors.device))
        chunks = make_chunks(
            anchors, anchor_valid, self.spec, chunk_anchors=self.chunk_anchors, dtype=dtype
        )
        return ChunkedAttention(chunks)

    def _fit(self, anchors: Tensor, width: int) -> Room:
        """The room, which grows where a batch exceeds it."""
        slots = anchors.numel() * self.spec.block_size
        room = grown(self._room, len(anchors) * width, slots)
        if self._room is not None and room != self._room:
            warnings.warn(
                f"attention: a batch of {len(anchors) * width:,} context tokens and {slots:,} block"
                f" tokens exceeds the room of {self._room.context:,} and {self._room.slots:,}; the "
                f"kernel is compiled again for {room.context:,} and {room.slots:,}. Call "
                "Drafter.reserve with the largest batch to compile once.",
                stacklevel=2,
            )
        self._room = room
        self.shapes.add(room)
        return room

    def _runs(self, room: Room, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the kernel compiles; each mode of autograd has a kernel of its own."""
        case = room, dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if case in self._tried:
            return True
        if torch.is_grad_enabled():
            _refuse_cpu(device)
        try:
            try_kernel(kernel_for(device), self.spec, room, device=device, dtype=dtype)
        except compile_errors() as error:
            self._give_up(error)
            return False
        self._tried.add(case)
        return True

    def _give_up(self, error: Exception) -> None:
        """Take sdpa from now on, and say so; refuse where flex is asked for by name."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        if self.choice == "flex":
            raise ValueError(
                f"attention=flex must compile on this device, got {reason}. Set attention to auto "
                "or sdpa."
            ) from error
        self.fallback = reason
        warnings.warn(
            f"attention: flex does not compile ({reason}); sdpa attends for the rest of the run, "
            "which takes longer.",
            stacklevel=2,
        )


def has_flex(device: torch.device) -> bool:
    """Whether flex is the better choice on a device.

    >>> import torch
    >>> has_flex(torch.device("cpu"))
    False
    """
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= FLEX_CAPABILITY


def _refuse_cpu(device: torch.device) -> None:
    """Refuse to train with flex where it has no backward pass."""
    if device.type == "cpu":
        raise ValueError(
            "attention=flex must train on a GPU, got a CPU: it has no backward pass there. Set "
            "attention to auto or sdpa."
        )
