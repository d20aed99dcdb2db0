"""The rows behind a step of a past run, from its ledger and the store it was trained on.

A ledger's headers say where each process took the run up and under which settings; lengths are in
the store. Together they give the plan that the process followed, and so every batch it trained.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lightning.batching import Batching, EpochPlan
from dflash_lightning.data.row_facts import RowFacts, describe_rows
from dflash_lightning.data.run_plan import Position, RunPlan
from dflash_lightning.data.step_text import step_text
from dflash_lightning.data.store import RowStore, split_rows
from dflash_lightning.diagnosis.run import Run

NEEDED = {"position", "settings", "world_size", "accumulate", "plan"}  # in a header
COUNTED = ("rows", "tokens", "padded_tokens")  # of a step, in ledger and plan alike
TOLD = (*COUNTED, "loss", "weight", "labels", "skipped", "top_row", "top_share", "top_pull")


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """An optimizer step: what the ledger says of it, and the rows that it trained.

    Args:
        run: Name of the run.
        step: Optimizer step from 0.
        epoch: From 0; None where it is not known.
        values: What the ledger says of the step, by column; what it does not know is absent.
        boundaries: Edges of the length buckets in tokens; empty where they are not known.
        buckets: What the ledger says of each bucket, likewise.
        rows: All rows of the step over all ranks, in the order of its batches; empty where they
            could not be named.
        places: Rank and micro batch that trained each of them.
        missing: Why no rows are named and what would name them; empty where they are.
    """

    run: str
    step: int
    epoch: int | None
    values: Mapping[str, float]
    boundaries: tuple[int, ...] = ()
    buckets: tuple[Mapping[str, float], ...] = ()
    rows: tuple[RowFacts, ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    missing: str = ""

    def text(self, at_most: int = 40) -> str:
        """Tables of at most 100 columns.

        Args:
            at_most: Rows that are listed; of others only the number.
        """
        return step_text(self, at_most)

    def __str__(self) -> str:
        return self.text()

    def to_dict(self) -> dict[str, Any]:
        """Plain types: the fields, each row with its ``rank`` and ``micro``."""
        places = [{"rank": rank, "micro": micro} for rank, micro in self.places]
        return {
            "run": self.run,
            "step": self.step,
            "epoch": self.epoch,
            "values": dict(self.values),
            "boundaries": list(self.boundaries),
            "buckets": [dict(bucket) for bucket in self.buckets],
            "rows": [r._asdict() | place for r, place in zip(self.rows, places, strict=True)],
            "missing": self.missing,
        }


def rows_of_step(
    run: Run, step: int, *, store: Path | None = None, tokenizer: str | None = None
) -> StepRows:
    """Name the rows that a step of a run trained, across restarts and layouts.

    Args:
        run: Read from its folder.
        step: Optimizer step from 0.
        store: Folder of the rows; by default where the run had them, if it is still there.
        tokenizer: Folder or hub name of the tokenizer that shows words; by default the run's.

    Returns:
        The rows, or what the ledger alone says and which file would name them.

    Raises:
        FileNotFoundError: ``store`` holds no store.
        ValueError: The run has no such step, ``store`` is another one, or the plan does not come
            out as the ledger says.
    """
    at = _index_of(run, step)
    first, header = _header_at(run, at)
    told = _told(run, at, header)
    begun = int(header.get("step", run.step[first]))
    if missing := _untold(run, header, begun=begun, step=step):
        return replace(told, missing=missing)
    opened, missing = find_store(header, store)
    if opened is None:
        return replace(told, missing=missing)
    plan, own, chosen = _plan_at(header, opened, begun, step)
    _check_counts(told, plan, own)
    places = [(rank, micro) for micro in range(plan.accumulate) for rank in range(plan.world_size)]
    batches = [chosen[plan.rows(own, rank, micro)].tolist() for rank, micro in places]
    rows = describe_rows(
        opened,
        [row for batch in batches for row in batch],
        boundaries=plan.boundaries,
        tokenizer=tokenizer or header.get("tokenizer"),
    )
    of_rows = [place for place, batch in zip(places, batches, strict=True) for _ in batch]
    return replace(told, epoch=plan.epoch, rows=tuple(rows), places=tuple(of_rows))


def find_store(header: Mapping[str, Any], given: Path | None = None) -> tuple[RowStore | None, str]:
    """The store that a run was trained on.

    Args:
        header: Of the run's ledger.
        given: The folder; by default where the run had it.

    Returns:
        The store and an empty line; or None, and a line that says what would help.

    Raises:
        FileNotFoundError: The given folder holds no store.
        ValueError: It holds another one.
    """
    wanted = header.get("settings", {}).get("data.store")
    place = header.get("store")
    if given is not None:
        store = RowStore.open(given, setting="store")
        if store.fingerprint != wanted:
            raise ValueError(
                f"store must be the one that the run was trained on (fingerprint {wanted}), got "
                f"{given} ({store.fingerprint}). Give the folder of the run's data.store."
            )
        return store, ""
    where = f", {place} when the run began" if place else ""
    help_line = f"`--store PATH` names them: the run's data.store{where} (fingerprint {wanted})."
    if place is None or not (Path(place) / "meta.json").is_file():
        return None, f"The rows are not named: their store is not here. {help_line}"
    store = RowStore.open(place)
    if store.fingerprint != wanted:
        return None, f"The rows are not named: their store was made anew since. {help_line}"
    return store, ""


def _index_of(run: Run, step: int) -> int:
    """Place of a step in the columns of a run."""
    at = int(np.searchsorted(run.step, step))
    if at == len(run) or run.step[at] != step:
        span = f"{run.step[0]} to {run.step[-1]}" if len(run) else "none"
        raise ValueError(
            f"step must be one that {run.name} has a line for ({span}), got {step}. Give another."
        )
    return at


def _header_at(run: Run, at: int) -> tuple[int, Mapping[str, Any]]:
    """The header that a step stands under, and the place of its first step."""
    before = [entry for entry in run.headers if entry[0] <= at]
    return before[-1] if before else (0, {})


def _untold(run: Run, header: Mapping[str, Any], *, begun: int, step: int) -> str:
    """What a header does not say of the plan of a step; empty where it says all."""
    if not header.keys() >= NEEDED:
        return (
            f"The rows are not named: what was read ({run.kind}) does not say how they were "
            "planned; the header of a ledger.csv that fit writes does."
        )
    if begun > step:
        return (
            f"The rows are not named: {run.kind} says only how steps from {begun} on were planned; "
            "the run folder's ledger.csv says it of every step."
        )
    return ""


def _told(run: Run, at: int, header: Mapping[str, Any]) -> StepRows:
    """What the ledger alone says of a step."""
    values = {name: float(run.column(name)[at]) for name in TOLD}
    epoch = run.column("epoch")[at]
    names = ("rows", "weight", "loss", "noise")
    numbers = {name: run.bucket(name)[at] for name in names}
    return StepRows(
        run=run.name,
        step=int(run.step[at]),
        epoch=int(epoch) if np.isfinite(epoch) else None,
        values=_known(values),
        boundaries=tuple(header.get("boundaries", ())),
        buckets=tuple(
            _known({name: float(numbers[name][k]) for name in names})
            for k in range(run.num_buckets)
        ),
    )


def _known(values: Mapping[str, float]) -> dict[str, float]:
    """What is a number, whole ones as integers."""
    finite = {name: value for name, value in values.items() if np.isfinite(value)}
    return {name: int(x) if x.is_integer() else x for name, x in finite.items()}


# -- the plan --------------------------------------------------------------------------------------


def _plan_at(
    header: Mapping[str, Any], store: RowStore, begun: int, step: int
) -> tuple[EpochPlan, int, np.ndarray]:
    """The plan of a step, the number of the step in it, and the store's rows behind its rows."""
    for first, plan, chosen in plans(header, store, begun):
        if step < first + plan.num_steps:
            return plan, step - first, chosen
    raise AssertionError("epochs go on without end")


def plans(
    header: Mapping[str, Any], store: RowStore, begun: int
) -> Iterator[tuple[int, EpochPlan, np.ndarray]]:
    """The plans that a process followed, one per epoch, without end.

    Args:
        header: Of the process, with all that ``NEEDED`` names.
        store: The rows.
        begun: Optimizer steps done when the process began.

    Yields:
        The step of the run that is step 0 of the plan, the plan, and the store's rows behind the
        plan's row numbers.

    Raises:
        ValueError: The plan that the process began with is not the one that the header names.
    """
    settings, position = header["settings"], Position.from_dict(header["position"])
    chosen, _ = split_rows(store.column("conversation"), settings["data.val_fraction"])
    run = RunPlan(
        store.lengths[chosen],
        _batching(settings),
        seed=settings["data.seed"],
        world_size=header["world_size"],
        accumulate=header["accumulate"],
        epoch=position.epoch,
    )
    run.resume(position, begun)
    _check_plan(run.plan, header)
    while True:
        first = -run.step_in_plan(0)
        yield first, run.plan, chosen
        run.set_epoch(run.epoch + 1, first + run.plan.num_steps)


def _batching(settings: Mapping[str, Any]) -> Batching:
    """Batching of a run, with the edges that it found."""
    names = {field.name: f"data.batching.{field.name}" for field in fields(Batching)}
    values = {name: settings[key] for name, key in names.items() if key in settings}
    return Batching(**values | {"boundaries": tuple(values["boundaries"])})


def _check_plan(plan: EpochPlan, header: Mapping[str, Any]) -> None:
    """Refuse a plan that is not the header's, whose edges were given or found."""
    found = replace(plan, batching=replace(plan.batching, boundaries=None))
    if header["plan"] not in (plan.fingerprint, found.fingerprint):
        raise ValueError(
            f"the plan of the run (fingerprint {header['plan']}) cannot be made again from its "
            f"ledger, which gives {found.fingerprint}. Take the version that trained the run."
        )


def _check_counts(told: StepRows, plan: EpochPlan, own: int) -> None:
    """Refuse a plan whose step is not of the size that was trained: the code may have changed."""
    batches = slice(own * plan.places, (own + 1) * plan.places)
    sizes, longest = plan.batches.sizes[batches], plan.longest[batches]
    first, end = plan.batches.offsets[[batches.start, batches.stop]]
    tokens = int(plan.lengths[plan.batches.rows[first:end]].sum())
    padded = int((sizes * plan.batching.padded(longest)).sum())
    planned = dict(zip(COUNTED, (int(sizes.sum()), tokens, padded), strict=True))
    trained = {name: told.values[name] for name in COUNTED if name in told.values}
    if trained != {name: planned[name] for name in trained} or told.epoch not in (None, plan.epoch):
        raise ValueError(
            f"step {told.step} of {told.run} trained {_counts(trained)} in epoch {told.epoch}, the "
            f"plan made from its ledger has {_counts(planned)} in epoch {plan.epoch}. Take the "
            "run folder's own ledger.csv, and the version that trained the run."
        )


def _counts(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{value:,.0f} {name.replace('_', ' ')}" for name, value in numbers.items())
