"""Runs that are killed again and again until they are done, as real processes on real signals."""

import csv
import json
import os
import random
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from dflash_lightning.data.store import RowStore, split_rows

TESTS = Path(__file__).parents[1]
VAL_FRACTION = 0.2
EPOCHS = 4


def recipe(store: RowStore, folder: Path, **trainer: object) -> Path:
    """A fit as a user would write it, with two loader workers and a save every second step."""
    logger = {"save_dir": str(folder), "name": "runs"}
    path = "lightning.pytorch.loggers.CSVLogger"
    config = {
        "seed_everything": 1,
        "trainer": {
            "max_epochs": EPOCHS,
            "accelerator": "cpu",
            "precision": "32-true",
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "logger": {"class_path": path, "init_args": logger},
            "callbacks": [{"class_path": "training.chain.RecordRows"}],
            **trainer,
        },
        "model": {
            "target": {"class_path": "dflash_lightning.random_target.RandomTarget"},
            "drafter": {
                "num_layers": 1,
                "block_size": 4,
                "target_layer_ids": [0, 2],
                "mask_token_id": 500,
            },
            "lr": 3e-3,
            "warmup_steps": 5,
        },
        "data": {
            "store": str(store.path),
            "val_fraction": VAL_FRACTION,
            "num_workers": 2,
            "batching": {"token_budget": 400, "max_rows": 3, "num_buckets": 2},
        },
        "resume": {"every_n_steps": 2},
    }
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(config))
    return folder / "recipe.yaml"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def clean_environment() -> dict[str, str]:
    """Without the W&B service of an earlier test, which processes would join."""
    # nor coverage, which stops a loader's worker for ever now and then when it is forked
    unwanted = ("WANDB", "COVERAGE", "COV_CORE")
    kept = {k: value for k, value in os.environ.items() if not any(x in k for x in unwanted)}
    return {**kept, "OMP_NUM_THREADS": "1"}


def run_links(folder: Path, links: list[dict]) -> list[list[int]]:
    """Run one fit after the other; exit codes of the ranks of each."""
    folder.mkdir(exist_ok=True)
    (folder / "spec.json").write_text(json.dumps({"links": links, "port": free_port()}))
    done = subprocess.run(
        [sys.executable, "-m", "training.chain", str(folder / "spec.json")],
        cwd=TESTS,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return json.loads((folder / "codes.json").read_text())


def link(
    recipe: Path, world_size: int = 2, accumulate: int = 1, more: tuple = (), **kill: object
) -> dict:
    options = ["--ckpt_path", "auto", *more]
    layout = {"world_size": world_size, "accumulate": accumulate}
    return {"recipe": str(recipe), "options": options, "kill": kill or None, **layout}


def trained(folder: Path) -> dict[tuple[int, int, int], dict]:
    """The batches that made the final weights, by step, rank and place in the window.

    A step that was trained again after a fall back to a checkpoint counts as it was the last time;
    what a killed process did beyond is forgotten.
    """
    lines = []
    for path in (folder / "runs" / "version_0").glob("rows-*.jsonl"):
        rank = int(path.stem.removeprefix("rows-"))
        lines += [{**json.loads(line), "rank": rank} for line in path.read_text().splitlines()]
    first = {}  # of each process: where it began
    for line in lines:
        first[line["restart"]] = min(line["step"], first.get(line["restart"], line["step"]))
    kept = {}
    for line in sorted(lines, key=lambda line: line["restart"]):
        later = [step for restart, step in first.items() if restart > line["restart"]]
        if line["step"] < min(later, default=line["step"] + 1):
            kept[line["step"], line["rank"], line["micro"]] = line
    return kept


def rows_by_epoch(batches: dict[tuple[int, int, int], dict]) -> list[list[int]]:
    epochs: dict[int, list[int]] = {}
    for line in batches.values():
        epochs.setdefault(line["epoch"], []).extend(line["rows"])
    return [sorted(epochs[epoch]) for epoch in sorted(epochs)]


def final(folder: Path) -> dict:
    path = folder / "runs" / "version_0" / "checkpoints" / "last.ckpt"
    return torch.load(path, weights_only=True)


def assert_same_end(one: dict, other: dict) -> None:
    """Bit-equal weights, moments and schedule."""
    assert one["global_step"] == other["global_step"]
    for name, weight in one["state_dict"].items():
        assert torch.equal(weight, other["state_dict"][name]), name
    (ours,), (theirs,) = one["optimizer_states"], other["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    for key, state in ours["state"].items():
        for name, value in state.items():
            assert torch.equal(value, theirs["state"][key][name]), (key, name)
    assert one["lr_schedulers"] == other["lr_schedulers"]


@pytest.fixture(scope="module")
def uninterrupted(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kill") / "whole"
    assert run_links(folder, [link(recipe(store, folder))]) == [[0, 0]]
    return folder


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_run_killed_ten_times_ends_as_one_that_was_left_alone(
    store: RowStore, uninterrupted: Path, tmp_path: Path, name: str
) -> None:
    total = final(uninterrupted)["global_step"]
    draw = random.Random(name)
    steps = sorted(draw.sample(range(total - 2), 10))
    if name == "SIGKILL":  # behind the last save, or the run would not get on
        steps = sorted({2 * (step // 2) + 2 for step in steps} | set(range(2, 22, 2)))[:10]
    kills = [
        {
            "step": step,
            "name": name,
            "rank": -1 if name == "SIGKILL" else draw.choice([0, 1, -1]),
            "hook": draw.choice(["start", "update"]),
        }
        for step in steps
    ]
    path = recipe(store, tmp_path)
    codes = run_links(tmp_path, [*(link(path, **kill) for kill in kills), link(path)])
    assert codes == [[75, 0] if name == "SIGTERM" else [-9, -9]] * 10 + [[0, 0]]
    train, _ = split_rows(store.column("conversation"), VAL_FRACTION)
    ours, theirs = trained(tmp_path), trained(uninterrupted)
    assert rows_by_epoch(ours) == [train.tolist()] * EPOCHS
    assert ours.keys() == theirs.keys()
    for key, line in ours.items():
        assert (line["rows"], line["anchors"]) == (theirs[key]["rows"], theirs[key]["anchors"])
    assert {line["restart"] for line in ours.values()} > {0, 1, 5}
    assert_same_end(final(tmp_path), final(uninterrupted))
    assert [row["step"] for row in ledger(tmp_path)] == [str(step) for step in range(total)]
    assert ledger(tmp_path) == ledger(uninterrupted)


def ledger(folder: Path) -> list[dict[str, str]]:
    """The rows of a ledger without what differs between two runs: clocks and restarts."""
    lines = (folder / "runs" / "version_0" / "ledger.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    clocks = ("time", "seconds", "restart")  # the seconds of every phase among them
    return [{k: v for k, v in row.items() if not k.endswith(clocks)} for row in rows]


@pytest.mark.ddp
@pytest.mark.slow
def test_the_world_changes_from_two_ranks_to_one_to_three_and_no_row_is_lost(
    store: RowStore, tmp_path: Path
) -> None:
    path = recipe(store, tmp_path, max_epochs=3)
    sharded = ("--model.shard_optimizer", "true")
    layouts = [(2, 1), (1, 1), (3, 1), (1, 2), (2, 1), (3, 1), (2, 2)]
    steps = [3, 5, 7, 12, 15, 17]
    links = [
        link(path, *layout, more=sharded, step=step, rank=-1)
        for layout, step in zip(layouts, steps, strict=False)
    ]
    codes = run_links(tmp_path, [*links, link(path, *layouts[-1], more=sharded)])
    assert [code[0] for code in codes] == [75] * len(steps) + [0]
    train, _ = split_rows(store.column("conversation"), VAL_FRACTION)
    batches = trained(tmp_path)
    assert rows_by_epoch(batches) == [train.tolist()] * 3
    rows = ledger(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    epochs = [int(row["epoch"]) for row in rows]
    assert epochs == sorted(epochs)
    for epoch in range(3):
        counted = [int(row["rows"]) for row in rows if int(row["epoch"]) == epoch]
        assert sum(counted) == len(train)
    rates = [float(row["lr"]) for row in rows]
    assert max(rates) == rates[4] == 3e-3  # warmed up once, in the first five steps
    assert all(a >= b for a, b in pairwise(rates[7:]))  # and falling since the last change
    assert final(tmp_path)["global_step"] == len(rows)


@pytest.mark.ddp
@pytest.mark.slow
def test_four_and_eight_processes_train_as_one(store: RowStore, tmp_path: Path) -> None:
    names = {4: tmp_path / "four", 8: tmp_path / "eight"}
    for ranks, folder in names.items():
        alone = tmp_path / f"alone-{ranks}"
        options = {"max_epochs": 2}
        one = link(recipe(store, alone, **options), 1, ranks)
        many = link(recipe(store, folder, **options), ranks)
        assert run_links(folder, [one, many]) == [[0], [0] * ranks]
        ours, theirs = ledger(folder), ledger(alone)
        assert len(ours) == len(theirs) >= 4
        for name in ("rows", "labels", "tokens", "padded_tokens"):
            assert [row[name] for row in ours] == [row[name] for row in theirs]
        for name in ("loss", "grad_norm"):
            expected = [float(row[name]) for row in theirs]
            assert [float(row[name]) for row in ours] == pytest.approx(expected, rel=1e-4)
        steps = {key[1]: 0 for key in trained(folder)}
        for _, rank, _ in trained(folder):
            steps[rank] += 1
        assert set(steps.values()) == {len(ours)}
        assert len(steps) == ranks


@pytest.mark.ddp
@pytest.mark.slow
def test_sharded_moments_recomputed_layers_and_gradients_in_buckets_change_no_bit(
    store: RowStore, uninterrupted: Path, tmp_path: Path
) -> None:
    strategy = {
        "class_path": "lightning.pytorch.strategies.DDPStrategy",
        "init_args": {"gradient_as_bucket_view": True},
    }
    lean = (
        *("--model.shard_optimizer", "true", "--model.activation_checkpointing", "true"),
        *("--trainer.strategy", json.dumps(strategy)),
    )
    path = recipe(store, tmp_path)
    links = [link(path, more=lean, step=9, rank=1), link(path, more=lean)]
    assert run_links(tmp_path, links) == [[75, 0], [0, 0]]
    assert_same_end(final(tmp_path), final(uninterrupted))


@pytest.mark.slow
def test_under_slurm_its_signal_saves_and_asks_for_the_job_again(
    store: RowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked.txt"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    scontrol.chmod(0o755)
    job = {"JOB_ID": "42", "JOB_NAME": "train", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}
    for name, value in {**job, "NODEID": "0", "NNODES": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    path = recipe(store, tmp_path, max_epochs=1)
    codes = run_links(tmp_path, [link(path, 1, step=3, name="SIGUSR1"), link(path, 1)])
    assert codes == [[75], [0]]
    assert asked.read_text() == "requeue 42\n"
    assert "requeued job 42" in (tmp_path / "log-0.txt").read_text()
    assert not list(tmp_path.rglob("hpc_ckpt_*"))
    train, _ = split_rows(store.column("conversation"), VAL_FRACTION)
    assert rows_by_epoch(trained(tmp_path)) == [train.tolist()]
