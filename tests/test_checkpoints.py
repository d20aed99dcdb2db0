"""Which checkpoint a run goes on from, whether it fits, and what changed since."""

import copy
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lightning.checkpoints import (
    Change,
    can_resume,
    changes_table,
    check_drafter,
    check_resumable,
    compare_settings,
    newest_complete,
    read_checkpoint,
    record_of,
    shown,
)

SETTINGS = {
    "model.lr": 6e-4,
    "model.warmup_steps": 100,
    "model.betas": [0.9, 0.95],
    "data.batching.token_budget": 46_080,
    "data.batching.num_buckets": 3,
    "data.batching.boundaries": [0, 512, 1024],
    "data.seed": 0,
    "data.store": "abc",
    "data.val_fraction": 0.05,
    "data.anchor_rate": 0.25,
    "trainer.world_size": 8,
    "trainer.accumulate_grad_batches": 1,
    "trainer.max_epochs": 6,
}
WHOLE = {
    "dflash": {"spec": {}},
    "optimizer_states": [{"state": {}}],
    "loops": {},
    "weights": torch.arange(1000.0),
}


def refused(text: str) -> pytest.RaisesExc:
    return pytest.raises(ValueError, match=re.escape(text))


def change(name: str, value: Any, *, mid_epoch: bool) -> Change:
    (found,) = compare_settings(SETTINGS, SETTINGS | {name: value}, mid_epoch=mid_epoch)
    assert found[:3] == (name, SETTINGS[name], value)
    return found


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mid_epoch", [False, True])
def test_the_same_settings_are_no_change(mid_epoch: bool):
    assert compare_settings(SETTINGS, copy.deepcopy(SETTINGS), mid_epoch=mid_epoch) == []


@pytest.mark.parametrize(
    ("name", "value", "between", "within"),
    [
        # free: what the configuration says holds
        ("model.lr", 3e-4, "0.0003", "0.0003"),
        ("model.betas", [0.9, 0.99], "[0.9, 0.99]", "[0.9, 0.99]"),
        ("data.anchor_rate", 0.5, "0.5", "0.5"),
        ("data.batching.num_buckets", 6, "6", "6"),
        ("trainer.max_epochs", 12, "12", "12"),
        # kept: what the checkpoint says holds
        ("model.warmup_steps", 200, *["100 (a warm-up is not repeated)"] * 2),
        # dealt: the rest of an epoch is dealt anew
        ("trainer.world_size", 4, "4", "4 (the rest of the epoch is dealt anew)"),
        ("trainer.accumulate_grad_batches", 2, "2", "2 (the rest of the epoch is dealt anew)"),
        # planned: only between epochs
        ("data.batching.token_budget", 32_768, "32768", None),
        ("data.seed", 1, "1", None),
        ("data.store", "xyz", "xyz", None),
        ("data.val_fraction", 0.1, "0.1", None),
        # fixed, always
        ("data.batching.boundaries", [0, 768, 1024], None, None),
    ],
)
def test_each_setting_has_a_rule(name: str, value: Any, between: str | None, within: str | None):
    for mid_epoch, used in ((False, between), (True, within)):
        if used is not None:
            assert change(name, value, mid_epoch=mid_epoch).used == used
            continue
        with refused(f"{name} must stay {shown(SETTINGS[name])} "):
            change(name, value, mid_epoch=mid_epoch)


def test_refusals_say_the_value_and_the_way_out():
    with refused(
        "data.seed must stay 0 until the epoch ends: the rest of it is planned with that, got 1. "
        "Give the old value, or resume from a checkpoint at an epoch's end."
    ):
        change("data.seed", 1, mid_epoch=True)
    with refused(
        "data.batching.boundaries must stay [0, 512, 1024] for the whole run: its curves are per "
        "bucket, got [0, 9]. Give them, or start a new run from this one's weights with model.init."
    ):
        change("data.batching.boundaries", [0, 9], mid_epoch=False)


def test_settings_that_only_one_side_knows_are_passed_over():
    one = {"data.seed": 0, "model.gone": 1}
    assert compare_settings(one, {"data.seed": 0, "data.new": 1}, mid_epoch=True) == []


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.sampled_from(["model.lr", "trainer.max_epochs", "data.anchor_rate"]), unique=True)
)
def test_changes_come_in_the_order_of_the_settings(names: list[str]):
    given_now = SETTINGS | dict.fromkeys(names, 7)
    found = [x.setting for x in compare_settings(SETTINGS, given_now, mid_epoch=True)]
    assert found == [name for name in SETTINGS if name in names]


def test_the_table_has_a_line_for_each_change():
    now = SETTINGS | {"model.lr": 3e-4, "trainer.world_size": 4, "model.warmup_steps": 50}
    lines = changes_table(compare_settings(SETTINGS, now, mid_epoch=True)).splitlines()
    assert lines[0] == "Settings that changed since the checkpoint"
    cells = [re.split(r"  +", line.strip()) for line in lines[1:] if line.strip("-─ ")]
    assert ["setting", "checkpoint", "config", "used"] in cells
    assert ["model.lr", "0.0006", "0.0003", "0.0003"] in cells
    assert ["model.warmup_steps", "100", "50", "100 (a warm-up is not repeated)"] in cells
    assert [
        *("trainer.world_size", "8", "4"),
        "4 (the rest of the epoch is dealt anew)",
    ] in cells


# -- files -----------------------------------------------------------------------------------------


def write(run: Path, name: str, age: int = 0, **changes: Any) -> Path:
    """A checkpoint of a run folder, ``age`` seconds old; a change to None leaves a part out."""
    path = run / "checkpoints" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({k: v for k, v in (WHOLE | changes).items() if v is not None}, path)
    return aged(path, age)


def aged(path: Path, age: int) -> Path:
    moment = 1_800_000_000 - age
    os.utime(path, (moment, moment))
    return path


def cut(path: Path, share: float) -> Path:
    """Leave the first part of a file, as a process that is killed while it writes."""
    moment = path.stat().st_mtime
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))
    os.utime(path, (moment, moment))
    return path


def test_the_newest_file_of_all_folders_is_found(tmp_path: Path):
    write(tmp_path / "a", "last.ckpt", age=30)
    newest = write(tmp_path / "b", "step=9.ckpt", age=10)
    write(tmp_path / "b", "last.ckpt", age=20)
    (tmp_path / "b" / "checkpoints" / "notes.txt").write_text("no checkpoint")
    (tmp_path / "c").mkdir()
    assert newest_complete(tmp_path.glob("*")) == (newest, [])


def test_there_may_be_none(tmp_path: Path):
    assert newest_complete([]) == (None, [])
    assert newest_complete([tmp_path / "missing"]) == (None, [])


def test_files_that_cannot_go_on_are_passed_over_and_named(tmp_path: Path):
    torn = cut(write(tmp_path / "a", "last.ckpt", age=1), 0.5)
    foreign = write(tmp_path / "a", "other.ckpt", age=2, dflash=None)
    weights = write(tmp_path / "a", "weights.ckpt", age=3, optimizer_states=None, loops=None)
    whole = write(tmp_path / "a", "previous.ckpt", age=4)
    write(tmp_path / "a", "older.ckpt", age=5)
    assert newest_complete([tmp_path / "a"]) == (whole, [torn, foreign, weights])
    whole.unlink()
    (tmp_path / "a" / "checkpoints" / "older.ckpt").unlink()
    assert newest_complete([tmp_path / "a"]) == (None, [torn, foreign, weights])


def test_of_files_equally_old_last_wins(tmp_path: Path):
    for name in ("a.ckpt", "last.ckpt", "previous.ckpt"):
        write(tmp_path / "a", name, age=7)
    found, _ = newest_complete([tmp_path / "a"])
    assert found == tmp_path / "a" / "checkpoints" / "last.ckpt"


def test_a_part_that_is_still_written_is_no_checkpoint(tmp_path: Path):
    whole = write(tmp_path / "a", "last.ckpt", age=9)
    write(tmp_path / "a", "next.ckpt.part", age=1)
    assert newest_complete([tmp_path / "a"]) == (whole, [])


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.9, 0.999])
def test_a_file_that_was_cut_is_not_read(tmp_path: Path, share: float):
    path = write(tmp_path, "last.ckpt")
    found = read_checkpoint(path)
    assert found is not None
    assert torch.equal(found["weights"], WHOLE["weights"])
    del found
    assert read_checkpoint(cut(path, share)) is None


def test_what_is_no_checkpoint_of_fit_is_not_read(tmp_path: Path):
    assert read_checkpoint(tmp_path / "missing.ckpt") is None
    assert read_checkpoint(write(tmp_path, "foreign.ckpt", dflash=None)) is None
    path = tmp_path / "list.ckpt"
    torch.save(["dflash"], path)
    assert read_checkpoint(path) is None
    text = tmp_path / "text.ckpt"
    text.write_text("dflash")
    assert read_checkpoint(text) is None
    with zipfile.ZipFile(tmp_path / "zip.ckpt", "w") as archive:
        archive.writestr("dflash", "no tensors")
    assert read_checkpoint(tmp_path / "zip.ckpt") is None


# -- checks ----------------------------------------------------------------------------------------


def test_only_a_checkpoint_with_optimizer_and_loops_goes_on():
    assert can_resume(WHOLE)
    assert not can_resume(None)
    for changes in ({"optimizer_states": []}, {"optimizer_states": None}):
        assert not can_resume(WHOLE | changes)
    for name in ("optimizer_states", "loops"):
        part = {k: v for k, v in WHOLE.items() if k != name}
        assert not can_resume(part)
        with refused("ckpt_path must be a checkpoint with optimizer state to be resumed; this one"):
            check_resumable(part)
    check_resumable(WHOLE)


def test_a_checkpoint_of_another_drafter_is_refused():
    spec = {"num_layers": 5, "block_size": 16, "layer_types": ["full_attention"]}
    check_drafter({"spec": spec}, copy.deepcopy(spec))
    with refused(
        "the checkpoint's drafter differs from model.drafter in num_layers (5 there, 4 here), "
        "block_size (16 there, 8 here). Give the settings in the run folder's config.yaml."
    ):
        check_drafter({"spec": spec}, spec | {"num_layers": 4, "block_size": 8})


def test_a_checkpoint_of_something_else_is_refused():
    assert record_of(WHOLE) is WHOLE["dflash"]
    with refused("ckpt_path must be a checkpoint that dflash-lightning fit wrote; this one was"):
        record_of({"state_dict": {}})
