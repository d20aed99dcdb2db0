"""What the diagnosis reaches on simulated runs: ``pytest -m benchmark -s tests/diagnosis``.

Every line has the number of its runs. Times are told beside one stable argsort of four million
random numbers, made in the same process.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from diagnosis.case import FAMILIES, Case
from diagnosis.reach import (
    CAUSES,
    FEW_ROWS,
    LONE_ROWS,
    MIX_ERROR,
    NAMED_ALONE,
    SHOCK,
    SMALL_BATCHES,
    Judged,
    Told,
    cases,
    judged,
    plan_pair,
    rate,
    reached,
    runs,
    sorted_pair,
    told,
)
from diagnosis.simulate import simulate

from dflash_lightning.diagnosis.run import BUCKET_COLUMNS, STEP_COLUMNS, Run
from dflash_lightning.table import Table

RANKS = (1, 2, 4, 8)
FIRST = 1_000_000  # seed; those below are the gate's
LONG, BLOCK = 100_000, 2_000  # steps
pytestmark = pytest.mark.benchmark


class Lines:
    """The lines of the table, and whether all that must be met is."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, str]] = []
        self.missed: list[str] = []

    def add(
        self, name: str, count: int, reach: str, value: float, form: str, *, met: bool | None
    ) -> None:
        """A measured line; ``met`` is None where nothing is asked for."""
        word = "told" if met is None else "yes" if met else "NO"
        self.rows.append((f"{name} ({count:,})", reach, format(value, form), word))
        if met is False:
            self.missed.append(name)

    def at_least(self, name: str, values: Iterable[bool], least: float) -> None:
        """A rate that must be reached."""
        flags = list(values)
        value = rate(flags)
        self.add(name, len(flags), f">= {least:.0%}", value, ".1%", met=value >= least)

    def at_most(self, name: str, values: Iterable[bool], most: float) -> None:
        """A rate that must not be exceeded."""
        flags = list(values)
        value = rate(flags)
        self.add(name, len(flags), f"<= {most:.0%}", value, ".1%", met=value <= most)

    def below(self, name: str, values: Iterable[float], most: float, form: str = ".3f") -> None:
        """What 95 % of the values must not exceed."""
        numbers = list(values)
        value = reached(numbers)
        self.add(name, len(numbers), f"<= {most:g}", value, form, met=value <= most)

    def told(self, name: str, count: int, value: float, form: str) -> None:
        """A number that nothing is asked of."""
        self.add(name, count, "", value, form, met=None)


@functools.cache
def healthy(family: str) -> tuple[Judged, ...]:
    return tuple(judged(case) for case in runs(cases(family, RANKS), 400, FIRST))


def shares_of_healthy(family: str) -> list[Told]:
    return [run.told for run in healthy(family) if run.told]


def shares(lines: Lines) -> None:
    for family in FAMILIES:
        lines.below(
            f"mix / (mix + noise), error of 95 %: {family}",
            (run.mix_error for run in shares_of_healthy(family)),
            MIX_ERROR[family],
        )
    for family in FAMILIES:
        least = 0.8 if family == "heavy" else 0.9
        covers = (run.covers for run in shares_of_healthy(family))
        lines.at_least(f"rest covers zero: {family}", covers, least)
        bias = float(np.mean([run.rest_error for run in shares_of_healthy(family)]))
        lines.told(f"rest, mean error: {family}", len(healthy(family)), bias, "+.3f")
    for family in FAMILIES:
        least = 0.8 if family == "heavy" else 0.88
        found = [told(case) for case in runs(cases(family, RANKS, shock=SHOCK), 150, FIRST + 1000)]
        covers = (run.covers for run in found)
        lines.at_least(f"rest covers a shock of {SHOCK}: {family}", covers, least)


def widths(lines: Lines) -> None:
    for family in FAMILIES:
        short = runs(cases(family, RANKS, steps=150), 100, FIRST + 2000)
        for steps, found in ((500, shares_of_healthy(family)), (150, [told(x) for x in short])):
            name = f"half width over its floor, {steps} steps, median: {family}"
            width = float(np.median([run.width for run in found]))
            lines.add(name, len(found), "<= 1.4", width, ".2f", met=width <= 1.4)


def alarms(lines: Lines) -> None:
    found = [run for family in FAMILIES for run in healthy(family)]
    lines.at_most("healthy: INVESTIGATE", (x.verdict == "INVESTIGATE" for x in found), 0.01)
    lines.at_most("healthy: not ON TRACK", (x.verdict != "ON TRACK" for x in found), 0.1)
    lines.at_most("healthy: a cause invented", (x.invents for x in found), 0.05)
    for cause in sorted({*CAUSES.values()} - {"epoch_edge"}):
        value = rate(cause in run.causes for run in found)
        lines.told(f"healthy: {cause}", len(found), value, ".2%")
    steep = [judged(case) for case in runs(cases("steep", RANKS), 300, FIRST + 3000)]
    steep += healthy("steep")
    no_shift = ("learning_rate" not in run.causes for run in steep)
    lines.at_least("no false shift at the peak: steep", no_shift, 0.99)


def faults(lines: Lines) -> None:
    for fault in NAMED_ALONE:
        of = [x for f in FAMILIES for x in runs(cases(f, RANKS, fault=fault), 40, FIRST + 4000)]
        found = [judged(case) for case in of]
        lines.at_least(f"{fault}: named", (run.finds for run in found), 0.95)
        alone = (run.finds and not run.invents for run in found)
        lines.at_least(f"{fault}: nothing else named", alone, 0.95)
    for family in FAMILIES:
        of = runs(cases(family, RANKS, fault="shift"), 120, FIRST + 5000)
        lines.at_least(f"shift at the peak: {family}", (judged(x).finds for x in of), 0.9)
    for family in FAMILIES:
        of = cases(family, (1,), fault="garbage", rows_per_batch=SMALL_BATCHES)
        rows = [judged(x).has_row for x in runs(of, 100, FIRST + 6000)]
        if family == "real":  # its rows scatter by one nat, and half of them weigh little
            lines.told(f"garbage row: {family}", len(rows), rate(rows), ".1%")
        else:
            lines.at_least(f"garbage row: {family}", rows, 0.9)


def few_rows(lines: Lines) -> None:
    for lighter in (0.0, 0.5):
        of = cases("plain", RANKS, weight_cv=1.0, rows_per_batch=FEW_ROWS, lighter=lighter)
        found = [judged(case) for case in runs(of, 300, FIRST + 7000)]
        name = f"uneven weights, variance ~ weight^-{lighter:g}"
        covers = [run.told.covers for run in found if run.told]
        alarm = (run.verdict == "INVESTIGATE" for run in found)
        if lighter:
            lines.told(f"{name}: rest covers zero", len(covers), rate(covers), ".1%")
            lines.told(f"{name}: INVESTIGATE", len(found), rate(alarm), ".1%")
        else:
            lines.at_least(f"{name}: rest covers zero", covers, 0.85)
            lines.at_most(f"{name}: INVESTIGATE", alarm, 0.01)
    lone = Case(seed=0, ranks=1, rows_per_batch=LONE_ROWS)
    for name, steps, warmup in (("150 steps", 150, 100), ("inside the warm-up", -200, 400)):
        of = [replace(lone, family=x, steps=steps, warmup=warmup) for x in FAMILIES]
        found = [judged(case) for one in of for case in runs([one], 40, FIRST + 8000)]
        calm = (run.verdict != "INVESTIGATE" for run in found)
        lines.at_least(f"lone rows, {name}: no INVESTIGATE", calm, 0.97)
        says = (any("lone rows" in x for x in run.missing) for run in found)
        lines.at_least(f"lone rows, {name}: says what is missing", says, 1.0)


def comparisons(lines: Lines) -> None:
    for family in FAMILIES:
        of = runs(cases(family, RANKS), 50, FIRST + 9000)
        found = [sorted_pair(case, 0.05) for case in of]
        lines.at_least(f"sorted and bucketed, covers: {family}", (x.covers for x in found), 0.9)
        errors = (pair.error for pair in found)
        lines.below(f"sorted and bucketed, error of 95 %: {family}", errors, 0.75, ".2f")
    ordered = [sorted_pair(x, 0.05, in_order=True) for x in runs([Case(seed=0)], 50, FIRST + 9500)]
    name = "the same, batches in order of length"
    lines.told(f"{name}, covers", len(ordered), rate(pair.covers for pair in ordered), ".1%")
    lines.told(f"{name}, error of 95 %", len(ordered), reached(x.error for x in ordered), ".2f")
    found = [plan_pair(case, 0.02) for case in runs(cases("plain", RANKS), 100, FIRST + 9800)]
    lines.at_least("same plan, covers", (paired.covers for paired, _ in found), 0.9)
    narrower = float(np.median([apart.half / paired.half for paired, apart in found]))
    lines.add(
        "same plan, times narrower", len(found), ">= 2.5", narrower, ".2f", met=narrower > 2.5
    )


# -- time and memory ------------------------------------------------------------------------------

READS = """
import json, resource, sys, time
import numpy as np

values = np.random.default_rng(0).random(4_000_000)

def seconds(work):
    start = time.process_time()
    result = work()
    return time.process_time() - start, result

base = min(seconds(lambda: np.argsort(values, kind="stable"))[0] for _ in range(3))
from dflash_lightning.diagnosis import diagnose, read_run
diagnose(sys.argv[2])
reading, run = seconds(lambda: read_run(sys.argv[1]))
analysing, found = seconds(lambda: diagnose(run))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([base, reading, analysing, peak, len(run), found.verdict]))
"""
IMPORTS = """
import sys, time
start = time.perf_counter()
import numpy
middle = time.perf_counter()
import dflash_lightning.diagnosis
end = time.perf_counter()
assert not {"torch", "lightning", "transformers", "scipy", "wandb"} & set(sys.modules)
print(end - middle)
"""


def python(code: str, *words: object) -> str:
    """What a process of its own prints."""
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write_steps(run: Run, file: Path, repeats: int) -> Path:
    """A ledger in which the steps of a run are repeated under new numbers."""
    names = [
        *STEP_COLUMNS[1:],
        *(f"{x}_{k}" for x in BUCKET_COLUMNS for k in range(run.num_buckets)),
    ]
    buckets = [run.bucket(name) for name in BUCKET_COLUMNS]
    cells = np.column_stack([*(run.column(name) for name in STEP_COLUMNS[1:]), *buckets])
    tokens, form = names.index("tokens_seen"), ",".join(["%.7g"] * len(names))
    with file.open("w") as out:
        out.write(f"# {json.dumps(run.headers[0][1])}\nstep,{','.join(names)}\n")
        for block in range(repeats):
            first = block * len(run)
            lines = (f"{first + i},{form % tuple(row)}" for i, row in enumerate(cells))
            out.write("\n".join(lines).replace("nan", "") + "\n")
            cells[:, tokens] += run.column("tokens_seen")[-1]
            cells[:, 0] += run.column("epoch")[-1] + 1
    return file


def times(lines: Lines, folder: Path) -> str:
    """The lines of time and memory, and the heading with their base."""
    run, _ = simulate(FIRST, steps=BLOCK - 100, ranks=1)
    short = write_steps(run, folder / "short.csv", 1)
    long = write_steps(run, folder / "long.csv", LONG // BLOCK)
    base, reading, analysing, peak, steps, _ = json.loads(python(READS, long, short))
    assert steps == LONG
    total = reading + analysing
    name = f"{LONG:,} steps read and analysed, times one argsort"
    met = total <= 3 or total <= 6 * base
    lines.add(name, 1, "<= 6, or 3 s", total / base, ".1f", met=met)
    lines.told("  seconds of reading", 1, reading, ".2f")
    lines.told("  seconds of analysing", 1, analysing, ".2f")
    lines.told("  peak memory, MiB", 1, peak, ".0f")
    beside = min(float(python(IMPORTS)) for _ in range(3))
    lines.add("import, seconds beside numpy's", 3, "<= 0.3", beside, ".2f", met=beside <= 0.3)
    return f"one argsort: {base:.3f} s"


def test_what_the_diagnosis_reaches(tmp_path: Path) -> None:
    lines = Lines()
    parts: tuple[Callable[[Lines], None], ...] = (
        *(shares, widths, alarms, faults, few_rows, comparisons),
    )
    for part in parts:
        part(lines)
    heading = times(lines, tmp_path)
    table = Table(heading, ("(runs)", "reach", "measured", "met"), lines.rows, "lrrl")
    sys.stdout.write("\n" + table.text() + "\n")
    assert not lines.missed
