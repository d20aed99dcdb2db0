"""Real fits on a tiny target: the global ratio, what is logged, what is saved, what is skipped."""

import csv
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml

from dflash_lightning import Batching, DFlashDataModule, DFlashModule, DrafterConfig, HFTarget
from dflash_lightning.callbacks import ValidateAtBothEnds
from dflash_lightning.data.collate import BatchIndex, RowBatches
from dflash_lightning.data.store import RowStore

DIALS = {"num_layers": 1, "block_size": 4, "target_layer_ids": [0, 2], "mask_token_id": 3}
BATCHING = {"token_budget": 256, "max_rows": 3, "num_buckets": 2}


def recipe(store: RowStore, target: Path, folder: Path, **trainer: object) -> Path:
    """A YAML file as a user would write it."""
    config = {
        "seed_everything": 1,
        "trainer": {
            "max_epochs": 2,
            "accelerator": "cpu",
            "precision": "32-true",
            "log_every_n_steps": 1,
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": str(folder), "name": "", "version": "run"},
            },
            **trainer,
        },
        "model": {
            "target": {
                "class_path": "dflash_lightning.HFTarget",
                "init_args": {"path": str(target), "dtype": "float32"},
            },
            "drafter": DIALS,
            "lr": 3e-3,
        },
        "data": {
            "store": str(store.path),
            "val_fraction": 0.2,
            "num_workers": 0,
            "batching": BATCHING,
        },
    }
    folder.mkdir(exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def fit(config: Path, *options: str) -> None:
    command = [sys.executable, "-m", "dflash_lightning", "fit", "--config", str(config), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def curve(folder: Path, name: str) -> list[float]:
    with (folder / "run" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def drafter_weights(folder: Path) -> dict[str, torch.Tensor]:
    saved = torch.load(folder / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    return saved["state_dict"]


def make_module(target: Path, **settings: object) -> DFlashModule:
    dials = DrafterConfig(**{**DIALS, "target_layer_ids": (0, 2)})
    return DFlashModule(HFTarget(str(target), "float32"), dials, lr=3e-3, **settings)


def make_data(store: RowStore, **settings: object) -> DFlashDataModule:
    values = {"batching": Batching(**BATCHING), "num_workers": 0, "val_fraction": 0.2, **settings}
    return DFlashDataModule(str(store.path), **values)


def make_trainer(folder: Path, **settings: object) -> L.Trainer:
    values = {"max_epochs": 1, "accelerator": "cpu", "gradient_clip_val": 1.0, **settings}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return L.Trainer(
        default_root_dir=folder,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        **quiet,
        **values,
    )


@pytest.mark.ddp
@pytest.mark.slow
def test_two_processes_train_as_one_that_accumulates_two(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fit(recipe(store, target_folder, one, accumulate_grad_batches=2))
    fit(recipe(store, target_folder, two), "--trainer.devices", "2", "--trainer.strategy", "ddp")
    losses = curve(one, "train/loss")
    assert len(losses) >= 8
    assert curve(two, "train/loss") == pytest.approx(losses, rel=1e-5)
    assert curve(two, "train/grad_norm") == pytest.approx(curve(one, "train/grad_norm"), rel=1e-4)
    assert curve(two, "val/est_tau") == pytest.approx(curve(one, "val/est_tau"), abs=1e-6)
    theirs = drafter_weights(two)
    for name, weight in drafter_weights(one).items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-4, atol=2e-6)


@pytest.mark.slow
def test_fit_leaves_config_metrics_checkpoint_and_drafter(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    fit(recipe(store, target_folder, tmp_path))
    run = tmp_path / "run"
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["batching"]["max_rows"] == 3
    assert {p.name for p in (run / "drafter").iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
    }
    with (run / "metrics.csv").open() as file:
        first = next(row for row in csv.DictReader(file) if row["val/est_tau"])
    assert first["step"] == "0"
    assert len(curve(tmp_path, "val/est_tau")) == 3  # before the first step and after each epoch
    assert curve(tmp_path, "train/loss")[-1] < curve(tmp_path, "train/loss")[0]


def test_checkpoint_holds_the_drafter_in_plain_types_and_no_target(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    module = make_module(target_folder)
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.fit(module, datamodule=make_data(store))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert set(saved["state_dict"]) == {f"drafter.{n}" for n in module.drafter.state_dict()}
    moments = saved["optimizer_states"][0]["state"]
    assert len(moments) == len(list(module.drafter.parameters()))
    assert saved["dflash"]["target_fingerprint"] == module.target.fingerprint


def test_a_step_draws_nothing_from_global_generators(store: RowStore, target_folder: Path) -> None:
    module = make_module(target_folder)
    module.target.load()
    rows = RowBatches(store, block_size=4, seed=0, anchor_rate=0.25, anchors_per_row=8)
    index = BatchIndex(0, torch.arange(3).numpy(), int(store.lengths[:3].max()))
    before = torch.get_rng_state()
    first = module.sums(rows[index])
    torch.rand(7)
    second = module.sums(rows[index])
    assert torch.equal(first.numerator, second.numerator)
    torch.set_rng_state(before)
    module.sums(rows[index])
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_grouped_in_any_way_give_the_same_sums(store: RowStore, target_folder: Path) -> None:
    module = make_module(target_folder)
    module.target.load()
    rows = RowBatches(store, block_size=4, seed=0, anchor_rate=0.25, anchors_per_row=8)

    def totals(groups: list[list[int]]) -> torch.Tensor:
        module.zero_grad()
        total = torch.zeros(2)
        for group in groups:
            ids = torch.tensor(group).numpy()
            s = module.sums(rows[BatchIndex(0, ids, int(store.lengths[ids].max()) + 5)])
            s.numerator.backward()
            total += torch.stack([s.numerator.detach(), s.weights.sum()])
        gradient = torch.cat([p.grad.flatten() for p in module.drafter.parameters()])
        return torch.cat([total, gradient])

    together = totals([[0, 1, 2, 3, 4, 5]])
    for groups in ([[0], [1], [2], [3], [4], [5]], [[5, 0], [1, 2, 3, 4]]):
        torch.testing.assert_close(totals(groups), together, rtol=1e-4, atol=1e-4)


class Poison(L.Callback):
    """Makes one step's gradient infinite on one parameter."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == self.step:
            pl_module.drafter.norm.weight.grad[0] = torch.inf


def test_a_step_that_is_not_finite_is_skipped_and_counted(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    module = make_module(target_folder)
    trainer = make_trainer(tmp_path, max_steps=4, callbacks=[Poison(2)])
    trainer.fit(module, datamodule=make_data(store))
    assert module.skipped_steps == 1
    assert trainer.global_step == 4
    state = trainer.optimizers[0].state
    assert {int(s["step"]) for s in state.values()} == {3}
    assert all(torch.isfinite(p).all() for p in module.parameters())


class Modes(L.Callback):
    """Remembers what is in training mode before each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool, bool]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        model = pl_module.target.model
        frozen = not any(p.requires_grad for p in model.parameters())
        self.seen.append((pl_module.drafter.training, model.training, frozen))


def test_validation_leaves_modes_as_they_were(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    modes = Modes()
    trainer = make_trainer(tmp_path, max_steps=6, val_check_interval=2, callbacks=[modes])
    trainer.fit(make_module(target_folder), datamodule=make_data(store))
    assert len(modes.seen) == 6
    assert set(modes.seen) == {(True, False, True)}


class Rates(L.Callback):
    """Remembers the learning rate of every update."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_warm_up_and_decay_count_optimizer_steps(
    store: RowStore, target_folder: Path, tmp_path: Path, accumulate: int
) -> None:
    module, rates = make_module(target_folder), Rates()
    module.warmup_steps = 2
    settings = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "callbacks": [rates]}
    trainer = make_trainer(tmp_path, **settings)
    trainer.fit(module, datamodule=make_data(store))
    assert len(rates.seen) == module.total_steps() == trainer.global_step
    assert rates.seen[:2] == pytest.approx([1.5e-3, 3e-3])
    assert rates.seen[1:] == sorted(rates.seen[1:], reverse=True)
    assert 0 < rates.seen[-1] < 3e-3 * 0.05


def test_loss_falls_below_the_uniform_guess_on_a_target_that_repeats(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    module = make_module(target_folder)
    trainer = make_trainer(tmp_path, max_epochs=8)
    trainer.fit(module, datamodule=make_data(store))
    assert trainer.callback_metrics["val/loss"] < 5.0 < torch.tensor(272.0).log()
    assert trainer.callback_metrics["val/accuracy/pos_01"] > 10 / 272


class Epochs(L.Callback):
    """Counts steps and validations of each epoch, and remembers the rows of every step."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[]]
        self.validated: list[int] = []

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        if trainer.current_epoch == len(self.rows):
            self.rows.append([])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.rows[-1] += batch.rows.tolist()

    def on_validation_end(self, trainer, pl_module) -> None:
        self.validated.append(trainer.current_epoch)


def test_epochs_of_different_length_lose_neither_rows_nor_validations(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    data = make_data(store, batching=Batching(order="random", token_budget=200, max_rows=64))
    epochs = Epochs()
    trainer = make_trainer(tmp_path, max_epochs=6, callbacks=[epochs])
    trainer.fit(make_module(target_folder), datamodule=data)
    steps = [data.num_steps(epoch + 1) - data.num_steps(epoch) for epoch in range(6)]
    assert len(set(steps)) > 1, "the case needs epochs of different length"
    assert trainer.global_step == sum(steps)
    for rows in epochs.rows:
        assert sorted(rows) == data.train_rows.tolist()
    assert epochs.validated == list(range(6))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", 0.0),
        ("warmup_ratio", 1.0),
        ("loss_decay_gamma", 0.0),
        ("betas", (0.9, 1.0)),
        ("weight_decay", -0.1),
        ("max_skipped_steps", 0),
    ],
)
def test_settings_outside_their_range_are_refused(
    target_folder: Path, setting: str, value: object
) -> None:
    dials = DrafterConfig(**{**DIALS, "target_layer_ids": (0, 2)})
    with pytest.raises(ValueError, match=rf"{setting} (must|in|and)"):
        DFlashModule(HFTarget(str(target_folder)), dials, **{setting: value})


def test_a_checkpoint_of_something_else_is_refused(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    module = make_module(target_folder)
    state = {f"drafter.{name}": weight for name, weight in module.drafter.state_dict().items()}
    other = {"state_dict": state, "pytorch-lightning_version": L.__version__, "epoch": 0}
    torch.save({**other, "global_step": 0, "loops": {}}, tmp_path / "other.ckpt")
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match="a checkpoint that dflash-lightning fit wrote"):
        trainer.validate(module, make_data(store), ckpt_path=tmp_path / "other.ckpt", verbose=False)


def test_a_run_that_max_steps_cuts_short_is_validated_at_its_last_step(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    both, steps = ValidateAtBothEnds(), Validations()
    trainer = make_trainer(tmp_path, max_epochs=2, max_steps=3, callbacks=[both, steps])
    trainer.fit(make_module(target_folder), datamodule=make_data(store))
    assert steps.seen == [0, 3]
    assert trainer.lightning_module.drafter.training


def test_a_whole_run_is_validated_once_at_its_last_step(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    both, steps = ValidateAtBothEnds(), Validations()
    trainer = make_trainer(tmp_path, max_epochs=2, callbacks=[both, steps])
    trainer.fit(make_module(target_folder), datamodule=make_data(store))
    assert len(steps.seen) == len(set(steps.seen)) == 3


class Validations(L.Callback):
    """Remembers the step of every validation."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_validation_end(self, trainer, pl_module) -> None:
        self.seen.append(trainer.global_step)


@pytest.mark.parametrize(
    ("name", "value"), [("limit_train_batches", 1), ("limit_train_batches", 0.5)]
)
def test_parts_of_an_epoch_are_refused(
    store: RowStore, target_folder: Path, tmp_path: Path, name: str, value: float
) -> None:
    trainer = make_trainer(tmp_path, **{name: value})
    with pytest.raises(ValueError, match=rf"trainer.{name} must stay"):
        trainer.fit(make_module(target_folder), datamodule=make_data(store))


def test_overfit_batches_is_refused(store: RowStore, target_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, overfit_batches=2)
    with pytest.raises(ValueError, match=r"trainer.\w+_batches must stay"):
        trainer.fit(make_module(target_folder), datamodule=make_data(store))


def test_clipping_by_value_is_refused(store: RowStore, target_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, gradient_clip_algorithm="value", max_steps=1)
    with pytest.raises(ValueError, match="gradient_clip_algorithm must be norm"):
        trainer.fit(make_module(target_folder), datamodule=make_data(store))


def test_a_checkpoint_of_another_drafter_is_refused_by_its_dials(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(make_module(target_folder), datamodule=make_data(store))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    dials = DrafterConfig(**{**DIALS, "target_layer_ids": (1, 2), "block_size": 5})
    other = DFlashModule(HFTarget(str(target_folder), "float32"), dials)
    with pytest.raises(ValueError, match=r"block_size \(4 there, 5 here\)"):
        make_trainer(tmp_path).validate(
            other, make_data(store), ckpt_path=tmp_path / "a.ckpt", verbose=False
        )
