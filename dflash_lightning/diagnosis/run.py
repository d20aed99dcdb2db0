"""What is known of a run: one entry per optimizer step, whatever file it came from."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Of rank 0, by the phase of a step; waiting for data is the mean of all ranks.
PHASE_COLUMNS = (
    *("target_seconds", "drafter_seconds", "head_seconds", "backward_seconds"),
    "optimizer_seconds",
)
STEP_COLUMNS = (
    *("step", "epoch", "time", "seconds", "lr", "grad_norm", "skipped", "loss", "weight", "rows"),
    *("tokens", "padded_tokens", "anchors", "labels", "tokens_seen", "wait_seconds"),
    *PHASE_COLUMNS,
    *("top_row", "top_share", "top_pull", "restart"),
)
BUCKET_COLUMNS = ("loss", "weight", "rows", "noise", "eff", "length")


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """The steps of a run in order; NaN where a value is not known.

    Args:
        name: How reports call it.
        kind: What it was read from, in words.
        headers: Of each process in turn: the position of its first step in the columns, and what
            the ledger's header line says. Empty where the source has none.
        missing: What the source could not tell, and what would supply it; one sentence each.
        step: Optimizer step from 0, int64 ``[T]``, rising.
        columns: The other columns of a step, float64 ``[T]`` each, by the names of
            ``STEP_COLUMNS``; what the source lacks is absent.
        buckets: Columns of the length buckets, float64 ``[T, K]`` each, by the names of
            ``BUCKET_COLUMNS``; all of them, or none where the source knows no buckets.
    """

    name: str
    kind: str
    headers: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    missing: tuple[str, ...] = ()
    step: Ints
    columns: Mapping[str, Floats]
    buckets: Mapping[str, Floats]

    def __post_init__(self) -> None:
        assert np.all(np.diff(self.step) > 0)
        assert not self.buckets or set(self.buckets) == set(BUCKET_COLUMNS)

    def __len__(self) -> int:
        """Steps."""
        return len(self.step)

    def column(self, name: str) -> Floats:
        """A column of the steps, float64 ``[T]``; all NaN where the source lacks it."""
        assert name in STEP_COLUMNS[1:]
        return self.columns.get(name, np.full(len(self), np.nan))

    def bucket(self, name: str) -> Floats:
        """A column of the buckets, float64 ``[T, K]``; ``[T, 0]`` where there are none."""
        assert name in BUCKET_COLUMNS
        return self.buckets.get(name, np.empty((len(self), 0)))

    @property
    def loss(self) -> Floats:
        """Loss of each step in nats, float64 ``[T]``."""
        return self.column("loss")

    @property
    def header(self) -> Mapping[str, Any]:
        """What the last process said of the run; empty where nothing did."""
        return self.headers[-1][1] if self.headers else {}

    @property
    def num_buckets(self) -> int:
        """Length buckets; 0 where the source knows none."""
        return self.bucket("loss").shape[1]

    def take(self, chosen: Bools) -> "Run":
        """The steps that are chosen, bool ``[T]``; headers move along with their first step."""
        before = np.concatenate([[0], np.cumsum(chosen)])
        return replace(
            self,
            headers=tuple((int(before[first]), header) for first, header in self.headers),
            step=self.step[chosen],
            columns={name: values[chosen] for name, values in self.columns.items()},
            buckets={name: values[chosen] for name, values in self.buckets.items()},
        )
