"""Restarts inside one process: files, validations; a test for each field case."""

import signal
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from training.chain import KillAt
from training.faults import Crash, FullDisk, LogsRanked
from training.restarts import (
    Run,
    last,
    make_module,
    run,
)

from dflash_lightning.callbacks import (
    Stopped,
)
from dflash_lightning.checkpoints import newest_complete, read_checkpoint
from dflash_lightning.data.store import RowStore

# -- files -----------------------------------------------------------------------------------------


def test_rs_08_a_save_that_fails_is_loud_and_leaves_older_files_whole(
    store: RowStore, whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run(store, tmp_path, FullDisk(4, 8), Crash(9), saves=2)
    said = capsys.readouterr().out
    assert said.count("NOT SAVED") == 2  # after step 6 and after step 8
    assert "next.ckpt" in said
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert {"last.ckpt", "previous.ckpt"} <= names
    assert not [name for name in names if name.endswith(".part")]
    newest, broken = newest_complete([tmp_path])
    assert newest == last(tmp_path)
    assert not broken
    assert read_checkpoint(newest)["global_step"] == 4
    again = run(store, tmp_path, ckpt=newest)
    assert again.watch.rows == {s: rows for s, rows in whole.watch.rows.items() if s >= 4}


def test_rs_08_a_stop_without_room_for_a_checkpoint_does_not_claim_one(
    store: RowStore, tmp_path: Path
) -> None:
    end = run(store, tmp_path, FullDisk(3, 9), KillAt(4), saves=2).error
    assert isinstance(end, Stopped)
    assert end.code == 1
    assert "stopped without a checkpoint" in str(end)
    assert read_checkpoint(last(tmp_path))["global_step"] == 2


def test_rs_08_a_stale_next_file_is_not_taken_for_a_save_that_failed(
    store: RowStore, tmp_path: Path
) -> None:
    run(store, tmp_path, Crash(3), saves=2)
    stale = tmp_path / "checkpoints" / "next.ckpt"
    stale.write_bytes(last(tmp_path).read_bytes())  # as after a kill just before the renaming
    end = run(store, tmp_path, FullDisk(2, 9), KillAt(4), ckpt=last(tmp_path)).error
    assert isinstance(end, Stopped)
    assert end.code == 1
    assert not (tmp_path / "checkpoints" / "previous.ckpt").exists()


def walk(value: object, path: str = "checkpoint") -> list[str]:
    """Where something else than tensors and plain types is."""
    if type(value) in (dict, OrderedDict, list, tuple):  # torch orders the names of weights
        items = value.items() if isinstance(value, dict) else enumerate(value)
        keys = list(value) if isinstance(value, dict) else []
        bad = [f"key {key!r} of {path}" for key in keys if type(key) not in (str, int)]
        return bad + [x for key, item in items for x in walk(item, f"{path}[{key!r}]")]
    plain = (torch.Tensor, str, int, float, bool, type(None))
    return [] if type(value) in plain else [f"{path}: {type(value)}"]


def test_rs_10_a_checkpoint_holds_tensors_and_plain_types_only(at_seven: Path) -> None:
    saved = torch.load(at_seven, weights_only=True)
    assert walk(saved) == []
    assert saved["dflash"]["settings"]["model.lr"] == 3e-3


def test_rs_11_saves_count_steps_and_are_announced(
    store: RowStore, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run(store, tmp_path, Crash(25), saves=10)
    folder = tmp_path / "checkpoints"
    steps = {
        name: read_checkpoint(folder / f"{name}.ckpt")["global_step"]
        for name in ("previous", "last")
    }
    assert steps == {"previous": 10, "last": 20}
    said = capsys.readouterr().out
    assert said.index("every 10 optimizer steps") < said.index("step 0: val/loss")


def test_pf_06_only_the_drafter_is_in_the_file_and_in_the_optimizer(
    store: RowStore, at_seven: Path, tmp_path: Path
) -> None:
    saved = torch.load(at_seven, weights_only=True)
    module = make_module()
    sizes = sorted(p.numel() for p in module.drafter.parameters())
    assert {name.split(".")[0] for name in saved["state_dict"]} == {"drafter"}
    moments = saved["optimizer_states"][0]["state"].values()
    assert sorted(state["exp_avg"].numel() for state in moments) == sizes
    with pytest.raises(ValueError, match=r"was trained for target random-qwen3 \(fingerprint"):
        run(store, tmp_path, ckpt=at_seven, module=make_module(seed=1))


# -- validation ------------------------------------------------------------------------------------


def test_a_stop_at_an_epochs_last_step_does_not_lose_its_validation(
    store: RowStore, whole: Run, at_epoch_end: tuple[Path, Run], tmp_path: Path
) -> None:
    path, first = at_epoch_end
    again = run(store, tmp_path, ckpt=path)
    assert first.watch.validated == [0]
    assert first.watch.validated + again.watch.validated == whole.watch.validated


@pytest.mark.parametrize("step", [3, 4, 5])
def test_a_stop_beside_a_validation_within_an_epoch_neither_loses_nor_repeats_it(
    store: RowStore, tmp_path: Path, step: int
) -> None:
    every = {"val_check_interval": 5, "max_epochs": 1}
    first = run(store, tmp_path, KillAt(step), **every)
    again = run(store, tmp_path, ckpt=last(tmp_path), **every)
    assert first.trainer.global_step == step + 1
    steps = again.trainer.global_step
    validated = sorted(first.watch.validated + again.watch.validated)
    assert [s for s in validated if s % 5 == 0] == list(range(0, steps + 1, 5))
    assert len(validated) == len(set(validated))


@pytest.mark.parametrize("epochs_done", [0, 1])
def test_a_stop_during_validation_repeats_it_as_a_whole_and_no_step(
    store: RowStore, whole: Run, tmp_path: Path, epochs_done: int
) -> None:
    step = sum(whole.steps_of_epochs[:epochs_done])
    stopped = run(store, tmp_path, KillAt(step, hook="validation"))
    assert isinstance(stopped.error, Stopped)
    assert (stopped.error.code, stopped.trainer.global_step) == (75, step)
    again = run(store, tmp_path, ckpt=last(tmp_path))
    assert {**stopped.watch.rows, **again.watch.rows} == whole.watch.rows
    assert stopped.watch.rows.keys().isdisjoint(again.watch.rows)
    assert stopped.watch.validated + again.watch.validated == whole.watch.validated
    values = [run.trainer.callback_metrics["val/est_tau"] for run in (again, whole)]
    assert values[0] == values[1]


def best(folder: Path, values: dict[int, float]) -> list[Callback]:
    saver = ModelCheckpoint(
        folder / "checkpoints",
        "step={step}",
        "val/given",
        mode="max",
        auto_insert_metric_name=False,
    )
    return [LogsRanked(values), saver]


@pytest.mark.parametrize("stop", ["middle", "end"])
def test_the_best_checkpoint_is_still_ranked_after_a_restart_and_nan_never_wins(
    store: RowStore, whole: Run, tmp_path: Path, stop: str
) -> None:
    first, second, _ = whole.steps_of_epochs
    nan = float("nan")
    values = dict(zip((0, first, first + second, 10**6), (0.1, 0.5, nan, 0.3), strict=True))
    values[whole.trainer.global_step] = values.pop(10**6)
    kill = KillAt(first + second + (3 if stop == "middle" else -1))
    stopped = run(store, tmp_path, *best(tmp_path, values), kill)
    assert isinstance(stopped.error, Stopped)
    again = run(store, tmp_path, *best(tmp_path, values), ckpt=last(tmp_path))
    saver = next(c for c in again.trainer.callbacks if isinstance(c, ModelCheckpoint))
    assert float(saver.best_model_score) == 0.5
    assert Path(saver.best_model_path).name == f"step={first}.ckpt"
    found = {p.name for p in (tmp_path / "checkpoints").glob("step=*.ckpt")}
    assert found == {f"step={first}.ckpt"}


def test_the_best_checkpoint_outlives_a_better_one_that_could_not_be_saved(
    store: RowStore, whole: Run, tmp_path: Path
) -> None:
    first, second, third = whole.steps_of_epochs
    values = {0: 0.1, first: 0.5, first + second: 0.7, first + second + third: 0.6}
    full = FullDisk(first + second - 1, first + second - 1)
    again = run(store, tmp_path, *best(tmp_path, values), full, max_epochs=2)
    found = {p.name for p in (tmp_path / "checkpoints").glob("step=*.ckpt")}
    assert again.error is None
    assert f"step={first}.ckpt" in found


def test_handlers_of_signals_are_given_back(store: RowStore, tmp_path: Path) -> None:
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(name) for name in names]
    run(store, tmp_path, max_steps=1)
    assert [signal.getsignal(name) for name in names] == before
    run(store, tmp_path, KillAt(0, "SIGINT"))
    assert [signal.getsignal(name) for name in names] == before
