"""A training step waits for its device once, to read what the step was."""

import signal
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from host_reads import Reads, counted
from training.test_fit import make_data, make_module, make_trainer

from dflash_lightning.callbacks import Ledger, stop_signals
from dflash_lightning.data.collate import BatchIndex, RowBatches
from dflash_lightning.data.store import RowStore
from dflash_lightning.phases import PhaseClock

# What the sdpa backend may read to cut the context to what a chunk of anchors sees.
ALLOWED = Counter(drafter=1)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Counts by the phase that a step has marked, whether or not a clock runs."""
    found = Reads()

    def mark(clock: PhaseClock, phase: str | None) -> None:
        found.place = phase

    monkeypatch.setattr(PhaseClock, "mark", mark)
    return found


def by_phase(reads: Reads) -> Counter[str | None]:
    return Counter(place for place, _ in reads.found)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x[0] > 0),
        lambda x: float(x[0]),
        lambda x: int(x.long().max()),
        lambda x: x[x > 0],
        lambda x: x.__setitem__(x > 0, 1.0),
        lambda x: x.nonzero(),
        lambda x: torch.nonzero(x),
        lambda x: torch.equal(x, x),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.cpu(),
        lambda x: torch.ops.aten.index.Tensor(x, [x > 0]),
        lambda x: torch.where(x > 0),
        lambda x: x.long().repeat_interleave(x.long().abs()),
    ],
)
def test_what_reads_the_device_is_counted_once(read: Callable[[torch.Tensor], object]) -> None:
    reads, values = Reads(), torch.tensor([1.0, -2.0, 3.0])
    with counted(reads):
        read(values)
    assert len(reads.found) == 1, reads.found


def test_what_reads_nothing_is_not_counted() -> None:
    reads, values = Reads(), torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    with counted(reads):
        kept = torch.where(values > 0, values, 0.0).index_select(0, torch.tensor([2, 0]))
        (kept[1:] * values[torch.tensor([0])].clamp_min(0.5)).sum().backward()
    assert reads.found == []


def test_target_drafter_head_and_backward_read_nothing(
    store: RowStore, target_folder: Path, reads: Reads
) -> None:
    module = make_module(target_folder)
    module.target.load()
    rows = RowBatches(store, block_size=4, seed=0, anchor_rate=0.25, anchors_per_row=8)
    batch = rows[BatchIndex(0, np.arange(3), int(store.lengths[:3].max()))]
    with counted(reads):
        sums = module.sums(batch)
        reads.place = "backward"
        sums.numerator.backward()
    assert all(p.grad is not None for p in module.drafter.parameters())
    assert by_phase(reads) <= ALLOWED, reads.found


@pytest.mark.parametrize(
    ("goal", "weighting"), [("ce", "dpace"), ("argmax", "dpace"), ("kl", "decay")]
)
def test_no_goal_or_weighting_reads_more_and_metrics_read_nothing(
    store: RowStore, target_folder: Path, reads: Reads, goal: str, weighting: str
) -> None:
    module = make_module(target_folder, goal=goal, weighting=weighting)
    module.target.load()
    rows = RowBatches(
        store, block_size=4, seed=0, anchor_rate=0.5, anchors_per_row=8, label_holes=True
    )
    batch = rows[BatchIndex(0, np.arange(3), int(store.lengths[:3].max()))]
    with counted(reads):
        s = module.sums(batch)
        reads.place = "backward"
        s.numerator.backward()
        reads.place = "metrics"
        module.val_metrics.update(
            s.losses, s.weights, s.correct, batch.label_slots, batch.anchors.numel()
        )
    assert by_phase(reads) <= ALLOWED, reads.found


class Steps(L.Callback):
    """Lets something watch each batch between the hooks at its ends."""

    def __init__(self, watch: Callable[[ExitStack], None]) -> None:
        self.watch, self.stack, self.count = watch, ExitStack(), 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.watch(self.stack)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.stack.close()
        self.count += 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_optimizer_step_reads_once(
    store: RowStore, target_folder: Path, tmp_path: Path, reads: Reads, accumulate: int
) -> None:
    steps = Steps(lambda stack: stack.enter_context(counted(reads)))
    settings = {"max_steps": 3, "accumulate_grad_batches": accumulate, "limit_val_batches": 0}
    trainer = make_trainer(tmp_path, callbacks=[Ledger(), steps], **settings)
    trainer.fit(make_module(target_folder), datamodule=make_data(store))
    found = by_phase(reads)
    assert (trainer.global_step, steps.count) == (3, 3 * accumulate)
    assert found.pop("drafter", 0) <= steps.count
    assert found == {"optimizer": 3}, reads.found
    assert {name for place, name in reads.found if place == "optimizer"} == {"tolist"}


def test_ranks_do_not_ask_each_other_for_signals_before_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals, "handle", lambda number, handler: signal.SIG_DFL)
    trainer, signals = make_trainer(tmp_path), stop_signals.StopSignals()
    loop = trainer.fit_loop.epoch_loop
    asks = loop._broadcast_sigterm_tensor
    signals.take_over(trainer)
    assert loop._broadcast_sigterm_tensor is stop_signals.nothing
    signals.give_back(trainer)
    assert loop._broadcast_sigterm_tensor == asks


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_optimizer_step_waits_for_the_gpu_once(
    store: RowStore, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = PhaseClock.mark

    def strict(clock: PhaseClock, phase: str | None) -> None:
        """Only reading the step, in the optimizer's phase, may wait."""
        mark(clock, phase)
        torch.cuda.set_sync_debug_mode("warn" if phase == "optimizer" else "error")

    def watch(stack: ExitStack) -> None:
        torch.cuda.set_sync_debug_mode("error")
        stack.callback(torch.cuda.set_sync_debug_mode, "default")

    monkeypatch.setattr(PhaseClock, "mark", strict)
    steps = Steps(watch)
    settings = {"max_steps": 4, "accelerator": "gpu", "devices": 1, "precision": "bf16-mixed"}
    trainer = make_trainer(tmp_path, callbacks=[Ledger(), steps], limit_val_batches=0, **settings)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(make_module(target_folder), datamodule=make_data(store))
    waits = [x for x in said if "synchronizing CUDA operation" in str(x.message)]
    assert trainer.global_step == 4
    assert len(waits) == 4
