"""The ``buckets`` command: what would this data do under which batching?"""

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dflash_lightning.batching import Batching, EpochPlan, plan_epoch
from dflash_lightning.batching.compare import compare
from dflash_lightning.batching.cost import CostFit, fit_cost, fit_cost_of_steps, read_timings
from dflash_lightning.batching.plot import plot_comparison
from dflash_lightning.batching.settings import Deal, Order, checked_lengths
from dflash_lightning.data.store import RowStore, split_rows, write_json
from dflash_lightning.figure import check_plot


def buckets(
    lengths: Path,
    *,
    order: Order = "bucketed",
    num_buckets: int = 6,
    boundaries: list[int] | None = None,
    token_budget: int = 49_152,
    max_rows: int = 64,
    pad_to: int = 1,
    sort_window: int = 32,
    deal: Deal = "stratified",
    cost_budget: float | None = None,
    cost_knee: float = 4096.0,
    world_size: int = 8,
    accumulate: int = 1,
    seed: int = 0,
    val_fraction: float = 0.0,
    timings: Path | None = None,
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Plan an epoch under every strategy: padding, waiting, mixing, and which one to take.

    Args:
        lengths: A ``.npy`` file of row lengths in tokens, or a folder written by ``prepare``.
        order: bucketed, sorted or random.
        num_buckets: Length buckets, with optimal boundaries.
        boundaries: Edges of the buckets in tokens instead, 0 first.
        token_budget: Most padded tokens of one batch.
        max_rows: Most rows of one batch.
        pad_to: Widths are rounded up to a multiple of this.
        sort_window: Batches of mean size in a window inside which rows are sorted; 0 sorts none.
        deal: How batches become steps: stratified, aligned or independent.
        cost_budget: Most cost of one batch, padded tokens x (1 + width / cost_knee).
        cost_knee: Width at which quadratic work equals linear work.
        world_size: Ranks.
        accumulate: Batches that a rank adds up for one step.
        seed: Seed of the plan.
        val_fraction: Share of a store's conversations to leave out; fit leaves out 0.05.
        timings: CSV file to fit cost_knee to: seconds, rows and width of batches, or a run's ledger
            (step, epoch, seconds, rows, padded_tokens; its first epoch is taken) together with the
            run's own settings.
        json: Also write all numbers here.
        plot: Also draw a picture here.
    """
    rows = read_lengths(lengths, val_fraction)
    batching = Batching(
        order=order,
        num_buckets=num_buckets,
        boundaries=None if boundaries is None else tuple(boundaries),
        token_budget=token_budget,
        max_rows=max_rows,
        pad_to=pad_to,
        sort_window=sort_window,
        deal=deal,
        cost_budget=cost_budget,
        cost_knee=cost_knee,
    )
    layout = {"seed": seed, "world_size": world_size, "accumulate": accumulate}
    if plot:
        check_plot(plot)
    fit = (
        fit_timings(timings, lambda e: plan_epoch(rows, batching, epoch=e, **layout))
        if timings
        else None
    )
    comparison = compare(
        rows,
        batching,
        **layout,
        progress=lambda plans: tqdm(plans, unit="plan", delay=1, disable=None, leave=False),
    )
    sys.stdout.write("\n\n".join(str(part) for part in (comparison, fit) if part) + "\n")
    if json:
        write_json(json, comparison.to_dict() | ({"cost": fit.to_dict()} if fit else {}))
    if plot:
        plot_comparison(comparison, plot)


def read_lengths(path: Path, val_fraction: float = 0.0) -> np.ndarray:
    """Row lengths of a ``.npy`` file or of a store.

    Args:
        path: The file, or the store's folder.
        val_fraction: Share of the store's conversations to leave out.

    Returns:
        Lengths in tokens, int32 ``[rows]``.

    Raises:
        FileNotFoundError: There is neither.
        ValueError: The file holds no lengths.
    """
    if path.is_dir():
        store = RowStore.open(path, setting="lengths")
        return checked_lengths(
            store.lengths[split_rows(store.column("conversation"), val_fraction)[0]]
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"lengths must be a .npy file of row lengths or a folder written by prepare; there is "
            f"none at {path}."
        )
    if val_fraction:
        raise ValueError(
            f"val_fraction is for a store, got {val_fraction} with the file {path}. Leave it out."
        )
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"lengths {path} must be a .npy file: {error}. Write it with numpy.save."
        ) from error
    if not isinstance(values, np.ndarray):
        raise ValueError(
            f"lengths {path} must be a .npy file with one array, got an archive of several. Write "
            "it with numpy.save."
        )
    return checked_lengths(values)


def fit_timings(path: Path, plan_of: Callable[[int], EpochPlan]) -> CostFit:
    """Fit the cost model to a file of timings.

    Args:
        path: CSV file; see ``buckets``. A ledger's ``step`` counts optimizer steps from 0 or 1;
            what it waited for data (``wait_seconds``) is left out.
        plan_of: The plan of an epoch of the run that wrote the ledger.

    Returns:
        The fit.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Columns are missing, or the ledger is not that of these settings.
    """
    names = ("seconds", "rows", "width", "step", "epoch", "padded_tokens", "wait_seconds")
    table = read_timings(path, names)
    if "padded_tokens" not in table and {"rows", "width"} <= table.keys():
        return fit_cost(table["rows"] * table["width"], table["width"], table["seconds"])
    missing = sorted({"rows", "step", "epoch", "padded_tokens"} - table.keys())
    if missing:
        raise ValueError(
            f"timings {path} must have rows and width, or be a ledger with step, epoch, rows and "
            f"padded_tokens; {', '.join(missing)} not found. Add the columns."
        )
    if not table["epoch"].size:
        raise ValueError(f"timings {path} must hold timed steps, got none. Let the run go on.")
    return _fit_ledger(path, table, plan_of)


def _fit_ledger(
    path: Path, table: dict[str, np.ndarray], plan_of: Callable[[int], EpochPlan]
) -> CostFit:
    """Fit to the first epoch in the ledger, whose steps must be those of the plan."""
    epoch = int(table["epoch"].min())
    chosen = table["epoch"] == epoch
    plan = plan_of(epoch)
    before = sum(plan_of(earlier).num_steps for earlier in range(epoch))
    sizes = plan.batches.sizes
    padded = sizes * plan.batching.padded(plan.longest)
    planned = np.stack([sizes, padded], axis=1).reshape(plan.num_steps, plan.places, 2).sum(1)
    found = np.stack([table["rows"], table["padded_tokens"]], axis=1)[chosen]
    for first in (0, 1):
        steps = table["step"][chosen].astype(np.int64) - before - first
        known = (steps >= 0) & (steps < plan.num_steps)
        if known.all() and (planned[steps] == found).all():
            waited = table["wait_seconds"] if "wait_seconds" in table else 0 * table["seconds"]
            return fit_cost_of_steps(plan, steps, (table["seconds"] - waited)[chosen])
    raise ValueError(
        f"timings {path} must come from a run with these lengths and settings, not restarted under "
        f"another layout: rows and padded_tokens of epoch {epoch} differ from the plan. Give the "
        "run's seed, world_size, accumulate, val_fraction and batching."
    )
