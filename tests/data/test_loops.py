"""What Lightning's loops are told: where a checkpoint stands, and how long an epoch is."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from dflash_lightning.data.loops import mend_progress, tell_epoch_length
from dflash_lightning.data.run_plan import Position


def counts(ready: int, processed: int | None = None) -> dict[str, int]:
    """Lightning's four counters: a checkpoint is written before ``completed`` is counted."""
    processed = ready if processed is None else processed
    return {"ready": ready, "completed": processed - 1, "started": ready, "processed": processed}


def saved(*, epoch: int, batch: int, before: int, step: int) -> dict:
    """What Lightning writes after ``batch`` batches of an epoch and ``before`` earlier ones."""
    begun = {"ready": epoch + 1, "completed": epoch, "started": epoch + 1, "processed": epoch}
    return {
        "global_step": step,
        "loops": {
            "fit_loop": {
                "state_dict": {},
                "epoch_loop.state_dict": {"_batches_that_stepped": step - 1},
                "epoch_loop.batch_progress": {
                    "total": counts(before + batch),
                    "current": counts(batch),
                    "is_last_batch": True,
                },
                "epoch_loop.val_loop.batch_progress": {
                    "total": counts(9),
                    "current": counts(4),
                    "is_last_batch": False,
                },
                "epoch_progress": {"total": dict(begun), "current": dict(begun)},
            }
        },
    }


def progress(checkpoint: dict) -> tuple[dict, dict]:
    loop = checkpoint["loops"]["fit_loop"]
    return loop["epoch_loop.batch_progress"], loop["epoch_progress"]


def same(number: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "completed", "started", "processed"), number)


def test_the_counters_are_lightnings_own():
    loop = L.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False).fit_loop
    real, ours = loop.state_dict(), saved(epoch=0, batch=1, before=0, step=1)
    for name, value in ours["loops"]["fit_loop"].items():
        assert real[name].keys() == value.keys()
        if "total" in value:
            assert real[name]["total"].keys() == value["total"].keys()


def test_a_plan_that_goes_on_at_its_steps_end_is_left_alone():
    checkpoint = saved(epoch=2, batch=6, before=20, step=13)
    before = copy.deepcopy(progress(checkpoint))
    mend_progress(checkpoint, Position(epoch=2, segments=((2, 2, 3),)), first_batch=6)
    assert progress(checkpoint) == before


def test_an_epoch_that_has_not_begun_is_left_alone():
    checkpoint = saved(epoch=0, batch=0, before=0, step=0)
    before = copy.deepcopy(progress(checkpoint))
    mend_progress(checkpoint, Position(epoch=0), first_batch=0)
    assert progress(checkpoint) == before


@pytest.mark.parametrize("first_batch", [0, 6])
def test_a_validation_begins_with_its_first_batch(first_batch: int):
    checkpoint = saved(epoch=2, batch=6, before=20, step=13)
    mend_progress(checkpoint, Position(epoch=2, segments=((2, 2, 3),)), first_batch)
    validation = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    assert validation["current"] == validation["total"] == same(0)


def test_a_plan_of_the_rest_begins_with_its_first_batch():
    checkpoint = saved(epoch=2, batch=6, before=20, step=13)
    epochs = copy.deepcopy(progress(checkpoint)[1])
    mend_progress(checkpoint, Position(epoch=2, segments=((2, 2, 3),)), first_batch=0)
    batches, after = progress(checkpoint)
    assert batches == {"total": same(26), "current": same(0), "is_last_batch": False}
    assert after == epochs


def test_a_step_that_was_under_way_begins_again():
    checkpoint = saved(epoch=0, batch=7, before=0, step=3)
    mend_progress(checkpoint, Position(epoch=0, segments=((1, 2, 3),)), first_batch=6)
    batches, epochs = progress(checkpoint)
    assert batches["current"] == same(6)
    assert batches["total"] == same(7)
    assert epochs["current"]["processed"] == 0


def test_an_epoch_that_max_steps_cut_short_goes_on():
    checkpoint = saved(epoch=1, batch=3, before=12, step=15)
    loop = checkpoint["loops"]["fit_loop"]
    loop["epoch_progress"] = {"total": same(2), "current": same(2)}  # all epochs are over, it says
    loop["epoch_loop.batch_progress"] = {"total": same(15), "current": same(3)}
    mend_progress(checkpoint, Position(epoch=1, segments=((1, 1, 3),)), first_batch=3)
    batches, epochs = progress(checkpoint)
    begun = {"ready": 2, "started": 2, "processed": 1, "completed": 1}
    assert epochs == {"total": begun, "current": begun}
    assert batches == {"total": same(15), "current": same(3), "is_last_batch": False}


@pytest.mark.parametrize("batch", [0, 12])
def test_after_a_finished_epoch_the_next_has_not_begun(batch: int):
    checkpoint = saved(epoch=1, batch=batch, before=12, step=6)
    position = Position(epoch=1, segments=((1, 2, 6),), finished=True)
    mend_progress(checkpoint, position, first_batch=0)
    batches, epochs = progress(checkpoint)
    assert epochs == {"total": same(2), "current": same(2)}
    assert batches == {"total": same(12 + batch), "current": same(0), "is_last_batch": False}


def test_lightning_reads_the_next_epoch_out_of_what_was_mended():
    checkpoint = saved(epoch=1, batch=12, before=12, step=6)
    mend_progress(checkpoint, Position(epoch=1, segments=((1, 2, 6),), finished=True), 0)
    trainer = L.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    loop = trainer.fit_loop
    state = loop.state_dict() | checkpoint["loops"]["fit_loop"]
    loop.load_state_dict(state)
    assert trainer.current_epoch == 2
    assert loop.epoch_loop.batch_progress.current.ready == 0
    assert not loop.epoch_loop.batch_progress.is_last_batch


# -- how long an epoch is --------------------------------------------------------------------------


def trainer_with(batches: int, **options: object) -> L.Trainer:
    """A trainer whose epoch of some batches has been set up."""
    options = {"logger": False, "accelerator": "cpu", "enable_checkpointing": False} | options
    trainer = L.Trainer(**options)
    loader = CombinedLoader(DataLoader(torch.arange(9), batch_size=None), "max_size_cycle")
    loader.limits = [batches]
    trainer.fit_loop._combined_loader, trainer.fit_loop.max_batches = loader, batches
    trainer.val_check_batch = batches
    return trainer


@pytest.mark.parametrize("told", [3, 5, 9])
def test_a_longer_and_a_shorter_epoch_have_their_own_length(told: int):
    trainer = trainer_with(5)
    tell_epoch_length(trainer, told)
    assert len(iter(trainer.fit_loop._combined_loader)) == told
    assert trainer.num_training_batches == told
    assert trainer.val_check_batch == told


def test_validation_keeps_its_share_of_an_epoch():
    trainer = trainer_with(5, val_check_interval=0.25)
    for told, interval in ((9, 2), (8, 2), (3, 1)):
        tell_epoch_length(trainer, told)
        assert trainer.val_check_batch == interval


def test_validation_after_a_number_of_batches_stays():
    trainer = trainer_with(5, val_check_interval=4)
    trainer.val_check_batch = 4
    tell_epoch_length(trainer, 9)
    assert trainer.val_check_batch == 4
    assert trainer.num_training_batches == 9


def test_a_limit_of_the_trainer_stays():
    trainer = trainer_with(5, limit_train_batches=5)
    tell_epoch_length(trainer, 9)
    assert trainer.num_training_batches == 5
    assert len(iter(trainer.fit_loop._combined_loader)) == 5


def test_before_the_first_epoch_there_is_nothing_to_tell():
    trainer = L.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    before = trainer.fit_loop.max_batches
    tell_epoch_length(trainer, 9)
    assert trainer.fit_loop._combined_loader is None
    assert trainer.fit_loop.max_batches == before
