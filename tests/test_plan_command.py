"""The plan command: the shipped configurations, what it refuses, what its numbers are."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from story import story_lengths

from dflash_lightning.__main__ import main
from dflash_lightning.batching import Batching, plan_epoch

CONFIGS = Path(__file__).parent.parent / "configs"
BIG = CONFIGS / "qwen3.6-27b-8gpu.yaml"
SMALL = CONFIGS / "qwen3-8b.yaml"

Shown = Callable[..., str]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> Shown:
    """Run the command in an empty folder; returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> str:
        monkeypatch.setattr("sys.argv", ["dflash-lightning", "plan", *map(str, args)])
        main()
        return capsys.readouterr().out

    return call


@pytest.fixture
def refused(shown: Shown, capsys: pytest.CaptureFixture) -> Shown:
    """Run a command line that must fail; returns the one line that it says."""

    def call(*args: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            shown(*args)
        line = stopped.value.code
        assert isinstance(line, str)
        assert line.startswith("dflash-lightning plan: ")
        assert "\n" not in line
        assert capsys.readouterr().out == ""
        return line

    return call


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.npy"
    np.save(path, story_lengths()[:4000])
    return path


def numbers(path: Path) -> dict:
    return json.loads(path.read_text())


def test_the_quick_start_is_planned_without_fetching_its_target(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    text = shown("--config", CONFIGS / "quickstart.yaml")
    assert text.startswith("smollm2 with 0.13 B weights, drafter with 0.009 B, on 1 GPU")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("config", "gigabytes"), [(BIG, 96), (SMALL, 80)])
def test_the_shipped_configurations_fit_with_a_margin(
    shown: Shown, tmp_path: Path, config: Path, gigabytes: int
) -> None:
    file = tmp_path / "plan.json"
    text = shown("--config", config, "--gpu_memory", gigabytes, "--json", file)
    assert max(map(len, text.splitlines())) <= 100
    assert "It fits: " in text
    found = numbers(file)
    assert found["fits"]
    assert 0.7 * gigabytes < found["memory"]["peak_bytes"] / 1e9 < 0.97 * gigabytes
    assert found["gpus"] == 8
    assert found["steps"] is None
    assert found["hours"] is None
    assert "give --lengths FILE.npy, or run `dflash-lightning prepare`" in " ".join(text.split())


def test_the_27b_recipe_leaves_three_gigabytes_and_no_more(shown: Shown, tmp_path: Path) -> None:
    file, free = tmp_path / "plan.json", []
    for more in ((), ("--data.batching.token_budget", 47_104)):
        shown("--config", BIG, *more, "--json", file)
        free.append(96 - numbers(file)["memory"]["peak_bytes"] / 1e9)
    assert free[0] > 3 > free[1]


def test_the_shipped_configurations_also_fit_where_flex_does_not_compile(
    shown: Shown, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    for config, gigabytes in ((BIG, 96), (SMALL, 80)):
        peaks = []
        for attention in ("auto", "sdpa"):
            options = ("--model.attention", attention, "--gpu_memory", gigabytes)
            assert "It fits: " in shown("--config", config, *options, "--json", file)
            peaks.append(numbers(file)["memory"]["peak_bytes"])
        assert peaks[0] < peaks[1]


def test_lengths_give_exact_steps_hours_and_mfu(
    shown: Shown, tmp_path: Path, lengths: Path
) -> None:
    file = tmp_path / "plan.json"
    options = ("--lengths", lengths, "--tokens_per_second", 25_100, "--json", file)
    text = shown("--config", BIG, *options, "--gpu", "RTX PRO 6000 Blackwell")
    found, rows = numbers(file), np.load(lengths)
    batching = Batching(
        boundaries=(0, 770, 1216, 1728, 2432, 3296, 8192),
        token_budget=46_080,
        max_rows=64,
        sort_window=0,
    )
    plans = [plan_epoch(rows, batching, seed=0, epoch=e, world_size=8) for e in range(6)]
    assert found["steps_per_epoch"] == [plan.num_steps for plan in plans]
    assert found["steps"] == sum(plan.num_steps for plan in plans)
    assert found["padded_tokens_per_epoch"] == [plan.report().padded_tokens for plan in plans]
    assert (found["rows"], found["tokens_per_epoch"]) == (4000, int(rows.sum()))
    assert found["hours"] == pytest.approx(6 * rows.sum() / 25_100 / 3600)
    shown("--config", BIG, *options, "--model.activation_checkpointing", "false")
    once = numbers(file)["flops_per_step"]  # nothing is computed twice
    assert once["drafter"] < found["flops_per_step"]["drafter"]
    work = sum(once.values()) * found["steps"]
    assert found["mfu"] == pytest.approx(work / (found["hours"] * 3600) / (8 * 503.8e12))
    for words in ("steps in all", "PFLOP a step", "hours", "MFU", "disk"):
        assert f"\n{words} " in text
    assert max(map(len, text.splitlines())) <= 100


def test_max_steps_ends_the_run(shown: Shown, tmp_path: Path, lengths: Path) -> None:
    file = tmp_path / "plan.json"
    shown("--config", BIG, "--lengths", lengths, "--trainer.max_steps", 30, "--json", file)
    found = numbers(file)
    assert found["steps"] == 30
    assert len(found["steps_per_epoch"]) == 2


def test_accumulation_and_devices_set_the_step(shown: Shown, tmp_path: Path, lengths: Path) -> None:
    file, options = tmp_path / "plan.json", ("--lengths", lengths, "--trainer.max_epochs", 1)
    shown("--config", BIG, *options, "--json", file)
    eight = numbers(file)
    more = (
        "--trainer.devices",
        2,
        "--trainer.num_nodes",
        2,
        "--trainer.accumulate_grad_batches",
        2,
    )
    shown("--config", BIG, *options, *more, "--json", file)
    four = numbers(file)
    assert (four["gpus"], four["accumulate"]) == (4, 2)
    assert four["steps"] == eight["steps"]


def test_one_gpu_is_assumed_where_none_are_counted(shown: Shown, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    text = shown("--config", SMALL, "--trainer.devices", "auto", "--json", file)
    assert "on 1 GPU (assumed: trainer.devices counts none)" in " ".join(text.split())
    assert numbers(file)["gpus_assumed"]


def test_ways_out_come_with_the_peak_that_they_give(shown: Shown, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    heavy = ("--data.anchor_rate", 0.25, "--model.shard_optimizer", "false")
    heavy += ("--model.activation_checkpointing", "false", "--trainer.strategy", "ddp")
    text = shown("--config", SMALL, *heavy, "--gpu_memory", 80, "--json", file)
    before = numbers(file)
    assert not before["fits"]
    assert "It does not fit: " in text
    ways = list(before["ways_out"])
    assert [way.split(":")[0] for way in ways] == [
        "DDPStrategy with gradient_as_bucket_view",
        "model.shard_optimizer",
        "model.activation_checkpointing",
        "data.batching.token_budget",
        "data.anchor_rate",
    ]
    shown("--config", SMALL, *heavy, "--data.anchor_rate", 0.125, "--json", file)
    assert numbers(file)["memory"]["peak_bytes"] == before["ways_out"]["data.anchor_rate: 0.125"]
    assert all(peak < before["memory"]["peak_bytes"] for peak in before["ways_out"].values())


def test_a_prepared_store_gives_its_training_rows(
    shown: Shown, tmp_path: Path, store, target_folder: Path
) -> None:
    file = tmp_path / "plan.json"
    options = {
        "trainer.max_epochs": 2,
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "model.target": "dflash_lightning.HFTarget",
        "model.target.path": target_folder,
        "model.drafter.num_layers": 1,
        "model.drafter.mask_token_id": 3,
        "data.store": store.path,
        "data.val_fraction": 0.25,
        "data.batching.token_budget": 1024,
    }
    shown(*(x for k, v in options.items() for x in (f"--{k}", v)), "--json", file)
    found = numbers(file)
    assert found["rows"] < len(store)
    assert len(found["steps_per_epoch"]) == 2
    weights = next(x for x in found["memory"]["lines"] if x["name"] == "target weights")
    assert weights["bytes"] == 4 * found["target_parameters"]  # float32 on a CPU


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model.drafter.num_layer", "3"), "did you mean model.drafter.num_layers?"),
        (("--token_budget", "9"), "did you mean data.batching.token_budget?"),
        (("--trainer.strategy", "fsdp"), "model.shard_optimizer=true"),
        (("--trainer.precision", "16-mixed"), "trainer.precision must be bf16-mixed or 32-true"),
        (("--data.anchor_rate", "3"), "anchor_rate must be in (0, 1]"),
        (("--model.drafter.block_size", "1"), "block_size must be at least 2, got 1"),
        (("--tokens_per_second", "0"), "tokens_per_second must be above 0"),
        (("--lengths", "none.npy"), "lengths must be a .npy file"),
        (("--data.batching.token_budget", "0"), "token_budget must be"),
    ],
)
def test_mistakes_are_one_line(refused: Shown, options: tuple, words: str) -> None:
    assert words in refused("--config", SMALL, *options)


def test_rows_over_the_budget_are_refused(refused: Shown, lengths: Path) -> None:
    small = ("--data.batching.token_budget", 4096)
    assert "token_budget must hold every row" in refused(
        "--config", BIG, "--lengths", lengths, *small
    )


def test_it_runs_without_network_or_gpu_and_exits_with_0(tmp_path: Path) -> None:
    code = """
        import socket, sys
        def refuse(*args, **kwargs): raise RuntimeError("network")
        socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
        from dflash_lightning.__main__ import main
        main()
        import torch
        assert not torch.cuda.is_initialized()
    """.replace("        ", "")
    home, folder = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "--config", str(BIG)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
        env={"PATH": "", "HOME": str(home), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("Qwen/Qwen3.6-27B with 26.90 B weights")
    assert list(folder.iterdir()) == []
