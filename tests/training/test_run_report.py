"""What a fit says of its plan: once, in the run folder, in W&B; and how often it plans."""

import gc
import json
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path

import lightning as L
import pytest
import wandb
from lightning.pytorch.loggers import WandbLogger
from training.test_fit import make_data, make_module, make_trainer, recipe

from dflash_lightning import Batching, EpochPlan
from dflash_lightning.batching.plan import plan_epoch
from dflash_lightning.callbacks import RunReport
from dflash_lightning.data.store import RowStore

UNEVEN = Batching(order="random", token_budget=200, max_rows=64)


def test_a_fit_prints_its_plan_once_and_writes_it_into_the_run_folder(
    store: RowStore, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    module, data = make_module(target_folder), make_data(store)
    expected = make_data(store)
    expected.setup("fit")
    trainer = make_trainer(tmp_path, max_epochs=2, callbacks=[RunReport()])
    trainer.fit(module, datamodule=data)
    said = capsys.readouterr().out
    report = repr(expected.report())
    assert said.count(report) == 1
    assert said.count("rows in") == 1
    steps = f"{trainer.global_step} optimizer steps in all"
    assert said.count(steps) == 1
    written = (tmp_path / "plan.txt").read_text()
    assert written.startswith(f"{report}\n\n{steps}\n")
    assert (
        f"learning rate 0.003 at the first step, 0.003 at step {module.effective_warmup()}"
        in written
    )


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where W&B leaves its files; nothing is sent."""
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "runs"


def table_of(folder: Path, name: str) -> tuple[list[str], list[list]]:
    (path,) = folder.glob(f"wandb/offline-run-*/files/media/table/plan/{name}_*.table.json")
    table = json.loads(path.read_text())
    return table["columns"], table["data"]


def test_weights_and_biases_gets_the_plan_as_tables(
    store: RowStore, target_folder: Path, tmp_path: Path, offline: Path
) -> None:
    # Few steps suffice; the last bucket has no rows, and W&B must take that, too.
    longest = int(store.lengths.max())
    batching = Batching(
        token_budget=2 * longest, max_rows=3, boundaries=(0, longest // 2, longest, longest + 9)
    )
    data = make_data(store, batching=batching)
    logger = WandbLogger(save_dir=offline, offline=True, project="plans")
    trainer = make_trainer(tmp_path, max_steps=1, callbacks=[RunReport()])
    trainer.loggers = [logger]
    trainer.fit(make_module(target_folder), datamodule=data)
    config = dict(logger.experiment.config)
    wandb.finish()
    report = data.report()
    numbers = json.loads(json.dumps(report.to_dict()))
    columns, rows = table_of(offline, "buckets")
    assert [dict(zip(columns, row, strict=True)) for row in rows] == numbers["buckets"]
    assert [row[columns.index("rows")] for row in rows][-1] == 0
    columns, rows = table_of(offline, "deals")
    assert columns == ["deal", "waiting_linear", "waiting_quadratic", "step_std"]
    deals = {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}
    assert deals == numbers["deals"]
    del numbers["buckets"], numbers["deals"]
    assert json.loads(json.dumps(config["plan"])) == numbers
    assert report.title in (offline / "plan.txt").read_text()


@pytest.mark.ddp
@pytest.mark.slow
def test_two_processes_say_it_once(store: RowStore, target_folder: Path, tmp_path: Path) -> None:
    config = recipe(store, target_folder, tmp_path, max_epochs=1, max_steps=1)
    options = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    command = [sys.executable, "-m", "dflash_lightning", "fit", "--config", str(config), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    text = (tmp_path / "run" / "plan.txt").read_text()
    assert " steps on 2 ranks (2 buckets, sort_window=32)" in text.splitlines()[0]
    assert done.stdout.count(text.strip()) == 1
    assert done.stdout.count("Epoch 0: ") == 1
    assert done.stdout.count("efficiency") == 1


# -- how often an epoch is planned -----------------------------------------------------------------


class Planned:
    """Stands in for ``plan_epoch``: plans the same, counts epochs, and watches what is kept."""

    def __init__(self, batching: Batching) -> None:
        self.batching = batching
        self.epochs: Counter = Counter()
        self.plans: list[weakref.ref[EpochPlan]] = []

    def __call__(self, lengths, batching, **arguments) -> EpochPlan:
        plan = plan_epoch(lengths, batching, **arguments)
        if batching == self.batching:  # validation has a plan of its own
            self.epochs[plan.epoch] += 1
            self.plans.append(weakref.ref(plan))
        return plan

    def alive(self) -> list[EpochPlan]:
        found = [plan for plan in (ref() for ref in self.plans) if plan is not None]
        if len(found) > 1:
            found.clear()
            gc.collect()
            found = [plan for plan in (ref() for ref in self.plans) if plan is not None]
        return found


class Watch(L.Callback):
    """Remembers, at each step, whether the current plan is the only one there is."""

    def __init__(self, planned: Planned) -> None:
        self.planned = planned
        self.seen: list[tuple[int, bool]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        (plan,) = self.planned.alive()
        self.seen.append((plan.epoch, plan is trainer.datamodule.plan))


def test_a_fit_plans_an_epoch_to_count_its_steps_and_to_train_it_and_keeps_one_plan(
    store: RowStore, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = Planned(UNEVEN)
    monkeypatch.setattr("dflash_lightning.data.run_plan.plan_epoch", planned)
    data = make_data(store, batching=UNEVEN)
    watch = Watch(planned)
    trainer = make_trainer(tmp_path, max_epochs=3, callbacks=[RunReport(), watch])
    trainer.fit(make_module(target_folder), datamodule=data)
    assert set(planned.epochs) == {0, 1, 2}
    assert planned.epochs[0] == 1
    assert max(planned.epochs.values()) <= 2
    assert [epoch for epoch, _ in watch.seen] == sorted(epoch for epoch, _ in watch.seen)
    assert {epoch for epoch, _ in watch.seen} == {0, 1, 2}
    assert all(only for _, only in watch.seen)
    assert len(watch.seen) == trainer.global_step


def test_steps_are_counted_once_for_each_epoch_and_exactly(
    store: RowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = Planned(UNEVEN)
    monkeypatch.setattr("dflash_lightning.data.run_plan.plan_epoch", planned)
    data = make_data(store, batching=UNEVEN)
    data.setup("fit")
    lengths = store.lengths[data.train_rows]
    own = [plan_epoch(lengths, UNEVEN, seed=0, epoch=epoch).num_steps for epoch in range(6)]
    assert len(set(own)) > 1, "the case needs epochs of different length"
    assert [data.num_steps(epochs) for epochs in (1, 4, 2, 6, 6)] == [
        sum(own[:epochs]) for epochs in (1, 4, 2, 6, 6)
    ]
    assert planned.epochs == Counter(range(6))
    assert planned.alive() == [data.plan]
    data.set_epoch(5)
    assert planned.alive() == [data.plan]
    assert data.plan.epoch == 5
    data.setup("fit")
    assert data.num_steps(1) == own[0]
