"""Runs of W&B on disk and on its servers; and one run that three loggers tell alike."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import wandb
from diagnosis.wandb_log import config_of, history_of, run_of, write_log
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from training.faults import Crash, CrashError
from training.restarts import BATCHING, make_module

from dflash_lightning import Batching, DFlashDataModule
from dflash_lightning.callbacks import Ledger, ResumePoints, WandbRun, join_run
from dflash_lightning.checkpoints import read_checkpoint
from dflash_lightning.data.store import RowStore
from dflash_lightning.diagnosis.ledger import read_run
from dflash_lightning.diagnosis.missing import MISSING
from dflash_lightning.diagnosis.run import BUCKET_COLUMNS, Run
from dflash_lightning.diagnosis.tracker import OfflineFile, Process, run_of_history, run_path

LOGGED = (
    *("epoch", "lr", "grad_norm", "skipped", "loss", "weight", "rows", "tokens", "labels"),
    *("tokens_seen", "top_row", "top_share", "top_pull", "restart"),
)


def fit(store: RowStore, folder: Path, end: int, ckpt: Path | None = None, clip: float = 1.0):
    """A process that logs every step and dies at one; with the checkpoint of an earlier one."""
    loggers = [CSVLogger(folder, name="runs"), WandbLogger(save_dir=folder, offline=True)]
    trainer = L.Trainer(
        accelerator="cpu",
        logger=loggers,
        log_every_n_steps=1,
        max_epochs=2,
        gradient_clip_val=clip,
        callbacks=[WandbRun(), Ledger(), ResumePoints(5, None), Crash(end)],
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if ckpt is not None:
        join_run(trainer, read_checkpoint(ckpt), ckpt)
    data = DFlashDataModule(
        str(store.path), batching=Batching(**BATCHING), num_workers=0, val_fraction=0.2
    )
    try:
        trainer.fit(make_module(max_skipped_steps=3), datamodule=data, ckpt_path=ckpt)
    except CrashError:
        pass
    finally:
        wandb.finish()
    return Path(trainer.log_dir)


@pytest.fixture(scope="module")
def restarted(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two epochs of 17 steps in three processes; each goes on from step 10 in another way."""
    folder = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        run = fit(store, folder, 14)
        ckpt = run / "checkpoints" / "last.ckpt"
        kept = ckpt.with_name("kept.ckpt")
        ckpt.rename(kept)
        fit(store, folder, 13, kept, clip=0.1)
        fit(store, folder, -1, kept, clip=0.01)
        yield folder


def sources(folder: Path) -> tuple[Run, Run, Run]:
    run = folder / "runs" / "version_0"
    return read_run(run), read_run(run / "metrics.csv"), read_run(folder / "wandb")


@pytest.mark.slow
def test_ledger_metrics_and_wandb_tell_the_same_run_also_after_restarts(restarted: Path):
    ledger, *others = sources(restarted)
    assert ledger.step.tolist() == list(range(34))
    for run in others:
        assert run.step.tolist() == ledger.step.tolist()
        assert run.columns.keys() == set(LOGGED)
        for name in LOGGED:
            # float32 in the loggers, seven digits in the ledger
            np.testing.assert_allclose(
                run.column(name), ledger.column(name), rtol=2e-6, err_msg=f"{run.kind}: {name}"
            )
        assert run.num_buckets == ledger.num_buckets == 2
        for name in BUCKET_COLUMNS:
            np.testing.assert_allclose(
                run.bucket(name), ledger.bucket(name), rtol=2e-6, err_msg=f"{run.kind}: {name}"
            )
    assert ledger.column("restart").tolist() == [0] * 10 + [1] * 24


@pytest.mark.slow
def test_wandb_has_the_headers_of_the_ledger(restarted: Path):
    ledger, metrics, online = sources(restarted)
    assert [at for at, _ in ledger.headers] == [0, 10]
    assert online.headers == ledger.headers
    assert ledger.missing == online.missing == ()
    assert metrics.missing == (MISSING["header"],)
    assert (ledger.kind, metrics.kind, online.kind) == (
        "ledger",
        "Lightning's metrics.csv",
        "offline W&B run",
    )


@pytest.mark.slow
def test_an_offline_run_is_found_from_each_of_its_folders(restarted: Path):
    folders = sorted((restarted / "wandb").glob("offline-run-*"))
    assert len(folders) == 3
    whole = read_run(restarted)
    assert len(whole) == 34
    for folder in (restarted / "wandb", *folders):
        run = read_run(folder)
        assert run.loss.tolist() == whole.loss.tolist()
        assert run.name == whole.name
    (first,) = folders[0].glob("run-*.wandb")
    assert read_run(first).step.tolist() == list(range(14))  # a file is itself


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.4, 0.7, 0.9, 0.99])
def test_a_file_that_a_kill_cut_short_is_read_up_to_there(
    restarted: Path, tmp_path: Path, share: float
):
    whole = min((restarted / "wandb").glob("offline-run-*/run-*.wandb"))
    data = whole.read_bytes()
    all_rows = list(OfflineFile(whole).rows())
    path = tmp_path / "run-cut.wandb"
    path.write_bytes(data[: int(share * len(data))])
    rows = list(OfflineFile(path).rows())
    assert rows == all_rows[: len(rows)]
    assert len(rows) > 0
    path.write_bytes(data[: int(share * len(data))] + bytes(5000))  # a disk that lost the end
    assert list(OfflineFile(path).rows()) == rows


# -- what the loggers are given -------------------------------------------------------------------


@pytest.mark.slow
def test_every_row_has_the_same_keys_and_numbers_of_rows_keep_their_digits(restarted: Path):
    files = sorted((restarted / "wandb").glob("offline-run-*/run-*.wandb"))
    # What W&B lost with a killed process is logged again from the ledger, which knows no accuracy.
    rows = [row for path in files for row in OfflineFile(path).rows() if "train/accuracy" in row]
    assert len({frozenset(row) for row in rows}) == 1
    assert {"train/top_share", "train/top_pull", "train/restart"} <= rows[0].keys()
    assert {f"train/bucket_{k}/{name}" for k in (0, 1) for name in BUCKET_COLUMNS} <= (
        rows[0].keys()
    )
    (config,) = [file.config for file in map(OfflineFile, files[:1]) if list(file.rows())]
    assert config["ledger"]["boundaries"][0] == 0
    assert config["ledger"].keys() >= {
        *("weight_share", "row_share", "warmup_steps", "total_steps", "peak_lr", "order", "deal"),
        *("world_size", "accumulate", "plan"),
    }


# -- history --------------------------------------------------------------------------------------


def read(rows: list[dict[str, Any]], **config: Any) -> Run:
    return run_of_history([Process(rows, config)], source="us/p/1", name="n", kind="W&B run")


def test_rows_of_the_servers_are_read():
    rows = [
        {"_step": 4, "_timestamp": 1.7e9, "trainer/global_step": 0, "train/loss": 3, "epoch": 0},
        {"_step": 5, "trainer/global_step": 1, "train/loss": "NaN", "train/lr": 1e-4},
        {"_step": 6, "trainer/global_step": 2, "train/loss": "Infinity", "train/lr": None},
        {"_step": 7, "trainer/global_step": 2, "val/loss": 2.5, "plan": {"_type": "table-file"}},
        {"_step": 8, "trainer/global_step": 3, "train/loss": "-Infinity", "train/lr": "high"},
    ]
    run = read(rows, ledger={"weight_share": [1.0]}, plan={"rows": 3})
    assert run.step.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(run.loss, [3, np.nan, np.inf, -np.inf])
    np.testing.assert_array_equal(run.column("lr"), [np.nan, 1e-4, np.nan, np.nan])
    assert run.headers == ((0, {"weight_share": [1.0]}),)
    assert (run.name, run.kind) == ("n", "W&B run")


def test_other_trainers_have_wandbs_own_step_or_one_of_their_own():
    own = [{"_step": step, "loss": 3 - step / 10} for step in range(0, 30, 10)]
    assert read(own).step.tolist() == [0, 10, 20]
    hugging_face = [
        {"_step": i, "train/global_step": 5 * i, "train/loss": 2.0, "train/learning_rate": 1e-4}
        for i in range(3)
    ]
    run = read(hugging_face)
    assert run.step.tolist() == [0, 5, 10]
    assert run.column("lr").tolist() == [1e-4] * 3
    assert run.headers == ()
    assert MISSING["header"] in run.missing


def logged(first: int, end: int, loss: float) -> list[dict[str, Any]]:
    return [
        {"trainer/global_step": s, "train/loss": loss, "train/lr": 1.0} for s in range(first, end)
    ]


def test_a_mark_of_a_restart_voids_what_came_after_its_step_and_repeated_rows_keep_their_place():
    rows = [
        *logged(0, 9, 1),
        {"restart": 1, "trainer/global_step": 6},
        *({"trainer/global_step": s, "train/loss": 1.5} for s in (4, 5)),  # logged again
        *logged(6, 7, 2),
    ]
    run = read(rows)
    assert run.step.tolist() == list(range(7))
    assert run.loss.tolist() == [1, 1, 1, 1, 1.5, 1.5, 2]
    assert run.column("lr").tolist() == [1] * 7  # what the repeated rows lack is still known
    assert run.column("restart").tolist() == [0] * 6 + [1]


def test_without_marks_steps_that_go_back_are_a_restart():
    run = read([*logged(0, 9, 1), *logged(5, 7, 2)])
    assert run.loss.tolist() == [1] * 5 + [2] * 2
    assert run.column("restart").tolist() == [0] * 5 + [1] * 2


def test_each_process_gives_its_header_from_its_first_step_on():
    parts = [
        Process(logged(0, 8, 1), {"ledger": {"number": 0}}),
        Process(logged(8, 9, 1), {}),
        Process(
            [{"restart": 2, "trainer/global_step": 5}, *logged(5, 9, 1)],
            {"ledger": {"number": 2}},
        ),
        Process(
            [{"restart": 3, "trainer/global_step": 9}],  # killed before its first step
            {"ledger": {"number": 3, "step": 9}},
        ),
    ]
    run = run_of_history(parts, source="s", name="n", kind="W&B run")
    assert run.headers == ((0, {"number": 0}), (5, {"number": 2}))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "us/p/1 must have a column of the step, .* its columns are none"),
        ([{"_step": 0, "acc": 1}], "us/p/1 must have a column of the loss, .* are _step, acc"),
        ([{"_step": 0, "loss": "x"}], "us/p/1 must hold steps with a loss, and no row has a loss"),
        ([{"_step": 0.5, "loss": 1}], "us/p/1, row 1: _step must be a whole number from 0 on"),
        ([{"_step": 0, "a": 1}, {"loss": 1}], "must have a _step and a loss in one row"),
    ],
)
def test_a_history_without_a_curve_is_refused(rows: list[dict[str, Any]], says: str):
    with pytest.raises(ValueError, match=says) as caught:
        read(rows)
    assert "\n" not in str(caught.value)


# -- files ----------------------------------------------------------------------------------------


def curve_file(path: Path, steps: range, loss: float = 1.0, **config: Any) -> Path:
    rows = [
        history_of(row, number) for number, row in enumerate(logged(steps[0], steps[-1] + 1, loss))
    ]
    return write_log(path, [run_of(path.stem[4:]), config_of(config), *rows])


def test_records_of_any_size_are_put_together(tmp_path: Path):
    config = {"long": "x" * 100_000, "ledger": {"step": 0}}  # over several blocks
    path = curve_file(tmp_path / "run-a.wandb", range(3000), **config)
    file = OfflineFile(path)
    rows = list(file.rows())
    assert [row["_step"] for row in rows] == list(range(3000))
    assert file.config == config
    assert file.run_id == "a"
    assert len(read_run(path)) == 3000


def test_the_newest_run_of_a_folder_is_taken_with_all_its_processes(tmp_path: Path):
    root = tmp_path / "wandb"
    curve_file(root / "run-20260101_120000-old" / "run-old.wandb", range(50))
    curve_file(root / "offline-run-20260102_120000-new" / "run-new.wandb", range(10), 1.0)
    curve_file(root / "run-20260102_130000-new" / "run-new.wandb", range(5, 8), 2.0)
    (root / "latest-run").symlink_to("run-20260101_120000-old")
    run = read_run(root)
    assert (run.name, run.kind) == ("new", "offline W&B run")
    assert run.loss.tolist() == [1] * 5 + [2] * 3
    assert read_run(tmp_path).loss.tolist() == run.loss.tolist()
    assert len(read_run(root / "run-20260101_120000-old")) == 50


def test_a_run_has_the_name_that_it_was_given(tmp_path: Path):
    rows = [history_of(row, 0) for row in logged(0, 3, 1)]
    path = write_log(tmp_path / "run-x.wandb", [run_of("x", name="orange"), *rows])
    assert read_run(path).name == "orange"
    assert read_run(path, name="mine").name == "mine"


def test_a_file_of_something_else_or_damaged_is_refused(tmp_path: Path):
    path = tmp_path / "run-a.wandb"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"run-a\.wandb must be a file of W&B, which begins with"):
        read_run(path)
    curve_file(path, range(3))
    data = bytearray(path.read_bytes())
    data[14:22] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"run-a\.wandb is damaged before byte \d+: ") as caught:
        read_run(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["file", "us/dflash/abc"])
def test_without_wandb_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
):
    path = curve_file(tmp_path / "run-a.wandb", range(3)) if source == "file" else source
    for name in ("wandb", "wandb.proto"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"where wandb is installed\. Run: pip install wandb\."):
        read_run(path)


# -- online ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "us/dflash/ab12cd34",
        "us/dflash/runs/ab12cd34",
        "wandb:us/dflash/ab12cd34",
        "https://wandb.ai/us/dflash/runs/ab12cd34",
        "https://wandb.ai/us/dflash/runs/ab12cd34/overview?nw=nwuser",
        "wandb:https://wandb.example.org/us/dflash/runs/ab12cd34#top",
    ],
)
def test_the_ways_to_name_a_run_on_the_servers(source: str):
    assert run_path(source) == "us/dflash/ab12cd34"


@pytest.mark.parametrize("source", ["a/b", "/a/b/c", "./a/b", "a/b/c.csv", "a/b/c/d", "wandb:a"])
def test_what_does_not_name_a_run_on_the_servers(source: str):
    assert run_path(source) is None


class Stored:
    """A run as W&B's API gives it."""

    name = "orange"
    config = {"ledger": {"weight_share": [1.0]}}  # noqa: RUF012

    def __init__(self, rows: list[dict[str, Any]], error: Exception | None = None) -> None:
        self._rows, self._error = rows, error

    def scan_history(self) -> Iterator[dict[str, Any]]:
        yield from self._rows
        if self._error is not None:
            raise self._error


class Api:
    """W&B's API with one run."""

    def __init__(self, stored: Stored | Exception) -> None:
        self._stored = stored

    def __call__(self) -> "Api":
        return self

    def run(self, path: str) -> Stored:
        assert path == "us/dflash/abc"
        if isinstance(self._stored, Exception):
            raise self._stored
        return self._stored


def test_a_run_on_the_servers_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wandb, "Api", Api(Stored(logged(0, 5, 2))))
    run = read_run("https://wandb.ai/us/dflash/runs/abc")
    assert (run.name, run.kind, len(run)) == ("orange", "W&B run", 5)
    assert run.header == {"weight_share": [1.0]}
    assert read_run("us/dflash/abc", name="mine").name == "mine"


@pytest.mark.parametrize(
    "stored",
    [
        wandb.errors.CommError("no way\nto the server."),
        wandb.errors.UsageError("no way to the server"),
        ValueError("no way to the server"),
        ConnectionError("no way to the server"),
        Stored(logged(0, 5, 2), wandb.errors.CommError("no way to the server")),
        Stored(logged(0, 5, 2), ConnectionError("no way to the server")),
    ],
)
def test_a_run_that_the_servers_do_not_give_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, stored: Stored | Exception
):
    monkeypatch.setattr(wandb, "Api", Api(stored))
    with pytest.raises(
        ValueError, match=r"^W&B run us/dflash/abc could not be read: no way"
    ) as caught:
        read_run("us/dflash/abc")
    assert str(caught.value).endswith(
        "to the server. Check the name and wandb login, or give the run folder or the offline W&B "
        "folder."
    )


def test_a_run_on_the_servers_without_a_curve_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wandb, "Api", Api(Stored([{"_step": 0, "acc": 1}])))
    with pytest.raises(ValueError, match=r"^us/dflash/abc must have a column of the loss"):
        read_run("us/dflash/abc")
