"""``diagnose`` where NumPy is all that is installed: a run folder copied to a laptop."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from diagnosis.write_ledger import run_on, strict_json, write_curve, write_ledger

import dflash_lightning
from dflash_lightning.data.store import RowStore

HEAVY = (
    *("torch", "lightning", "jsonargparse", "matplotlib", "tqdm", "wandb", "transformers"),
    *("torchmetrics", "yaml", "scipy", "tokenizers"),
)
REFUSE_OTHERS = """
import sys

class Refuser:
    # coverage measures this process where tests are measured, and imports on
    known = {*sys.stdlib_module_names, "numpy", "dflash_lightning", "coverage"}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in self.known:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Refuser())
"""
ANSWERS = """
import contextlib, io, json, pathlib, sys
from dflash_lightning.__main__ import main
file, answers = pathlib.Path("numbers.json"), []
for words in json.loads(sys.argv[1]):
    said, refusal = io.StringIO(), ""
    file.unlink(missing_ok=True)
    sys.argv = ["dflash-lightning", "diagnose", *words, "--json", str(file)]
    with contextlib.redirect_stdout(said):
        try:
            main()
        except SystemExit as stopped:
            refusal = stopped.code
    numbers = file.read_text() if file.exists() else "null"
    answers.append([said.getvalue(), numbers, refusal])
print(json.dumps(answers))
"""
NOTEBOOK = """
import json, sys
from dflash_lightning import diagnose
found = diagnose(sys.argv[1])
assert found.verdict in found._repr_html_()
assert found.shares["mix"].share + found.shares["noise"].share + found.shares["rest"].share
try:
    found.plot()
except ValueError as error:
    told = str(error)
print(json.dumps([found.to_dict(), str(found), told]))
"""
IMPORTABLE = """
import importlib, sys
found = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    found.append(name)
print(found)
"""


class Done(NamedTuple):
    """How a process ended, and what it wrote."""

    code: int
    out: str
    err: str


Start = Callable[..., Done]


class Answer(NamedTuple):
    """What the command printed and wrote, or why it refused."""

    text: str
    numbers: Any
    refusal: str


class Copied(NamedTuple):
    """What was copied from the machine that trained; ``worded`` is the run with a tokenizer."""

    run: Path
    worded: Path
    baseline: Path
    curve: Path
    store: Path


@pytest.fixture(scope="module")
def copied(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Copied:
    """Two run folders and a curve whose store is gone, and the store at another place."""
    root = tmp_path_factory.mktemp("laptop")
    harder = 4.0 * (np.arange(len(store)) == 17)
    gone, folders = {"store": "/nowhere/rows"}, []
    for seed, name, more in (
        (0, "orange", {}),
        (0, "worded/orange", {"tokenizer": "/nowhere/target"}),
        (1, "purple", {}),
    ):
        run = run_on(store, epochs=12, harder=harder, seed=seed)
        run = replace(run, headers=((0, run.headers[0][1] | gone | more),))
        folders.append(write_ledger(run, root / name))
        assert {file.name for file in folders[-1].iterdir()} == {"ledger.csv", "config.yaml"}
    curve = write_curve(run, root / "curve.csv")
    shutil.copytree(store.path, root / "rows")
    return Copied(*folders, curve, root / "rows")


def start(folder: Path, command: list[str]) -> Done:
    """Run a command in a folder that holds nothing of this project."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "WANDB"))}
    settings["OPENBLAS_NUM_THREADS"] = "1"  # the same sums everywhere
    done = subprocess.run(
        command, cwd=folder, env=settings, capture_output=True, text=True, timeout=120, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def questions(copied: Copied) -> dict[str, list[str]]:
    run, store = str(copied.run), ["--store", str(copied.store)]
    return {
        "whole": [run],
        "sources": [run, *store],
        "pair": [run, "--baseline", str(copied.baseline)],
        "step": [run, "--step", "7"],
        "rows of step": [run, "--step", "7", *store],
        "rows": [run, "--rows"],
        "rows in words": [run, "--rows", *store],
        "curve": [str(copied.curve)],
    }


def refusals(copied: Copied) -> dict[str, list[str]]:
    """Command lines that need more than NumPy, by what is said."""
    run, store = str(copied.run), copied.store
    return {
        "plot loss.png needs matplotlib, which is not installed: pip install "
        "'dflash-lightning[plot]'.": [run, "--plot", "loss.png"],
        "A run of W&B can only be read where wandb is installed. Run: pip install wandb.": [
            "us/dflash/ab12cd34"
        ],
        f"tokenizer must be the one that prepared {store}, on this machine, and take transformers "
        "to read; got t. Leave it out to see token ids.": [
            *(run, "--rows", "--tokenizer", "t", "--store", str(store))
        ],
    }


def answers(program: Start, asked: Iterable[list[str]]) -> list[Answer]:
    """What the command answers, in one process for all questions."""
    done = program(ANSWERS, json.dumps(list(asked)))
    assert (done.code, done.err) == (0, "")
    return [Answer(text, strict_json(raw), why) for text, raw, why in json.loads(done.out)]


@pytest.fixture(scope="module")
def expected(copied: Copied, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What is answered where all packages are installed."""
    folder = tmp_path_factory.mktemp("full")

    def full(code: str, *words: str) -> Done:
        return start(folder, [sys.executable, "-c", code, *words])

    found = dict(zip(questions(copied), answers(full, questions(copied).values()), strict=True))
    assert [answer.refusal for answer in found.values()] == [""] * len(found)
    return found


def check(bare: Start, copied: Copied, expected: dict[str, Answer]) -> None:
    """Everything works without the other packages, and with the numbers that they would give."""
    assert bare(IMPORTABLE, *HEAVY).out == "[]\n"
    assert bare(IMPORTABLE, "numpy").out == "['numpy']\n"
    asked, lines = questions(copied), refusals(copied)
    worded = [str(copied.worded), *asked["rows of step"][1:]]
    found = answers(bare, [*asked.values(), *lines.values(), worded])
    assert dict(zip(asked, found, strict=False)) == expected
    assert found.pop() == expected["rows of step"]  # where words cannot be shown, ids are
    said = [f"dflash-lightning diagnose: {line}" for line in lines]
    assert found[len(asked) :] == [Answer("", None, line) for line in said]

    noted = bare(NOTEBOOK, str(copied.run))
    assert noted.code == 0, noted.err
    whole, text, told = strict_json(noted.out)
    assert (f"{text}\n", whole) == expected["whole"][:2]
    assert told == (
        "a plot needs matplotlib, which is not installed: pip install 'dflash-lightning[plot]'."
    )


def test_what_is_compared_below_names_rows_and_says_what_is_missing(
    copied: Copied, expected: dict[str, Answer]
) -> None:
    assert "\nVerdict: " in expected["whole"].text
    assert expected["pair"].numbers["comparison"] is not None
    named = expected["rows of step"].numbers
    assert (len(named["rows"]), named["missing"]) == (named["values"]["rows"], "")
    assert expected["step"].numbers["rows"] == []
    assert "`--store PATH` names them" in " ".join(expected["step"].text.split())
    worst = expected["rows in words"].numbers["rows"][0]
    assert (worst["row"], worst["source"]) == (17, "b")


def test_numpy_is_all_that_a_diagnosis_imports(
    copied: Copied, expected: dict[str, Answer], tmp_path: Path
) -> None:
    def bare(code: str, *words: str) -> Done:
        return start(tmp_path, [sys.executable, "-c", REFUSE_OTHERS + code, *words])

    check(bare, copied, expected)


@pytest.mark.slow
def test_a_copied_run_folder_is_diagnosed_where_only_numpy_is_installed(
    copied: Copied, expected: dict[str, Answer], tmp_path: Path
) -> None:
    environment = tmp_path / "bare"
    python = environment / "bin" / "python"
    for command in (
        [sys.executable, "-m", "venv", str(environment)],
        [str(python), "-m", "pip", "install", "-q", f"numpy=={np.__version__}"],
    ):
        done = start(tmp_path, command)
        assert done.code == 0, done.err
    (packages,) = environment.glob("lib/python*/site-packages")
    package = Path(dflash_lightning.__file__).parent
    # As pip would without dependencies, and without fetching what builds packages.
    shutil.copytree(package, packages / package.name, ignore=shutil.ignore_patterns("__pycache__"))

    def bare(code: str, *words: str) -> Done:
        return start(tmp_path, [str(python), "-c", code, *words])

    where = bare("import dflash_lightning as package; print(package.__file__)")
    assert Path(where.out.strip()).is_relative_to(environment)
    check(bare, copied, expected)
    file = tmp_path / "numbers.json"
    words = ["-m", "dflash_lightning", "diagnose", str(copied.run), "--json", str(file)]
    assert start(tmp_path, [str(python), *words]) == Done(0, expected["whole"].text, "")
    assert strict_json(file.read_text()) == expected["whole"].numbers
    words = ["-m", "dflash_lightning", "diagnose", str(copied.run), "--plot", "loss.png"]
    refused = start(tmp_path, [str(python), *words])
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == f"dflash-lightning diagnose: {next(iter(refusals(copied)))}\n"
