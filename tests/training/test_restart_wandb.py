"""What W&B has of a run that is stopped and taken up again; a test for each field case."""

import csv
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from training.restarts import (
    RECORD,
    both_loggers,
    fault,
    said,
)
from training.test_kill import clean_environment, final, ledger, link, recipe, run_links
from training.wandb_file import history

from dflash_lightning.data.store import RowStore
from dflash_lightning.diagnosis import read_run
from dflash_lightning.diagnosis.run import BUCKET_COLUMNS

pytestmark = pytest.mark.slow


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
def test_lg_01_what_a_kill_took_from_wandb_is_logged_again_as_far_as_the_ledger_tells(
    logged: Path,
) -> None:
    ledger, online = read_run(logged / "runs" / "version_0"), read_run(logged / "wandb")
    assert online.step.tolist() == ledger.step.tolist()
    for name in (
        "lr",
        "grad_norm",
        "weight",
        "rows",
        "top_row",
        "top_share",
        "top_pull",
        "restart",
    ):
        np.testing.assert_allclose(online.column(name), ledger.column(name), rtol=2e-6)
    assert online.num_buckets == ledger.num_buckets == 2
    for name in BUCKET_COLUMNS:
        np.testing.assert_allclose(online.bucket(name), ledger.bucket(name), rtol=2e-6)
    _, rows = history(logged)
    killed = {row["trainer/global_step"] for row in rows if "train/accuracy" not in row}
    assert killed >= {4, 5, 6, 7}, "these were lost, and are what is checked here"
    whole = next(row for row in rows if "train/accuracy" in row)
    again = [r for r in rows if "train/accuracy" not in r and "train/loss" in r]
    lacking = {"train/accuracy", "train/padding_fraction", "train/skipped_steps"}
    lacking |= {"train/eta_hours", "train/rank_waiting"}
    for row in again:
        assert {name for name in whole if name not in row} == lacking


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
        env={**clean_environment(), "WANDB_SILENT": "true"},
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
