"""The rehearsal: every stage of a run in small, beside its folder, without a trace."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from training.test_fit import BATCHING, recipe

from dflash_lightning import Batching, plan_epoch
from dflash_lightning.data.store import RowStore, split_rows
from dflash_lightning.rehearsal import disk_needed, newest, rehearse


def files_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.slow
def test_a_rehearsal_says_what_the_run_will_take_and_leaves_nothing(
    store: RowStore, target_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    config = recipe(store, target_folder, tmp_path)
    before = files_in(tmp_path)
    rehearse(["--config", str(config)])
    said = capfd.readouterr().out
    assert files_in(tmp_path) == before
    assert said.endswith("rehearsal: passed\n")
    layout = {"world_size": 1, "accumulate": 1}
    rows, _ = split_rows(store.column("conversation"), 0.2)
    lengths, batching = store.lengths[rows], Batching(**BATCHING)
    steps = sum(
        plan_epoch(lengths, batching, seed=1, epoch=epoch, **layout).num_steps for epoch in (0, 1)
    )
    assert f"{steps} optimizer steps on 1 rank\n" in said
    assert " hours at " in said
    assert "peak memory " in said
    assert f"free in {tmp_path}" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "stage", "word"),
    [
        ("--model.lrr=1", "configuration", "lrr"),
        ("--data.batching.token_budget=10", "2 steps and a save", "token_budget"),
    ],
)
def test_a_stage_that_fails_is_named_with_its_one_line_and_nothing_is_left(
    store: RowStore, target_folder: Path, tmp_path: Path, option: str, stage: str, word: str
) -> None:
    config = recipe(store, target_folder, tmp_path)
    before = files_in(tmp_path)
    with pytest.raises(ValueError, match=f"failed at stage '{stage}': .*{word}") as refused:
        rehearse(["--config", str(config), option])
    assert "\n" not in str(refused.value)
    assert files_in(tmp_path) == before


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_leaves_nothing(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    config = recipe(store, target_folder, tmp_path)
    before = files_in(tmp_path)
    # a shell without job control has its background jobs ignore Ctrl-C, and tests with them
    script = (
        "import signal, sys; from dflash_lightning.rehearsal import rehearse; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); rehearse(sys.argv[1:])"
    )
    command = [sys.executable, "-c", script, "--config", str(config)]
    rehearsing = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert rehearsing.stdout is not None
    while "drafter: " not in (line := rehearsing.stdout.readline()):
        assert line, "the fit began"
    (folder,) = tmp_path.glob(".rehearsal-*")
    rehearsing.send_signal(signal.SIGINT)
    _, complaints = rehearsing.communicate(timeout=30)
    assert rehearsing.returncode != 0
    assert "KeyboardInterrupt" in complaints
    assert files_in(tmp_path) == before
    running = Path("/proc").glob("[0-9]*/cmdline")
    assert not [file for file in running if folder.name in command_line(file)]


def command_line(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # ended meanwhile
        return ""


def test_disk_counts_every_checkpoint_that_is_kept_and_lines_for_every_step(tmp_path: Path) -> None:
    run, exported = tmp_path / "run", tmp_path / "exported"
    (run / "checkpoints").mkdir(parents=True)
    exported.mkdir()
    for name, size in (("last.ckpt", 1000), ("step=2.ckpt", 900)):
        (run / "checkpoints" / name).write_bytes(bytes(size))
    (run / "ledger.csv").write_bytes(bytes(30))
    (exported / "model.safetensors").write_bytes(bytes(500))
    assert newest(run).name == "last.ckpt"
    plan = {"steps": 600, "steps_per_epoch": [100] * 6}
    for top, kept in ((1, 4), (5, 8), (-1, 9)):
        config = yaml.safe_load(f"checkpoint: {{save_top_k: {top}}}")
        assert disk_needed(config, run, exported, plan) == kept * 1000 + 500 + 600 * 10
