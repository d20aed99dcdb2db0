"""The frozen head: the loss of every labelled slot, chunk by chunk."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Goal = Literal["ce", "argmax", "kl"]


class SlotLosses(NamedTuple):
    """What the head says about M labelled slots.

    Args:
        losses: Of each slot in nats, float32 ``[M]``, differentiable.
        correct: Whether the drafter's most likely token is the goal's, bool ``[M]``: the label for
            ``ce``, the target's most likely token otherwise.
    """

    losses: Tensor
    correct: Tensor


class ChunkedHead:
    """Losses through a frozen head without a ``[M, V]`` tensor.

    The head is frozen, so the gradient of each slot's loss with respect to its hidden state is made
    in the forward pass of its chunk: two matrix products a chunk, nothing recomputed. The buffers
    live as long as the object.

    ==========  ==========================================================
    goal        loss of a slot
    ==========  ==========================================================
    ``ce``      cross-entropy to the label
    ``argmax``  cross-entropy to the target's most likely token
    ``kl``      KL(target || drafter) over the vocabulary: zero where equal
    ==========  ==========================================================

    Args:
        chunk_bytes: Size of one chunk of float32 logits.
        goal: What the drafter should predict.
    """

    def __init__(self, chunk_bytes: int = 100_000_000, goal: Goal = "ce") -> None:
        self.chunk_bytes = chunk_bytes
        self.goal: Goal = goal
        self._buffers: dict[torch.dtype, Tensor] = {}

    def __call__(
        self, hidden: Tensor, head: Tensor, labels: Tensor, teacher: Tensor | None = None
    ) -> SlotLosses:
        """Evaluate M labelled slots.

        Args:
            hidden: Output-normed hidden states of the drafter, ``[M, D]``.
            head: Frozen head, ``[V, D]``; products are made in its dtype, sums in float32.
            labels: Token ids, int64 ``[M]``.
            teacher: Output-normed hidden states of the target that predict the same tokens, in the
                dtype of the head, ``[M, D]``; not read for ``ce``.

        Raises:
            ValueError: The goal is the target's and its hidden states are missing.
        """
        if self.goal == "ce":
            teacher = None
        elif teacher is None:
            raise ValueError(
                f"goal {self.goal} needs the target's hidden states, got none. Give them as "
                "teacher, or use goal ce."
            )
        return SlotLosses(*_SlotLosses.apply(hidden, head, labels, teacher, self))

    def chunk(
        self, hidden: Tensor, head: Tensor, labels: Tensor, teacher: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, correctness and slopes ``[m, V]`` of m slots; the slopes lie in the buffers.

        Arguments as in :meth:`__call__`, a few slots of them. The slope of a slot is the gradient
        of its loss with respect to its logits, in the dtype of the head.
        """
        if teacher is not None and self.goal == "kl":
            losses, correct, slopes = self._divergence(hidden, head, teacher)
        else:
            if teacher is not None:
                labels = self._raw_logits(teacher, head).argmax(1)
            losses, correct, slopes = self._cross_entropy(hidden, head, labels)
        if head.dtype != slopes.dtype:
            out = self.buffer(len(slopes), head.shape[0], slopes, head.dtype)
            slopes = out.copy_(slopes)
        return losses, correct, slopes

    def rows(self, vocab: int) -> int:
        """Slots of a chunk; with ``kl`` three tensors of logits' size share its bytes."""
        return max(1, self.chunk_bytes // (4 * vocab * (3 if self.goal == "kl" else 1)))

    def buffer(self, rows: int, vocab: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A reused ``[rows, vocab]`` tensor on the device of ``like``."""
        kept = self._buffers.get(dtype)
        if kept is None or kept.device != like.device or kept.numel() < rows * vocab:
            kept = self._buffers[dtype] = torch.empty(rows * vocab, dtype=dtype, device=like.device)
        return kept[: rows * vocab].view(rows, vocab)

    def _raw_logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Logits in the dtype of the head, as the target makes its own."""
        out = self.buffer(len(hidden), head.shape[0], hidden, head.dtype)
        return torch.mm(hidden, head.T, out=out)

    def _logits(self, hidden: Tensor, head: Tensor, out: Tensor) -> Tensor:
        """Logits in float32, in ``out``."""
        if head.dtype == torch.float32:
            return torch.mm(hidden, head.T, out=out)
        return out.copy_(self._raw_logits(hidden, head))

    def _cross_entropy(
        self, hidden: Tensor, head: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, correctness and slopes against one token a slot."""
        out = self.buffer(len(hidden), head.shape[0], hidden, torch.float32)
        logits = self._logits(hidden, head, out)
        label = labels[:, None]
        best = logits.argmax(dim=1, keepdim=True)
        top, of_label = logits.gather(1, best), logits.gather(1, label)
        probs = torch.softmax(logits, dim=1, out=logits)
        # the most likely token has at least probability 1 / V: its logarithm is safe
        losses = (top - of_label) - probs.gather(1, best).log()
        slopes = probs.scatter_add_(1, label, torch.full_like(of_label, -1.0))
        return losses[:, 0], best[:, 0] == labels, slopes

    def _divergence(
        self, hidden: Tensor, head: Tensor, teacher: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, correctness and slopes against the target's distribution."""
        size = (len(hidden), head.shape[0])
        buffers = self.buffer(3 * size[0], size[1], hidden, torch.float32).view(3, *size)
        ours, theirs, theirs_probs = buffers
        self._logits(hidden, head, ours)
        self._logits(teacher, head, theirs)
        correct = ours.argmax(1) == theirs.argmax(1)
        torch.log_softmax(ours, dim=1, out=ours)
        torch.log_softmax(theirs, dim=1, out=theirs)
        torch.exp(theirs, out=theirs_probs)
        # finite logarithms: a token that the target excludes adds 0, not NaN
        losses = theirs.sub_(ours).mul_(theirs_probs).sum(1)
        return losses, correct, ours.exp_().sub_(theirs_probs)


class _SlotLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        teacher: Tensor | None,
        chunked: ChunkedHead,
    ) -> tuple[Tensor, Tensor]:
        losses = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        correct = torch.empty(len(labels), dtype=torch.bool, device=hidden.device)
        learns = ctx.needs_input_grad[0]
        # kept as the product gives it, of a loss with factor 1: rounded once, whatever follows
        gradient = torch.empty_like(hidden, dtype=head.dtype) if learns else None
        rows = chunked.rows(head.shape[0])
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(labels), rows):
                part = slice(start, start + rows)
                losses[part], correct[part], slopes = chunked.chunk(
                    hidden[part].to(head.dtype),
                    head,
                    labels[part],
                    None if teacher is None else teacher[part],
                )
                if gradient is not None:
                    torch.mm(slopes, head, out=gradient[part])
        ctx.save_for_backward(gradient)
        ctx.hidden_dtype = hidden.dtype
        ctx.mark_non_differentiable(correct)
        return losses, correct

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Weights and factors are float32 and make the product so: bf16 would round them.
        (gradient,) = ctx.saved_tensors
        of_hidden = gradient * upstream[0][:, None]
        return of_hidden.to(ctx.hidden_dtype), None, None, None, None
