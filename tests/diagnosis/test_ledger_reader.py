"""The ledger as it is read back, folders in which a run is found, and what is refused."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lightning.callbacks.ledger_file import LedgerFile
from dflash_lightning.diagnosis.ledger import CHUNK, read_run
from dflash_lightning.diagnosis.run import BUCKET_COLUMNS, STEP_COLUMNS

HEADER = {"format": 1, "boundaries": [0, 8, 16], "weight_share": [0.25, 0.75], "plan": "abc"}


def write(folder: Path, rows: list[dict[str, Any]], **header: Any) -> Path:
    """A process that writes rows; its first one decides where an older ledger is cut."""
    folder.mkdir(exist_ok=True, parents=True)
    file = LedgerFile(folder, {**HEADER, **header}, say=pytest.fail)
    file.resume(rows[0]["step"])
    for row in rows:
        file.write(row)
    file.close()
    return folder / "ledger.csv"


def rows_of(steps: Any, **more: Any) -> list[dict[str, Any]]:
    """Rows whose loss tells the step, with two buckets of which the second is often empty."""
    return [
        {
            "step": int(step),
            "loss": 2 + step / 1000,
            "lr": 1e-4,
            "loss_k": [2.0, None if step % 3 else 3.0 + step],
            "weight_k": [100.0, 0.0 if step % 3 else 50.0],
            **more,
        }
        for step in steps
    ]


def table(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_text("\n".join(lines) + end)
    return path


# -- what is read ---------------------------------------------------------------------------------


numbers = st.one_of(
    st.none(),
    st.floats(-1e6, 1e6),
    st.floats(1e-30, 1e-3),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0]),
)
counts = st.one_of(st.none(), st.integers(0, 2**53))


@st.composite
def processes(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """Rows of the processes of a run, each of which goes on from a step of the one before."""
    num_buckets = draw(st.integers(1, 3))
    found, first = [], 0
    for restart in range(draw(st.integers(1, 4))):
        rows = []
        for step in range(first, first + draw(st.integers(1, 6))):
            row = {name: draw(numbers) for name in STEP_COLUMNS}
            row |= {name: draw(counts) for name in ("rows", "tokens_seen", "top_row")}
            row |= {"step": step, "restart": restart, "time": draw(st.floats(0, 2e9))}
            for name in BUCKET_COLUMNS:
                row[f"{name}_k"] = [draw(numbers) for _ in range(num_buckets)]
            rows.append(row)
        found.append(rows)
        first = draw(st.integers(0, rows[-1]["step"] + 1))
    return found


def expected(value: float | None, name: str = "") -> float:
    """A value as seven digits keep it, or for the time of day three after the point."""
    if value is None:
        return math.nan
    if name == "time":
        return float(f"{value:.3f}")
    return float(f"{value:.7g}") if isinstance(value, float) else float(value)


@settings(max_examples=60, deadline=None)
@given(found=processes(), data=st.data())
def test_a_run_is_read_as_it_was_written_over_restarts_and_a_kill(
    tmp_path_factory: pytest.TempPathFactory, found: list[list[dict[str, Any]]], data: st.DataObject
):
    folder = tmp_path_factory.mktemp("ledger")
    kept: dict[int, dict[str, Any]] = {}
    first_of: dict[int, int] = {}
    boundaries = list(range(len(found[0][0]["loss_k"]) + 1))
    for number, rows in enumerate(found):
        path = write(folder, rows, boundaries=boundaries, number=number)
        first = rows[0]["step"]
        kept = {step: row for step, row in kept.items() if step < first}
        first_of = {n: step for n, step in first_of.items() if step in kept}
        kept |= {row["step"]: row for row in rows}
        first_of[number] = first
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole + last[: data.draw(st.integers(0, len(last) - 1))])  # killed
    run = read_run(folder)
    assert run.kind == "ledger"
    assert run.step.dtype == np.int64
    assert run.step.tolist() == list(kept) == list(range(len(kept)))
    for name in STEP_COLUMNS[1:]:
        values = [expected(row[name], name) for row in kept.values()]
        np.testing.assert_array_equal(run.column(name), values, err_msg=name)
    for name in BUCKET_COLUMNS:
        values = [[expected(x) for x in row[f"{name}_k"]] for row in kept.values()]
        np.testing.assert_array_equal(run.bucket(name), values, err_msg=name)
    headers = [(at, header["number"]) for at, header in run.headers]
    assert headers == [(step, number) for number, step in first_of.items()]
    assert run.header["boundaries"] == boundaries


def test_rows_beyond_the_first_chunk_are_read_as_well(tmp_path: Path):
    count = 2 * CHUNK + 7
    write(tmp_path, rows_of(range(count)))
    run = read_run(tmp_path)
    assert run.step.tolist() == list(range(count))
    np.testing.assert_allclose(run.loss, 2 + np.arange(count) / 1000, rtol=1e-6)
    assert np.isnan(run.bucket("loss")[:, 1]).tolist() == [step % 3 > 0 for step in range(count)]


def test_the_last_row_of_a_step_counts_and_headers_keep_to_their_first_row(tmp_path: Path):
    path = table(
        tmp_path / "ledger.csv",
        '# {"number": 0}',
        "step,loss",
        *(f"{step},{step}" for step in range(6)),
        '# {"number": 1}',  # all its rows are replaced
        "step,loss",
        "4,40",
        "5,50",
        '# {"number": 2}',
        "3,300",
        "4,400",
        "5,500",
        "6,600",
    )
    run = read_run(path)
    assert run.step.tolist() == list(range(7))
    assert run.loss.tolist() == [0, 1, 2, 300, 400, 500, 600]
    assert run.headers == ((0, {"number": 0}), (3, {"number": 2}))


def test_step_and_loss_are_enough_and_strange_columns_do_no_harm(tmp_path: Path):
    path = table(tmp_path / "ledger.csv", "moon,loss,step", "7,2.5,0", "8,nan,1", "9,-inf,2", ",,3")
    run = read_run(path)
    assert run.step.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(run.loss, [2.5, math.nan, -math.inf, math.nan])
    assert dict(run.columns).keys() == {"loss"}
    assert run.num_buckets == 0
    assert np.isnan(run.column("lr")).all()
    kinds = [text.split(":")[0] for text in run.missing]
    assert kinds == [
        "loss per length bucket and its noise",
        "shares of the buckets in the data set, length of the warm-up, settings of the plan",
        "learning rate",
        "gradient norm",
        "edges of epochs, which look like jumps",
        "tokens seen, at which runs with other batches compare",
        "rows of a step",
        "the row that moves a step most",
        "restarts",
        "updates that were skipped",
    ]


def test_bucket_columns_are_read_by_name_and_absent_ones_are_unknown(tmp_path: Path):
    path = table(
        tmp_path / "ledger.csv", "step,loss,loss_1,weight_0,loss_0,noise_1", "0,2,21,5,20,0.5"
    )
    run = read_run(path)
    assert run.bucket("loss").tolist() == [[20, 21]]
    np.testing.assert_array_equal(run.bucket("weight"), [[5, math.nan]])
    np.testing.assert_array_equal(run.bucket("noise"), [[math.nan, 0.5]])
    assert np.isnan(run.bucket("length")).all()
    assert "rows, eff, length of the length buckets: the ledger.csv of the run folder has them" in (
        run.missing
    )


def test_a_complete_ledger_misses_nothing(tmp_path: Path):
    values = {name: 1.0 for name in STEP_COLUMNS if name != "step"}
    buckets = {f"{name}_k": [1.0, 2.0] for name in BUCKET_COLUMNS}
    write(tmp_path, [{"step": step, **values, **buckets} for step in range(3)])
    assert read_run(tmp_path).missing == ()


@pytest.mark.parametrize("text", ["+1.5", " 1.5 ", "1.5e0", ".15e1", "01.5", "1.5E+00"])
def test_a_number_that_python_reads_is_read(tmp_path: Path, text: str):
    path = table(tmp_path / "ledger.csv", "step,loss,lr", "0,2,0", f"1,{text},", "2,3,0")
    assert read_run(path).loss.tolist() == [2, 1.5, 3]


def test_lines_may_end_as_on_windows_and_be_empty(tmp_path: Path):
    path = tmp_path / "ledger.csv"
    path.write_bytes(b'# {"plan": "x"}\r\nstep,loss\r\n0,2\r\n\r\n1,3\r\n2,')
    run = read_run(path)
    assert (run.step.tolist(), run.loss.tolist(), run.header["plan"]) == ([0, 1], [2, 3], "x")


def test_steps_that_a_full_disk_lost_leave_a_gap(tmp_path: Path):
    write(tmp_path, rows_of([0, 1, 2, 7, 8, 9]))
    run = read_run(tmp_path)
    assert run.step.tolist() == [0, 1, 2, 7, 8, 9]
    assert not any("log_every_n_steps" in text for text in run.missing)


# -- where a run is found -------------------------------------------------------------------------


def test_a_run_folder_a_file_and_the_folder_of_versions_are_the_same_run(tmp_path: Path):
    root = tmp_path / "runs" / "orange"
    for number in (2, 9, 10):
        write(root / f"version_{number}", rows_of(range(number)))
    (root / "version_11").mkdir()  # a process that died before its first step
    (root / "version_old").mkdir()
    for source in (root, str(root), root / "version_10", root / "version_10" / "ledger.csv"):
        run = read_run(source)
        assert (run.name, len(run)) == ("orange/version_10", 10)
    assert len(read_run(root / "version_9")) == 9
    assert read_run(root, name="stratified").name == "stratified"


def test_a_folder_without_versions_gives_the_run_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write(tmp_path / "purple", rows_of(range(3)))
    assert read_run(path).name == read_run(path.parent).name == "purple"
    monkeypatch.chdir(path.parent)
    assert read_run(".").name == read_run("ledger.csv").name == "purple"
    path.rename("of-last-week.csv")
    run = read_run("of-last-week.csv")  # a ledger under another name
    assert (run.name, run.kind, run.num_buckets) == ("of-last-week", "ledger", 2)


def test_a_ledger_is_preferred_to_metrics_and_metrics_to_nothing(tmp_path: Path):
    metrics = table(tmp_path / "metrics.csv", "epoch,step,train/loss", "0,0,7")
    assert read_run(tmp_path).kind == "Lightning's metrics.csv"
    write(tmp_path, rows_of(range(2)))
    assert read_run(tmp_path).kind == "ledger"
    assert read_run(metrics).loss.tolist() == [7]


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["step,loss", "0,2", "1,two"], "line 3: loss must be a number or empty, got 'two'. Mend"),
        (["step,loss", "0,2", "1,1.5.2"], "line 3: loss must be a number or empty, got '1.5.2'."),
        (["step,loss", "0,2", "1,1 2"], "line 3: loss must be a number or empty, got '1 2'."),
        (["step,loss", "0,true"], "line 2: loss must be a number or empty, got 'true'."),
        (["step,loss", "0,null"], "line 2: loss must be a number or empty, got 'null'."),
        (["step,loss", "0,[1]"], r"line 2: loss must be a number or empty, got '\[1\]'."),
        (
            ["step,loss", "0,2,3"],
            "line 2: a row must have 2 cells, as the line of names has, got 3",
        ),
        (["step,loss", "0,2", "", "1"], "line 4: a row must have 2 cells, as the line of names"),
        (["step,loss", "0,2", "step,loss,lr"], "line 3: a row must have 2 cells"),
        (["step,loss", "0,2", "1.5,2"], "line 3: step must be a whole number from 0 on, got 1.5."),
        (["step,loss", "-1,2"], "line 2: step must be a whole number from 0 on, got -1."),
        (["step,loss", ",2"], "line 2: step must be a whole number from 0 on, got nan."),
        (["step,loss", "inf,2"], "line 2: step must be a whole number from 0 on, got inf."),
        (["step,loss", "1e300,2"], r"line 2: step must be a whole number from 0 on, got 1e\+300."),
        (
            ["step,lr", "0,2"],
            "must have the columns step and loss, and lacks loss; it has step, lr.",
        ),
        (
            ["a,b", "0,2"],
            "must have the columns step and loss, and lacks step and loss; it has a, b",
        ),
        (
            ["# {", "step,loss", "0,2"],
            "line 1: a line that begins with # must be an object in JSON",
        ),
        (["step,loss", "# [1]", "0,2"], "line 2: a line that begins with # must be an object"),
        (["step,loss", "0,2", "# note"], "line 3: a line that begins with # must be an object"),
        (["step,loss"], "must hold steps, and holds no finished one"),
        ([""], "must hold steps, and holds no finished one"),
        (['# {"plan": 1}'], "must hold steps, and holds no finished one"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, lines: list[str], says: str):
    path = table(tmp_path / "ledger.csv", *lines)
    with pytest.raises(ValueError, match=f"^{path}.*{says}") as caught:
        read_run(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("at", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 5])
@pytest.mark.parametrize("cell", ["x", "1,5", "\x00", "0x10"])
def test_a_damaged_cell_is_found_wherever_it_is(tmp_path: Path, at: int, cell: str):
    lines = [f"{step},2,0.5" for step in range(2 * CHUNK + 9)]
    lines[at] = f"{at},2,{cell}"
    path = table(tmp_path / "ledger.csv", "step,loss,lr", *lines)
    with pytest.raises(ValueError, match=rf"line {at + 2}: (lr must be a number|a row must have)"):
        read_run(path)


def test_cells_that_make_up_for_one_another_are_noticed(tmp_path: Path):
    path = table(tmp_path / "ledger.csv", "step,loss,lr", "0,2", "1,2,3,4")
    with pytest.raises(ValueError, match="line 2: a row must have 3 cells"):
        read_run(path)


def test_bytes_changed_by_chance_are_refused_or_leave_numbers_that_a_slow_reader_finds(
    tmp_path: Path,
):
    path = write(tmp_path, rows_of(range(40)))
    whole = path.read_bytes()
    draw = random.Random(0)
    begin = whole.index(b"\n0,") + 1
    refused = 0
    for _ in range(300):
        at = draw.randrange(begin, len(whole))
        changed = whole[:at] + bytes([draw.randrange(32, 127)]) + whole[at + 1 :]
        path.write_bytes(changed)
        try:
            run = read_run(path)
        except ValueError:
            refused += 1
            continue
        lines = [x.split(",") for x in changed[begin:].decode().split("\n")[:-1]]
        slow = {float(cells[0]): float(cells[7] or "nan") for cells in lines}
        assert dict(zip(run.step, run.loss, strict=True)) == pytest.approx(slow, nan_ok=True)
    assert refused > 100


def test_a_folder_without_a_run_says_what_was_sought(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has neither ledger\.csv nor") as caught:
        read_run(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path} must hold a run")
    assert "Give a run folder with ledger.csv or metrics.csv" in str(caught.value)


@pytest.mark.parametrize("source", ["no/such", "/tmp/no/such/run", "a/b.csv", "wandb:moon", "x"])
def test_a_name_of_nothing_says_what_is_accepted(source: str):
    with pytest.raises(ValueError, match="nothing of that name is there") as caught:
        read_run(source)
    assert str(caught.value).startswith(f"{source} must be a run folder with ledger.csv")


def test_a_slip_in_a_path_is_not_looked_for_on_the_net(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="nothing of that name is there"):
        read_run("runs/orange/version_8")


def test_headers_hold_what_was_written(tmp_path: Path):
    path = write(tmp_path, rows_of(range(2)), settings={"data.seed": 0}, order="bucketed")
    header = json.loads(path.read_text().splitlines()[0][2:])
    assert read_run(path).headers == ((0, header),)
    assert header["settings"] == {"data.seed": 0}
