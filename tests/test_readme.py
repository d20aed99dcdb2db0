"""What the README shows is run: every command, every block of Python, every shipped configuration.

Long commands get limits appended; nothing else about them is changed.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from diagnosis.simulate import simulate, sorted_and_bucketed
from diagnosis.write_ledger import write_ledger
from training.test_kill import clean_environment

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SHORT_FIT = "--trainer.max_steps 3 --trainer.limit_val_batches 1 --data.cache_features false"
LIMITS = {
    "fit": SHORT_FIT,
    "validate": "--trainer.limit_val_batches 1 --data.cache_features false",
    "decode": "--max_new_tokens 4",
    "regenerate": "--max_new_tokens 12",
}
EXPECTED = {
    "--rehearse": "rehearsal: passed",
    "auto": "going on from",
    "--profile": "Most of a step is ",
    "decode": "output equal to the target's own for 20 of 20 prompts",
    "--baseline": "Against purple: ",
    "--step": "Step 2 of ",
    "--rows": "top row of more than one step",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    """Every dflash-lightning command of the README, in order."""
    parts = [part.strip() for block in blocks("bash") for part in re.split(r"&&|\n", block)]
    return [shlex.split(part)[1:] for part in parts if part.startswith("dflash-lightning")]


def run(arguments: list[str], folder: Path, **environment: str) -> str:
    command = [sys.executable, "-m", "dflash_lightning", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the converted target is kept: the user's setting, or a fresh folder."""
    return os.environ.get("DFLASH_CACHE") or str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout with a prompt file in it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "dflash_lightning"):
        (folder / name).symlink_to(ROOT / name)
    lines = [
        {"messages": [{"role": "user", "content": f"Name a fruit that begins with {letter}."}]}
        for letter in "abcdefghijklmnopqrst"
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, run in zip(("orange", "purple"), sorted_and_bucketed(0), strict=True):
        write_ledger(run[0], folder / "runs" / name)
    return folder


def limited(arguments: list[str], before: list[str]) -> list[str]:
    """A command that does little; the first fit has its preflight, later ones need none."""
    if {"--help", "--print_config"} & set(arguments):
        return arguments
    limits = shlex.split(LIMITS.get(arguments[0], ""))
    if arguments[0] == "diagnose" and "--step" in arguments:
        limits += ["--step", "2"]  # the run is as short as its fit here
    if arguments[0] == "fit" and "fit" in before:
        limits += ["--preflight", "false"]
    return [*arguments, *limits]


@pytest.mark.slow
def test_every_command_of_the_readme_runs(workplace: Path, cache: str) -> None:
    names: list[str] = []
    for arguments in commands():
        arguments = limited(arguments, names)
        names.append(arguments[0])
        printed = run(arguments, workplace, DFLASH_CACHE=cache)
        if arguments[0] == "fit" and "--print_config" not in arguments:
            assert "val/est_tau" in printed
        for word in EXPECTED.keys() & set(arguments):
            assert EXPECTED[word] in printed
    used = {"fit", "validate", "decode", "regenerate", "prepare", "buckets", "export", "diagnose"}
    assert used <= set(names)
    for picture in ("buckets.png", "loss.png"):
        assert (workplace / picture).stat().st_size > 10_000
    first = workplace / "runs" / "quickstart" / "version_0"
    left = ("config.yaml", "plan.txt", "preflight.json", "ledger.csv", "metrics.csv")
    for name in (*left, "checkpoints/last.ckpt", "drafter/config.json"):
        assert (first / name).is_file(), name
    assert (workplace / "my-drafter" / "model.safetensors").is_file()
    assert list((workplace / "runs").rglob("offline-run-*/run-*.wandb"))


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("python"))
def test_every_python_block_of_the_readme_runs(code: str, tmp_path: Path, cache: str) -> None:
    script = tmp_path / "block.py"
    script.write_text(code.replace("trainer.fit(", "data.cache_features = False\ntrainer.fit("))
    write_ledger(simulate(0)[0], tmp_path / "runs" / "quickstart" / "version_0")
    command = [sys.executable, str(script)]
    environment = {**os.environ, "DFLASH_CACHE": cache}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=600)


def test_the_readme_names_the_test_command_of_the_gate() -> None:
    assert "pytest" in (ROOT / ".ci" / "run").read_text()
    assert not re.findall(r"^[A-Z_]{8,}$", README, flags=re.MULTILINE)
    assert any("pip install -e '.[dev,plot]' && pytest" in block for block in blocks("bash"))


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda p: p.stem)
@pytest.mark.parametrize("overlay", ["", *sorted(ROOT.glob("configs/overlays/*.yaml"))])
def test_every_configuration_parses(path: Path, overlay: Path | str, tmp_path: Path) -> None:
    extra = ["--config", str(overlay)] if overlay else []
    arguments = ["fit", "--config", str(path), *extra, "--print_config"]
    settings = yaml.safe_load(run(arguments, tmp_path))
    assert settings["model"]["target"]["init_args"]["path"]
    assert settings["trainer"]["logger"]


def test_the_pictures_of_the_readme_are_there() -> None:
    for name in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / name).read_bytes().startswith(b"\x89PNG")


def test_the_embedded_data_is_what_the_readme_says() -> None:
    folder = ROOT / "dflash_lightning" / "assets"
    assert sum(p.stat().st_size for p in folder.iterdir() if p.is_file()) < 1_000_000
    trained = {json.loads(line)["id"] for line in (folder / "prompts.jsonl").open()}
    asked = [json.loads(line) for line in (folder / "prompts.jsonl").open()]
    held = [json.loads(line) for line in (folder / "heldout.jsonl").open()]
    assert len(held) == 20
    assert not trained & {record["id"] for record in held}
    texts = {m["content"] for record in asked for m in record["messages"]}
    assert not texts & {m["content"] for record in held for m in record["messages"]}
