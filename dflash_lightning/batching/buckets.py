"""Length buckets, and the boundaries that leave the least padding.

A batch grows row by row until one more would break a limit, and the row that did not fit opens the
next. How many rows a batch may hold falls as its longest row grows: ``n`` rows fit exactly if the
longest of them, ``M_n``, is at most some ``reach(n)``. Rows of a bucket come in random order, and
``F`` is the distribution function of their widths; the first row of a batch, which did not fit
before, has another, ``G``. With ``S_n = G(reach(n)) F(reach(n))^(n-1)``, the chance of n rows or
more,

    rows of a batch     E[N] = sum_n S_n
    its padded tokens   E[N M_N] = sum_n n (E[M_n; M_n <= reach(n)]
                                            - F(reach(n+1)) E[M_n; M_n <= reach(n+1)])
    the next first row  G(x) = sum_n (S_n F(x) - P(M_n <= reach(n+1)) F(min(x, reach(n+1))))

and in the long run a bucket of R rows takes ``R E[N M_N] / E[N]`` padded tokens (renewal theorem).
``mean_batches`` solves the last equation exactly, for many buckets at once.
"""

import functools
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dflash_lightning.batching.settings import Batching, check_fit, checked_int, checked_lengths

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_CELLS = 256
MOST_ROWS = 512  # batches of more rows are treated alike where boundaries are chosen


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

    Exact dynamic programming over the histogram of widths. Up to 256 distinct widths are told
    apart (64 where batches hold 256 rows or more); beyond that, edges lie on a grid of so many
    cells, half of equal width and half of equal row counts, and wherever one row less fits.

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
    most = np.minimum(limits.most_rows(widths[edges[1:] - 1]), MOST_ROWS)
    return edges, _expected_padding(rows, mean_widths, most)


def _cells(widths: Ints, counts: Ints, limits: Batching) -> Ints:
    """Starts of the cells among the distinct widths, and the end, int64 ``[cells + 1]``."""
    largest = min(int(limits.most_rows(widths[:1])[0]), MOST_ROWS)
    # The table takes as many steps as rows of a batch times cells: large caps get fewer cells.
    limit = int(np.clip(2**14 // largest, 64, MOST_CELLS))
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
    """Expected padded tokens of every bucket of neighbouring cells, given each cell's rows."""
    below = np.concatenate([[0.0], np.cumsum(rows)])
    table = np.full((rows.size + 1, rows.size + 1), np.inf)
    for end in range(1, rows.size + 1):
        starts = np.arange(end)
        batch_rows, padded = mean_batches(below, widths, most, starts, end)
        table[:end, end] = (below[end] - below[:end]) * padded / batch_rows
    return table


def mean_batches(
    below: Floats, widths: Floats, most: Ints, starts: Ints, end: int
) -> tuple[Floats, Floats]:
    """Mean rows and padded tokens of a batch, of every bucket of cells ``starts[i] .. end - 1``.

    Args:
        below: Rows in all cells before each cell, and in all, ``[cells + 1]``.
        widths: Width of each cell in tokens, rising, ``[cells]``.
        most: Most rows of a batch whose longest is in each cell, falling, ``[cells]``.
        starts: First cells of the buckets, rising, ``[s]``.
        end: Cell after the last of every bucket.

    Returns:
        Mean rows of a batch and mean padded tokens of a batch, ``[s]`` each.
    """
    fits = int(most[end - 1])  # so many rows fit whatever they are
    sizes = np.arange(fits + 1, most[starts[0]] + 1)
    reach = (-most).searchsorted(-sizes, side="right")
    total = below[end] - below[starts]
    share = np.maximum(below[reach][:, None] - below[starts], 0) / total  # F(reach(n))
    chance, firsts, more, fewer = _first_rows(share, sizes)
    rest = slice(0, end - 1)  # every cell but the last, where all is 1
    f = np.maximum(below[1:end] - below[starts][:, None], 0) / total[:, None]
    level = np.maximum(most[rest] - fits, 0)
    density = f * (1 - fewer[level].T) - (1 - f) * more[level].T  # G
    density *= _growth(f, share, reach, fits, starts)
    reached = firsts * share ** (sizes - 1)[:, None]  # S_n
    padded = fits * widths[end - 1] + widths[reach] @ reached - density @ np.diff(widths[:end])
    return fits + chance, padded


def _first_rows(share: Floats, sizes: Ints) -> tuple[Floats, Floats, Floats, Floats]:
    """Solve for G at ``reach(n)``, given ``share = F(reach(n))`` and ``sizes = n``, ``[n, s]``.

    Put together by n, the equation in the module's head reads, for any x with
    ``reach(m + 1) < x <= reach(m)``,

        G(x) = F(x) (1 - u_m) - (1 - F(x)) v_m
        u_m = sum_{n <= m} t_n (1 - F(reach(n))),  v_m = sum_{n > m} t_n F(reach(n)),
        t_n = G(reach(n)) F(reach(n))^(n - 2).

    Every ``u_m``, ``v_m`` follows from the ones before; they depend linearly on the sum of all,
    ``v_0``, which is chosen so that the last ``v_m`` is 0.

    Returns:
        ``v_0``, ``[s]``; ``G(reach(n))``, ``[n, s]``; ``v_m``, ``u_m`` from m = 0, ``[n + 1, s]``.
    """
    count, buckets = share.shape
    # Index 0 holds the constant, 1 the factor of v_0.
    firsts = np.zeros((2, count, buckets))
    u, v = np.zeros((2, 2, count + 1, buckets))
    v[1, 0] = 1
    for at in range(count):
        f = share[at]
        firsts[:, at] = -f * u[:, at] - (1 - f) * v[:, at]
        firsts[0, at] += f
        t = firsts[:, at] * f ** (sizes[at] - 2)
        u[:, at + 1] = u[:, at] + t * (1 - f)
        v[:, at + 1] = v[:, at] - t * f
    total = -v[0, -1] / v[1, -1]
    return total, *(part[0] + part[1] * total for part in (firsts, v, u))


def _growth(f: Floats, share: Floats, reach: Ints, fits: int, starts: Ints) -> Floats:
    """Sum over n of ``n F^(n-1)`` times the chance that the n-th row is the last, ``[s, cells]``.

    For a cell where at most m rows fit: ``sum_{fits <= n < m} n (1 - F(reach(n+1))) F^(n-1)`` and
    ``m F^(m-1)``.
    """
    grown = np.zeros_like(f)
    power = f ** (fits - 1)
    inside, buckets = f.shape[1], starts.size
    cells = np.minimum(np.append(reach, 0), f.shape[1]).tolist()
    staying = np.concatenate([share, np.zeros((1, starts.size))])
    for n, (more, stays) in enumerate(zip(cells, staying, strict=True), start=fits):
        grown[:buckets, more:inside] += n * power[:buckets, more:inside]
        if more == 0:
            break
        buckets = int(starts.searchsorted(more))  # later buckets have no cell that takes more rows
        part = power[:buckets, :more]
        grown[:buckets, :more] += (n * (1 - stays[:buckets]))[:, None] * part
        part *= f[:buckets, :more]
        inside = more
    return grown


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
