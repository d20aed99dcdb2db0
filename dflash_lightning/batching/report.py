"""The report of a plan: padding, limits, waiting of ranks, mixing; as numbers, text and HTML."""

import dataclasses
import html
from typing import Any

from dflash_lightning.batching.settings import Deal
from dflash_lightning.table import Table, wrapped

DEALS = (
    "Waiting: slowest / mean rank, linear, with cost_knee. "
    "Step std: of the loss, buckets 0.1 apart."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketReport:
    """One length bucket; a row counts where its own length belongs, wherever it is batched.

    Args:
        low: Rows are longer than this, in tokens.
        high: Rows are at most so long, in tokens.
        rows: Rows.
        token_share: Share of all real tokens.
        batches: Batches whose longest row lies here.
        batch_rows: Mean rows of these batches; None without any.
        batch_width: Mean width of these batches in tokens; None without any.
        mean_length: Mean length of the rows in tokens; None without any.
        efficiency: Real tokens of the rows over the places they take in their batches; None
            without rows.
        predicted: The same, predicted from the lengths; None where batches mix buckets.
    """

    low: int
    high: int
    rows: int
    token_share: float
    batches: int
    batch_rows: float | None
    batch_width: float | None
    mean_length: float | None
    efficiency: float | None
    predicted: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DealReport:
    """One way to deal the plan's batches into steps.

    Args:
        waiting_linear: Mean over steps of the slowest rank's work over the mean rank's, where work
            grows with padded tokens.
        waiting_quadratic: The same for ``padded tokens * (1 + width / cost_knee)``.
        step_std: Standard deviation from step to step of the mean loss per real token, if the mean
            losses of neighbouring buckets lay 0.1 apart and rows did not differ otherwise.
    """

    waiting_linear: float
    waiting_quadratic: float
    step_std: float


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PlanReport:
    """What a plan does; printable, with an HTML table in notebooks.

    Args:
        title: What was planned, in words.
        rows: Rows.
        batches: Batches.
        steps: Optimizer steps.
        tokens: Real tokens.
        padded_tokens: Padded tokens.
        efficiency: Real over padded tokens.
        predicted: Efficiency predicted from the lengths.
        fill: Padded tokens over what all batches may hold.
        closed_by: Share of the batches that each limit closed; see ``CLOSED_BY``.
        peak: The largest batch over the token budget.
        widths: Distinct widths.
        shapes: Distinct pairs of rows and width.
        lag1: Correlation of the mean lengths of consecutive batches of a rank; 0 where undefined.
        again: Probability that two rows of one batch share a batch in the next epoch, too.
        deal: How the plan deals its steps.
        deals: The plan's steps, and what the other deals would give.
        random_step_std: ``step_std`` of a global batch of as many rows drawn at random.
        buckets: The buckets.
        warnings: What looks wrong, each with its remedy.
    """

    title: str
    rows: int
    batches: int
    steps: int
    tokens: int
    padded_tokens: int
    efficiency: float
    predicted: float
    fill: float
    closed_by: dict[str, float]
    peak: float
    widths: int
    shapes: int
    lag1: float
    again: float
    deal: Deal
    deals: dict[str, DealReport]
    random_step_std: float
    buckets: tuple[BucketReport, ...]
    warnings: tuple[str, ...]

    @property
    def waiting_linear(self) -> float:
        """Waiting under the plan's own deal, linear cost."""
        return self.deals[self.deal].waiting_linear

    @property
    def waiting_quadratic(self) -> float:
        """Waiting under the plan's own deal, quadratic cost."""
        return self.deals[self.deal].waiting_quadratic

    @property
    def step_std(self) -> float:
        """Standard deviation of the step loss under the plan's own deal."""
        return self.deals[self.deal].step_std

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain types, under the names above."""
        return dataclasses.asdict(self)

    def tables(self) -> list[Table]:
        """The report as tables: the whole, the deals, the buckets."""
        closed = ", ".join(
            f"{name} {share:.0%}" for name, share in self.closed_by.items() if share > 0.005
        )
        whole = [
            ("efficiency", f"{self.efficiency:.3f}", "real / padded tokens"),
            ("predicted", f"{self.predicted:.3f}", "the same, predicted from the lengths"),
            ("fill", f"{self.fill:.3f}", "padded tokens / budget of all batches"),
            ("closed by", "", closed),
            ("peak", f"{self.peak:.3f}", "largest batch / budget"),
            ("widths", f"{self.widths:,}", f"distinct; {self.shapes:,} of rows x width"),
            ("lag-1", f"{self.lag1:.3f}", "correlation of consecutive batch lengths of a rank"),
            ("again", f"{self.again:.4f}", "batch-mates that share the next epoch's batch too"),
        ]
        shown = self.deals
        if len(set(self.deals.values())) == 1:  # one batch a step: nothing to deal
            shown = {self.deal: self.deals[self.deal]}
        deals = [
            (
                name + (" (this plan)" if name == self.deal else ""),
                f"{deal.waiting_linear:.3f}",
                f"{deal.waiting_quadratic:.3f}",
                f"{deal.step_std:.4f}",
            )
            for name, deal in shown.items()
        ]
        deals.append(("a random global batch", "", "", f"{self.random_step_std:.4f}"))
        return [
            Table(self.title, ("", "", ""), whole, align="lrl"),
            Table(DEALS, ("deal of the steps", "waiting", "with knee", "step std"), deals),
            self.bucket_table(),
        ]

    def bucket_table(self) -> Table:
        """One line per bucket."""
        headers = ("bucket", "rows", "tokens", "length", "batch", "width", "eff.", "predicted")
        return Table("", headers, [_bucket_cells(bucket) for bucket in self.buckets])

    def __repr__(self) -> str:
        parts = [table.text() for table in self.tables()]
        notes = [wrapped(f"! {warning}") for warning in self.warnings]
        return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(warning)}</p>" for warning in self.warnings)
        return "".join(table.html() for table in self.tables()) + notes


def _bucket_cells(bucket: BucketReport) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else f"{value:{form}}"

    return (
        f"({bucket.low}, {bucket.high}]",
        f"{bucket.rows:,}",
        f"{bucket.token_share:.1%}",
        number(bucket.mean_length, ",.0f"),
        number(bucket.batch_rows, ".1f"),
        number(bucket.batch_width, ",.0f"),
        number(bucket.efficiency, ".3f"),
        number(bucket.predicted, ".3f"),
    )
