"""Restarts inside one process: rows, state, settings, files; a test for each field case."""

import csv
import signal
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from training.chain import KillAt
from training.faults import Crash, CrashError, FullDisk, LogsRanked

from dflash_lightning import Batching, DFlashDataModule, DFlashModule, DrafterConfig, RandomTarget
from dflash_lightning.callbacks import (
    AtomicCheckpointIO,
    Ledger,
    ResumePoints,
    RunReport,
    Stopped,
    ValidateAtBothEnds,
)
from dflash_lightning.checkpoints import newest_complete, read_checkpoint
from dflash_lightning.data.store import RowStore

BATCHING = {"token_budget": 400, "max_rows": 2, "num_buckets": 2}
EPOCHS = 3


class Watch(Callback):
    """Remembers what every step was given, when it was validated, and the state after a step."""

    def __init__(self, snapshot: int | None = None) -> None:
        self.rows: dict[int, list[int]] = {}
        self.anchors: dict[int, list[list[int]]] = {}
        self.epochs: dict[int, int] = {}
        self.rates: dict[int, float] = {}
        self.validated: list[int] = []
        self.snapshot = snapshot
        self.state: dict[str, torch.Tensor] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        step = trainer.global_step
        self.rows[step] = batch.rows.tolist()
        self.anchors[step] = batch.anchors.tolist()
        self.epochs[step] = trainer.current_epoch
        self.rates[step] = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.snapshot:
            self.state = state_of(trainer)

    def on_validation_end(self, trainer, pl_module) -> None:
        self.validated.append(trainer.global_step)


def state_of(trainer: L.Trainer) -> dict[str, torch.Tensor]:
    """Weights and moments, copied."""
    state = {n: p.detach().clone() for n, p in trainer.lightning_module.named_parameters()}
    for number, moments in enumerate(trainer.optimizers[0].state.values()):
        state |= {f"{number}.{name}": value.clone() for name, value in moments.items()}
    return state


class Run(NamedTuple):
    """One process of a run."""

    watch: Watch
    trainer: L.Trainer
    error: BaseException | None

    @property
    def steps_of_epochs(self) -> list[int]:
        epochs = list(self.watch.epochs.values())
        return [epochs.count(epoch) for epoch in sorted(set(epochs))]


def make_module(seed: int = 0, **settings: Any) -> DFlashModule:
    dials = DrafterConfig(num_layers=1, block_size=4, target_layer_ids=(0, 2), mask_token_id=500)
    return DFlashModule(
        RandomTarget(seed=seed), dials, **{"lr": 3e-3, "warmup_steps": 5} | settings
    )


def run(
    store: RowStore,
    folder: Path,
    *extra: Callback,
    ckpt: Path | None = None,
    module: DFlashModule | None = None,
    data: dict[str, Any] | None = None,
    saves: int = 1000,
    snapshot: int | None = None,
    **settings: Any,
) -> Run:
    """Train in this process until the end, a stop, or a crash."""
    values = {"batching": Batching(**BATCHING), "num_workers": 0, "val_fraction": 0.2}
    watch = Watch(snapshot)
    own = [ValidateAtBothEnds(), RunReport(), Ledger(), watch, *extra]
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        callbacks=[*own, ResumePoints(saves, None)],
        plugins=[AtomicCheckpointIO()],
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": EPOCHS, "gradient_clip_val": 1.0, "enable_checkpointing": True} | settings,
    )
    datamodule = DFlashDataModule(str(store.path), **values | (data or {}))
    error = None
    try:
        trainer.fit(module or make_module(), datamodule=datamodule, ckpt_path=ckpt)
    except (Stopped, CrashError) as end:
        error = end
    return Run(watch, trainer, error)


def last(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def whole(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three epochs without a stop; the state after step 8 is kept."""
    return run(store, tmp_path_factory.mktemp("whole"), snapshot=8)


@pytest.fixture(scope="module")
def at_seven(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that a signal stopped after seven steps: in mid-epoch, past the warm-up."""
    folder = tmp_path_factory.mktemp("seven")
    stopped = run(store, folder, KillAt(6)).error
    assert isinstance(stopped, Stopped)
    assert stopped.code == 75
    return last(folder)


@pytest.fixture(scope="module")
def at_epoch_end(
    store: RowStore, whole: Run, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Run]:
    """A run that was stopped in the last step of its first epoch, before the validation."""
    folder = tmp_path_factory.mktemp("end")
    first = run(store, folder, KillAt(whole.steps_of_epochs[0] - 1))
    assert isinstance(first.error, Stopped)
    return last(folder), first


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


def ledger(folder: Path) -> list[dict[str, str]]:
    lines = (folder / "ledger.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


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
    written = {int(row["step"]): float(row["lr"]) for row in ledger(tmp_path)}
    assert written == pytest.approx(expected, rel=1e-6)


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


def test_handlers_of_signals_are_given_back(store: RowStore, tmp_path: Path) -> None:
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(name) for name in names]
    run(store, tmp_path, max_steps=1)
    assert [signal.getsignal(name) for name in names] == before
    run(store, tmp_path, KillAt(0, "SIGINT"))
    assert [signal.getsignal(name) for name in names] == before
