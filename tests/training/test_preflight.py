"""The preflight: the heaviest batches, wherever they stand, and no trace of them afterwards."""

import copy
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from training.test_fit import make_data, make_module, make_trainer

from dflash_lightning import Batching, DFlashModule
from dflash_lightning.callbacks.memory import EXPAND, Memory, out_of_memory
from dflash_lightning.callbacks.preflight import Preflight, heaviest_of
from dflash_lightning.data.collate import Batch
from dflash_lightning.data.store import RowStore

SCRIPT = Path(__file__).with_name("run_preflight.py")
ONE_BY_ONE = Batching(token_budget=256, max_rows=1)


class Recorded(DFlashModule):
    """Remembers the rows of every batch that it is given, and draws from all global generators."""

    def sums(self, batch: Batch):
        drawn = (torch.rand(()).item(), np.random.rand(), random.random())  # noqa: NPY002
        vars(self).setdefault("drawn", []).append(drawn)
        vars(self).setdefault("given", []).append(batch.rows.tolist())
        return super().sums(batch)


def recorded(target: Path) -> Recorded:
    module = make_module(target)
    module.__class__ = Recorded
    return module


def state_of(trainer: L.Trainer) -> dict:
    """Everything that a step changes, by value."""
    module, optimizer = trainer.lightning_module, trainer.optimizers[0]
    return {
        "weights": {n: p.clone() for n, p in module.drafter.state_dict().items()},
        "gradients": [p.grad for p in module.drafter.parameters()],
        "moments": dict(optimizer.state),
        "rates": [group["lr"] for group in optimizer.param_groups],
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"],
        "called": vars(optimizer).get("_opt_called"),
        "step": trainer.global_step,
        "counted": copy.deepcopy([module.progress, module.step_stats, vars(module.statistics)]),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1],  # noqa: NPY002 - it is the global state that is meant
        "python": random.getstate(),
    }


class Looks(L.Callback):
    """Takes the state at the start of a fit."""

    def __init__(self) -> None:
        self.seen: dict = {}

    def on_fit_start(self, trainer, pl_module) -> None:
        self.seen = state_of(trainer)


def same(a: object, b: object) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_fit_is_bit_equal_with_and_without_and_nothing_is_left_behind(
    store: RowStore, target_folder: Path, tmp_path: Path, accumulate: int
) -> None:
    finals = []
    for enabled in (False, True):
        L.seed_everything(5, verbose=False)
        module, before, after = recorded(target_folder), Looks(), Looks()
        trainer = make_trainer(
            tmp_path,
            max_steps=4,
            accumulate_grad_batches=accumulate,
            callbacks=[before, Preflight(enabled=enabled), after],
        )
        trainer.fit(module, datamodule=make_data(store))
        assert same(after.seen, before.seen)
        assert before.seen["moments"] == {}
        optimizer = trainer.optimizers[0]
        finals.append((state_of(trainer), optimizer.state_dict(), module.drawn))
    (without, moments, drawn), (with_it, their_moments, all_drawn) = finals
    assert len(all_drawn) > len(drawn)
    assert all_drawn[-len(drawn) :] == drawn
    assert same(with_it["weights"], without["weights"])
    assert same(their_moments, moments)
    assert with_it["rates"] == without["rates"]
    assert with_it["step"] == without["step"] == 4


def test_the_heaviest_batch_is_tried_although_it_stands_late_in_the_plan(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    for seed in range(100):
        data = make_data(store, batching=ONE_BY_ONE, seed=seed)
        data.setup("fit")
        (step, *_) = np.flatnonzero(data.plan.longest == data.plan.longest.max())
        if step > 0.9 * data.plan.num_steps:
            break
    else:
        pytest.fail("no seed puts the longest row late")
    module, preflight = recorded(target_folder), Preflight()
    trainer = make_trainer(tmp_path, max_steps=1, callbacks=[preflight])
    trainer.fit(module, datamodule=make_data(store, batching=ONE_BY_ONE, seed=seed))
    longest = data.train_rows[data.plan.rows(int(step), 0)].tolist()
    assert module.given[0] == longest  # before any step
    first = preflight.results[0]
    assert (first.step, first.rows) == (step, 1)
    assert first.width == store.lengths[longest[0]]
    assert "longest rows" in first.reason


def test_anchors_are_counted_from_the_loss_masks(store: RowStore, target_folder: Path) -> None:
    data = make_data(store, anchor_rate=0.5, anchors_per_row=6)
    data.setup("fit")
    loader = data.train_dataloader()
    slots = [batch.anchors.numel() for batch in loader]
    chosen = {heavy.reason: heavy for heavy in heaviest_of(data)}
    (most,) = [heavy for reason, heavy in chosen.items() if "most anchors" in reason]
    assert slots[most.step] == max(slots)


def test_results_hold_sizes_seconds_and_peaks_and_are_said_and_written(
    store: RowStore, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    preflight = Preflight()
    trainer = make_trainer(tmp_path, max_steps=1, callbacks=[preflight])
    data = make_data(store)
    trainer.fit(make_module(target_folder), datamodule=data)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("preflight")]
    assert len(said) == len(preflight.results) + 1
    for line, t in zip(said, preflight.results, strict=False):
        rows = data.train_rows[data.plan.rows(t.step, t.rank, t.micro)]
        assert (t.rows, t.tokens) == (len(rows), store.lengths[rows].sum())
        assert t.width == store.lengths[rows].max()
        assert f"{t.reason}: {t.rows} x {t.width:,} tokens, {t.anchors:,} anchor slots" in line
        assert 0 < t.seconds < 60
        assert math.isfinite(t.loss)
        assert 0 <= t.peak_bytes <= preflight.peak_bytes
    assert "the process " in said[-1]  # grew, or needed no more than before
    tokens, seconds = (sum(getattr(t, n) for t in preflight.results) for n in ("tokens", "seconds"))
    assert preflight.tokens_per_second == pytest.approx(tokens / seconds)
    written = json.loads((tmp_path / "preflight.json").read_text())
    assert [b["seconds"] for b in written["batches"]] == [t.seconds for t in preflight.results]
    assert written["peak"] == preflight.peak_bytes


class NotFinite(DFlashModule):
    """Its loss is no number where the rows are longest."""

    def sums(self, batch: Batch):
        found = super().sums(batch)
        longest = batch.input_ids.shape[1] == self.trainer.datamodule.plan.longest.max()
        return found._replace(numerator=found.numerator * (torch.nan if longest else 1))


def test_a_loss_that_is_not_finite_is_noted_and_not_refused(
    store: RowStore, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    module = make_module(target_folder)
    module.__class__ = NotFinite
    before, preflight, after = Looks(), Preflight(), Looks()
    trainer = make_trainer(tmp_path, max_steps=1, callbacks=[before, preflight, after])
    trainer.fit(module, datamodule=make_data(store))
    note = "preflight, longest rows: its loss is nan; a step with it will be skipped"
    assert note in capsys.readouterr().out
    first, *others = preflight.results
    assert math.isnan(first.loss)
    assert others
    assert all(math.isfinite(t.loss) for t in others)
    assert same(after.seen, before.seen)


class Full(DFlashModule):
    """Has no memory."""

    def sums(self, batch: Batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_memory_that_runs_out_is_refused_in_one_line_that_leaves_the_model_as_it_was(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    module = make_module(target_folder)
    module.__class__ = Full
    looks = Looks()
    trainer = make_trainer(tmp_path, callbacks=[looks, Preflight()])
    data = make_data(store)
    with pytest.raises(ValueError, match="token_budget must let the heaviest batches") as refused:
        trainer.fit(module, datamodule=data)
    text = str(refused.value)
    assert "\n" not in text
    longest = data.train_rows[data.plan.rows(*heaviest_of(data)[0][1:])]
    width = store.lengths[longest].max()
    assert f"with the longest rows: {len(longest)} x {width} tokens" in text
    assert f"store rows {', '.join(map(str, longest[:3]))}" in text
    assert "got token_budget=256" in text
    ways = text.partition("cheapest first: ")[2].split("; ")
    assert [way.split()[1] for way in ways] == [
        "model.activation_checkpointing",
        "data.batching.token_budget",
        "data.anchor_rate.",
    ]
    assert same(
        {n: p.clone() for n, p in module.drafter.state_dict().items()}, looks.seen["weights"]
    )


def test_other_errors_are_not_taken_for_memory(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    assert out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not out_of_memory(RuntimeError("shapes cannot be multiplied"))

    class Broken(DFlashModule):
        def sums(self, batch: Batch):
            raise RuntimeError("shapes cannot be multiplied")

    module = make_module(target_folder)
    module.__class__ = Broken
    trainer = make_trainer(tmp_path, callbacks=[Preflight()])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.fit(module, datamodule=make_data(store))


def test_a_gap_is_named_only_where_it_is_large_and_segments_do_not_expand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    wide = Memory(peak=60, reserved=71, outside=5, card=100)
    assert wide.is_fragmented
    assert wide.left == 24
    assert not wide._replace(reserved=69).is_fragmented
    assert not Memory(peak=60, reserved=0, outside=0, card=0).is_fragmented
    name, _, value = EXPAND.partition("=")
    for variable in (name, "PYTORCH_ALLOC_CONF"):
        with monkeypatch.context() as patched:
            patched.setenv(variable, value)
            assert not wide.is_fragmented


# -- two processes ---------------------------------------------------------------------------------


def run(store: RowStore, folder: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(store.path), str(folder), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "zero"])
def test_two_processes_are_bit_equal_with_and_without_and_try_the_same_batches(
    store: RowStore, tmp_path: Path, kind: str
) -> None:
    records = {}
    for preflight in ("without", "with"):
        done = run(store, tmp_path, preflight, kind)
        assert done.returncode == 0, done.stderr[-3000:]
        files = [tmp_path / f"{preflight}-{kind}-{rank}.pt" for rank in (0, 1)]
        records[preflight] = [torch.load(file, weights_only=True) for file in files]
        assert done.stdout.count("preflight: the process ") == (preflight == "with")
    one, two = records["with"]
    assert len(one["tried"]) > 1
    assert one["tried"] == two["tried"]
    assert one["peak"] == two["peak"] > 0
    for without, with_it in zip(records["without"], records["with"], strict=True):
        assert without.pop("tried") == []
        del with_it["tried"], without["peak"], with_it["peak"]
        assert [name for name in without if not same(with_it[name], without[name])] == []
    assert records["with"][0]["step"] == 6


@pytest.mark.ddp
@pytest.mark.slow
def test_memory_that_runs_out_on_one_of_two_processes_ends_both_with_the_refusal(
    store: RowStore, tmp_path: Path
) -> None:
    done = run(store, tmp_path, "with", "full")
    assert done.returncode != 0
    refusals = [line for line in done.stderr.splitlines() if "ValueError: data.batching" in line]
    assert len(refusals) == 2
    assert all("set model.shard_optimizer" in line for line in refusals)
    assert not list(tmp_path.glob("*.pt"))
