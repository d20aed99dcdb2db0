"""The cost fit: knees recovered from simulated steps, intervals that cover, refusals, files."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from batching.plans import FEW, batches_of, plannable_cases, steps_of
from hypothesis import given
from story import story_lengths

from dflash_lightning.batching import Batching, EpochPlan, plan_epoch
from dflash_lightning.batching.cost import (
    CostFit,
    fit_cost,
    fit_cost_of_steps,
    rank_work,
    read_timings,
)
from dflash_lightning.batching.settings import Deal

RUNS = 100
SECONDS_PER_TOKEN, SECONDS_PER_STEP, NOISE = 2e-6, 0.05, 0.004


@functools.cache
def timed_plan(world_size: int, deal: Deal = "stratified") -> EpochPlan:
    """About 120 steps of chats."""
    rows = story_lengths(2500 * world_size)
    batching = Batching(sort_window=8, token_budget=49_152, deal=deal)
    return plan_epoch(rows, batching, seed=0, epoch=0, world_size=world_size)


def true_seconds(plan: EpochPlan, knee: float) -> np.ndarray:
    """What each step takes: its slowest rank's padded (1 + width / knee), and a constant."""
    found = []
    for step in steps_of(plan):
        work = [0.0] * plan.world_size
        for place, batch in enumerate(step):
            width = int(plan.lengths[batch].max())
            work[place % plan.world_size] += len(batch) * width * (1 + width / knee)
        found.append(SECONDS_PER_STEP + SECONDS_PER_TOKEN * max(work))
    return np.array(found)


@functools.cache
def simulated_fits(knee: float, world_size: int, held_up: int, delay: float) -> list[CostFit]:
    """Runs whose steps scatter, and some of whose steps were held up by something else."""
    # Stratified steps of linear work all take equally long: they say nothing.
    deal = "aligned" if math.isinf(knee) and world_size > 1 else "stratified"
    plan = timed_plan(world_size, deal)
    exact = true_seconds(plan, knee)
    random = np.random.default_rng(world_size)
    fits = []
    for _ in range(RUNS):
        seconds = exact + NOISE * random.standard_normal(exact.size)
        late = random.choice(exact.size, held_up, replace=False)
        seconds[late] += delay * random.uniform(0.5, 2, held_up)
        fits.append(fit_cost_of_steps(plan, np.arange(plan.num_steps), seconds))
    return fits


# -- what is recovered -----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("knee", [1000, 4096, 50_000, math.inf])
@pytest.mark.parametrize("held_up", [0, 3])
def test_intervals_hold_the_true_knee_in_at_least_88_of_100_runs(
    knee: float, world_size: int, held_up: int
) -> None:
    fits = simulated_fits(knee, world_size, held_up, 0.1)
    assert sum(fit.low <= knee <= fit.high for fit in fits) >= 0.88 * RUNS
    assert all(fit.low <= fit.knee <= fit.high for fit in fits)
    if knee <= 4096:
        assert np.median([fit.knee for fit in fits]) == pytest.approx(knee, rel=0.1)
        assert np.median([fit.high / fit.low for fit in fits]) < 3
    assert np.median([fit.scatter for fit in fits]) == pytest.approx(NOISE, rel=0.15)


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("held_up", [0, 3])
def test_linear_work_leaves_the_upper_end_open(world_size: int, held_up: int) -> None:
    fits = simulated_fits(math.inf, world_size, held_up, 0.1)
    assert sum(math.isinf(fit.high) for fit in fits) >= 0.8 * RUNS
    assert np.median([fit.low for fit in fits]) > 5_000


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize(("held_up", "delay"), [(0, 0.0), (3, 0.1), (1, 5.0)])
def test_steps_that_were_held_up_are_left_out_and_hardly_any_other(
    world_size: int, held_up: int, delay: float
) -> None:
    fits = simulated_fits(4096, world_size, held_up, delay)
    for fit in fits:
        assert fit.timings + fit.outliers == timed_plan(world_size).num_steps
    assert sum(held_up <= fit.outliers <= held_up + 5 for fit in fits) >= 0.95 * RUNS


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("knee", [300.0, 4096.0, 50_000.0])
def test_exact_timings_give_the_knee_to_the_next_of_the_grid(knee: float, world_size: int) -> None:
    plan = timed_plan(world_size)
    fit = fit_cost_of_steps(plan, np.arange(plan.num_steps), true_seconds(plan, knee))
    assert fit.knee == pytest.approx(knee, rel=0.02)
    assert fit.seconds_per_token == pytest.approx(SECONDS_PER_TOKEN, rel=0.03)
    assert fit.seconds_per_step == pytest.approx(SECONDS_PER_STEP, rel=0.05)
    assert fit.scatter < 1e-3


def test_a_fit_of_batches_is_that_of_steps_of_one_rank() -> None:
    plan = timed_plan(1)
    seconds = true_seconds(plan, 2000) + NOISE * np.random.default_rng(0).standard_normal(
        plan.num_steps
    )
    widths = np.array([plan.width(step, 0) for step in range(plan.num_steps)])
    rows = np.array([plan.rows(step, 0).size for step in range(plan.num_steps)])
    by_steps = fit_cost_of_steps(plan, np.arange(plan.num_steps), seconds)
    assert fit_cost(rows * widths, widths, seconds) == by_steps


def test_steps_may_be_some_of_the_plan_in_any_order() -> None:
    plan = timed_plan(8)
    seconds = true_seconds(plan, 3000)
    chosen = np.random.default_rng(0).permutation(plan.num_steps)[:40]
    assert fit_cost_of_steps(plan, chosen, seconds[chosen]).knee == pytest.approx(3000, rel=0.02)


def test_the_slowest_rank_counts_and_not_the_mean_rank() -> None:
    plan = timed_plan(8)
    linear, quadratic = rank_work(plan)
    mean = SECONDS_PER_TOKEN * (linear + quadratic / 1500).mean(1)
    slowest = SECONDS_PER_TOKEN * (linear + quadratic / 1500).max(1)
    steps = np.arange(plan.num_steps)
    assert fit_cost_of_steps(plan, steps, slowest).scatter < 1e-4
    assert fit_cost_of_steps(plan, steps, mean).scatter > 1e-3


@FEW
@given(plannable_cases())
def test_the_work_of_a_rank_is_the_sum_over_its_batches(case) -> None:
    lengths, batching, arguments = case
    plan = plan_epoch(lengths, batching, **arguments)
    linear, quadratic = rank_work(plan)
    shape = (plan.num_steps, plan.world_size)
    by_hand = np.zeros((2, *shape))
    for step in range(plan.num_steps):
        for rank in range(plan.world_size):
            for micro in range(plan.accumulate):
                width = plan.width(step, rank, micro)
                padded = plan.rows(step, rank, micro).size * width
                by_hand[:, step, rank] += padded, padded * width
    assert linear.shape == quadratic.shape == shape
    assert np.array_equal(np.stack([linear, quadratic]), by_hand)
    assert linear.sum() == sum(
        len(rows) * int(batching.padded(plan.lengths[rows].max(keepdims=True))[0])
        for rows in batches_of(plan)
    )


def test_empty_places_of_a_rest_are_no_work() -> None:
    plan = plan_epoch([9] * 12, Batching(token_budget=10), seed=0, epoch=0)
    linear, quadratic = rank_work(plan.resume(9, world_size=4, accumulate=1))
    assert linear.tolist() == [[9, 9, 9, 0]]
    assert quadratic.tolist() == [[81, 81, 81, 0]]


# -- refusals --------------------------------------------------------------------------------------

WIDTHS = np.tile(np.arange(100, 1000, 50), 2)
PADDED = np.repeat([2, 3], 18) * WIDTHS
GOOD = {"padded": PADDED, "widths": WIDTHS, "seconds": 1e-6 * PADDED * (1 + WIDTHS / 500)}


def spoilt(values: np.ndarray, value: float) -> np.ndarray:
    changed = values.astype(np.float64)
    changed[3] = value
    return changed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {name: values[:7] for name, values in GOOD.items()},
            r"timings must be 8 or more and finite, got 7 of which 7 finite\. Time more",
        ),
        (
            {name: values[:0] for name, values in GOOD.items()},
            r"timings must be 8 or more and finite, got 0 of which 0 finite\. Time more",
        ),
        ({"seconds": spoilt(GOOD["seconds"], math.nan)}, r"got 36 of which 35 finite"),
        ({"seconds": spoilt(GOOD["seconds"], math.inf)}, r"got 36 of which 35 finite"),
        ({"padded": np.full(36, 500), "widths": np.full(36, 100)}, r"all 36 are alike\. Time step"),
        (
            {"seconds": np.ones(35)},
            r"must be flat and equally long, got shapes \(36,\), \(36,\) an",
        ),
        ({"widths": 7}, r"must be flat and equally long, got shapes \(36,\), \(\) and \(36,\)"),
        (
            {name: values.reshape(6, 6) for name, values in GOOD.items()},
            r"got shapes \(6, 6\), \(6, 6\) and \(6, 6\)\. Give one value per timing\.",
        ),
    ],
)
def test_timings_that_say_nothing_are_refused_in_one_line(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        fit_cost(**GOOD | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["padded", "widths"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_work_that_is_not_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        fit_cost(**GOOD | {name: spoilt(GOOD[name], value)})


@pytest.mark.parametrize("seconds", [1 - GOOD["seconds"], np.ones(36)])
def test_timings_in_which_more_work_takes_no_more_time_are_refused(seconds: np.ndarray) -> None:
    with pytest.raises(ValueError, match="seconds"):
        fit_cost(PADDED, WIDTHS, seconds)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([-1, *range(9)], r"steps must lie in 0\.\.\d+, got -1\.\.8\. Give the plan of the epoch"),
        ([*range(9), 10_000], r"steps must lie in 0\.\.\d+, got 0\.\.10000\. Give the plan of"),
        (range(9), r"steps and seconds must be flat and equally long, got shapes \(9,\) and \(10,"),
        ([], r"steps and seconds must be flat and equally long, got shapes \(0,\) and \(10,\)"),
    ],
)
def test_steps_that_the_plan_lacks_or_that_have_no_time_are_refused(
    steps: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        fit_cost_of_steps(timed_plan(8), np.array(steps, np.int64), np.ones(10))
    assert "\n" not in str(caught.value)


# -- files -----------------------------------------------------------------------------------------

COLUMNS = ("seconds", "rows", "width", "step")


def written(folder: Path, text: str) -> Path:
    path = folder / "timings.csv"
    path.write_text(text)
    return path


def test_columns_are_read_in_any_order_past_comments_and_empty_cells(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "# a run of yesterday\nwidth,loss,seconds\n100,3.5,0.25\n# a pause\n200,3.4,\n300,,1e-1\n",
    )
    found = read_timings(path, COLUMNS)
    assert {name: values.tolist() for name, values in found.items()} == {
        "seconds": [0.25, 0.1],
        "width": [100.0, 300.0],
    }
    assert all(values.dtype == np.float64 for values in found.values())


def test_a_file_without_lines_has_columns_without_values(tmp_path: Path) -> None:
    found = read_timings(written(tmp_path, "step,seconds\n"), COLUMNS)
    assert {name: values.shape for name, values in found.items()} == {"step": (0,), "seconds": (0,)}


def test_a_line_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    found = read_timings(written(tmp_path, "seconds,width\n1,2\n3\n"), COLUMNS)
    assert found["width"].tolist() == [2.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows,width\n1,2\n", r"must have a column seconds, got rows, width\. Give a ledger, or a"),
        ("", r"must have a column seconds, got "),
        ("seconds,rows\n1,many\n", r"must hold numbers: could not convert string to float: 'many'"),
    ],
)
def test_files_without_timings_are_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_timings(written(tmp_path, text), COLUMNS)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "timings.csv") in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"there is none at {path}"):
            read_timings(path, COLUMNS)


# -- as numbers and as text ------------------------------------------------------------------------

FIT = CostFit(
    knee=4096.4,
    low=3000.0,
    high=5500.0,
    seconds_per_token=2e-6,
    seconds_per_step=0.0512,
    timings=1200,
    outliers=3,
    scatter=0.0042,
)


def test_what_is_infinite_is_none_in_json() -> None:
    assert FIT.to_dict() == dataclasses.asdict(FIT)
    endless = dataclasses.replace(FIT, knee=math.inf, high=math.inf)
    assert endless.to_dict() == FIT.to_dict() | {"knee": None, "high": None}
    assert json.dumps(endless.to_dict(), allow_nan=False)
    fitted = fit_cost(**GOOD).to_dict()
    assert {type(value) for value in fitted.values()} <= {int, float, type(None)}


def test_a_fit_reads_as_a_sentence() -> None:
    assert str(FIT) == (
        "cost_knee 4,096 tokens, 95 % interval 3,000 .. 5,500, from 1,200 timings "
        "(3 outliers left out)\n2.00 us a padded token, 51.2 ms a step, scatter 4.2 ms"
    )
    assert "interval 3,000 .. infinite, from" in str(dataclasses.replace(FIT, high=math.inf))


def test_a_fit_without_quadratic_work_reads_as_a_sentence() -> None:
    linear = str(dataclasses.replace(FIT, knee=math.inf, low=math.inf, high=math.inf))
    assert linear.startswith("cost_knee infinite tokens, 95 % interval infinite .. infinite, from")
