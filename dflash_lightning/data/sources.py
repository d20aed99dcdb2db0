"""What every step of a past run drew of each source, from its plan and the store."""

from pathlib import Path

import numpy as np

from dflash_lightning.batching import EpochPlan
from dflash_lightning.data.steps import NEEDED, find_store, plans
from dflash_lightning.diagnosis import Run, Sources


def sources_of(run: Run, given: Path | None = None) -> Sources | None:
    """Rebuild the plans of a run and count the sources of its steps.

    Args:
        run: Read from its folder.
        given: Folder of the rows; by default where the run had them, if it is still there.

    Returns:
        Parts of the sources in the supervised tokens of each step; None where the store is not at
        hand or has one source, or where the run does not say how it was planned.

    Raises:
        FileNotFoundError: The given folder holds no store.
        ValueError: It holds another one, or the plan does not come out as the ledger says.
    """
    if not all(header.keys() >= NEEDED for _, header in run.headers):
        return None
    store, _ = find_store(run.header, given)
    if store is None or len(store.meta["sources"]) < 2:
        return None
    names = store.meta["sources"]
    source, supervised = store.column("source"), store.supervised
    tokens = np.zeros((len(run), len(names)))
    ends = [*(first for first, _ in run.headers[1:]), len(run)]
    for (first, header), end in zip(run.headers, ends, strict=True):
        if first == end:
            continue
        begun = int(header.get("step", run.step[first]))
        for start, plan, chosen in plans(header, store, begun):
            drawn = _drawn(plan, source[chosen], supervised[chosen], len(names))
            own = run.step[first:end] - start
            inside = (own >= 0) & (own < plan.num_steps)
            tokens[first:end][inside] = drawn[own[inside]]
            if start + plan.num_steps > run.step[end - 1]:
                break
    known = tokens.sum(1) > 0
    portion = tokens[known] / tokens[known].sum(1, keepdims=True)
    return Sources(tuple(name or "none" for name in names), run.step[known], portion)


def _drawn(plan: EpochPlan, source: np.ndarray, tokens: np.ndarray, num_sources: int) -> np.ndarray:
    """Tokens of each source in each step of a plan, float64 ``[steps, G]``."""
    batch = np.repeat(np.arange(len(plan.batches)), plan.batches.sizes)
    place = (batch // plan.places) * num_sources + source[plan.batches.rows]
    weights = tokens[plan.batches.rows]
    counts = np.bincount(place, weights, minlength=plan.num_steps * num_sources)
    return counts.reshape(plan.num_steps, num_sources)
