"""The objective: weighted cross-entropy through a frozen head, chunk by chunk."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

DECAY_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}  # DFlash (arXiv 2602.06036), appendix A.1


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


class HeadLoss(NamedTuple):
    """What the head says about M labelled slots.

    Args:
        numerator: Sum of weight times cross-entropy in nats, float32 scalar; the only
            differentiable part.
        cross_entropy: Per slot in nats, float32 ``[M]``.
        correct: Whether the label is the most likely token, bool ``[M]``.
    """

    numerator: Tensor
    cross_entropy: Tensor
    correct: Tensor


class ChunkedHead:
    """Cross-entropy through a frozen head without a ``[M, V]`` tensor.

    The head is frozen, so the gradient with respect to the hidden states is made in the forward
    pass of each
    chunk: two matrix products a chunk, nothing recomputed. The buffers live as long as the object.

    Args:
        chunk_bytes: Size of one chunk of float32 logits.
    """

    def __init__(self, chunk_bytes: int = 100_000_000) -> None:
        self.chunk_bytes = chunk_bytes
        self._buffers: dict[torch.dtype, Tensor] = {}

    def __call__(self, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> HeadLoss:
        """Evaluate M labelled slots.

        Args:
            hidden: Output-normed hidden states, ``[M, D]``.
            head: Frozen head, ``[V, D]``; products are made in its dtype, sums in float32.
            labels: Token ids, int64 ``[M]``.
            weights: Weight of each slot, float32 ``[M]``.
        """
        return HeadLoss(*_HeadLoss.apply(hidden, head, labels, weights, self))

    def buffer(self, rows: int, vocab: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A reused ``[rows, vocab]`` tensor on the device of ``like``."""
        kept = self._buffers.get(dtype)
        if kept is None or kept.device != like.device or kept.numel() < rows * vocab:
            kept = self._buffers[dtype] = torch.empty(rows * vocab, dtype=dtype, device=like.device)
        return kept[: rows * vocab].view(rows, vocab)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        buffers: ChunkedHead,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cross_entropy = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        correct = torch.empty(len(labels), dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden)
        rows = max(1, buffers.chunk_bytes // (4 * head.shape[0]))
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(labels), rows):
                part = slice(start, start + rows)
                cross_entropy[part], correct[part], gradient[part] = _chunk(
                    hidden[part].to(head.dtype), head, labels[part], weights[part], buffers
                )
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(cross_entropy, correct)
        return (cross_entropy * weights).sum(), cross_entropy, correct

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        # A factor that is not 1 must not be rounded into bf16 here: multiply in float32.
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * upstream[0]).to(gradient.dtype), None, None, None, None


def _chunk(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, buffers: ChunkedHead
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, correctness and weighted gradient of a few slots, in place in the buffers."""
    size = (len(labels), head.shape[0])
    raw = torch.mm(hidden, head.T, out=buffers.buffer(*size, hidden, head.dtype))
    narrow = head.dtype != torch.float32
    logits = buffers.buffer(*size, hidden, torch.float32).copy_(raw) if narrow else raw
    label = labels[:, None]
    best = logits.argmax(dim=1, keepdim=True)
    top, of_label = logits.gather(1, best), logits.gather(1, label)
    probs = torch.softmax(logits, dim=1, out=logits)
    # the most likely token has at least probability 1 / V: its logarithm is safe
    cross_entropy = top - probs.gather(1, best).log() - of_label
    slope = probs.scatter_add_(1, label, torch.full_like(of_label, -1.0))
    gradient = torch.mm(raw.copy_(slope) if narrow else slope, head)
    # weights in float32, after the product: a factor must not be rounded to bf16
    return cross_entropy[:, 0], best[:, 0] == labels, gradient.float() * weights[:, None]
