"""Batching settings, and the checks of everything that a plan is made from."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Order = Literal["bucketed", "sorted", "random"]
Deal = Literal["stratified", "aligned", "independent"]

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How rows of unequal length become batches, and batches optimizer steps.

    Args:
        order: ``bucketed`` shuffles rows inside length buckets; ``sorted`` cuts rows in order of
            length, so that only the order of its batches changes between epochs; ``random``
            shuffles all rows.
        num_buckets: Length buckets to make where ``boundaries`` are not given. Data with few
            distinct lengths get fewer.
        boundaries: Edges of the buckets in tokens, 0 first; bucket k holds
            ``boundaries[k] < length <= boundaries[k + 1]``. None: the optimum for the lengths.
        token_budget: Most tokens of one batch, padding included, after rounding.
        max_rows: Most rows of one batch.
        pad_to: Batch widths are rounded up to a multiple of this before the budget is checked.
        sort_window: Rows of a shuffled bucket are sorted by length inside windows of this many
            batches of mean size, never more than an eighth of the bucket; 0 sorts nothing.
        deal: How batches are dealt into steps: ``stratified`` gives every step one batch of each
            length stratum, ``aligned`` gives it neighbours in length, ``independent`` any.
        cost_budget: Most cost of one batch, ``padded tokens * (1 + width / cost_knee)``; None sets
            no such limit.
        cost_knee: Width in tokens at which work that grows with the square of the width equals
            work that grows with the width.

    Raises:
        ValueError: A value is outside its range, or no row could fit a batch.
    """

    order: Order = "bucketed"
    num_buckets: int = 6
    boundaries: tuple[int, ...] | None = None
    token_budget: int = 49_152
    max_rows: int = 64
    pad_to: int = 1
    sort_window: int = 32
    deal: Deal = "stratified"
    cost_budget: float | None = None
    cost_knee: float = 4096.0

    def __post_init__(self) -> None:
        """Refuse settings that no plan could follow; numbers become plain ones."""
        for name, choices in (("order", get_args(Order)), ("deal", get_args(Deal))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}; "
                    f"use {name}={choices[0]!r} if unsure."
                )
        for name in ("num_buckets", "token_budget", "max_rows", "pad_to", "sort_window"):
            least = 0 if name == "sort_window" else 1
            object.__setattr__(self, name, checked_int(name, getattr(self, name), at_least=least))
        for name in ("cost_budget", "cost_knee"):
            if name == "cost_knee" or self.cost_budget is not None:
                object.__setattr__(self, name, _checked_positive(name, getattr(self, name)))
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

    def cost(self, widths: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        """Cost of one row in a batch of each width, in tokens of a batch of width near 0.

        Args:
            widths: Padded lengths in tokens, integers of any shape.

        Returns:
            ``width * (1 + width / cost_knee)``, float64, of the same shape.
        """
        return widths * (1 + widths / self.cost_knee)

    def most_rows(self, widths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Most rows that a batch of each width may hold under all limits.

        Args:
            widths: Padded lengths in tokens, integers of any shape.

        Returns:
            Rows, int64, of the same shape; falls, or stays, as the width grows. 0 where not even
            one row fits.
        """
        most = np.minimum(self.token_budget // widths, self.max_rows).astype(np.int64)
        if self.cost_budget is None:
            return most
        cost = self.cost(widths)
        dear = np.minimum(self.cost_budget // cost, most)
        return (dear - (dear * cost > self.cost_budget)).astype(np.int64)


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
        batching: Limits and rounding.

    Raises:
        ValueError: A row, rounded up to ``pad_to``, exceeds ``token_budget`` or ``cost_budget``.
    """
    longest = lengths.max(keepdims=True)
    if batching.most_rows(batching.padded(longest))[0] > 0:
        return
    width = int(batching.padded(longest)[0])
    over = int((batching.most_rows(batching.padded(lengths)) == 0).sum())
    name, needed = "token_budget", width
    if width <= batching.token_budget:
        name, needed = "cost_budget", math.ceil(batching.cost(np.array(width)))
    raise ValueError(
        f"{name} must hold every row: {over} of {lengths.size} rows do not fit, the longest has "
        f"{longest[0]} tokens (width {width} with pad_to={batching.pad_to}), got "
        f"{name}={getattr(batching, name)}. Raise {name} to {needed}, or leave out longer rows "
        "(max_length)."
    )


def _checked_positive(name: str, value: float) -> float:
    """A plain float, refused unless it is a finite number above 0."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ValueError(
            f"{name} must be a finite number above 0, got {value!r}. Change {name}, or leave it "
            "out for its default."
        )
    return float(value)


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
