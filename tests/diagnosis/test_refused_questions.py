"""How ``diagnose`` ends: 0 for every verdict, and one line for every mistake."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from diagnosis.asking import Folder, flat
from diagnosis.simulate import simulate
from diagnosis.write_ledger import write_curve, write_metrics
from tiny import make_tokenizer, write_chats

from dflash_lightning.__main__ import main as program
from dflash_lightning.data.diagnose import main
from dflash_lightning.data.prepare import prepare_store
from dflash_lightning.data.store import RowStore


def as_process(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "dflash_lightning", "diagnose", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("name", "verdict"), [("garbage", "WATCH"), ("divergence", "INVESTIGATE")])
def test_every_verdict_is_a_success(folder_of: Folder, name: str, verdict: str) -> None:
    done = as_process(folder_of(name))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\nVerdict: {verdict}." in done.stdout


def test_a_refusal_is_one_line_on_stderr_and_a_failure(tmp_path: Path) -> None:
    done = as_process(tmp_path / "nothing")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"dflash-lightning diagnose: {tmp_path}/nothing must be a run fo")


@pytest.fixture
def places(healthy: Path, trained: Path, store: RowStore, tmp_path: Path) -> dict[str, Path]:
    """What command lines below call by name."""
    run = simulate(1)[0]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "ledger.csv").write_text('# {"boundaries": [0, 8]}\nstep,loss\n')
    (tmp_path / "folder.png").mkdir()
    chats = write_chats(tmp_path / "chats.jsonl", 41)
    other = prepare_store(chats, make_tokenizer(), tmp_path / "other", max_length=256)
    return {
        "HEALTHY": healthy,
        "TRAINED": trained,
        "EMPTY": tmp_path / "empty",
        "SHORT": write_curve(run.take(run.step < 30), tmp_path / "short.csv"),
        "METRICS": write_metrics(run, tmp_path / "metrics"),
        "OTHER": other.path,
        "HERE": tmp_path,
    }


REFUSED = {
    "": r"the following arguments are required: RUN\. See dflash-lightning diagnose --help\.",
    "HERE/nothing": r"\S+/nothing must be a run folder .*; nothing of that name is there\.",
    "HERE": r"\S+ must hold a run, and has neither ledger\.csv nor metrics\.csv, .* Give a run .*",
    "EMPTY": r"\S+ledger\.csv must hold steps, and holds no finished one\.",
    "HEALTHY METRICS": r"unrecognized arguments: \S+metrics\. See .*",
    "HEALTHY --zebra 3": r"unrecognized arguments: --zebra 3\. See .*",
    "HEALTHY --ste 3": r"unrecognized arguments: --ste 3\. See .*",
    "HEALTHY --step x": r"argument --step: invalid int value: 'x'\. See .*",
    "HEALTHY --step 600": r"step must be one that healthy has .* \(0 to 599\), got 600\. Give .*",
    "HEALTHY --step -1": r"step must be one that healthy has .* \(0 to 599\), got -1\. Give .*",
    "HEALTHY --step 3 --rows": r"argument --rows: not allowed with argument --step\. See .*",
    "HEALTHY --plot HERE/a.pngg": r"plot must end in one of .*, png, .* \S+a\.pngg\. Use \.png\.",
    "HEALTHY --plot HERE/a": r"plot must end in one of .*, got \S+/a\. Use \.png\.",
    "HEALTHY --plot a.png --step 3": r"plot shows the whole run, got a\.png together with step .*",
    "HEALTHY --plot a.png --rows": r"plot shows the whole run, got a\.png together with step or .*",
    "HEALTHY --plot HERE/folder.png": r"plot must be a file to write, \S+ is a folder\. Give .*",
    "HEALTHY --json HERE": r"json must be a file to write, \S+ is a folder\. Give a file in it\.",
    "HEALTHY --json SHORT/a.json": r"json must be a file that can be written, \S+ does not take .*",
    "HEALTHY --tokenizer T": r"tokenizer shows words of the rows that step or rows name, got T .*",
    "TRAINED --rows --tokenizer no/such": r"tokenizer must be the one .* got no/such\. .*",
    "TRAINED --step 3 --store OTHER": r"store must be the one .* \(fingerprint \w+\), got .*",
    "TRAINED --rows --store OTHER": r"store must be the one .* \(fingerprint \w+\), got .*",
    "TRAINED --store OTHER": r"store must be the one .* \(fingerprint \w+\), got .*",
    "TRAINED --step 3 --store HERE": r"store must be a folder written by `dflash-lightning prep.*",
    "HEALTHY --baseline HERE/nothing": r"\S+/nothing must be a run folder .* is there\.",
    "HEALTHY --baseline SHORT": r"a comparison needs 40 steps of each run .* has 30\. Let .*",
    "METRICS --rows": r"rows take the top rows of at least three steps, Lightning's metrics.csv .*",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_mistake_is_refused_in_one_line_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    places: dict[str, Path],
    tmp_path: Path,
    line: str,
) -> None:
    words = [re.sub(r"^[A-Z]{4,}", lambda name: str(places[name[0]]), x) for x in line.split()]
    json_too = [] if "--json" in line else ["--json", str(tmp_path / "numbers.json")]
    monkeypatch.setattr("sys.argv", ["dflash-lightning", "diagnose", *words, *json_too])
    with pytest.raises(SystemExit) as stopped:
        program()
    said = stopped.value.code
    assert isinstance(said, str)
    assert "\n" not in said
    assert re.fullmatch(f"dflash-lightning diagnose: {REFUSED[line]}", said), said
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")
    assert not (tmp_path / "numbers.json").exists()


def test_a_picture_that_cannot_be_written_is_refused_before_the_run_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^plot must end in one of .* Use \.png\.$"):
        main([str(tmp_path / "nothing"), "--plot", "loss.xls"])


def test_help_explains_the_run_and_every_option(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: dflash-lightning diagnose [-h] ")
    assert max(map(len, text.splitlines())) <= 100
    above, options = text.split("\noptions:\n")
    for source in ("version_0", "ledger.csv", "metrics.csv", "step and loss", "offline W&B"):
        assert source in flat(above)
    explained = dict(re.findall(r"^  (--\w+)(?: \S+)?\s+(\w.*)", options, re.MULTILINE))
    assert explained.keys() == {
        *("--baseline", "--step", "--rows", "--plot", "--json", "--store", "--tokenizer"),
    }
