"""The heaviest batches of a plan, each by a measure of its own."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_lightning.batching.plan import EpochPlan

Ints = npt.NDArray[np.int64]

# Anchors are counted by reading rows from the disk: enough of them to find the batch that has most,
# few enough that a cold network disk costs seconds.
READ_ROWS = 4096


class Heavy(NamedTuple):
    """A batch that is the heaviest of its plan.

    Args:
        reason: In what; several where one batch is the heaviest in several ways.
        step: Its step.
        rank: Its rank.
        micro: Its place among the rank's accumulated batches.
    """

    reason: str
    step: int
    rank: int
    micro: int


def heaviest(
    plan: EpochPlan,
    most: npt.NDArray[np.integer],
    count: Callable[[Ints], npt.NDArray[np.integer]],
    *,
    read_rows: int = READ_ROWS,
) -> list[Heavy]:
    """The batches that need most memory or time, wherever in the plan they stand.

    They are: the one with the longest width, the most padded tokens, the most rows, the most anchor
    slots (rows times the most anchors of a row, as padded) and the most labels, taken as
    proportional to the anchors. Among equals more padded tokens decide, then the place in the plan.

    Anchors follow from loss masks. Batches are read in order of what their lengths allow at most,
    until no other can exceed the best; where that would take more than ``read_rows`` rows, the best
    of those that were read is taken.

    Args:
        plan: The plan.
        most: Most anchors that each row can have by its length, never falling with the length,
            integers ``[rows]``.
        count: Anchors of rows: row ids, int64 ``[n]``, to integers ``[n]``.
        read_rows: Most rows that ``count`` is asked for.

    Returns:
        The batches without repeats; none where the plan has no rows.
    """
    batches = plan.batches
    filled = np.flatnonzero(batches.sizes)
    if not filled.size:
        return []
    sizes, starts = batches.sizes[filled], batches.offsets[filled]
    widths = plan.batching.padded(plan.longest[filled])
    tokens = sizes * widths
    by_row = most[batches.rows].astype(np.int64)
    slots = sizes * np.maximum.reduceat(by_row, starts)
    labels = np.add.reduceat(by_row, starts)
    anchors = _Anchors(plan, filled, count, read_rows)
    reasons: dict[int, list[str]] = {}
    for reason, batch in (
        ("longest rows", _first(widths, tokens)),
        ("most padded tokens", _first(tokens, slots)),
        ("most rows", _first(sizes, tokens)),
        ("most anchors", anchors.most(slots, lambda found: found.size * int(found.max()))),
        ("most labels", anchors.most(labels, lambda found: int(found.sum()))),
    ):
        reasons.setdefault(int(filled[batch]), []).append(reason)
    return [Heavy(_and(names), *_place(plan, batch)) for batch, names in reasons.items()]


class _Anchors:
    """Counts the anchors of batches, each once, until too many rows are read.

    Args:
        plan: The plan.
        filled: Batches with rows, int64 ``[F]``.
        count: Anchors of rows.
        read_rows: Most rows to ask for.
    """

    def __init__(
        self,
        plan: EpochPlan,
        filled: Ints,
        count: Callable[[Ints], npt.NDArray[np.integer]],
        read_rows: int,
    ) -> None:
        self.batches, self.filled, self.count = plan.batches, filled, count
        # each of the two questions may read half
        self.share = read_rows // 2
        self.found: dict[int, npt.NDArray[np.integer]] = {}

    def most(self, bounds: Ints, measure: Callable[[npt.NDArray[np.integer]], int]) -> int:
        """Index into ``filled`` of the batch with the largest measure, int64 bounds ``[F]``."""
        best, value, left = -1, -1, self.share
        for batch in np.argsort(-bounds, kind="stable").tolist():
            if bounds[batch] <= value:
                break
            if batch not in self.found:
                start, end = self.batches.offsets[self.filled[batch] :][:2]
                left -= int(end - start)
                if left < 0 and best >= 0:
                    break
                self.found[batch] = self.count(self.batches.rows[start:end].astype(np.int64))
            if (measured := measure(self.found[batch])) > value:
                best, value = batch, measured
        return best


def _first(first: Ints, second: Ints) -> int:
    """Index of the largest ``first``; among equals of the largest ``second``, then the lowest."""
    among = np.flatnonzero(first == first.max())
    return int(among[second[among].argmax()])


def _and(names: list[str]) -> str:
    """Names as a list in words.

    >>> _and(["a"]), _and(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _place(plan: EpochPlan, batch: int) -> tuple[int, int, int]:
    """Step, rank and micro-batch of a position in the plan."""
    step, place = divmod(batch, plan.places)
    micro, rank = divmod(place, plan.world_size)
    return step, rank, micro
