"""The ledger as a file, which survives restarts and bad disks; and the time that is left."""

import csv
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_lightning.callbacks.ledger_file import LedgerFile, last_rows
from dflash_lightning.callbacks.rate import Rate, Stopwatch
from dflash_lightning.callbacks.step_values import step_values
from dflash_lightning.diagnosis import read_run
from dflash_lightning.diagnosis.run import PHASE_COLUMNS

HEADER = {"format": 1, "boundaries": [0, 8, 16], "world_size": 2, "plan": "abc"}
ORDER = (
    "step,epoch,time,seconds,lr,grad_norm,skipped,loss,weight,rows,tokens,padded_tokens,anchors,"
    "labels,tokens_seen,wait_seconds,target_seconds,drafter_seconds,head_seconds,backward_seconds,"
    "optimizer_seconds,top_row,top_share,top_pull,restart,"
    "loss_0,weight_0,rows_0,noise_0,eff_0,length_0,loss_1,weight_1,rows_1,noise_1,eff_1,length_1"
)


def row_of(step: int, **other: Any) -> dict[str, Any]:
    """A row as the callback gives it, with keys that are no columns."""
    return {
        "step": step,
        "epoch": 0,
        "time": 1767225600.1234,
        "seconds": 0.5,
        "lr": 1.2e-5,
        "grad_norm": 0.25,
        "skipped": 0,
        "loss": 10 / 3,
        "weight": 3512.0,
        "rows": 12,
        "tokens": 4000,
        "padded_tokens": 4100,
        "anchors": 300,
        "labels": 1500,
        "tokens_seen": 4000 * (step + 1),
        "wait_seconds": 0.01,
        "target_seconds": 0.125,
        "drafter_seconds": 0.0625,
        "head_seconds": 0.1,
        "backward_seconds": 0.15,
        "optimizer_seconds": 0.02,
        "top_row": 17,
        "top_share": 0.4,
        "top_pull": -0.02,
        "restart": 0,
        "accuracy": 0.1,
        "bad_rows": [],
        "loss_k": [3.0, None],
        "weight_k": [3512.0, 0.0],
        "rows_k": [12, 0],
        "noise_k": [1 / 700, None],
        "eff_k": [9.5, 0.0],
        "length_k": [1.5, None],
        **other,
    }


def start(folder: Path, step: int = 0, **header: Any) -> tuple[LedgerFile, list[str], int]:
    """A process that begins at a step: its file, what it says, and how many lines it cut."""
    said: list[str] = []
    file = LedgerFile(folder, {**HEADER, **header}, say=said.append)
    return file, said, file.resume(step)


def run(folder: Path, first: int, end: int, **other: Any) -> int:
    """A process that trains some steps and then ends."""
    file, said, cut = start(folder, first)
    for step in range(first, end):
        file.write(row_of(step, **other))
    file.close()
    assert said == []
    return cut


def lines(path: Path) -> list[str]:
    text = path.read_text()
    assert text.endswith("\n")
    return text.splitlines()


def steps(path: Path) -> list[int]:
    """Steps of the rows, in order."""
    return [int(line.split(",")[0]) for line in lines(path) if line[0].isdigit()]


# -- what a line says -----------------------------------------------------------------------------


def test_columns_values_and_digits(tmp_path: Path):
    file, said, cut = start(tmp_path)
    file.write(row_of(7))
    file.close()
    first, columns, row = lines(tmp_path / "ledger.csv")
    assert first.startswith("# ")
    assert json.loads(first[2:]) == HEADER
    assert columns == ORDER
    assert row == (
        "7,0,1767225600.123,0.5,1.2e-05,0.25,0,3.333333,3512,12,4000,4100,300,1500,32000,0.01,"
        "0.125,0.0625,0.1,0.15,0.02,17,0.4,-0.02,0,3,3512,12,0.001428571,9.5,1.5,,0,0,,0,"
    )
    assert (said, cut) == ([], 0)


def test_what_is_missing_or_not_finite_is_seen_as_such(tmp_path: Path):
    file, _, _ = start(tmp_path)
    file.write(row_of(0, top_row=None, loss=float("nan"), loss_k=[float("inf"), None]))
    file.write({"step": 1, "loss": 2.5})
    file.close()
    with (tmp_path / "ledger.csv").open() as text:
        text.readline()
        first, second = csv.DictReader(text)
    assert (first["top_row"], first["loss"], first["loss_0"]) == ("", "nan", "inf")
    filled = {name: value for name, value in second.items() if value}
    assert filled == {"step": "1", "loss": "2.5"}


def test_counts_keep_all_their_digits(tmp_path: Path):
    file, _, _ = start(tmp_path)
    file.write(row_of(12_345_678, tokens_seen=1_797_483_647_123, top_row=902_086_123))
    file.close()
    values = dict(zip(ORDER.split(","), lines(tmp_path / "ledger.csv")[-1].split(","), strict=True))
    assert values["step"] == "12345678"
    assert values["tokens_seen"] == "1797483647123"
    assert values["top_row"] == "902086123"


def test_a_row_is_on_its_way_to_the_disk_as_soon_as_it_is_written(tmp_path: Path):
    file, _, _ = start(tmp_path)
    for step in range(3):
        file.write(row_of(step))
        assert steps(tmp_path / "ledger.csv") == list(range(step + 1))
    file.close()


def test_a_killed_process_loses_no_row(tmp_path: Path):
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from dflash_lightning.callbacks.ledger_file import LedgerFile\n"
        "file = LedgerFile(Path(sys.argv[1]), {'boundaries': [0, 8, 16]}, say=print)\n"
        "file.resume(0)\n"
        "for step in range(5): file.write({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert steps(tmp_path / "ledger.csv") == [0, 1, 2, 3, 4]


# -- restarts -------------------------------------------------------------------------------------


def test_a_restart_cuts_back_marks_itself_and_keeps_what_it_cut(tmp_path: Path):
    # LG-01: logged to 130, checkpoint at 100, resumed to 160
    path, replaced = tmp_path / "ledger.csv", tmp_path / "ledger-replaced.csv"
    assert run(tmp_path, 0, 130) == 0
    assert not replaced.exists()
    assert run(tmp_path, 100, 160, restart=1, loss=2.0) == 30
    assert steps(path) == list(range(160))
    assert steps(replaced) == list(range(100, 130))
    text = lines(path)
    assert [i for i, line in enumerate(text) if line.startswith("# {")] == [0, 102]
    assert text[1] == ORDER
    assert text.count(ORDER) == 1
    with path.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    assert [row["restart"] for row in rows] == ["0"] * 100 + ["1"] * 60
    assert {row["loss"] for row in rows[100:]} == {"2"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ledger-replaced.csv", "ledger.csv"]


def test_two_restarts_from_one_checkpoint_leave_each_step_once(tmp_path: Path):
    path, replaced = tmp_path / "ledger.csv", tmp_path / "ledger-replaced.csv"
    run(tmp_path, 0, 20)
    assert run(tmp_path, 10, 15) == 10
    assert run(tmp_path, 10, 12) == 5
    assert run(tmp_path, 10, 14) == 2
    assert steps(path) == list(range(14))
    assert steps(replaced) == [*range(10, 20), *range(10, 15), *range(10, 12)]
    headers = [json.loads(line[2:]) for line in lines(path) if line.startswith("#")]
    assert headers == [HEADER, HEADER]  # none is left of processes whose rows are gone
    notes = [line for line in lines(replaced) if "replaced_from_step" in line]
    assert [json.loads(note[2:])["replaced_from_step"] for note in notes] == [10, 10, 10]


def test_a_restart_at_the_next_step_cuts_nothing(tmp_path: Path):
    run(tmp_path, 0, 5)
    assert run(tmp_path, 5, 7) == 0
    assert steps(tmp_path / "ledger.csv") == list(range(7))
    assert not (tmp_path / "ledger-replaced.csv").exists()


def test_a_restart_that_trains_nothing_writes_nothing(tmp_path: Path):
    run(tmp_path, 0, 5)
    before = (tmp_path / "ledger.csv").read_bytes()
    assert run(tmp_path, 5, 5) == 0
    assert (tmp_path / "ledger.csv").read_bytes() == before


@pytest.mark.parametrize("resumed", [True, False])
def test_a_new_run_in_an_old_folder_keeps_the_old_rows_aside(tmp_path: Path, resumed: bool):
    run(tmp_path, 0, 5)
    file = LedgerFile(tmp_path, HEADER, say=print)
    if resumed:
        assert file.resume(0) == 5
    file.write(row_of(0, loss=1.0))
    file.close()
    assert steps(tmp_path / "ledger.csv") == [0]
    assert lines(tmp_path / "ledger.csv")[1] == ORDER
    assert steps(tmp_path / "ledger-replaced.csv") == list(range(5))
    assert ORDER in lines(tmp_path / "ledger-replaced.csv")


@pytest.mark.parametrize("left", [1, 7, 40, 90])
def test_a_line_that_a_kill_left_unfinished_is_set_aside(tmp_path: Path, left: int):
    path = tmp_path / "ledger.csv"
    run(tmp_path, 0, 5)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole[: len(whole) - len(last) + left])
    # Step 4 was trained before the checkpoint at 5, but what is known of it is not to be trusted.
    assert run(tmp_path, 5, 7) == 1
    assert steps(path) == [0, 1, 2, 3, 5, 6]
    assert lines(tmp_path / "ledger-replaced.csv")[-1] == last[:left].decode()


@pytest.mark.parametrize("garbage", [b"\x00\x00\x00\n", b"\xff\xfe,,,\n", b"3,0\n", b"\n"])
def test_a_damaged_line_in_the_middle_is_set_aside(tmp_path: Path, garbage: bytes):
    path = tmp_path / "ledger.csv"
    run(tmp_path, 0, 5)
    text = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*text[:4], garbage, *text[4:]]))
    assert run(tmp_path, 5, 6) == 1
    assert steps(path) == list(range(6))
    assert (tmp_path / "ledger-replaced.csv").read_bytes().endswith(garbage)


@pytest.mark.parametrize("size", [0, 1, 20, 100, 150])
def test_a_kill_while_the_header_was_written_leaves_no_half_header(tmp_path: Path, size: int):
    path = tmp_path / "ledger.csv"
    run(tmp_path, 0, 1)
    path.write_bytes(path.read_bytes()[:size])
    run(tmp_path, 0, 2)
    text = lines(path)
    assert json.loads(text[0][2:]) == HEADER
    assert text[1] == ORDER
    assert steps(path) == [0, 1]


def test_rows_with_other_columns_are_set_aside_with_their_header(tmp_path: Path):
    run(tmp_path, 0, 3)
    file, _, cut = start(tmp_path, 3, boundaries=[0, 4, 8, 16])
    file.write({"step": 3, "loss_k": [1.0, None, 2.0]})
    file.close()
    assert cut == 3
    assert steps(tmp_path / "ledger.csv") == [3]
    assert lines(tmp_path / "ledger.csv")[1].endswith("length_2")
    assert ORDER in lines(tmp_path / "ledger-replaced.csv")


def without_phases(path: Path) -> list[str]:
    """Rewrite a ledger as it was before steps had phases; its rows."""
    names = ORDER.split(",")
    kept = [i for i, name in enumerate(names) if name not in PHASE_COLUMNS]
    assert len(kept) == len(names) - 5
    text = [
        line if line[0] == "#" else ",".join(line.split(",")[i] for i in kept)
        for line in lines(path)
    ]
    path.write_text("\n".join(text) + "\n")
    return [line for line in text if line[0].isdigit()]


def test_a_ledger_from_before_steps_had_phases_goes_on(tmp_path: Path):
    path, replaced = tmp_path / "ledger.csv", tmp_path / "ledger-replaced.csv"
    run(tmp_path, 0, 5)
    new = [line for line in lines(path) if line[0].isdigit()]
    old = without_phases(path)
    assert all("0.0625" not in line for line in old)
    assert run(tmp_path, 3, 7, restart=1) == 2
    assert steps(path) == list(range(7))
    text = lines(path)
    assert text.count(ORDER) == 1
    assert text[1] == ORDER
    # Everything that was there stands in its column, and the phases are empty.
    phases = "0.125,0.0625,0.1,0.15,0.02"
    assert text[2:5] == [line.replace(phases, ",,,,") for line in new[:3]]
    assert {line.count(",") for line in text[2:5]} == {ORDER.count(",")}
    assert [line for line in lines(replaced) if line[0].isdigit()] == [
        line.replace(phases, ",,,,") for line in new[3:]
    ]
    found = read_run(tmp_path)
    assert found.step.tolist() == list(range(7))
    assert found.loss.tolist() == [pytest.approx(10 / 3)] * 7
    known = np.isfinite(found.column("backward_seconds"))
    assert known.tolist() == [False] * 3 + [True] * 4
    assert len(found.headers) == 2


def test_a_ledger_from_before_steps_had_phases_is_read_as_it_is(tmp_path: Path):
    run(tmp_path, 0, 5)
    without_phases(tmp_path / "ledger.csv")
    found = read_run(tmp_path)
    assert found.missing == ()
    assert found.column("wait_seconds").tolist() == [0.01] * 5
    assert np.isnan(found.column("target_seconds")).all()
    (row,) = last_rows(tmp_path / "ledger.csv", 1)
    values = step_values(row)
    assert values["data_wait_share"] == 0.02
    assert values.keys() == step_values(row_of(0)).keys()


@pytest.mark.parametrize("old", ["loss_1", "step", "zebra"])
def test_rows_whose_columns_mean_something_else_are_set_aside(tmp_path: Path, old: str):
    run(tmp_path, 0, 3)
    path = tmp_path / "ledger.csv"
    text = path.read_text()
    renamed = ORDER.replace("loss_1", "loss_2") if old == "loss_1" else ORDER + f",{old}_1"
    path.write_text(text.replace(ORDER, renamed))
    assert run(tmp_path, 3, 4) == 3
    assert steps(path) == [3]
    assert renamed in lines(tmp_path / "ledger-replaced.csv")


def test_a_line_of_an_older_ledger_that_a_kill_left_unfinished_is_set_aside(tmp_path: Path):
    path = tmp_path / "ledger.csv"
    run(tmp_path, 0, 5)
    last = without_phases(path)[-1]
    path.write_bytes(path.read_bytes()[: -len(last) + 10])
    assert run(tmp_path, 5, 6) == 1
    assert steps(path) == [0, 1, 2, 3, 5]
    assert lines(tmp_path / "ledger-replaced.csv")[-1] == last[:11]


def test_a_long_ledger_is_cut_about_as_fast_as_it_is_read(tmp_path: Path):
    file, _, _ = start(tmp_path)
    file.write(row_of(0))
    file.close()
    path = tmp_path / "ledger.csv"
    *head, row = path.read_bytes().splitlines(keepends=True)
    rest = row[1:]
    path.write_bytes(b"".join([*head, *(b"%d%b" % (step, rest) for step in range(100_000))]))
    began = time.perf_counter()
    fields = sum(len(line.split(b",")) for line in path.read_bytes().splitlines())
    parsed = time.perf_counter() - began
    began = time.perf_counter()
    _, _, cut = start(tmp_path, 99_990)
    assert time.perf_counter() - began < 10 * parsed + 0.5
    assert fields > 3_000_000
    assert cut == 10


# -- disks ----------------------------------------------------------------------------------------


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond a size: a real error, after a part was written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_loses_rows_counts_them_and_leaves_no_half_line(tmp_path: Path):
    path = tmp_path / "ledger.csv"
    file, said, _ = start(tmp_path)
    for step in range(3):
        file.write(row_of(step))
    with full_disk(path.stat().st_size + 50):
        for step in range(3, 7):
            file.write(row_of(step))
    for step in range(7, 10):
        file.write(row_of(step))
    assert len(said) == 1
    assert said[0].startswith(f"ledger: {path} could not be written (")
    file.close()
    assert steps(path) == [0, 1, 2, 7, 8, 9]
    assert {line.count(",") for line in lines(path)[1:]} == {ORDER.count(",")}
    assert said[1:] == [f"ledger: 4 rows could not be written to {path}"]
    file.close()
    assert len(said) == 2


def test_a_disk_that_is_full_from_the_start_still_gets_a_header_later(tmp_path: Path):
    file, said, _ = start(tmp_path)
    with full_disk(60):
        file.write(row_of(0))
    file.write(row_of(1))
    file.close()
    text = lines(tmp_path / "ledger.csv")
    assert json.loads(text[0][2:]) == HEADER
    assert text[1] == ORDER
    assert steps(tmp_path / "ledger.csv") == [1]
    assert len(said) == 2


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("in the way of the run folder")
    file, said, cut = start(tmp_path / "file")
    for step in range(3):
        file.write(row_of(step))
    file.close()
    assert cut == 0
    assert "the run goes on" in said[0]
    assert said[1].startswith("ledger: 3 rows could not be written")


def test_a_cut_that_the_disk_refuses_is_made_later_and_loses_no_old_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run(tmp_path, 0, 10)
    before = (tmp_path / "ledger.csv").read_bytes()
    with full_disk(100):
        file, said, cut = start(tmp_path, 5)
        file.write(row_of(5))
        assert (tmp_path / "ledger.csv").read_bytes() == before
    assert cut == 0
    assert len(said) == 1
    file.write(row_of(6))  # too early for another attempt
    assert (tmp_path / "ledger.csv").read_bytes() == before
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    file.write(row_of(7))
    file.close()
    assert steps(tmp_path / "ledger.csv") == [0, 1, 2, 3, 4, 7]
    assert steps(tmp_path / "ledger-replaced.csv") == [5, 6, 7, 8, 9]
    assert said[1].startswith("ledger: 2 rows could not be written")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ledger-replaced.csv", "ledger.csv"]


# -- the time left --------------------------------------------------------------------------------


def bucketed(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds of steps whose rows are short or long: 1 s a step in the mean.

    Long rows take three times as long, for a third more tokens.
    """
    random = np.random.default_rng(seed)
    is_long = random.random(count) < 0.5
    seconds = np.where(is_long, 1.5, 0.5) * random.uniform(0.9, 1.1, count)
    tokens = np.where(is_long, 32_000.0, 24_000.0) * random.uniform(0.95, 1.05, count)
    return tokens, seconds


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slow_start", [0.0, 30.0])
def test_twenty_steps_after_a_resume_the_time_left_is_right(seed: int, slow_start: float):
    # UX-03: 10,000 steps at 1 s, resumed at 5,000
    tokens, seconds = bucketed(10_000, seed)
    seconds[5000] += slow_start  # a process's first step: kernels are chosen, workers start
    rate = Rate()
    for step in range(5000, 10_000):
        rate.add(tokens=tokens[step], seconds=seconds[step])
        left = seconds[step + 1 :].sum()
        if step == 5019:
            assert rate.seconds_left(tokens[step + 1 :].sum()) == pytest.approx(left, rel=0.2)
        elif step > 5200 and left > 500:
            assert rate.seconds_left(tokens[step + 1 :].sum()) == pytest.approx(left, rel=0.1)


def test_the_next_epoch_begins_with_the_time_left_of_the_run():
    # UX-03: the same at the start of another epoch; its first step waits for workers
    tokens, seconds = bucketed(10_000)
    seconds[7500] += 5
    rate = Rate()
    for step in range(5000, 7520):
        rate.add(tokens=tokens[step], seconds=seconds[step])
    left = seconds[7520:].sum()
    assert rate.seconds_left(tokens[7520:].sum()) == pytest.approx(left, rel=0.2)


def test_a_run_that_becomes_slower_is_believed_after_some_hundred_steps():
    rate = Rate()
    for step in range(1400):
        rate.add(tokens=1000, seconds=1.0 if step < 400 else 4.0)
        if step == 600:
            assert 250 < rate.tokens_per_second < 400
    assert rate.tokens_per_second == pytest.approx(250, rel=0.01)


def test_the_rate_is_that_of_the_mixture_not_the_mean_of_rates():
    rate = Rate()
    for _ in range(500):
        rate.add(tokens=1000, seconds=1)
        rate.add(tokens=1000, seconds=9)
    assert rate.tokens_per_second == pytest.approx(200, rel=0.02)


def test_before_anything_is_known_the_time_left_is_not_a_number():
    rate = Rate()
    assert np.isnan(rate.seconds_left(10.0))
    assert rate.seconds_left(0) == 0
    rate.add(tokens=100, seconds=2)
    assert rate.seconds_left(100) == 2
    assert rate.seconds_left(-5) == 0  # never negative
    silent = Rate()
    silent.add(tokens=0, seconds=1)
    assert np.isnan(silent.seconds_left(10))


# -- the stopwatch --------------------------------------------------------------------------------


def test_a_stopwatch_counts_only_while_it_runs(monkeypatch: pytest.MonkeyPatch):
    now = iter([10.0, 12.0, 20.0, 21.5, 50.0, 50.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = Stopwatch()
    watch.start()
    watch.start()  # runs already
    watch.pause()
    watch.pause()  # stands already
    watch.start()
    assert watch.take() == 3.5
    assert watch.take() == 0
    watch.start()
    assert watch.take() == 0.25
