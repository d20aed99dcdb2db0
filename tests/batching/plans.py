"""Shared by the plan's tests: families of lengths, random cases, and walks through a plan."""

import functools
import time
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from dflash_lightning.batching import Batching, EpochPlan, plan_epoch

MANY = settings(max_examples=250, deadline=None, derandomize=True, database=None)
FEW = settings(max_examples=80, deadline=None, derandomize=True, database=None)
ORDERS = ("bucketed", "sorted", "random")
DEALS = ("stratified", "aligned", "independent")
FAMILIES = ("log-normal", "heavy tail", "zipf", "two piles", "uniform", "equal")

HEAVY = st.floats(0.001, 1.0).map(lambda u: min(400, int(3 / u)))
LENGTHS = st.one_of(
    st.lists(HEAVY, min_size=1, max_size=150),
    st.lists(HEAVY, min_size=60, max_size=150),
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.builds(lambda length, count: [length] * count, st.integers(1, 90), st.integers(1, 120)),
    st.integers(1, 500).map(lambda length: [length]),
    st.lists(st.sampled_from([3, 4, 250, 251]), min_size=1, max_size=120),
)
LAYOUTS = st.fixed_dictionaries({"world_size": st.integers(1, 9), "accumulate": st.integers(1, 4)})


@st.composite
def batchings(draw, longest: int, *, orders: tuple[str, ...] = ORDERS) -> Batching:
    """Settings under which a row of that length fits a batch."""
    pad_to = draw(st.sampled_from([1, 1, 7, 16, 64]))
    width = rounded(longest, pad_to)
    # Powers of two: costs are then exact, and no batch that just fits depends on rounding.
    knee = draw(st.sampled_from([32.0, 4096.0]))
    spare = draw(st.none() | st.sampled_from([1.0, 1.5, 4.0, 50.0]))
    return Batching(
        order=draw(st.sampled_from(orders)),
        num_buckets=draw(st.integers(1, 8)),
        token_budget=width + draw(st.integers(0, 900)),
        max_rows=draw(st.sampled_from([1, 2, 5, 64, 64])),
        pad_to=pad_to,
        sort_window=draw(st.sampled_from([0, 1, 2, 32, 1000])),
        deal=draw(st.sampled_from(DEALS)),
        cost_budget=None if spare is None else spare * width * (1 + width / knee),
        cost_knee=knee,
    )


@st.composite
def cases(draw, *, orders: tuple[str, ...] = ORDERS):
    """Lengths, settings that hold the longest of them, and the other arguments of a plan."""
    lengths = draw(LENGTHS)
    batching = draw(batchings(max(lengths), orders=orders))
    return lengths, batching, {"seed": draw(st.integers(0, 2**40)), "epoch": 3} | draw(LAYOUTS)


def plannable_cases(**options):
    """As ``cases``, where a plan exists."""
    return cases(**options).filter(lambda case: plannable(*case))


@functools.cache
def family(name: str, rows: int = 20_000) -> np.ndarray:
    """Lengths of one kind, int32, the same in every run: quantiles, scrambled."""
    u = (np.arange(rows) + 0.5) / rows
    if name == "log-normal":
        lengths = np.exp(6.5 + 0.9 * np.array([NormalDist().inv_cdf(x) for x in u]))
    elif name == "heavy tail":
        lengths = 100 / (1 - u) ** 0.7
    elif name == "zipf":
        lengths = 20 * np.ceil((1 - u) ** (-1 / 1.2))
    elif name == "two piles":
        lengths = np.where(u < 0.7, 90 + 40 * u, 3000 + 400 * u)
    elif name == "uniform":
        lengths = 16 + 2032 * u
    else:
        lengths = np.full(rows, 700.0)
    scrambled = np.argsort(np.arange(rows) * 2_654_435_761 % 2**32, kind="stable")
    found = np.clip(lengths, 16, 8192).astype(np.int32)[scrambled]
    found.flags.writeable = False
    return found


def seconds(work: Callable[[], object], times: int = 3) -> float:
    """Least processor time of a few tries."""
    tries = []
    for _ in range(times):
        start = time.process_time()
        work()
        tries.append(time.process_time() - start)
    return min(tries)


def rounded(length: int, pad_to: int) -> int:
    """Round up by walking."""
    while length % pad_to:
        length += 1
    return length


def fits(rows: int, width: int, batching: Batching) -> bool:
    """The three limits of a batch, as the settings state them."""
    cost = rows * (width * (1 + width / batching.cost_knee))
    return (
        rows <= batching.max_rows
        and rows * width <= batching.token_budget
        and (batching.cost_budget is None or cost <= batching.cost_budget)
    )


def walk(lengths: list[int], batching: Batching) -> list[list[int]]:
    """Slow twin of the cut: add one row at a time, close when it would no longer fit."""
    batches: list[list[int]] = [[]]
    for row in range(len(lengths)):
        wider = [*batches[-1], row]
        if fits(len(wider), rounded(max(lengths[r] for r in wider), batching.pad_to), batching):
            batches[-1] = wider
        else:
            batches.append([row])
    return batches


def fewest_batches(lengths: list[int], batching: Batching) -> int:
    """Longest first: a batch led by its longest row takes as many others as it can."""
    return len(walk(sorted(lengths, reverse=True), batching))


def plannable(lengths: list[int], batching: Batching, layout: dict[str, int]) -> bool:
    """True where some number of batches fills every place of every step."""
    places = layout["world_size"] * layout["accumulate"]
    counts = range(fewest_batches(lengths, batching), len(lengths) + 1)
    return any(count % places == 0 for count in counts)


def grid(plan: EpochPlan) -> list[tuple[int, int, int]]:
    """Every (step, rank, micro), in the order of the places of a step."""
    return [
        (step, rank, micro)
        for step in range(plan.num_steps)
        for micro in range(plan.accumulate)
        for rank in range(plan.world_size)
    ]


def batches_of(plan: EpochPlan) -> list[list[int]]:
    """Rows of every batch, step by step and place by place."""
    return [plan.rows(*place).tolist() for place in grid(plan)]


def steps_of(plan: EpochPlan) -> list[list[list[int]]]:
    """Rows of every batch of every step."""
    batches, places = batches_of(plan), plan.world_size * plan.accumulate
    return [batches[start : start + places] for start in range(0, len(batches), places)]


def rows_of(steps: list[list[list[int]]]) -> list[int]:
    """All rows of some steps, in order."""
    return [row for step in steps for batch in step for row in batch]


def members(plan: EpochPlan) -> set[frozenset[int]]:
    """Which rows share a batch, whatever the order."""
    return {frozenset(batch) for batch in batches_of(plan)}


def padded_tokens(plan: EpochPlan) -> list[int]:
    """Padded tokens of every batch."""
    return [plan.rows(*place).size * plan.width(*place) for place in grid(plan)]


def efficiency(plan: EpochPlan) -> float:
    """Real over padded tokens of a plan of all rows."""
    widths = plan.batching.padded(plan.batches.longest(plan.lengths))
    return float(plan.lengths.sum(dtype=np.int64) / (widths * plan.batches.sizes).sum())


def plan_of(lengths, batching=None, *, seed=0, epoch=0, **layout) -> EpochPlan:
    return plan_epoch(lengths, batching or Batching(), seed=seed, epoch=epoch, **layout)
