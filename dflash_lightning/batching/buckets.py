"""Batching settings, and what they mean: length buckets, and where a batch ends."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Order = Literal["bucketed", "sorted", "random"]

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How rows of unequal length become batches.

    Args:
        order: ``bucketed`` shuffles rows inside length buckets, then the batches; ``sorted`` cuts
            rows in order of length, so that only the order of its batches changes between epochs;
            ``random`` shuffles all rows.
        num_buckets: Length buckets to make where ``boundaries`` are not given. Data with few
            distinct lengths get fewer.
        boundaries: Edges of the buckets in tokens, 0 first; bucket k holds
            ``boundaries[k] < length <= boundaries[k + 1]``. None: equal numbers of rows.
        token_budget: Most tokens of one batch, padding included, after rounding.
        max_rows: Most rows of one batch.
        pad_to: Batch widths are rounded up to a multiple of this before the budget is checked.

    Raises:
        ValueError: A value is outside its range, or no row could fit a batch.
    """

    order: Order = "bucketed"
    num_buckets: int = 6
    boundaries: tuple[int, ...] | None = None
    token_budget: int = 49_152
    max_rows: int = 64
    pad_to: int = 1

    def __post_init__(self) -> None:
        """Refuse settings that no plan could follow; numbers become plain ints."""
        if self.order not in get_args(Order):
            raise ValueError(
                f"order must be one of {', '.join(get_args(Order))}, got {self.order!r}; "
                "use order='bucketed' if unsure."
            )
        for name in ("num_buckets", "token_budget", "max_rows", "pad_to"):
            object.__setattr__(self, name, checked_int(name, getattr(self, name), at_least=1))
        if self.pad_to > self.token_budget:
            raise ValueError(
                f"pad_to must not exceed token_budget, got pad_to={self.pad_to} and "
                f"token_budget={self.token_budget}. Lower pad_to or raise token_budget."
            )
        if self.boundaries is not None:
            object.__setattr__(self, "boundaries", _checked_boundaries(self.boundaries))

    def padded(self, lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Lengths rounded up to a multiple of ``pad_to``.

        Args:
            lengths: Lengths in tokens, integers of any shape.

        Returns:
            Widths in tokens, int64, of the same shape.
        """
        return -(-lengths.astype(np.int64) // self.pad_to) * self.pad_to


def quantile_boundaries(lengths: npt.ArrayLike, num_buckets: int) -> tuple[int, ...]:
    """Bucket edges that share the rows out evenly, as far as equal lengths allow.

    Args:
        lengths: Row lengths in tokens, integers ``[rows]``, each at least 1.
        num_buckets: Buckets to aim for; data with few distinct lengths get fewer.

    Returns:
        Edges in tokens, strictly rising, 0 first and the longest row last; no bucket is empty.

    Raises:
        ValueError: Lengths are no flat list of positive integers, or num_buckets is below 1.

    >>> quantile_boundaries([3, 5, 5, 9], 2)
    (0, 5, 9)
    >>> quantile_boundaries([7, 7, 7], 6)
    (0, 7)
    """
    rising = np.sort(checked_lengths(lengths))
    num_buckets = min(checked_int("num_buckets", num_buckets, at_least=1), rising.size)
    shares = np.arange(1, num_buckets + 1)
    ends = -(-shares * rising.size // num_buckets)
    return (0, *np.unique(rising[ends - 1]).tolist())


def bucket_of(lengths: npt.ArrayLike, boundaries: tuple[int, ...]) -> npt.NDArray[np.int64]:
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


def checked_lengths(lengths: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Lengths as a flat int32 array, refused unless every one is a positive integer.

    Args:
        lengths: Row lengths in tokens, integers ``[rows]``.

    Returns:
        The lengths, int32 ``[rows]``; a view where they had that type.

    Raises:
        ValueError: They are empty, not flat, no integers, below 1, or too large for int32.
    """
    rows = np.asarray(lengths)
    if rows.ndim != 1 or rows.size == 0 or rows.dtype.kind not in "iu":
        raise ValueError(
            "lengths must be a flat, non-empty array of integers, got shape "
            f"{rows.shape} and dtype {rows.dtype}. Pass one token count per row."
        )
    outside = (rows < 1) | (rows > INT32_MAX)
    if outside.any():
        first = int(outside.argmax())
        raise ValueError(
            f"lengths must lie in 1..{INT32_MAX}, got {rows[first]} at row {first} "
            f"({int(outside.sum())} such rows). Leave these rows out."
        )
    return rows.astype(np.int32, copy=False)


def checked_int(
    name: str, value: int | np.integer, *, at_least: int, at_most: int = INT32_MAX
) -> int:
    """A plain int, refused unless it is an integer in a range.

    Args:
        name: The setting, as the user wrote it.
        value: What the user gave; NumPy's integers pass, a bool does not.
        at_least: Smallest value allowed.
        at_most: Largest value allowed.

    Returns:
        The value.

    Raises:
        ValueError: The value is no integer or lies outside the range.
    """
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_int or not at_least <= value <= at_most:
        raise ValueError(
            f"{name} must be an integer in {at_least}..{at_most}, got {value!r}. "
            f"Change {name} to a value in that range."
        )
    return int(value)


def check_fit(lengths: npt.NDArray[np.int32], batching: Batching) -> None:
    """Refuse rows that are longer than a whole batch may be.

    Args:
        lengths: Row lengths in tokens, int32 ``[rows]``.
        batching: Budget and rounding.

    Raises:
        ValueError: A row, rounded up to ``pad_to``, exceeds ``token_budget``.
    """
    longest = int(lengths.max())
    fits = batching.token_budget // batching.pad_to * batching.pad_to
    if longest > fits:
        width = -(-longest // batching.pad_to) * batching.pad_to
        raise ValueError(
            f"token_budget must hold every row: {int((lengths > fits).sum())} of {lengths.size} "
            f"rows do not fit, the longest has {longest} tokens (width {width} with "
            f"pad_to={batching.pad_to}), got token_budget={batching.token_budget}. "
            f"Raise token_budget to {width}, or leave out longer rows (max_length)."
        )


def cut_batches(
    widths: npt.NDArray[np.int64], run_ends: list[int], batching: Batching
) -> npt.NDArray[np.int64]:
    """Close each batch where one more row would break the budget or the cap.

    Args:
        widths: Rounded row lengths in the order in which rows are batched, int64 ``[rows]``; each
            at most ``token_budget``.
        run_ends: Ends of the runs of rows that no batch may cross, rising, the last ``rows``.
        batching: Budget and cap.

    Returns:
        Where each batch starts, and the end of the last, int64 ``[batches + 1]``.

    >>> cut_batches(np.array([5, 4, 3, 9]), [4], Batching(token_budget=10)).tolist()
    [0, 2, 3, 4]
    """
    budget, max_rows = batching.token_budget, batching.max_rows
    counts = np.arange(1, min(max_rows, widths.size) + 1)
    offsets = [0]
    start = 0
    for run_end in run_ends:
        while start < run_end:
            reach = min(run_end - start, max_rows, budget // int(widths[start]))
            padded = np.maximum.accumulate(widths[start : start + reach]) * counts[:reach]
            start += int(padded.searchsorted(budget, side="right"))
            offsets.append(start)
    return np.array(offsets, np.int64)


def _checked_boundaries(boundaries: tuple[int, ...]) -> tuple[int, ...]:
    """Bucket edges as plain ints, refused unless they start at 0 and rise strictly."""
    edges = np.asarray(boundaries)
    if edges.ndim != 1 or edges.size < 2 or edges.dtype.kind not in "iu":
        raise ValueError(
            f"boundaries must be a list of two or more integers, got {edges.tolist()!r}. "
            "Start at 0 and end at the longest row, or set boundaries to null."
        )
    if edges[0] != 0 or not (edges[1:] > edges[:-1]).all():
        raise ValueError(
            f"boundaries must start at 0 and rise strictly, got {tuple(edges.tolist())}. "
            "Begin with 0 and remove repeated edges."
        )
    return tuple(edges.tolist())
