"""Two pieces of work side by side: what each costs, as ratios."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lightning.functional.head import ChunkedHead
from dflash_lightning.target import HFTarget

Work = Callable[[], object]


class Ratio(NamedTuple):
    """Ratios of pairs that ran one after the other.

    Args:
        median: Of all pairs.
        low: Smallest.
        high: Largest.
        seconds: Median of the first and of the second work.
    """

    median: float
    low: float
    high: float
    seconds: tuple[float, float]


def side_by_side(first: Work, second: Work, pairs: int = 5) -> Ratio:
    """Times of ``second`` over those of ``first``, in turns; both have run before.

    Times are the process's own on the processor, so that others on the machine matter less.
    """
    times = np.array([[_seconds(first), _seconds(second)] for _ in range(pairs)])
    ratios = times[:, 1] / times[:, 0]
    medians = np.median(times, axis=0)
    return Ratio(
        float(np.median(ratios)), ratios.min(), ratios.max(), (float(medians[0]), float(medians[1]))
    )


def _seconds(work: Work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def head_inputs(
    labels: int, width: int, vocab: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and labels without content; under a fake mode without memory."""
    return (
        torch.zeros(labels, width, requires_grad=True),
        torch.zeros(vocab, width, dtype=dtype),
        torch.zeros(labels, dtype=torch.int64),
    )


def chunked_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> None:
    """Our loss and its gradient with buffers that are new."""
    ChunkedHead()(hidden, head, labels).losses.sum().backward()


def plain_formula(hidden: Tensor, head: Tensor, labels: Tensor) -> None:
    """Cross-entropy in float32 of all logits at once, and its gradient."""
    logits = hidden.to(head.dtype) @ head.T
    F.cross_entropy(logits.float(), labels, reduction="sum").backward()


@torch.no_grad()
def all_hidden_states(target: HFTarget, ids: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
    """Features as trainers on Hugging Face models read them: every layer, and the head."""
    out = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[i + 1] for i in layer_ids], dim=-1)
