"""Restarts over processes: signals, ranks, loggers, the command line; a test for each field case."""

import csv
import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from training.test_kill import final, ledger, link, recipe, rows_by_epoch, run_links, trained
from training.wandb_file import history

from dflash_lightning.data.store import RowStore, StoredRow, split_rows, write_store
from dflash_lightning.functional.schedule import schedule_factor

pytestmark = pytest.mark.slow
RECORD = {"class_path": "training.chain.RecordRows"}


def fault(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"training.faults.{name}", "init_args": arguments}


def said(folder: Path, number: int = 0) -> str:
    return (folder / f"log-{number}.txt").read_text()


def csv_logger(folder: Path) -> dict[str, Any]:
    arguments = {"save_dir": str(folder), "name": "runs"}
    return {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": arguments}


def wandb_logger(folder: Path, **more: Any) -> dict[str, Any]:
    arguments = {"save_dir": str(folder), "project": "tests", "offline": True, **more}
    return {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": arguments}


def both_loggers(folder: Path, **more: Any) -> list[dict[str, Any]]:
    return [csv_logger(folder), wandb_logger(folder, **more)]


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs" / "version_0" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# -- files and signals -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped_at_37(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, a save every 1000 steps, SIGTERM to rank 1 in step 37; then the rest."""
    folder = tmp_path_factory.mktemp("stop")
    path = recipe(store, folder, max_epochs=8)
    rarely = ("--resume.every_n_steps", "1000")
    links = [link(path, more=rarely, step=36, rank=1), link(path, more=rarely)]
    (folder / "codes.txt").write_text(json.dumps(run_links(folder, links)))
    return folder


@pytest.mark.ddp
def test_rs_09_a_signal_to_one_rank_saves_once_and_the_run_goes_on_at_the_next_step(
    store: RowStore, stopped_at_37: Path
) -> None:
    assert json.loads((stopped_at_37 / "codes.txt").read_text()) == [[75, 0], [0, 0]]
    assert said(stopped_at_37).count("stopped after step 37, as a signal asked for it") == 1
    assert "Traceback" not in said(stopped_at_37)
    assert "epoch" in said(stopped_at_37, 1)
    rows = trained(stopped_at_37)
    first = {line["restart"]: [] for line in rows.values()}
    for line in rows.values():
        first[line["restart"]].append(line["step"])
    assert {restart: (min(s), max(s)) for restart, s in first.items()} == {
        0: (0, 36),
        1: (37, final(stopped_at_37)["global_step"] - 1),
    }
    train, _ = split_rows(store.column("conversation"), 0.2)
    assert rows_by_epoch(rows) == [train.tolist()] * 8


@pytest.mark.ddp
def test_config_and_metrics_of_earlier_processes_are_kept(stopped_at_37: Path) -> None:
    run = stopped_at_37 / "runs" / "version_0"
    assert [p.name for p in sorted(run.glob("config*.yaml"))] == ["config-1.yaml", "config.yaml"]
    assert yaml.safe_load((run / "config-1.yaml").read_text())["resume"]["every_n_steps"] == 1000
    assert not list(run.parent.glob("version_1"))
    steps = [int(row["step"]) for row in metrics(stopped_at_37) if row["train/loss"]]
    total = final(stopped_at_37)["global_step"]
    assert len(steps) == len(set(steps)) == total
    losses = [float(row["train/loss"]) for row in metrics(stopped_at_37) if row["train/loss"]]
    assert losses == pytest.approx([float(row["loss"]) for row in ledger(stopped_at_37)], rel=1e-5)
    assert len([row for row in metrics(stopped_at_37) if row["val/loss"]]) == 1 + 8


def test_rs_08_auto_falls_back_to_the_file_before_and_says_so(
    store: RowStore, tmp_path: Path
) -> None:
    path = recipe(store, tmp_path, max_epochs=1)
    assert run_links(tmp_path, [link(path, 1, step=7, name="SIGKILL")]) == [[-9]]
    folder = tmp_path / "runs" / "version_0" / "checkpoints"
    for name in [*folder.glob("step=*.ckpt")]:
        name.unlink()  # the best so far, of step 0
    whole = (folder / "last.ckpt").read_bytes()
    (folder / "last.ckpt").write_bytes(whole[: len(whole) // 2])
    torch.save({"config": Path("somewhere")}, folder / "foreign.ckpt")
    assert run_links(tmp_path, [link(path, 1)]) == [[0]]
    log = said(tmp_path)
    assert f"passed over {folder / 'last.ckpt'}: it is not complete" in log
    assert f"passed over {folder / 'foreign.ckpt'}: " in log
    assert f"going on from {folder / 'previous.ckpt'}" in log
    again = [line["step"] for line in trained(tmp_path).values() if line["restart"] == 1]
    assert min(again) == 4
    train, _ = split_rows(store.column("conversation"), 0.2)
    assert rows_by_epoch(trained(tmp_path)) == [train.tolist()]


def test_rs_08_a_damaged_file_that_is_asked_for_is_refused_in_one_line(
    store: RowStore, tmp_path: Path
) -> None:
    torch.save({"config": Path("somewhere")}, tmp_path / "foreign.ckpt")
    asked = link(recipe(store, tmp_path), 1, more=("--ckpt_path", str(tmp_path / "foreign.ckpt")))
    assert run_links(tmp_path, [asked]) == [[1]]
    (line,) = (x for x in said(tmp_path).splitlines() if x.startswith("dflash-lightning fit: "))
    assert "ckpt_path must be a whole checkpoint of fit" in line
    assert "Traceback" not in said(tmp_path)


@pytest.mark.ddp
def test_rs_08_a_place_that_cannot_be_written_is_refused_before_the_target_is_loaded(
    store: RowStore, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    place = ("--trainer.logger.init_args.save_dir", str(tmp_path / "file" / "runs"))
    nowhere = ("--model.target.init_args.model_type", "llama")  # would be read only afterwards
    codes = run_links(tmp_path, [link(recipe(store, tmp_path), 1, more=(*place, *nowhere))])
    assert codes == [[1]]
    (line,) = (x for x in said(tmp_path).splitlines() if x.startswith("dflash-lightning fit: "))
    assert re.search(r"run folder \S+ must be writable, got: Not a directory at \S+/file\. ", line)
    assert "drafter:" not in said(tmp_path)
    assert "Traceback" not in said(tmp_path)


# -- Weights & Biases ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logged(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, three epochs, three restarts after two kinds of signal; another logger beside."""
    folder = tmp_path_factory.mktemp("wandb")
    callbacks = [RECORD, fault("LogsBeside")]
    path = recipe(store, folder, logger=both_loggers(folder), max_epochs=3, callbacks=callbacks)
    links = [
        link(path, step=3, rank=1),
        link(path, step=8, name="SIGKILL", rank=-1, hook="update"),
        link(path, step=12, rank=0),
        link(path),
    ]
    assert run_links(folder, links) == [[75, 0], [-9, -9], [75, 0], [0, 0]]
    return folder


@pytest.mark.ddp
def test_lg_01_nothing_that_a_run_logged_is_lost_after_a_restart(logged: Path) -> None:
    _, rows = history(logged)
    losses: dict[int, list[float]] = {}
    for row in rows:
        if "train/loss" in row:
            losses.setdefault(int(row["trainer/global_step"]), []).append(row["train/loss"])
    written = {int(row["step"]): float(row["loss"]) for row in ledger(logged)}
    total = final(logged)["global_step"]
    assert list(written) == list(range(total))
    assert losses.keys() == written.keys()
    for step, loss in written.items():
        assert losses[step][-1] == pytest.approx(loss, rel=1e-5)
    validations = {row["trainer/global_step"] for row in rows if "val/loss" in row}
    assert len(validations) == 4


@pytest.mark.ddp
def test_lg_01_restarts_are_marked_in_the_ledger_and_in_wandb(logged: Path) -> None:
    lines = (logged / "runs" / "version_0" / "ledger.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    first: dict[str, int] = {}
    for row in rows:
        first.setdefault(row["restart"], int(row["step"]))
    assert first == {"0": 0, "1": 4, "2": 8, "3": 13}
    _, logged_rows = history(logged)
    marks = [(r["restart"], r["trainer/global_step"]) for r in logged_rows if "restart" in r]
    # The second process was killed before W&B wrote down that it began.
    assert marks == [(2, 8), (3, 13)]


@pytest.mark.ddp
def test_lg_02_a_run_restarted_three_times_has_one_id_and_steps_that_rise(logged: Path) -> None:
    ids, rows = history(logged)
    assert len(ids) == 1
    assert final(logged)["wandb"]["id"] in ids
    files = sorted((logged / "wandb").glob("offline-run-*"))
    steps = [row["_step"] for row in rows]
    assert len(files) == 4
    assert all(a <= b for a, b in pairwise(steps)), "W&B drops what does not rise"


@pytest.mark.ddp
def test_lg_03_values_logged_beside_push_no_step_ahead(logged: Path) -> None:
    _, rows = history(logged)
    beside = {row["beside"] for row in rows if "beside" in row}
    killed = set(range(5, 9))  # with the process that wrote them nowhere else
    assert beside >= set(range(1, final(logged)["global_step"])) - killed
    assert len([row for row in rows if "beside" in row and "train/loss" in row]) == 0


@pytest.mark.ddp
def test_lg_05_an_outside_launcher_opens_one_run_a_start(logged: Path) -> None:
    assert len(list((logged / "wandb").glob("offline-run-*"))) == 4
    assert len(list((logged / "wandb").glob("offline-run-*/run-*.wandb"))) == 4


@pytest.mark.ddp
def test_lg_02_a_new_run_from_weights_has_an_id_of_its_own(
    store: RowStore, logged: Path, tmp_path: Path
) -> None:
    weights = logged / "runs" / "version_0" / "checkpoints" / "last.ckpt"
    path = recipe(store, tmp_path, logger=both_loggers(tmp_path), max_steps=1)
    new = link(path, 1, more=("--model.init", str(weights)))
    assert run_links(tmp_path, [new]) == [[0]]
    theirs, _ = history(logged)
    ours, rows = history(tmp_path)
    assert len(ours) == 1
    assert ours.isdisjoint(theirs)
    assert not [row for row in rows if "restart" in row]
    assert ledger(tmp_path)[0]["step"] == "0"


@pytest.mark.ddp
def test_lg_05_ranks_that_the_trainer_starts_itself_open_one_run(
    store: RowStore, tmp_path: Path
) -> None:
    path = recipe(store, tmp_path, logger=both_loggers(tmp_path), max_steps=2, callbacks=[])
    options = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    done = subprocess.run(
        [sys.executable, "-m", "dflash_lightning", "fit", "--config", str(path), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ids, rows = history(tmp_path)
    assert len(ids) == len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    assert len([row for row in rows if "train/loss" in row]) == 2
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["version_0"]


def test_lg_06_without_key_and_terminal_the_run_is_written_to_disk_at_once(
    store: RowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_API_KEY", "")
    for name in ("WANDB_MODE", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    path = recipe(store, tmp_path, logger=both_loggers(tmp_path, offline=False), max_steps=2)
    began = time.monotonic()
    assert run_links(tmp_path, [link(path, 1)]) == [[0]]
    assert time.monotonic() - began < 60
    log = said(tmp_path)
    assert log.count("W&B: no API key, so the run is written to disk") == 1
    assert "wandb sync" in log
    assert "Traceback" not in log
    ids, rows = history(tmp_path)
    assert len(ids) == 1
    assert len([row for row in rows if "train/loss" in row]) == 2


# -- ranks -----------------------------------------------------------------------------------------


def partly_masked(folder: Path, *, masked: set[int], rows: int = 24) -> RowStore:
    """Rows of random ids; those that are masked have nothing to learn from."""
    rng = np.random.default_rng(0)

    def stored(i: int) -> StoredRow:
        length = 20 + 3 * (i % 5)
        mask = np.zeros(length, dtype=bool)
        mask[length // 2 :] = i not in masked
        return StoredRow(rng.integers(4, 200, length), mask, i, "a")

    meta = {"key": {"tokenizer": "none"}, "report": {}}
    return write_store(folder, map(stored, range(rows)), meta, lambda: list(range(rows)))


@pytest.mark.ddp
def test_dd_03_a_rank_without_labels_takes_part_and_the_loss_is_that_of_one_process(
    tmp_path: Path,
) -> None:
    store = partly_masked(tmp_path / "store", masked={i for i in range(24) if i % 3})
    many, one = tmp_path / "many", tmp_path / "one"
    small = ("--data.batching.max_rows", "2", "--data.batching.deal", "independent")
    links = [
        link(recipe(store, many, max_epochs=2), 2, 1, more=small),
        link(recipe(store, one, max_epochs=2), 1, 2, more=small),
    ]
    assert run_links(tmp_path, links) == [[0, 0], [0]]
    steps: dict[tuple[int, int], list[int]] = {}
    for (step, rank, _), line in trained(many).items():
        steps.setdefault((step, rank), []).append(len(line["anchors"]))
    empty = {key for key, anchors in steps.items() if not sum(anchors)}
    alone = {(step, rank) for step, rank in empty if (step, 1 - rank) not in empty}
    assert {rank for _, rank in alone} == {0, 1}, "the case needs ranks without labels"
    ours, theirs = ledger(many), ledger(one)
    nothing = [row["step"] for row in ours if row["labels"] == "0"]
    log = said(tmp_path)
    assert re.findall(r"step (\d+): update skipped, nothing to learn in rows", log) == nothing
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for name in ("labels", "skipped", "rows"):
        assert [row[name] for row in ours] == [row[name] for row in theirs]
    for name in ("loss", "grad_norm"):
        expected = [float(row[name]) for row in theirs]
        found = [float(row[name]) for row in ours]
        assert found == pytest.approx(expected, rel=1e-4, nan_ok=True)


@pytest.mark.ddp
def test_lr_03_the_planned_steps_are_those_that_are_made_on_two_ranks_that_accumulate(
    store: RowStore, tmp_path: Path
) -> None:
    assert run_links(tmp_path, [link(recipe(store, tmp_path, max_epochs=2), 2, 2)]) == [[0, 0]]
    planned = int(re.search(r"(\d+) optimizer steps in all", said(tmp_path))[1])
    rows = ledger(tmp_path)
    assert len(rows) == planned == final(tmp_path)["global_step"]
    expected = [
        3e-3 * schedule_factor(step, warmup_steps=5, total_steps=planned)
        for step in range(planned)
    ]
    assert [float(row["lr"]) for row in rows] == pytest.approx(expected, rel=1e-5)
    assert (
        "learning rate 0.0006 at the first step, 0.003 at step 5, where the warm-up ends, then "
        f"cosine, {expected[-1]:.3g} at the last step"
    ) in said(tmp_path)


@pytest.mark.ddp
def test_dd_04_columns_do_not_depend_on_the_data(store: RowStore, tmp_path: Path) -> None:
    edges = [0, 60, int(store.lengths.max()) + 1, int(store.lengths.max()) + 100]
    names, keys = {"some": 1, "other": 2}, []
    links = []
    for name, seed in names.items():
        path = recipe(store, tmp_path / name, max_steps=1)
        single = ("--data.batching.max_rows", "1", "--seed_everything", str(seed))
        boundaries = ("--data.batching.boundaries", str(edges))
        links.append(link(path, 1, more=(*single, *boundaries)))
    assert run_links(tmp_path, links) == [[0], [0]]
    seen = set()
    for name in names:
        rows = metrics(tmp_path / name)
        keys.append(list(rows[0]))
        (step,) = (row for row in rows if row["train/loss"])
        seen |= {k for k in range(3) if float(step[f"train/bucket_{k}/rows"])}
        for bucket in range(3):
            assert f"train/bucket_{bucket}/loss" in keys[-1]
            assert f"train/bucket_{bucket}/noise" in keys[-1]
    assert set(keys[0]) == set(keys[1])
    assert 2 not in seen  # a bucket that has no row at all has its columns, too


@pytest.mark.ddp
def test_dd_06_validation_is_the_same_for_one_two_and_four_ranks_and_fewer_rows_than_ranks(
    store: RowStore, tmp_path: Path
) -> None:
    links = []
    few = ("--data.val_fraction", "0.05")
    for ranks in (1, 2, 4):
        for name, more in (("many", ()), ("few", few)):
            path = recipe(store, tmp_path / f"{name}-{ranks}", max_steps=1)
            links.append(link(path, ranks, more=more))
    assert {code for codes in run_links(tmp_path, links) for code in codes} == {0}
    for name in ("many", "few"):
        found = []
        for ranks in (1, 2, 4):
            rows = metrics(tmp_path / f"{name}-{ranks}")
            first = next(row for row in rows if row["val/loss"])
            assert first["step"] == "0"
            found.append([float(v) for k, v in sorted(first.items()) if k.startswith("val/") and v])
        assert found[1] == pytest.approx(found[0], rel=1e-6)
        assert found[2] == pytest.approx(found[0], rel=1e-6)
    _, val = split_rows(store.column("conversation"), 0.05)
    assert len(val) < 4


# -- updates that are not finite -------------------------------------------------------------------


@pytest.mark.ddp
def test_a_run_whose_updates_stay_not_finite_ends_with_a_checkpoint_and_names_the_rows(
    store: RowStore, tmp_path: Path
) -> None:
    poison = fault("Poison", first=4, rank=1)
    path = recipe(store, tmp_path, callbacks=[RECORD, poison])
    limit = ("--model.max_skipped_steps", "3")
    healed = recipe(store, tmp_path / "healed")
    assert run_links(tmp_path, [link(path, more=limit)]) == [[1, 0]]
    log = said(tmp_path)
    (line,) = (x for x in log.splitlines() if x.startswith("dflash-lightning fit: "))
    assert "stopped after step 7, as 3 updates in a row were not finite; saved " in line
    assert "Traceback" not in log
    batches = trained(tmp_path)
    skips = re.findall(r"step (\d+): update skipped.*loss of rows (\[.*?\]) is not finite", log)
    assert [int(step) for step, _ in skips] == [4, 5, 6]
    for step, rows in skips:
        assert sorted(json.loads(rows)) == sorted(batches[int(step), 1, 0]["rows"])
    assert [row["skipped"] for row in ledger(tmp_path)] == ["0"] * 4 + ["1"] * 3
    saved = final(tmp_path)
    assert saved["global_step"] == 7
    assert all(torch.isfinite(weight).all() for weight in saved["state_dict"].values())
    moments = saved["optimizer_states"][0]["state"].values()
    assert {int(state["step"]) for state in moments} == {4}
    cured = link(healed, more=("--ckpt_path", str(tmp_path / "runs/version_0/checkpoints/last.ckpt")))
    assert run_links(tmp_path / "healed", [cured]) == [[0, 0]]


@pytest.mark.ddp
def test_both_ranks_skip_together_where_only_one_has_a_bad_gradient(
    store: RowStore, tmp_path: Path
) -> None:
    poison = fault("Poison", first=3, last=4, rank=1, what="gradient")
    path = recipe(store, tmp_path, max_epochs=1, callbacks=[RECORD, poison])
    assert run_links(tmp_path, [link(path)]) == [[0, 0]]
    rows = ledger(tmp_path)
    assert [int(row["step"]) for row in rows if row["skipped"] == "1"] == [3, 4]
    assert all(float(row["loss"]) > 0 for row in rows)
    batches = trained(tmp_path)
    for step, numbers in re.findall(
        r"step (\d+): update skipped, gradient norm nan; it is from rows (\[.*?\])", said(tmp_path)
    ):
        both = batches[int(step), 0, 0]["rows"] + batches[int(step), 1, 0]["rows"]
        assert sorted(json.loads(numbers)) == sorted(both)
    assert said(tmp_path).count("update skipped") == 2
    moments = final(tmp_path)["optimizer_states"][0]["state"].values()
    assert {int(state["step"]) for state in moments} == {len(rows) - 2}
