"""The command table and the public names: what starts, what is light, what exits how."""

import subprocess
import sys
import textwrap
from importlib import metadata

import numpy as np
import pytest

import dflash_lightning
from dflash_lightning.__main__ import POSITIONAL, TOOLS, TRAINER, is_ours, main, overview, tool

HEAVY = ("torch", "lightning", "transformers", "torchmetrics", "wandb", "jsonargparse", "yaml")
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocker())
"""


def python(code: str, *args: str) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter."""
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def without(modules: tuple[str, ...], code: str, *args: str) -> subprocess.CompletedProcess:
    """Run code in an interpreter that cannot import some modules."""
    return python(BLOCKER.format(blocked=set(modules)) + textwrap.dedent(code), *args)


def shown(monkeypatch, capsys, *args: str) -> str:
    """What a command line prints; it must succeed."""
    monkeypatch.setattr("sys.argv", ["dflash-lightning", *args])
    monkeypatch.setenv("COLUMNS", "200")
    status = None
    try:
        main()
    except SystemExit as stopped:
        status = stopped.code
    assert not status
    return capsys.readouterr().out


# -- help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",)])
def test_the_overview_names_every_command(monkeypatch, capsys, args: tuple) -> None:
    text = shown(monkeypatch, capsys, *args)
    assert text == overview() + "\n"
    first, _, *rows = text.splitlines()
    assert first == "usage: dflash-lightning COMMAND [options]; each has --help"
    assert [row.split()[0] for row in rows] == [*TRAINER, *TOOLS]
    assert all(len(row.split()) > 2 for row in rows)


OPTIONS = {
    "regenerate": "--prompts --target --output --max_new_tokens --temperature --batch_size --seed",
    "prepare": "--input --tokenizer --output --max_length --long_rows --overwrite --json",
    "buckets": (
        "lengths --order --num_buckets --boundaries --token_budget --max_rows --pad_to "
        "--sort_window --deal --cost_budget --cost_knee --world_size --accumulate --seed "
        "--val_fraction --timings --json --plot"
    ),
    "diagnose": "RUN --baseline --step --rows --plot --json --store --tokenizer",
    "export": "ckpt folder --dtype",
    "decode": "--drafter --target --prompts --max_new_tokens --json",
}


def test_every_tool_is_tested_here() -> None:
    assert OPTIONS.keys() == TOOLS.keys()
    assert set(POSITIONAL) <= TOOLS.keys()


@pytest.mark.parametrize("name", TOOLS)
def test_a_tools_help_explains_every_option(monkeypatch, capsys, name: str) -> None:
    text = shown(monkeypatch, capsys, name, "--help")
    assert text.startswith(f"usage: dflash-lightning {name} ")
    words = text.replace(",", " ").split()
    assert set(OPTIONS[name].split()) <= set(words)
    assert tool(name).__doc__.splitlines()[0] in " ".join(text.split())


@pytest.mark.parametrize("name", TRAINER)
def test_the_trainers_help_explains_the_settings(monkeypatch, capsys, name: str) -> None:
    text = shown(monkeypatch, capsys, name, "--help")
    assert text.startswith("usage: dflash-lightning ")
    for option in ("--config", "--data.store", "--data.batching.token_budget", "--model.lr"):
        assert f"{option} " in text, option
    assert "Most tokens of one batch, padding included, after rounding." in " ".join(text.split())
    assert "--data.seed" not in text  # said once, by seed_everything


# -- what is light ---------------------------------------------------------------------------------


def test_help_starts_without_any_heavy_import() -> None:
    code = """
        import dflash_lightning.__main__ as program
        program.main()
        """
    for args in ((), ("--help",)):
        done = without(HEAVY, code, *args)
        assert done.returncode == 0, done.stderr
        assert done.stdout == overview() + "\n"


def test_the_package_itself_imports_nothing_heavy() -> None:
    code = f"""
        import sys
        import dflash_lightning, dflash_lightning.__main__
        print(sorted(set({HEAVY!r}) & set(sys.modules)))
        """
    assert python(code).stdout == "[]\n"


def test_planning_works_without_torch() -> None:
    code = """
        import dflash_lightning.batching
        from dflash_lightning import Batching, EpochPlan, plan_epoch
        plan = plan_epoch([3, 1, 2], Batching(token_budget=4), seed=0, epoch=0)
        assert isinstance(plan, EpochPlan)
        print(plan.report().rows)
        """
    done = without(HEAVY, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"


def test_the_buckets_command_runs_without_torch(tmp_path) -> None:
    np.save(tmp_path / "lengths.npy", np.arange(1, 60))
    code = """
        import sys
        from dflash_lightning.__main__ import main
        sys.argv = ["dflash-lightning", "buckets", *sys.argv[1:], "--max_rows", "8"]
        main()
        """
    blocked = ("torch", "lightning", "transformers", "torchmetrics", "wandb")
    done = without(blocked, code, str(tmp_path / "lengths.npy"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Epoch 0: 59 rows in ")
    assert "\nUse sort_window=" in done.stdout


def test_the_blocker_blocks() -> None:
    done = without(("torch",), "import torch")
    assert done.returncode == 1
    assert "blocked: torch" in done.stderr


# -- names and exits -------------------------------------------------------------------------------


def test_every_public_name_is_there() -> None:
    promised = """
        DFlashDataModule DFlashModule DrafterConfig Drafter HFTarget Batching EpochPlan plan_epoch
        speculative_generate export_drafter load_drafter diagnose
        """
    assert set(promised.split()) <= set(dflash_lightning.__all__)
    for name in dflash_lightning.__all__:
        assert getattr(dflash_lightning, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'dflash_lightning' has no attribute 'zebra'"):
        _ = dflash_lightning.zebra


def test_the_console_script_is_main() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="dflash-lightning")
    assert script.load() is main


@pytest.mark.parametrize("module", ["dflash_lightning", "dflash_lightning.__main__"])
def test_a_refusal_is_one_line_on_stderr_and_a_failing_exit(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "fti"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "dflash-lightning fti: unknown command 'fti'; did you mean 'fit'?\n"


def test_an_error_that_is_no_check_of_ours_keeps_its_traceback(monkeypatch) -> None:
    def broken(name: str, rest: list[str]) -> None:
        int("seven")

    monkeypatch.setattr("dflash_lightning.__main__.run", broken)
    monkeypatch.setattr("sys.argv", ["dflash-lightning", "fit"])
    with pytest.raises(ValueError, match="invalid literal") as found:
        main()
    assert not is_ours(found.value)
