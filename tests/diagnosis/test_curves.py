"""Curves of other trainers: which columns count, how rows become steps, what is refused."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from dflash_lightning.diagnosis.ledger import read_run
from dflash_lightning.diagnosis.logged import ledger_name
from dflash_lightning.diagnosis.missing import MISSING


def table(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_text("\n".join(lines) + end)
    return path


def pairs(path: Path) -> list[tuple[int, float]]:
    run = read_run(path)
    return list(zip(run.step.tolist(), run.loss.tolist(), strict=True))


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        *("step", "Step", "global_step", "trainer/global_step", "_step", "iteration", "ITER"),
        "train/global_step",
    ],
)
@pytest.mark.parametrize(
    "loss",
    [
        *("loss", "Loss", "train/loss", "train_loss", "training_loss", "loss_step"),
        *("train/loss_step", "train_loss_step", "Value", "orange - train/loss"),
    ],
)
def test_the_names_that_trainers_use_are_known(tmp_path: Path, step: str, loss: str):
    path = table(tmp_path / "curve.csv", f"{step},{loss}", "10,3.5", "20,3")
    assert pairs(path) == [(10, 3.5), (20, 3.0)]
    run = read_run(path)
    assert (run.name, run.kind) == ("curve", "CSV of a loss")


@pytest.mark.parametrize(
    "name",
    [
        *("val/loss", "train/loss_epoch", "orange - train/loss__MIN", "loss_0", "Wall time"),
        *("lr-AdamW-momentum", "restart", "train/bucket_0/spread"),
    ],
)
def test_names_that_mean_something_else_are_left_alone(name: str):
    assert ledger_name(name) is None


def test_a_chart_that_wandb_exports_is_read_without_its_extremes(tmp_path: Path):
    path = tmp_path / "wandb_export.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        key = "orange - train/loss"
        writer.writerow(["trainer/global_step", key, f"{key}__MIN", f"{key}__MAX"])
        writer.writerows([[0, 4.5, 4.25, 4.75], [50, 4.0, 3.75, 4.25]])
    assert pairs(path) == [(0, 4.5), (50, 4.0)]


def test_a_scalar_that_tensorboard_exports_is_read(tmp_path: Path):
    path = table(tmp_path / "t.csv", "Wall time,Step,Value", "1.7e9,0,4.5", "1.7e9,1,4.25")
    assert pairs(path) == [(0, 4.5), (1, 4.25)]


def test_a_named_training_loss_comes_before_a_loss_and_lightnings_step_before_others(
    tmp_path: Path,
):
    path = table(tmp_path / "t.csv", "_step,step,trainer/global_step,loss,train/loss", "9,8,7,1,2")
    assert pairs(path) == [(7, 2.0)]


def test_optional_columns_are_taken_where_they_are(tmp_path: Path):
    path = table(
        tmp_path / "log.csv",
        "step,loss,learning_rate,grad_norm,epoch,tokens_seen,moon",
        "0,3,1e-4,0.5,0.25,100,full",
        "1,2,2e-4,,1.25,200,new",
    )
    run = read_run(path)
    assert run.column("lr").tolist() == [1e-4, 2e-4]
    np.testing.assert_array_equal(run.column("grad_norm"), [0.5, math.nan])
    assert run.column("epoch").tolist() == [0, 1]  # Transformers logs parts of epochs
    assert run.column("tokens_seen").tolist() == [100, 200]
    kept = {"gaps", "lr", "grad_norm", "epoch", "tokens_seen"}
    assert run.missing == tuple(x for name, x in MISSING.items() if name not in kept | NO_BUCKETS)


NO_BUCKETS = {"bucket_columns"}


def test_a_bare_curve_says_all_that_it_cannot_tell(tmp_path: Path):
    run = read_run(table(tmp_path / "curve.csv", "step,loss", "0,3", "1,2"))
    assert run.missing == tuple(
        text for name, text in MISSING.items() if name not in {"gaps", "bucket_columns"}
    )
    assert run.missing[0].startswith("loss per length bucket and its noise: the ledger.csv")
    assert "learning rate: log it as lr" in run.missing
    assert (run.headers, dict(run.buckets), run.num_buckets) == ((), {}, 0)


# -- rows -----------------------------------------------------------------------------------------


def test_two_columns_of_numbers_are_step_and_loss(tmp_path: Path):
    assert pairs(table(tmp_path / "c.csv", "0,3.5", "1,3.25")) == [(0, 3.5), (1, 3.25)]
    assert pairs(table(tmp_path / "c.csv", "", "5,nan")) == [
        (5, pytest.approx(math.nan, nan_ok=True))
    ]


def test_the_last_line_needs_no_end_unless_it_is_cut(tmp_path: Path):
    path = tmp_path / "c.csv"
    assert pairs(table(path, "step,loss,lr", "0,3,1", "1,2,1", end="")) == [(0, 3.0), (1, 2.0)]
    for cut in ("1", "1,2", "1,2.", "1,2,1e-"):
        expected = [(0, 3.0)]
        assert pairs(table(path, "step,loss,lr", "0,3,1", cut, end="")) == expected, cut


def test_empty_lines_spaces_a_byte_order_mark_and_windows_ends_do_no_harm(tmp_path: Path):
    path = tmp_path / "c.csv"
    path.write_bytes("\ufeffstep, loss\r\n\r\n0, 3.5\r\n1 ,\r\n2, 3\r\n".encode())
    assert pairs(path) == [(0, 3.5), (2, 3.0)]


def test_steps_may_be_written_as_decimal_numbers_and_in_any_order(tmp_path: Path):
    path = table(tmp_path / "c.csv", "step,loss", "30.0,1", "20.0,2", "10.0,3")
    assert pairs(path) == [(10, 3.0), (20, 2.0), (30, 1.0)]
    assert pairs(table(path, "step,loss", "3,1", "1,2", "2,3")) == [(1, 2.0), (2, 3.0), (3, 1.0)]


def test_of_a_step_that_is_there_twice_the_later_row_counts(tmp_path: Path):
    path = table(tmp_path / "c.csv", "step,loss", "0,1", "1,2", "1,3", "2,4")
    assert pairs(path) == [(0, 1.0), (1, 3.0), (2, 4.0)]


def test_rows_of_one_step_are_merged_and_those_with_a_loss_come_first(tmp_path: Path):
    path = table(
        tmp_path / "metrics.csv",
        "epoch,lr-AdamW,step,tokens_seen,train/loss,val/loss",
        ",1e-4,0,,,",  # Lightning's LearningRateMonitor
        "0,,0,100,4,",
        ",2e-4,1,,,",
        "0,,1,200,3,",
        "0,,2,200,,5",  # a validation after two steps
        ",3e-4,2,,,",
        "1,,2,300,2,",
        "0,,2,200,,5",  # a row of a validation that comes late
        "1,,3,300,,4",  # steps without a loss are none
    )
    run = read_run(path)
    assert run.step.tolist() == [0, 1, 2]
    assert run.loss.tolist() == [4, 3, 2]
    assert run.column("lr").tolist() == [1e-4, 2e-4, 3e-4]
    assert run.column("epoch").tolist() == [0, 0, 1]
    assert run.column("tokens_seen").tolist() == [100, 200, 300]


def test_a_restart_in_metrics_voids_what_it_repeats_and_what_it_left_behind(tmp_path: Path):
    path = table(
        tmp_path / "metrics.csv",
        "epoch,step,train/loss",
        *(f"0,{step},{10 + step}" for step in range(7)),
        *(f"0,{step},{20 + step}" for step in (3, 4)),  # killed again, at once
        *(f"0,{step},{30 + step}" for step in (2, 3, 4)),
        "1,5,35",
    )
    run = read_run(path)
    assert run.step.tolist() == [0, 1, 2, 3, 4, 5]
    assert run.loss.tolist() == [10, 11, 32, 33, 34, 35]
    assert np.diff(run.column("restart")).nonzero()[0].tolist() == [1, 2]  # steps 2 and 3


def test_metrics_with_the_newest_row_first_have_no_restarts(tmp_path: Path):
    path = table(tmp_path / "metrics.csv", "step,loss", "30,1", "20,2", "10,3")
    assert pairs(path) == [(10, 3.0), (20, 2.0), (30, 1.0)]


def test_our_own_keys_become_the_columns_of_the_ledger(tmp_path: Path):
    names = ("loss", "weight", "rows", "noise", "eff", "length")
    buckets = [f"train/bucket_{k}/{name}" for k in (0, 1) for name in names]
    path = table(
        tmp_path / "metrics.csv",
        ",".join(
            ["epoch,step,train/loss,train/top_row,train/skipped_steps,train/restart", *buckets]
        ),
        "0,0,4,17,0,0,1,2,3,4,5,6,nan,0,0,nan,0,nan",
        "0,1,4,nan,1,0,1,2,3,4,5,6,7,8,9,10,11,12",
        "0,2,4,3,1,0,1,2,3,4,5,6,7,8,9,10,11,12",
        "0,3,4,3,3,1,1,2,3,4,5,6,7,8,9,10,11,12",
    )
    run = read_run(path)
    np.testing.assert_array_equal(run.column("top_row"), [17, math.nan, 3, 3])
    assert run.column("skipped").tolist() == [0, 1, 0, 1]  # the logger counts those of the run
    assert run.column("restart").tolist() == [0, 0, 0, 1]
    assert run.num_buckets == 2
    for i, name in enumerate(names):
        assert run.bucket(name)[1:].tolist() == [[1 + i, 7 + i]] * 3
    np.testing.assert_array_equal(run.bucket("loss")[0], [1, math.nan])
    assert not any("bucket" in text for text in run.missing if not text.startswith("shares"))


def test_updates_skipped_before_the_first_row_that_is_there_are_not_its_own(tmp_path: Path):
    path = table(tmp_path / "m.csv", "step,loss,train/skipped_steps", "7,1,2", "8,1,2", "9,1,3")
    assert read_run(path).column("skipped").tolist() == [0, 0, 1]
    path = table(tmp_path / "m.csv", "step,loss,train/skipped_steps", "0,1,1", "1,1,1")
    assert read_run(path).column("skipped").tolist() == [1, 0]


@pytest.mark.parametrize("gap", [2, 50, 1000])
def test_a_log_of_every_nth_step_says_so(tmp_path: Path, gap: int):
    rows = [f"{step},{step % 7}" for step in range(gap - 1, 20 * gap, gap)]
    run = read_run(table(tmp_path / "c.csv", "step,loss", *rows))
    assert len(run) == 20
    assert run.missing[0] == (
        f"most steps, since one of {gap:,} is logged: log_every_n_steps=1 logs all, and ledger.csv "
        "always has them; what is said of single steps holds for the logged ones"
    )


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            ["tokens,nats", "0,3"],
            r"step, called trainer/global_step, .*, _step; its columns are tokens, nats\. Give a",
        ),
        (
            ["step,nats", "0,3"],
            "must have a column of the loss, called train/loss, .* are step, nats. Give a",
        ),
        (["step,loss", "0,", "1,"], "must hold steps with a loss, and no row has a loss."),
        (["step,loss"], "must hold steps with a loss, and no row has a step."),
        ([""], "must hold steps with a loss, and is empty."),
        (
            ["0,1,2", "1,2,3"],
            "line 1: must name the columns, as more than step and loss .* 3 numbers",
        ),
        (["5"], "line 1: must name the columns"),
        (["step,loss", "0,3", "1,much"], "line 3: loss must be a number or empty, got 'much'."),
        (["step,loss", "0,3", "one,2"], "line 3: step must be a number or empty, got 'one'."),
        (["step,loss", "0,3", "0.5,2"], "line 3: step must be a whole number from 0 on, got 0.5."),
        (["step,loss", "-1,3"], "line 2: step must be a whole number from 0 on, got -1."),
        (["step,loss", "nan,3"], "line 2: step must be a whole number from 0 on, got nan."),
        (
            ["step,loss", "0,3,4"],
            "line 2: a row must have 2 cells, as the line of names has, got 3",
        ),
        (["step,loss", "0", "1,2"], "line 2: a row must have 2 cells"),
        (
            ["step,red - train/loss,blue - train/loss", "0,3,4"],
            "must be of one run, and has 2 columns of the loss: red - train/loss, blue",
        ),
        (["step,loss", "0,", ",3"], "must have a step and a loss in one row, and no row has both"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, lines: list[str], says: str):
    path = table(tmp_path / "curve.csv", *lines)
    with pytest.raises(ValueError, match=f"^{path}.*{says}") as caught:
        read_run(path)
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_refused(tmp_path: Path):
    path = tmp_path / "curve.csv"
    path.touch()
    with pytest.raises(ValueError, match="must hold steps with a loss, and is empty"):
        read_run(path)


def test_a_file_of_something_else_is_refused_in_a_line(tmp_path: Path):
    path = tmp_path / "picture.png"
    path.write_bytes(bytes(range(256)) * 50)
    with pytest.raises(ValueError, match=f"^{path}") as caught:
        read_run(path)
    assert "\n" not in str(caught.value)


def test_many_columns_are_not_all_listed(tmp_path: Path):
    names = ",".join(f"c{i}" for i in range(30))
    path = table(tmp_path / "c.csv", names, ",".join("1" * 30))
    with pytest.raises(ValueError, match="c10, c11 and 18 more"):
        read_run(path)
