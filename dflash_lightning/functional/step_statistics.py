"""The statistics of one optimizer step: sums over rows, reduced over ranks, read once.

A row i of the step has the weighted loss sum ``s_i`` and the weight ``n_i``; a bucket k holds the
rows whose own length falls into it, ``N_k = sum n_i``, ``loss_k = sum s_i / N_k``.

``noise_k``, the variance of ``loss_k`` as an estimate, is the delete-one jackknife of a ratio
(Quenouille 1956, Tukey 1958; Cochran, Sampling Techniques, 3rd edition, chapter 6). Without row i
the loss is ``(sum s - s_i) / (N_k - n_i)``, which is ``loss_k - (s_i - loss_k n_i) / (N_k - n_i)``:

    noise_k = (r - 1) / r * sum_i ((s_i - loss_k n_i) / (N_k - n_i))^2

over the r rows with a weight. ``eff_k = N_k^2 / sum n_i^2`` counts the rows that matter;
``length_k`` is the weighted mean of log length. Deviations are measured against ``ref_k``, a
running mean of the ``loss_k`` of earlier steps, since in a bucket of one row ``loss_k`` is the row.

The jackknife needs ``N_k`` and ``loss_k`` of all ranks, hence two reductions a step. Neither size
depends on the data, and nothing is read by the host before ``StepTotals.read``.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_lightning.functional.step_totals import (
    BAD_SLOTS,
    BUCKET_SUMS,
    CANDIDATE,
    ROUNDING,
    StepTotals,
)

KEEP = 0.9  # of the running mean, each step: about the last ten steps that had the bucket
NO_ROW = 2.0**53  # above every row number, and still exact


class RowSums(NamedTuple):
    """What the rows of a batch contribute, each ``[B]`` and, except the bucket, float64.

    Args:
        ids: Row numbers in the store.
        bucket: By the row's own length, int64.
        log_length: Logarithm of the length in tokens.
        s: Weighted loss sum in nats.
        n: Weight.
    """

    ids: Tensor
    bucket: Tensor
    log_length: Tensor
    s: Tensor
    n: Tensor


class StepStatistics:
    """Collects the rows of one optimizer step, then reduces them over ranks.

    Args:
        boundaries: Edges of the length buckets in tokens, 0 first, strictly rising.
        rank: This rank.
        world_size: Ranks.

    >>> statistics = StepStatistics((0, 8, 16), rank=0, world_size=1)
    >>> statistics.add(
    ...     rows=torch.tensor([7, 3]),
    ...     lengths=torch.tensor([8, 9]),
    ...     row_of_label=torch.tensor([0, 0, 1]),
    ...     weights=torch.tensor([1.0, 0.5, 1.0]),
    ...     losses=torch.tensor([2.0, 4.0, 3.0]),
    ...     correct=torch.tensor([True, False, False]),
    ...     padded_tokens=18,
    ...     anchors=2,
    ... )
    >>> step = statistics.reduce(lambda own: own).read()
    >>> step["loss"], step["rows"], [round(x, 3) for x in step["loss_k"]], step["weight_k"]
    (2.8, 2, [2.667, 3.0], [1.5, 1.0])
    """

    def __init__(self, boundaries: Sequence[int], *, rank: int, world_size: int) -> None:
        self.num_buckets = len(boundaries) - 1
        self.rank = rank
        self.world_size = world_size
        self._inner = torch.tensor(boundaries[1:-1], dtype=torch.int64)
        self._ref = torch.full((self.num_buckets,), math.nan, dtype=torch.float64)  # NaN: unseen
        self._clear()

    def _clear(self) -> None:
        """Forget the rows, for the next step."""
        self._rows: list[RowSums] = []
        self._sums: list[Tensor] = []
        self._counts = [0, 0, 0]

    def add(
        self,
        *,
        rows: Tensor,
        lengths: Tensor,
        row_of_label: Tensor,
        weights: Tensor,
        losses: Tensor,
        correct: Tensor,
        padded_tokens: int,
        anchors: Tensor | int,
    ) -> None:
        """Add a batch; a placeholder, which has no rows, counts nothing.

        Args:
            rows: Row numbers in the store, int64 ``[B]``, on the CPU.
            lengths: Real tokens of each row, int64 ``[B]``, on the device.
            row_of_label: Row of the batch to which each label belongs, int64 ``[M]``.
            weights: Weight of each label, float32 ``[M]``.
            losses: Of each label in nats, float32 ``[M]``.
            correct: Whether each draft token is the goal's, bool ``[M]``.
            padded_tokens: Tokens of the batch with padding.
            anchors: Their number, or a tensor whose sum it is.
        """
        self._to(lengths.device)
        if not len(rows):
            return
        weights = weights.detach().double()
        weighted = weights * losses.detach().double()
        none = lengths.new_zeros(len(rows), dtype=torch.float64)
        self._rows.append(
            RowSums(
                ids=rows.to(lengths.device, torch.float64, non_blocking=True),
                # left-open, right-closed: as many inner edges as are below the length
                bucket=(lengths[:, None] > self._inner).sum(1),
                log_length=lengths.double().log(),
                s=none.index_add(0, row_of_label, weighted),
                n=none.index_add(0, row_of_label, weights),
            )
        )
        count = anchors.sum() if isinstance(anchors, Tensor) else lengths.new_full((), anchors)
        sums = [weighted.sum(), weights.sum(), correct.sum(), lengths.sum(), count]
        self._sums.append(torch.stack([x.double() for x in sums]))
        for i, more in enumerate((len(rows), padded_tokens, len(row_of_label))):
            self._counts[i] += more

    def reduce(
        self,
        sum_over_ranks: Callable[[Tensor], Tensor],
        extra: Sequence[float] | Tensor = (),
    ) -> StepTotals:
        """Sum over ranks in exactly two reductions; empty again for the next step afterwards.

        Args:
            sum_over_ranks: Takes this rank's float64 vector, returns the sum of all ranks'. All
                ranks call it equally often and with equal sizes.
            extra: Numbers to sum over ranks along the way; as many on every rank.
        """
        rows = self._all_rows()
        first = sum_over_ranks(self._first(rows, extra))
        s, n = first[-BUCKET_SUMS * self.num_buckets :].view(BUCKET_SUMS, -1)[:2]
        loss = torch.where(n > 0, s / n.clamp_min(1e-300), math.nan)
        fallback = torch.where(loss.isfinite(), loss, 0.0)
        seen = self._ref.isfinite()
        ref = torch.where(seen, self._ref, fallback)
        second = sum_over_ranks(self._second(rows, loss, n, ref))
        # From global sums only, so it is the same on all ranks.
        followed = torch.where(seen, KEEP * self._ref + (1 - KEEP) * loss, loss)
        self._ref = torch.where(loss.isfinite(), followed, self._ref)
        self._clear()
        return StepTotals(first, second, self.num_buckets, self.world_size)

    def state_dict(self) -> dict[str, list[float | None]]:
        """The running mean of each bucket's loss in nats; None for a bucket not seen yet."""
        return {"ref": [None if math.isnan(x) else x for x in self._ref.tolist()]}

    def load_state_dict(self, state: dict[str, list[float | None]]) -> None:
        """Take up the running means.

        Raises:
            ValueError: They belong to another number of buckets.
        """
        if len(state["ref"]) != self.num_buckets:
            raise ValueError(
                f"the statistics to restore must have {self.num_buckets} buckets, got "
                f"{len(state['ref'])}. Give data.batching the boundaries of the resumed run."
            )
        known = [math.nan if x is None else x for x in state["ref"]]
        self._ref = torch.tensor(known, dtype=torch.float64).to(self._ref.device)

    def _to(self, device: torch.device) -> None:
        """Keep what is needed at every step on the device."""
        if self._ref.device != device:
            self._inner, self._ref = self._inner.to(device), self._ref.to(device)

    def _all_rows(self) -> RowSums:
        """The rows of all batches of this rank."""
        none = self._ref[:0]
        start = RowSums(none, none.long(), none, none, none)
        return RowSums(*(torch.cat(parts) for parts in zip(start, *self._rows, strict=True)))

    def _first(self, rows: RowSums, extra: Sequence[float] | Tensor) -> Tensor:
        """This rank's sums that need nothing else."""
        device = self._ref.device
        on_host = self._counts if isinstance(extra, Tensor) else [*self._counts, *extra]
        parts = [
            torch.stack([*self._sums, self._ref.new_zeros(5)]).sum(0),
            torch.tensor(on_host, dtype=torch.float64).to(device, non_blocking=True),
        ]
        if isinstance(extra, Tensor):
            parts.append(extra.to(device, torch.float64).flatten())
        n, one = rows.n, torch.ones_like(rows.n)
        per_row = [rows.s, n, one, (n > 0).double(), n * n, n * rows.log_length]
        return torch.cat([*parts, *(self._per_bucket(rows, x) for x in per_row)])

    def _second(self, rows: RowSums, loss: Tensor, weight: Tensor, ref: Tensor) -> Tensor:
        """This rank's sums that need the loss and weight of all ranks' buckets, and its slot."""
        rest = weight[rows.bucket] - rows.n
        some = rest > ROUNDING * weight[rows.bucket]
        pull = (rows.s - loss[rows.bucket] * rows.n) / torch.where(some, rest, 1.0)
        squares = torch.where(some, pull * pull, 0.0)
        finite = rows.s.isfinite()
        deviation = (rows.s - ref[rows.bucket] * rows.n).abs()
        deviation = torch.where(deviation > ROUNDING * rows.s.abs(), deviation, 0.0)
        deviation = torch.where(finite, deviation, math.inf)
        slots = self._ref.new_zeros(self.world_size, CANDIDATE + BAD_SLOTS)
        if len(rows.ids):
            slots[self.rank] = torch.cat([_candidate(rows, deviation), _bad_ids(rows, finite)])
        shared = [squares, torch.where(finite, deviation, 0.0)]
        return torch.cat([*(self._per_bucket(rows, x) for x in shared), slots.flatten()])

    def _per_bucket(self, rows: RowSums, values: Tensor) -> Tensor:
        # Not a product with a one-hot matrix: there a row that is not finite would spoil all.
        return self._ref.new_zeros(self.num_buckets).index_add(0, rows.bucket, values)


def _candidate(rows: RowSums, deviation: Tensor) -> Tensor:
    """The row that deviates most, the lowest number among equals: float64 ``[5]``."""
    best = torch.where(deviation == deviation.max(), rows.ids, NO_ROW).argmin()
    columns = torch.stack([deviation, rows.ids + 1, rows.bucket.double(), rows.s, rows.n])
    # Indexing with a scalar tensor would read it on the host.
    return columns.index_select(1, best.view(1))[:, 0]


def _bad_ids(rows: RowSums, finite: Tensor) -> Tensor:
    """Numbers + 1 of the first non-finite rows, 0 where there is none: float64 ``[4]``."""
    bad = torch.cat(
        [torch.where(finite, NO_ROW, rows.ids), rows.ids.new_full((BAD_SLOTS,), NO_ROW)]
    )
    bad = bad.sort().values[:BAD_SLOTS]
    return torch.where(bad < NO_ROW, bad + 1, 0.0)
