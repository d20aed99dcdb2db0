"""A made-up data set and its epochs: rows in buckets, cut into batches, dealt into steps.

The rules are those of ``dflash_lightning.batching`` in short: batches of a bucket have a fixed
number of rows, which the story's token budget gives on average, and every row comes once an epoch.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STORY_EDGES = (350, 770, 1216, 1728, 2432, 3296, 8192)  # nearly all rows have over 350 tokens
STORY_ROWS = (64, 40, 28, 20, 15, 11)  # of a batch, at 49,152 padded tokens and 64 rows at most
STORY_BATCHES = (0.065, 0.075, 0.165, 0.077, 0.222, 0.396)  # share of a bucket in the batches
WINDOW_BATCHES = 32
WINDOWS_PER_BUCKET = 8  # at least
ROW_WEIGHT = 15.0  # of a row of 1,000 tokens


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How rows become steps; see ``simulate``."""

    order: str
    deal: str
    ranks: int
    epoch_steps: int
    rows_per_batch: tuple[int, ...]
    window: bool
    group: int

    @property
    def places(self) -> int:
        """Batches of an epoch."""
        return self.ranks * self.epoch_steps

    @property
    def batches(self) -> Ints:
        """Batches of an epoch from each bucket, int64 ``[K]``."""
        k = len(self.rows_per_batch)
        share = np.array(STORY_BATCHES) if k == len(STORY_BATCHES) else np.full(k, 1 / k)
        ends = np.rint(np.cumsum(share / share.sum()) * self.places).astype(np.int64)
        batches = np.diff(ends, prepend=0)
        assert batches.min() > 0
        return batches


@dataclass(frozen=True, eq=False)
class DataSet:
    """Rows ordered by bucket; ``[R]`` each.

    Args:
        boundaries: Edges of the buckets in tokens, 0 first.
        bucket: Of each row, int64.
        log_length: Logarithm of the length in tokens.
        n: Weight.
        deviation: Standard deviation of a row's loss per weight, around what its bucket and
            length say.
        lasting: The part of it that is the same every epoch, in such deviations; its weighted sum
            over a bucket is zero, so that the bucket's loss is what the truth says.
        lasting_share: Share of the lasting part in the variance.
    """

    boundaries: tuple[int, ...]
    bucket: Ints
    log_length: Floats
    n: Floats
    deviation: Floats
    lasting: Floats
    lasting_share: float

    @property
    def share(self) -> Floats:
        """Share of each bucket in the weight, float64 ``[K]``."""
        weight = np.bincount(self.bucket, self.n)
        return weight / weight.sum()

    @property
    def row_share(self) -> Floats:
        """Share of each bucket in the rows, float64 ``[K]``."""
        return np.bincount(self.bucket) / self.bucket.size

    @property
    def longer(self) -> Floats:
        """Log length above the bucket's weighted mean."""
        return centred(self.log_length, self.bucket, self.n)


def centred(values: Floats, bucket: Ints, weight: Floats) -> Floats:
    """Values less the weighted mean of their bucket."""
    return values - (np.bincount(bucket, values * weight) / np.bincount(bucket, weight))[bucket]


def make_rows(
    rng: np.random.Generator,
    layout: Layout,
    *,
    edges: tuple[int, ...],
    cv: float,
    sigma: float,
    lighter: float,
    lasting_share: float,
) -> DataSet:
    """Rows whose log length is uniform in a bucket and whose weight grows with its square root.

    Args:
        rng: Random numbers.
        layout: How many rows there have to be.
        edges: Lengths between which the rows of the buckets lie, in tokens.
        cv: Coefficient of variation of the weights of rows of one length.
        sigma: Typical standard deviation of a row's loss in nats; short rows have 1.2 times it,
            long ones 0.8 times.
        lighter: A row's variance falls with this power of its weight.
        lasting_share: Share of its variance that is the same every epoch.
    """
    k = len(layout.rows_per_batch)
    bucket = np.repeat(np.arange(k), layout.batches * np.array(layout.rows_per_batch))
    edge = np.log(edges)
    length = edge[bucket] + np.diff(edge)[bucket] * rng.random(bucket.size)
    wide = np.sqrt(np.log1p(cv**2))
    n = ROW_WEIGHT * np.exp((length - np.log(1000)) / 2)
    n *= np.exp(wide * rng.standard_normal(bucket.size) - wide**2 / 2)
    mean = np.bincount(bucket, n) / np.bincount(bucket)
    deviation = sigma * np.linspace(1.2, 0.8, k)[bucket] * (mean[bucket] / n) ** (lighter / 2)
    lasting = centred(rng.standard_normal(bucket.size), bucket, n * deviation)
    return DataSet((0, *edges[1:]), bucket, length, n, deviation, lasting, lasting_share)


def recorded_rows(rng: np.random.Generator, layout: Layout, file: Path) -> DataSet:
    """Rows drawn with replacement from a real recording, whose own losses are kept every epoch.

    The buckets hold equally many recorded rows. Their variance is that of the finite population
    in the linearised ratio: the mean square of ``n_i`` times the residual is the same for all rows
    of a bucket, so a row's own variance goes with ``1 / n_i^2``. Lengths are shuffled among a
    bucket's rows: in the order of their lengths, as batches are dealt, the many copies of a
    recorded row would meet, and their losses are the same.

    Args:
        rng: Random numbers.
        layout: How many rows there have to be.
        file: An npz with ``loss`` per weight in nats, ``weight`` and ``log_length``, ``[R]`` each.
    """
    with np.load(file) as arrays:
        loss, n, length = (
            np.asarray(arrays[name], np.float64) for name in ("loss", "weight", "log_length")
        )
    k = len(layout.rows_per_batch)
    inner = np.quantile(length, np.arange(1, k) / k)
    of_recorded = np.searchsorted(inner, length)
    wanted = layout.batches * np.array(layout.rows_per_batch)
    drawn = np.concatenate(
        [rng.choice(np.flatnonzero(of_recorded == i), wanted[i]) for i in range(k)]
    )
    drawn_lengths = length[drawn[np.lexsort((rng.random(drawn.size), of_recorded[drawn]))]]
    bucket, n = of_recorded[drawn], n[drawn]
    residual = centred(loss[drawn], bucket, n)
    square = np.bincount(bucket, (n * residual) ** 2) / np.bincount(bucket)
    deviation = np.sqrt(square)[bucket] / n
    edges = np.rint(np.exp([*inner, length.max()])).astype(int)
    boundaries = (0, *(int(edge) for edge in edges))
    return DataSet(boundaries, bucket, drawn_lengths, n, deviation, residual / deviation, 1.0)


def draw_steps(
    rng: np.random.Generator, data: DataSet, layout: Layout, total: int
) -> tuple[Ints, Ints]:
    """The row ids of steps 0 to ``total - 1`` and the step of each, rising."""
    rows, sizes = [], []
    for _ in range(-(-total // layout.epoch_steps)):
        epoch_rows, epoch_sizes = _deal_epoch(rng, data, layout)
        rows.append(epoch_rows)
        sizes.append(epoch_sizes.reshape(-1, layout.ranks).sum(1))
    per_step = np.concatenate(sizes)[:total]
    return np.concatenate(rows)[: per_step.sum()], np.repeat(np.arange(total), per_step)


def _deal_epoch(rng: np.random.Generator, data: DataSet, layout: Layout) -> tuple[Ints, Ints]:
    """All rows in the order of the steps, and the rows of each batch."""
    rows, sizes = _cut(rng, data, layout)
    starts = np.cumsum(sizes) - sizes
    longest = np.maximum.reduceat(data.log_length[rows], starts)
    order = _order(rng, longest, layout)
    sizes, starts = sizes[order], starts[order]
    ends = np.cumsum(sizes)
    return rows[np.repeat(starts - ends + sizes, sizes) + np.arange(rows.size)], sizes


def _cut(rng: np.random.Generator, data: DataSet, layout: Layout) -> tuple[Ints, Ints]:
    """Rows in the order of the batches, and the rows of each batch."""
    sizes = np.repeat(layout.rows_per_batch, layout.batches)
    if layout.order == "random":
        rows = rng.permutation(data.bucket.size)
        return rows, np.diff(np.rint(np.linspace(0, rows.size, sizes.size + 1)).astype(np.int64))
    if layout.order == "sorted":
        return np.lexsort((data.log_length, data.bucket)), sizes
    counts = np.bincount(data.bucket)
    starts = np.cumsum(counts) - counts
    rows = np.concatenate(
        [start + rng.permutation(count) for start, count in zip(starts, counts, strict=True)]
    )
    if layout.window:
        batches = np.maximum(np.minimum(WINDOW_BATCHES, layout.batches // WINDOWS_PER_BUCKET), 1)
        window = (np.arange(rows.size) - starts[data.bucket]) // (
            batches * np.array(layout.rows_per_batch)
        )[data.bucket]
        rows = rows[np.lexsort((data.log_length[rows], window, data.bucket))]
    return rows, sizes


def _order(rng: np.random.Generator, longest: Floats, layout: Layout) -> Ints:
    """Positions of the batches so that each run of ``ranks`` is a step."""
    order = rng.permutation(longest.size)
    if layout.group:
        group = np.arange(longest.size) // (layout.group * layout.ranks)
        return order[np.lexsort((longest[order], group))]
    if layout.deal == "independent":
        return order
    order = order[np.argsort(longest[order], kind="stable")]
    if layout.deal == "aligned":
        return rng.permutation(order.reshape(-1, layout.ranks)).ravel()
    return rng.permuted(order.reshape(layout.ranks, -1), axis=1).T.ravel()
