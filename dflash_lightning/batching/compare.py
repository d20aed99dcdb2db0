"""The same rows under every strategy, side by side, and which one to take."""

import dataclasses
import html
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from dflash_lightning.batching.buckets import best_boundaries
from dflash_lightning.batching.measure import MOST_WAITING
from dflash_lightning.batching.plan import EpochPlan, plan_epoch
from dflash_lightning.batching.predict import predicted_padding
from dflash_lightning.batching.report import PlanReport
from dflash_lightning.batching.settings import Batching, Deal, checked_lengths
from dflash_lightning.table import Table, wrapped

SORT_WINDOWS = (0, 32, 64)
MOST_BUCKETS = 16
GOOD_ENOUGH = 0.005  # efficiency that is not worth another doubling of the sort window


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Reports of all strategies on the same rows; printable.

    Args:
        batching: The settings asked about.
        plan: The plan they make.
        reports: One per strategy.
        name: The strategy that ``batching`` is.
        efficiency: Efficiency predicted for 1 to 16 buckets: under the optimal boundaries without
            sort windows (``optimal``) and with those of ``batching`` (``windows``), and under
            boundaries of equal token mass without windows (``equal_mass``), the usual choice.
        recommended: The settings to take.
        recommendation: One sentence that says why.
    """

    batching: Batching
    plan: EpochPlan
    reports: dict[str, PlanReport]
    name: str
    efficiency: dict[str, dict[int, float]]
    recommended: Batching
    recommendation: str

    @property
    def own(self) -> PlanReport:
        """The report of the settings asked about."""
        return self.reports[self.name]

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain types."""
        return {
            "batching": dataclasses.asdict(self.batching),
            "boundaries": list(self.plan.boundaries),
            "strategies": {name: report.to_dict() for name, report in self.reports.items()},
            "efficiency": self.efficiency,
            "recommended": dataclasses.asdict(self.recommended),
            "recommendation": self.recommendation,
        }

    def table(self) -> Table:
        """A line per strategy."""
        columns = ("strategy", "steps", "eff.", "fill", "again", "lag-1", "waiting", "step std")
        rows = [
            (
                name + (" *" if name == self.name else ""),
                f"{report.steps:,}",
                f"{report.efficiency:.3f}",
                f"{report.fill:.2f}",
                f"{report.again:.3f}",
                f"{report.lag1:.2f}",
                " ".join(f"{report.deals[deal].waiting_linear:.2f}" for deal in get_args(Deal)),
                " ".join(f"{report.deals[deal].step_std:.3f}" for deal in get_args(Deal)),
            )
            for name, report in self.reports.items()
        ]
        title = "Strategies (* asked about); waiting and step std under stratified, aligned, "
        return Table(title + "independent steps", columns, rows)

    def __repr__(self) -> str:
        return "\n\n".join([repr(self.own), self.table().text(), wrapped(self.recommendation)])

    def _repr_html_(self) -> str:
        body = self.own._repr_html_() + self.table().html()
        return f"{body}<p>{html.escape(self.recommendation)}</p>"


def compare(
    lengths: npt.ArrayLike,
    batching: Batching,
    *,
    seed: int = 0,
    world_size: int = 1,
    accumulate: int = 1,
    progress: Callable[[list[Any]], Iterable[Any]] = list,
) -> Comparison:
    """Plan the same rows under every strategy.

    Args:
        lengths: Row lengths in tokens, integers ``[rows]``, each at least 1.
        batching: The settings asked about; the strategies differ from them in order and window.
        seed: Of the plans.
        world_size: Ranks.
        accumulate: Batches that each rank adds up for one optimizer step.
        progress: Wraps the list of plans to make, such as ``tqdm``.

    Returns:
        The comparison.

    Raises:
        ValueError: As ``plan_epoch``.
    """
    rows = checked_lengths(lengths)
    layout = {"seed": seed, "epoch": 0, "world_size": world_size, "accumulate": accumulate}
    edges = batching.boundaries or best_boundaries(rows, batching.num_buckets, batching)
    # The same boundaries for all, so that buckets can be compared.
    asked = replace(batching, boundaries=edges)
    strategies = _strategies(asked)
    own = next(name for name, settings in strategies.items() if settings == asked)
    reports = {
        name: plan_epoch(rows, strategies[name], **layout).report()
        for name in progress(list(strategies))
    }
    bucketed = {n: r for n, r in reports.items() if strategies[n].order == "bucketed"}
    best = max(report.efficiency for report in bucketed.values())
    enough = [n for n, r in bucketed.items() if r.efficiency >= best - GOOD_ENOUGH]
    chosen = min(enough, key=lambda n: strategies[n].sort_window)
    recommended = replace(
        batching,
        order="bucketed",
        sort_window=strategies[chosen].sort_window,
        deal=_best_deal(reports[chosen]),
    )
    return Comparison(
        batching=batching,
        plan=plan_epoch(rows, batching, **layout),
        reports=reports,
        name=own,
        efficiency=_efficiency_by_buckets(rows, batching),
        recommended=recommended,
        recommendation=_recommendation(recommended, reports[chosen], reports),
    )


def _strategies(batching: Batching) -> dict[str, Batching]:
    """Settings by name; those asked about are among them."""
    found = {
        "sorted": replace(batching, order="sorted"),
        "random": replace(batching, order="random"),
    }
    windows = {*SORT_WINDOWS, batching.sort_window}
    for window in sorted(windows):
        found[f"bucketed, window {window}"] = replace(
            batching, order="bucketed", sort_window=window
        )
    return found


def _efficiency_by_buckets(
    lengths: npt.NDArray[np.int32], batching: Batching
) -> dict[str, dict[int, float]]:
    """Predicted efficiency for each number of buckets under three choices of boundaries."""
    plain = replace(batching, order="bucketed", boundaries=None, sort_window=0)
    windows = replace(plain, sort_window=batching.sort_window)
    rising = np.sort(lengths)
    mass = np.cumsum(rising, dtype=np.int64)
    found: dict[str, dict[int, float]] = {"optimal": {}, "windows": {}, "equal_mass": {}}
    for count in range(1, min(MOST_BUCKETS, np.unique(rising).size) + 1):
        best = best_boundaries(lengths, count, plain)
        cuts = mass.searchsorted(np.arange(1, count + 1) / count * mass[-1])
        even = (0, *np.unique(rising[np.minimum(cuts, rising.size - 1)]).tolist())
        for name, settings, edges in (
            ("optimal", plain, best),
            ("windows", windows, best),
            ("equal_mass", plain, even),
        ):
            padded = predicted_padding(lengths, settings, edges).sum()
            found[name][count] = float(mass[-1] / padded)
    return found


def _best_deal(report: PlanReport) -> Deal:
    """Stratified, unless ranks would wait too long for the slowest."""
    return "aligned" if report.deals["stratified"].waiting_linear > MOST_WAITING else "stratified"


def _recommendation(settings: Batching, report: PlanReport, reports: dict[str, PlanReport]) -> str:
    """One sentence: what to set, and what it gives against the alternatives."""
    stds = {name: deal.step_std for name, deal in report.deals.items()}
    at_random = reports["random"].efficiency
    facts = [
        f"{report.efficiency:.1%} of the padded tokens are real (random order {at_random:.1%})",
        f"{report.again:.1%} of batch-mates meet again (sorted {reports['sorted'].again:.0%})",
    ]
    if settings.deal == "stratified" and stds["aligned"] > 1.5 * stds["stratified"] > 0:
        factor = stds["aligned"] / stds["stratified"]
        facts.append(f"length moves the step loss {factor:.0f} times less than in aligned steps")
    waiting = report.deals[settings.deal].waiting_linear - 1
    if waiting > 0.005:
        facts.append(f"ranks wait {waiting:.1%} for the slowest")
    chosen = f"Use sort_window={settings.sort_window} with deal={settings.deal}"
    return f"{chosen}: {', '.join(facts)}."
