"""Starts that would do harm later are refused in one line, on all ranks."""

import fcntl
from pathlib import Path

import pytest
from training.test_kill import link, recipe, run_links

from dflash_lightning.callbacks import run_lock
from dflash_lightning.data.store import RowStore


def said(folder: Path, number: int) -> list[str]:
    """The refusals of a link, one from each rank."""
    lines = (folder / f"log-{number}.txt").read_text().splitlines()
    return [line for line in lines if line.startswith("dflash-lightning fit: ")]


@pytest.mark.ddp
@pytest.mark.slow
def test_ranks_that_go_on_from_different_files_are_refused_together(
    store: RowStore, tmp_path: Path
) -> None:
    path = recipe(store, tmp_path, max_epochs=1)
    apart = {**link(path), "rank_options": {"1": ["--ckpt_path", "null"]}}
    assert run_links(tmp_path, [link(path, step=3), apart]) == [[75, 0], [1, 1]]
    lines = said(tmp_path, 1)
    assert len(lines) == 2
    rule = "ckpt_path must be the same file on all ranks; they are at optimizer steps 0 to 4."
    assert all(rule in line for line in lines)


@pytest.mark.slow
def test_a_start_that_would_spoil_or_miss_another_run_is_refused(
    store: RowStore, tmp_path: Path
) -> None:
    path = recipe(store, tmp_path, max_epochs=1, logger=False, default_root_dir=str(tmp_path / "x"))
    anew = {**link(path, 1), "options": []}
    board = link(path, 1, more=("--trainer.logger", "true"))
    in_file = recipe(store, tmp_path / "file", max_epochs=1)
    in_file.write_text(in_file.read_text() + "rehearse: true\n")
    links = [anew, anew, link(path, 1), board, link(in_file, 1)]
    assert run_links(tmp_path, links) == [[0], [1], [0], [1], [1]]
    assert "run folder" in said(tmp_path, 1)[0]
    assert "Give --ckpt_path auto" in said(tmp_path, 1)[0]
    assert "going on from" in (tmp_path / "log-2.txt").read_text()
    assert "ckpt_path auto must know where runs are" in said(tmp_path, 3)[0]
    assert "rehearse must be given as --rehearse" in said(tmp_path, 4)[0]


@pytest.mark.slow
def test_a_second_fit_in_a_run_folder_is_refused(
    store: RowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(store, tmp_path, max_epochs=1)
    assert run_links(tmp_path, [link(path, 1, step=3)]) == [[75]]
    with (tmp_path / "runs" / "version_0" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run_links(tmp_path, [link(path, 1)]) == [[1]]
    assert "must belong to one fit at a time" in said(tmp_path, 0)[-1]
    assert run_links(tmp_path, [link(path, 1)]) == [[0]]
    assert run_lock.PATIENCE < 60
