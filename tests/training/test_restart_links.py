"""Restarts over processes: signals, files, ranks; a test for each field case."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from training.restarts import (
    both_loggers,
    metrics,
    said,
)
from training.test_kill import final, ledger, link, recipe, rows_by_epoch, run_links, trained

from dflash_lightning.data.store import RowStore, StoredRow, split_rows, write_store
from dflash_lightning.functional.schedule import schedule_factor

pytestmark = pytest.mark.slow

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
    codes = run_links(tmp_path, [link(recipe(store, tmp_path), 1, more=place)])
    assert codes == [[1]]
    (line,) = (x for x in said(tmp_path).splitlines() if x.startswith("dflash-lightning fit: "))
    assert re.search(r"run folder \S+ must be writable, got: Not a directory at \S+/file\. ", line)
    assert "drafter:" not in said(tmp_path)
    assert "Traceback" not in said(tmp_path)


@pytest.mark.parametrize("kind", ["none", "wandb", "wandb first"])
def test_auto_finds_the_files_of_a_run_whatever_logs_it(
    store: RowStore, tmp_path: Path, kind: str
) -> None:
    both = both_loggers(tmp_path / "logs")
    logger = {"none": False, "wandb": both[1], "wandb first": both[::-1]}[kind]
    settings = {"logger": logger, "max_epochs": 1, "default_root_dir": str(tmp_path / "logs")}
    path = recipe(store, tmp_path, callbacks=[], **settings)
    (tmp_path / "logs").mkdir()
    assert run_links(tmp_path, [link(path, 1, step=4), link(path, 1)]) == [[75], [0]]
    assert "restart 1: epoch 0 after 5 of its steps" in said(tmp_path, 1)


@pytest.mark.ddp
def test_a_signal_within_the_first_validation_is_a_stop_too_and_workers_do_not_hold_it_up(
    store: RowStore, tmp_path: Path
) -> None:
    path = recipe(store, tmp_path, max_epochs=1)
    began = time.monotonic()
    links = [link(path, step=0, rank=1, hook="validation"), link(path)]
    assert run_links(tmp_path, links) == [[75, 0], [0, 0]]
    assert time.monotonic() - began < 60
    assert "stopped after step 0, as a signal asked for it" in said(tmp_path)
    train, _ = split_rows(store.column("conversation"), 0.2)
    assert rows_by_epoch(trained(tmp_path)) == [train.tolist()]


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
        3e-3 * schedule_factor(step, warmup_steps=5, total_steps=planned) for step in range(planned)
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
