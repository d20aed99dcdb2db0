"""Restarts inside one process: rows, state, settings; a test for each field case."""

import csv
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from training.chain import KillAt
from training.faults import Crash, CrashError
from training.restarts import (
    BATCHING,
    EPOCHS,
    Run,
    last,
    make_module,
    run,
    state_of,
)

from dflash_lightning import Batching
from dflash_lightning.data.store import RowStore

# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_rs_01_the_epoch_after_a_restart_has_its_own_order(
    store: RowStore, whole: Run, at_epoch_end: tuple[Path, Run], tmp_path: Path, workers: int
) -> None:
    again = run(store, tmp_path, ckpt=at_epoch_end[0], data={"num_workers": workers})
    first = whole.steps_of_epochs[0]
    assert min(again.watch.rows) == first
    for step, rows in again.watch.rows.items():
        assert rows == whole.watch.rows[step]
        assert again.watch.epochs[step] == whole.watch.epochs[step]
    assert again.watch.rows.keys() == {s for s in whole.watch.rows if s >= first}
    head = [whole.watch.rows[s] for s in range(3)]
    assert [again.watch.rows[first + s] for s in range(3)] != head


def test_rs_02_the_rest_of_an_epoch_is_that_of_the_same_plan(
    store: RowStore, whole: Run, at_seven: Path, tmp_path: Path
) -> None:
    again = run(store, tmp_path, ckpt=at_seven)
    first = whole.steps_of_epochs[0]
    assert again.watch.rows == {s: rows for s, rows in whole.watch.rows.items() if s >= 7}
    epoch = [row for s in range(7) for row in whole.watch.rows[s]]
    epoch += [row for s in range(7, first) for row in again.watch.rows[s]]
    assert sorted(epoch) == whole.trainer.datamodule.train_rows.tolist()


def test_rs_03_batches_that_workers_built_ahead_are_not_counted(
    store: RowStore, whole: Run, tmp_path: Path
) -> None:
    four = {"num_workers": 4}
    crashed = run(store, tmp_path, Crash(12), saves=10, data=four)
    assert isinstance(crashed.error, CrashError)
    again = run(store, tmp_path, ckpt=last(tmp_path), data=four, max_steps=14)
    assert again.watch.rows == {step: whole.watch.rows[step] for step in (10, 11, 12, 13)}


def test_rs_04_the_skip_is_not_applied_again_in_later_epochs(
    store: RowStore, whole: Run, at_seven: Path, tmp_path: Path
) -> None:
    again = run(store, tmp_path, ckpt=at_seven)
    first, *later = whole.steps_of_epochs
    assert again.steps_of_epochs == [first - 7, *later]


def test_a_run_stopped_twice_within_one_epoch_loses_nothing(
    store: RowStore, whole: Run, at_seven: Path, tmp_path: Path
) -> None:
    middle = run(store, tmp_path, KillAt(9), ckpt=at_seven)
    again = run(store, tmp_path, ckpt=last(tmp_path))
    assert list(middle.watch.rows) == [7, 8, 9]
    assert {**middle.watch.rows, **again.watch.rows} == {
        s: rows for s, rows in whole.watch.rows.items() if s >= 7
    }
    for name, value in state_of(again.trainer).items():
        assert torch.equal(value, state_of(whole.trainer)[name]), name


class Steps(DummyLogger):
    """Remembers the steps of the losses that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def log_metrics(self, metrics, step=None) -> None:
        if "train/loss" in metrics:
            self.seen.append(step)


def test_loggers_keep_the_step_axis_over_restarts_under_other_layouts(
    store: RowStore, tmp_path: Path
) -> None:
    logger = Steps()
    for accumulate, stop in [(1, 6), (3, 9), (2, 12), (2, 10_000)]:
        ckpt = last(tmp_path) if logger.seen else None
        layout = {"accumulate_grad_batches": accumulate, "log_every_n_steps": 1}
        end = run(store, tmp_path, KillAt(stop), ckpt=ckpt, logger=logger, **layout)
    assert logger.seen == list(range(end.trainer.global_step))


def test_rs_12_anchors_after_a_restart_are_those_of_a_run_left_alone(
    store: RowStore, whole: Run, at_seven: Path, tmp_path: Path
) -> None:
    torch.manual_seed(123)
    again = run(store, tmp_path, ckpt=at_seven, max_steps=9, data={"num_workers": 2})
    assert again.watch.anchors == {step: whole.watch.anchors[step] for step in (7, 8)}


# -- state -----------------------------------------------------------------------------------------


def test_rs_05_rate_moments_and_weights_are_bit_equal_after_the_next_step(
    store: RowStore, whole: Run, at_seven: Path, tmp_path: Path
) -> None:
    again = run(store, tmp_path, ckpt=at_seven, snapshot=8, max_steps=-1)
    assert again.watch.rates == {s: rate for s, rate in whole.watch.rates.items() if s >= 7}
    assert again.watch.state.keys() == whole.watch.state.keys()
    for name, value in whole.watch.state.items():
        assert torch.equal(again.watch.state[name], value), name


def test_rs_05_a_warm_up_that_was_stopped_goes_on(
    store: RowStore, whole: Run, tmp_path: Path
) -> None:
    run(store, tmp_path, KillAt(1))
    again = run(store, tmp_path, ckpt=last(tmp_path))
    assert again.watch.rates == {s: rate for s, rate in whole.watch.rates.items() if s >= 2}
    assert [whole.watch.rates[s] for s in range(2, 5)] == pytest.approx([1.8e-3, 2.4e-3, 3e-3])


def test_rs_05_weights_alone_are_no_resume_point_but_a_start(
    store: RowStore, whole: Run, tmp_path: Path
) -> None:
    file = tmp_path / "weights.ckpt"
    whole.trainer.save_checkpoint(file, weights_only=True)
    with pytest.raises(ValueError, match=r"holds weights only.* give it as model\.init\.$") as line:
        run(store, tmp_path / "a", ckpt=file)
    assert "\n" not in str(line.value)
    new = run(store, tmp_path / "b", module=make_module(init=str(file)), max_steps=2)
    assert list(new.watch.rows) == [0, 1]
    assert new.watch.rates[0] == pytest.approx(3e-3 / 5)
    assert new.trainer.lightning_module.progress["restarts"] == 0
    begun = make_module(init=str(file))
    begun._start_weights()
    for name, value in whole.trainer.lightning_module.drafter.state_dict().items():
        assert torch.equal(begun.drafter.state_dict()[name], value), name


# -- settings --------------------------------------------------------------------------------------


def rates_of_ledger(folder: Path) -> dict[int, float]:
    lines = (folder / "ledger.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {int(row["step"]): float(row["lr"]) for row in rows}


def cells(said: str, setting: str) -> list[str]:
    """The row of the table of changes that begins with a setting."""
    (line,) = (x for x in said.splitlines() if x.strip().startswith(f"{setting} "))
    return line.split(maxsplit=3)


def test_rs_06_a_run_that_is_extended_says_so_and_does_not_warm_up_again(
    store: RowStore, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    by_ratio = {"warmup_steps": None, "warmup_ratio": 0.25}
    run(store, tmp_path, module=make_module(**by_ratio), max_epochs=None, max_steps=12)
    capsys.readouterr()
    module = make_module(**by_ratio)
    again = run(store, tmp_path, module=module, ckpt=last(tmp_path), max_epochs=None, max_steps=30)
    said = capsys.readouterr().out
    header = next(x for x in said.splitlines() if x.strip().startswith("setting"))
    assert header.split() == ["setting", "checkpoint", "config", "used"]
    assert cells(said, "trainer.max_steps") == ["trainer.max_steps", "12", "30", "30"]
    assert cells(said, "model.warmup_steps")[:3] == ["model.warmup_steps", "3", "8"]
    assert cells(said, "model.warmup_steps")[3].startswith("3 (")
    rates = list(again.watch.rates.values())
    assert list(again.watch.rates) == list(range(12, 30))
    assert all(a > b for a, b in pairwise(rates))
    # A cosine from step 3 to step 30: at step 12, a third is behind it.
    assert rates[0] == pytest.approx(3e-3 * 0.75)
    assert 0 < rates[-1] < 3e-3 * 0.01


def test_rs_06_more_epochs_are_planned_and_used(
    store: RowStore, at_seven: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    again = run(store, tmp_path, ckpt=at_seven, max_epochs=EPOCHS + 1)
    assert cells(capsys.readouterr().out, "trainer.max_epochs")[1:] == ["3", "4", "4"]
    assert len(again.steps_of_epochs) == 4
    assert again.trainer.global_step == again.trainer.lightning_module.total_steps()
    assert list(again.watch.rates.values())[-1] < 3e-3 * 0.01


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [("lr", 1.5e-3, ["0.003", "0.0015", "0.0015"]), ("schedule", "constant", ["cosine"])],
)
def test_rs_06_another_rate_or_schedule_is_used_from_the_next_step(
    store: RowStore,
    whole: Run,
    at_seven: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    setting: str,
    value: object,
    shown: list[str],
) -> None:
    again = run(store, tmp_path, ckpt=at_seven, module=make_module(**{setting: value}))
    assert cells(capsys.readouterr().out, f"model.{setting}")[1 : 1 + len(shown)] == shown
    expected = {
        "lr": {s: rate / 2 for s, rate in whole.watch.rates.items() if s >= 7},
        "schedule": {s: 3e-3 for s in whole.watch.rates if s >= 7},
    }[setting]
    assert again.watch.rates == pytest.approx(expected)
    assert rates_of_ledger(tmp_path) == pytest.approx(expected, rel=1e-6)


def test_rs_07_another_budget_is_refused_in_mid_epoch_and_taken_at_its_end(
    store: RowStore, at_seven: Path, at_epoch_end: tuple[Path, Run], tmp_path: Path
) -> None:
    smaller = {"batching": Batching(**BATCHING | {"token_budget": 300, "max_rows": 1})}
    message = r"data\.batching\.\w+ must stay \d+ until the epoch ends.* Give the old value, or "
    with pytest.raises(ValueError, match=message):
        run(store, tmp_path, ckpt=at_seven, data=smaller)
    again = run(store, tmp_path, ckpt=at_epoch_end[0], data=smaller)
    rows = [again.watch.rows[step] for step in again.watch.rows]
    assert {len(batch) for batch in rows} == {1}
    train = again.trainer.datamodule.train_rows.tolist()
    assert sorted(row for batch in rows for row in batch) == sorted(2 * train)
    assert again.trainer.global_step == again.trainer.lightning_module.total_steps()


@pytest.mark.parametrize("where", ["middle", "end"])
def test_rs_07_boundaries_are_those_of_the_run_for_good(
    store: RowStore, at_seven: Path, at_epoch_end: tuple[Path, Run], tmp_path: Path, where: str
) -> None:
    one = {"batching": Batching(**BATCHING | {"num_buckets": 1})}
    path = at_seven if where == "middle" else at_epoch_end[0]
    with pytest.raises(ValueError, match=r"boundaries must stay \[.*for the whole run.*model.init"):
        run(store, tmp_path, ckpt=path, data=one)
