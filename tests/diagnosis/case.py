"""What can be simulated: the settings of a case, and the curves that its family prescribes."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from diagnosis.dealt import STORY_EDGES, STORY_ROWS, DataSet, Floats, Layout
from diagnosis.planted import FAULTS, GROUP_STEPS

FAMILIES = ("plain", "changing", "steep", "edges", "heavy", "real")
DEALS = ("stratified", "aligned", "independent")
ROW_LOSSES = Path(__file__).parent / "row_losses.npz"
GAP = 0.7  # nats between the losses of the first and the last bucket
EDGE_DROP = 0.15  # nats at each epoch edge
BUDGET = 49_152  # padded tokens of a batch


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings of a simulated run.

    Args:
        seed: Of everything random.
        family: ``plain``: a power law; ``changing``: gaps and noise shrink in log time; ``steep``:
            from 9 to 5 nats within the warm-up; ``edges``: a drop at each epoch edge; ``heavy``:
            errors with Student's t of 3 degrees, scaled to the same variance; ``real``: rows of a
            recording.
        deal: ``stratified``, ``aligned`` or ``independent``.
        ranks: Batches of a step.
        steps: Steps after the warm-up; a negative number ends the run inside it.
        warmup: Steps of the warm-up.
        num_buckets: Length buckets.
        rows_per_batch: Rows of a batch of each bucket; what the budget allows by default.
        epochs: Epochs of the run, of equally many steps.
        peak_lr: Learning rate at the end of the warm-up.
        planned_steps: Where the rate reaches zero; the end of the run by default.
        order: ``bucketed``, ``random`` (no buckets) or ``sorted`` (the same batches every epoch).
        window: Whether rows are sorted by length in windows of a bucket.
        group: Steps in whose groups batches come in length order, whatever the deal; 0 for none.
        weight_cv: Coefficient of variation of the weights of rows of one length.
        sigma: Typical deviation of a row's loss in nats.
        lighter: A row's variance falls with this power of its weight.
        slope: Nats per log length inside a bucket.
        lasting: Share of the rows' variance that is the same every epoch.
        shock: Deviation of a shock common to the rows of a step, in noise deviations.
        fault: One of ``FAULTS``, or empty.
        fault_size: Factor on its size.
        offset: Added to the curve in nats.
        own_noise: Share of the rows' passing variance that comes from another stream: two cases
            that differ in it share rows, but not all of the noise.
        file: Recording for ``real``.
    """

    seed: int
    family: str = "plain"
    deal: str = "stratified"
    ranks: int = 8
    steps: int = 500
    warmup: int = 100
    num_buckets: int = 6
    rows_per_batch: tuple[int, ...] | None = None
    epochs: int = 3
    peak_lr: float = 6e-4
    planned_steps: int | None = None
    order: str = "bucketed"
    window: bool = False
    group: int = 0
    weight_cv: float = 0.5
    sigma: float = 0.6
    lighter: float = 0.5
    slope: float = 0.1
    lasting: float = 0.5
    shock: float = 0.0
    fault: str = ""
    fault_size: float = 1.0
    offset: float = 0.0
    own_noise: float = 0.0
    file: Path = ROW_LOSSES

    def __post_init__(self) -> None:
        assert self.family in FAMILIES
        assert self.deal in DEALS
        assert self.order in ("bucketed", "random", "sorted")
        assert self.fault in ("", *FAULTS)

    @property
    def total(self) -> int:
        """Steps of the run."""
        return self.warmup + self.steps

    @property
    def planned(self) -> int:
        """Steps after which the learning rate is zero."""
        return self.planned_steps or self.total

    @property
    def first(self) -> int:
        """First step after the warm-up, or 0 where the run ends inside it."""
        return self.warmup if self.steps > 0 else 0

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch."""
        return -(-self.total // self.epochs)

    @property
    def edges(self) -> tuple[int, ...]:
        """Lengths between which the rows of the buckets lie, in tokens."""
        if self.num_buckets == len(STORY_ROWS):
            return STORY_EDGES
        spaced = np.geomspace(STORY_EDGES[0], STORY_EDGES[-1], self.num_buckets + 1)
        return tuple(round(x) for x in spaced.tolist())

    @property
    def layout(self) -> Layout:
        """How rows become steps."""
        fitting = tuple(min(64, BUDGET // upper) for upper in self.edges[1:])
        usual = STORY_ROWS if self.num_buckets == len(STORY_ROWS) else fitting
        ordered = GROUP_STEPS if self.fault == "length_ordered" else 0
        return Layout(
            order=self.order,
            deal=self.deal,
            ranks=self.ranks,
            epoch_steps=self.epoch_steps,
            rows_per_batch=self.rows_per_batch or usual,
            window=self.window,
            group=self.group or ordered,
        )

    @property
    def curve(self) -> Floats:
        """Loss of a row of average length without any fault, in nats, ``[T]``."""
        t = np.arange(self.total)
        if self.family == "steep":  # 9 at first, 5 at the end of the warm-up, 3 in the end
            return self.offset + 3 + 6 * (1 + 2.5 * t / self.warmup) ** (-np.log(3) / np.log(3.5))
        falls = self.offset + 2 + 3.5 * (1 + t / 50) ** -0.5
        drop = EDGE_DROP if self.family == "edges" else 0.0
        return falls - drop * (t // self.epoch_steps)

    def gaps(self, data: DataSet) -> Floats:
        """Offsets of the buckets, whose weighted mean is zero, in nats, ``[T, K]``."""
        b = GAP * np.linspace(-0.5, 0.5, self.num_buckets)
        return self._shrinking(1.3, 0.5)[:, None] * (b - b @ data.share)

    @property
    def scale(self) -> Floats:
        """Factor on the deviation of the rows, ``[T]``."""
        return self._shrinking(1.2, 0.8)

    def _shrinking(self, start: float, end: float) -> Floats:
        """A factor that changes linearly in log time, or 1 in families that do not change."""
        if self.family != "changing":
            return np.ones(self.total)
        passed = np.log1p(np.arange(self.total) / 100) / np.log1p(self.total / 100)
        return start + (end - start) * passed

    @property
    def lr(self) -> Floats:
        """Learning rate: linear warm-up, then a cosine, ``[T]``."""
        t = np.arange(self.total)
        done = np.clip((t - self.warmup) / max(1, self.planned - self.warmup), 0, 1)
        falling = (1 + np.cos(np.pi * done)) / 2
        return self.peak_lr * np.where(t < self.warmup, (t + 1) / self.warmup, falling)
