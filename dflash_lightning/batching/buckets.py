"""Length buckets, and the boundaries that leave the least padding.

A batch grows row by row until one more would break a limit. How many rows a batch may hold falls as
its longest row grows, so a batch of rows drawn at random from one bucket reaches ``n`` rows exactly
if the longest of its first ``n`` is at most some ``reach(n)``. With ``F`` the distribution of
widths in the bucket and ``M_n`` the longest of ``n`` rows,

    P(N >= n)      = F(reach(n))^n
    E[padded]      = sum_n n (E[M_n; M_n <= reach(n)] - E[M_n; M_n <= reach(n+1)] F(reach(n+1)))

and a bucket of R rows costs ``R E[padded] / E[N]`` padded tokens in the long run (renewal theorem).
That a row which did not fit opens the next batch, and is longer than most, is left out here and
counted in ``predict``; it moves no boundary by more than the choice is worth.
"""

import functools
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dflash_lightning.batching.settings import Batching, check_fit, checked_int, checked_lengths

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_CELLS = 512


def bucket_of(lengths: npt.ArrayLike, boundaries: tuple[int, ...]) -> Ints:
    """Bucket of each length: the k with ``boundaries[k] < length <= boundaries[k + 1]``.

    Args:
        lengths: Row lengths in tokens, integers ``[rows]``, each at least 1.
        boundaries: Edges of the buckets in tokens, 0 first, strictly rising.

    Returns:
        Bucket of each row, int64 ``[rows]``, from 0 to ``len(boundaries) - 2``.

    Raises:
        ValueError: Lengths are no flat list of positive integers, or one is above the last edge.

    >>> bucket_of([64, 65, 128], (0, 64, 128)).tolist()
    [0, 1, 1]
    """
    rows = checked_lengths(lengths)
    longest = int(rows.max())
    if longest > boundaries[-1]:
        raise ValueError(
            f"boundaries must end at the longest row ({longest} tokens) or above, got "
            f"{boundaries[-1]}; {int((rows > boundaries[-1]).sum())} rows are longer. "
            f"Raise the last of boundaries to {longest}, or set boundaries to null."
        )
    return np.searchsorted(np.asarray(boundaries), rows, side="left").astype(np.int64) - 1


def optimal_boundaries(
    lengths: npt.ArrayLike,
    num_buckets: int,
    *,
    token_budget: int,
    max_rows: int,
    pad_to: int = 1,
) -> tuple[int, ...]:
    """Bucket edges with the fewest expected padded tokens where rows are shuffled in each bucket.

    Exact dynamic programming over the histogram of widths. Up to 512 distinct widths are told
    apart; beyond that, edges lie on a grid of about 512 cells, half of equal width and half of
    equal row counts, with an edge wherever one row more or less fits a batch.

    Args:
        lengths: Row lengths in tokens, integers ``[rows]``, each at least 1.
        num_buckets: Buckets to make; data with fewer distinct widths get fewer.
        token_budget: Most padded tokens of one batch.
        max_rows: Most rows of one batch.
        pad_to: Widths are rounded up to a multiple of this.

    Returns:
        Edges in tokens, strictly rising, 0 first and the longest row last; no bucket is empty.

    Raises:
        ValueError: An argument is outside its range, or a row is longer than the budget.

    >>> optimal_boundaries([3, 3, 3, 8, 8, 9], 2, token_budget=18, max_rows=8)
    (0, 3, 9)
    """
    limits = Batching(token_budget=token_budget, max_rows=max_rows, pad_to=pad_to)
    return best_boundaries(lengths, num_buckets, limits)


def best_boundaries(
    lengths: npt.ArrayLike, num_buckets: int, batching: Batching
) -> tuple[int, ...]:
    """As ``optimal_boundaries``, under every limit of ``batching``; its order does not matter."""
    rows = checked_lengths(lengths)
    num_buckets = checked_int("num_buckets", num_buckets, at_least=1)
    check_fit(rows, batching)
    widths, counts = np.unique(batching.padded(rows), return_counts=True)
    # Equal limits share one table, whatever else the settings say.
    limits = replace(
        batching, order="bucketed", num_buckets=1, boundaries=None, sort_window=0, deal="stratified"
    )
    edges, table = _padding_table(widths.tobytes(), counts.astype(np.int64).tobytes(), limits)
    inner = widths[_best_cuts(table, min(num_buckets, edges.size - 1), edges)[1:-1] - 1]
    return (0, *inner.tolist(), int(rows.max()))


@functools.lru_cache(maxsize=8)
def _padding_table(
    widths_bytes: bytes, counts_bytes: bytes, limits: Batching
) -> tuple[Ints, Floats]:
    """Cells of the histogram, and the padding of every bucket made of neighbouring cells.

    Returns:
        Where each cell starts among the distinct widths, and the end, int64 ``[cells + 1]``; and
        expected padded tokens of the bucket of cells ``a .. b - 1`` at ``[a, b]``, infinite for
        ``a >= b``, float64 ``[cells + 1, cells + 1]``.
    """
    widths = np.frombuffer(widths_bytes, np.int64)
    counts = np.frombuffer(counts_bytes, np.int64)
    edges = _cells(widths, counts, limits)
    rows = np.add.reduceat(counts, edges[:-1]).astype(np.float64)
    mean_widths = np.add.reduceat(widths * counts, edges[:-1]) / rows
    return edges, _expected_padding(rows, mean_widths, limits.most_rows(widths[edges[1:] - 1]))


def _cells(widths: Ints, counts: Ints, limits: Batching) -> Ints:
    """Starts of the cells among the distinct widths, and the end, int64 ``[cells + 1]``."""
    largest = int(limits.most_rows(widths[:1])[0])
    # The table takes rows of a batch x cells x cells steps; caps of many rows get fewer cells.
    limit = int(np.clip(np.sqrt(6e7 / largest), 64, MOST_CELLS))
    if widths.size <= limit:
        return np.arange(widths.size + 1)
    even = np.linspace(0, widths[-1], limit // 2 + 1)
    mass = np.arange(1, limit // 2) / (limit // 2) * counts.sum()
    last_that_fits = -limits.most_rows(widths)
    inner = np.concatenate(
        [
            widths.searchsorted(even, side="right"),
            counts.cumsum().searchsorted(mass) + 1,
            last_that_fits.searchsorted(-np.arange(1, min(largest, 64) + 1), side="right"),
        ]
    )
    return np.unique(np.concatenate([[0, widths.size], inner]))


def _expected_padding(rows: Floats, widths: Floats, most: Ints) -> Floats:
    """Expected padded tokens of every bucket of neighbouring cells; see the module's head.

    Buckets that end with the same cell are treated together, in order of that cell. For these,
    ``longest[n - 1, a]`` is the mean longest of n rows from cell a on, no longer than ``reach(n)``;
    ``shorter[n - 1, a]`` the same with ``reach(n + 1)``.
    """
    cells = rows.size
    below = np.concatenate([[0.0], np.cumsum(rows)])
    sizes = np.arange(1, most[0] + 1)
    reach = np.append((-most).searchsorted(-sizes, side="right"), 0)
    longest, shorter = np.zeros((2, sizes.size, cells))
    table = np.full((cells + 1, cells + 1), np.inf)
    for end in range(1, cells + 1):
        fits = int(most[end - 1])  # a batch of any rows of this bucket reaches so many
        total = below[end] - below[:end]
        with np.errstate(divide="ignore"):  # a bucket of one cell: log 0, power 0
            step = np.log(below[end - 1] - below[:end]) - np.log(total)
        stays = np.exp(sizes[:fits, None] * step)
        part = longest[:fits, :end]
        part *= stays
        part += widths[end - 1] * (1 - stays)
        later = int(most[end]) if end < cells else 0
        frozen = slice(max(later - 1, 0), fits - 1)  # all n with later <= n < fits
        shorter[frozen, :end] = longest[frozen, :end]
        share = np.maximum(below[reach[fits:]][:, None] - below[:end], 0) / total
        reaches = share ** np.append(sizes[fits:], sizes.size + 1)[:, None]
        n = sizes[fits - 1 :, None]
        padded = n * longest[fits - 1 :, :end]
        padded[1:] *= reaches[:-1]
        padded -= n * shorter[fits - 1 :, :end] * reaches
        table[:end, end] = total * padded.sum(0) / (fits + reaches[:-1].sum(0))
    return table


def _best_cuts(table: Floats, num_buckets: int, edges: Ints) -> Ints:
    """Edges of the best ``num_buckets`` buckets, as positions among the distinct widths."""
    best = table[0]
    choices = []
    for _ in range(num_buckets - 1):
        through = best[:, None] + table
        choices.append(through.argmin(0))
        best = through.min(0)
    cuts = [edges.size - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return edges[[0, *reversed(cuts)]]
