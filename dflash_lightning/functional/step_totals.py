"""The totals of one optimizer step, as they lie in two vectors, and the numbers they make.

What the numbers mean: :mod:`dflash_lightning.functional.step_statistics`.
"""

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

SUMS = 8  # numerator, weight, correct, tokens, anchors, rows, padded tokens, labels
BUCKET_SUMS = 6  # s, n, rows, rows with a weight, n^2, n log length
CANDIDATE = 5  # deviation, row number + 1, bucket, s, n
BAD_SLOTS = 4  # row numbers of non-finite rows that a rank can report in one step
# A row holds all of the weight where no more than rounding is left without it.
ROUNDING = 1e-12


@dataclass(frozen=True)
class StepTotals:
    """The sums of a step over all ranks, still on the device.

    Args:
        first: Sums that need nothing else, float64.
        second: Sums that need the first, and one slot per rank, float64.
        num_buckets: Length buckets.
        world_size: Ranks.
    """

    first: Tensor
    second: Tensor
    num_buckets: int
    world_size: int

    @property
    def numerator(self) -> Tensor:
        """Sum of weighted losses in nats, float64 scalar."""
        return self.first[0]

    @property
    def weight(self) -> Tensor:
        """Sum of weights, float64 scalar."""
        return self.first[1]

    def read(self, grad_norm: Tensor | None = None) -> dict[str, Any]:
        """Plain numbers, with the one host read of a step.

        Args:
            grad_norm: Norm of the gradient, a scalar that is read along with the totals.

        Returns:
            ``loss`` in nats and ``accuracy``, NaN without weight or labels; ``weight``; the counts
            ``rows``, ``tokens``, ``padded_tokens``, ``anchors``, ``labels``, ``correct``;
            ``extra``, the sums of what was given; ``bad_rows``, numbers of rows whose loss is not
            finite, at most four a rank; ``top_row``, the row that deviates most, with
            ``top_share``, its part of its bucket's deviations, and ``top_pull``, the change of the
            loss that it causes in nats, each None where there is none; a list with one entry
            per bucket for ``loss_k``, ``weight_k``, ``rows_k``, ``noise_k``, ``eff_k`` and
            ``length_k``, None where a value does not exist; and ``grad_norm`` if it was given.
        """
        k = self.num_buckets
        beside = [] if grad_norm is None else [grad_norm.double().view(1)]
        values = iter(torch.cat([self.first, self.second, *beside]).tolist())
        first, second = (list(islice(values, len(sums))) for sums in (self.first, self.second))
        numerator, weight, *counts = first[:SUMS]
        correct, tokens, anchors, rows, padded, labels = map(int, counts)
        sums = _parts(first[len(first) - BUCKET_SUMS * k :], k)
        squares, deviations = _parts(second[: 2 * k], k)
        slots = _parts(second[2 * k :], CANDIDATE + BAD_SLOTS)
        loss = numerator / weight if weight else math.nan
        return {
            "loss": loss,
            "weight": weight,
            "rows": rows,
            "tokens": tokens,
            "padded_tokens": padded,
            "anchors": anchors,
            "labels": labels,
            "correct": correct,
            "accuracy": correct / labels if labels else math.nan,
            "extra": first[SUMS : len(first) - BUCKET_SUMS * k],
            **_top(slots, deviations, loss, sum(sums[1])),
            "bad_rows": sorted(int(i) - 1 for slot in slots for i in slot[CANDIDATE:] if i),
            **_bucket_lists(sums, squares),
            **({} if grad_norm is None else {"grad_norm": next(values)}),
        }


def _parts(values: list[float], size: int) -> list[list[float]]:
    """Cut a flat list into lists of one size."""
    return [values[i : i + size] for i in range(0, len(values), size)]


def _bucket_lists(sums: list[list[float]], squares: list[float]) -> dict[str, list[Any]]:
    """What the ledger says of each bucket."""
    rows = zip(*sums, squares, strict=True)
    return {
        name: list(column)
        for name, column in zip(
            ("loss_k", "weight_k", "rows_k", "noise_k", "eff_k", "length_k"),
            zip(*(_bucket(*row) for row in rows), strict=True),
            strict=True,
        )
    }


def _bucket(
    s: float, n: float, rows: float, weighted: float, n2: float, n_log: float, squares: float
) -> tuple[Any, ...]:
    """Loss, weight, rows, noise, effective rows and mean log length of one bucket."""
    if not n:
        return None, 0.0, int(rows), None, 0.0, None
    effective = n * n / n2
    noise = (weighted - 1) / weighted * squares
    known = weighted >= 2 and effective >= 1.5 and math.isfinite(noise)
    return s / n, n, int(rows), noise if known else None, effective, n_log / n


def _top(
    slots: list[list[float]], deviations: list[float], loss: float, weight: float
) -> dict[str, Any]:
    """The row that deviates most among the ranks' candidates."""
    candidates = [slot[:CANDIDATE] for slot in slots if slot[1]]
    if not candidates or max(c[0] for c in candidates) == 0:
        return {"top_row": None, "top_share": None, "top_pull": None}
    deviation, number, bucket, s, n = min(candidates, key=lambda c: (-c[0], c[1]))
    rest = weight - n
    return {
        "top_row": int(number) - 1,
        "top_share": deviation / deviations[int(bucket)] if math.isfinite(deviation) else 1.0,
        # loss - (numerator - s) / rest, without the difference of two large numbers
        "top_pull": (s - loss * n) / rest if rest > ROUNDING * weight else None,
    }
