"""``diagnose`` as users call it: what it prints, writes and draws."""

import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnosis.asking import Ask, Folder, Told, flat
from diagnosis.planted import FAULTS
from diagnosis.simulate import same_plan, simulate, sorted_and_bucketed
from diagnosis.write_ledger import (
    run_on,
    strict_json,
    write_curve,
    write_ledger,
    write_metrics,
)

import dflash_lightning
from dflash_lightning.data.store import RowStore
from dflash_lightning.diagnosis import read_run
from dflash_lightning.diagnosis.run import Run

KEYS = {
    *("run", "source", "verdict", "window", "std", "shares", "causes", "mix_adjusted"),
    *("comparison", "random", "missing", "reasons"),
}
FOUND = {
    "length_ordered": ("WATCH", "period"),
    "step_spread": ("INVESTIGATE", "spread"),
    "row_spread": ("INVESTIGATE", "spread"),
    "epoch_edges": ("ON TRACK", "epoch_edge"),
    "divergence": ("INVESTIGATE", "divergence"),
    "shift": ("INVESTIGATE", "learning_rate"),
    "restart": ("ON TRACK", "restart"),
    "non_finite": ("INVESTIGATE", "non_finite"),
    "garbage": ("WATCH", "rows"),
}


# -- the whole run ---------------------------------------------------------------------------------


def test_a_healthy_run_is_told_in_words_and_numbers(ask: Ask, told: Told, healthy: Path) -> None:
    text, numbers = ask(healthy), told(healthy)
    assert text.startswith("Why does the loss of healthy jump?  ")
    assert "steps 99..599, standard deviation from step to step 0.0" in text.splitlines()[0]
    for name in ("length mix", "sampling noise", "unexplained"):
        assert re.search(rf"^ +-?\d+ %  {name} ", text, re.MULTILINE)
    assert "\n\nVerdict: ON TRACK." in text
    assert (numbers["run"], numbers["source"], numbers["verdict"]) == (
        *("healthy", "ledger", "ON TRACK"),
    )
    assert numbers["window"] == [99, 599]
    assert numbers["causes"] == numbers["missing"] == []
    assert sum(part["share"] for part in numbers["shares"].values()) == pytest.approx(1)
    assert [f"{round(100 * part['share'])} %" for part in numbers["shares"].values()] == re.findall(
        r"^ +(-?\d+ %)", text, re.MULTILINE
    )


def test_every_fault_is_expected_here() -> None:
    assert FOUND.keys() == set(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_in_text_and_numbers(
    ask: Ask, told: Told, folder_of: Folder, fault: str
) -> None:
    verdict, cause = FOUND[fault]
    text, numbers = ask(folder_of(fault)), told(folder_of(fault))
    assert f"\n\nVerdict: {verdict}." in text
    assert f"\nFound:\n  {cause.replace('_', ' ')}: " in text
    assert (numbers["verdict"], [c["cause"] for c in numbers["causes"]]) == (verdict, [cause])
    (found,) = numbers["causes"]
    assert found["says"] in flat(text)
    truth = simulate(1, fault=fault)[1]
    assert tuple(found["rows"]) == truth.rows
    assert all(f"row {row} " in flat(text) for row in truth.rows)


def test_a_baseline_is_compared_at_equal_tokens(ask: Ask, told: Told, folder_of: Folder) -> None:
    (purple, _), (orange, _) = sorted_and_bucketed(3)
    run, baseline = folder_of("orange", orange), folder_of("purple", purple)
    text, numbers = ask(run, "--baseline", baseline), told(run, "--baseline", baseline)
    compared = numbers["comparison"]
    assert compared.keys() == {
        *("difference", "low", "high", "at_tokens", "at_step", "same_rows", "says"),
    }
    assert not compared["same_rows"]
    assert compared["low"] < 0 < compared["high"]
    seen = min(r.column("tokens_seen")[-1] for r in (orange, purple))
    assert compared["at_tokens"] == pytest.approx(seen, rel=1e-6)
    assert "\nAgainst purple: at " in text
    assert f"{compared['says']}." in flat(text)
    assert "its batches never change" in flat(text)


def test_runs_that_drew_the_same_rows_are_told_apart_by_less(told: Told, folder_of: Folder) -> None:
    (first, _), (second, _) = same_plan(1)
    run = folder_of("second", second)
    numbers = told(run, "--baseline", folder_of("first", first))
    assert numbers["comparison"]["same_rows"]
    apart = numbers["random"]["apart"]
    assert 1 <= apart["same_plan_steps"] < apart["steps"]
    assert told(run)["random"]["apart"]["same_plan_steps"] is None


# -- numbers ---------------------------------------------------------------------------------------

NAN = float("nan")


def changed(**columns: Any) -> Run:
    run = simulate(1)[0]
    steps = np.arange(len(run))
    return replace(run, columns={**run.columns, **{n: f(steps) for n, f in columns.items()}})


def bucketless(name: str) -> Run:
    run = simulate(1)[0]
    return replace(run, buckets={**run.buckets, name: np.full_like(run.bucket(name), NAN)})


ODD: dict[str, Callable[[], Run]] = {
    "no finite loss": lambda: changed(loss=lambda t: NAN + t),
    "a loss without end": lambda: changed(
        loss=lambda t: np.where(t == 300, np.inf, 3.0 + 1 / (1 + t))
    ),
    "a gradient without end": lambda: changed(grad_norm=lambda t: np.where(t == 300, np.inf, 2.0)),
    "all updates skipped": lambda: changed(skipped=lambda t: 1.0 + 0 * t),
    "no rate": lambda: changed(lr=lambda t: NAN + t),
    "no tokens": lambda: changed(tokens_seen=lambda t: NAN + t),
    "no top rows": lambda: changed(top_row=lambda t: NAN + t),
    "a pull without end": lambda: changed(top_pull=lambda t: np.where(t == 9, np.inf, 0.1)),
    "no noise": lambda: bucketless("noise"),
    "no weights": lambda: bucketless("weight"),
    "no lengths": lambda: bucketless("length"),
    "one step": lambda: simulate(1)[0].take(np.arange(600) < 1),
    "two steps": lambda: simulate(1)[0].take(np.arange(600) < 2),
    "fifty steps": lambda: simulate(1)[0].take(np.arange(600) < 50),
    "every tenth step": lambda: simulate(1)[0].take(np.arange(600) % 10 == 0),
    "one bucket": lambda: simulate(1, num_buckets=1)[0],
    "random order": lambda: simulate(1, order="random")[0],
    "rows alone": lambda: simulate(1, ranks=1, rows_per_batch=(1,) * 6)[0],
    "warming up": lambda: simulate(1, steps=-20)[0],
}


@pytest.mark.parametrize("name", ODD)
def test_numbers_are_strict_json_with_the_promised_keys_whatever_the_run_lacks(
    ask: Ask, tmp_path: Path, name: str
) -> None:
    folder, file = write_ledger(ODD[name](), tmp_path / "run"), tmp_path / "numbers.json"
    assert "\nVerdict: " in ask(folder, "--json", file)
    numbers = strict_json(file.read_text())
    assert numbers.keys() == KEYS
    assert numbers["verdict"] in ("ON TRACK", "WATCH", "INVESTIGATE")
    assert numbers["shares"].keys() == {"mix", "noise", "rest"}
    known = [part for part in numbers["shares"].values() if part is not None]
    assert all(part.keys() == {"share", "low", "high"} for part in known)
    causes = [cause.keys() for cause in numbers["causes"]]
    assert causes == [{"cause", "steps", "rows", "share", "says"}] * len(causes)
    assert numbers["random"] is None or numbers["random"].keys() == {
        *("memory", "power", "smoothing", "apart", "change"),
    }
    assert all(isinstance(line, str) and line for line in numbers["missing"] + numbers["reasons"])
    ask(folder, "--step", "0", "--json", file)
    assert strict_json(file.read_text())["step"] == 0


@pytest.mark.parametrize("bare", ["curve", "metrics"])
def test_a_curve_of_another_trainer_is_judged_and_what_is_missing_is_said(
    ask: Ask, told: Told, tmp_path: Path, bare: str
) -> None:
    run = simulate(1)[0]
    file = write_curve(run, tmp_path / "curve.csv")
    source = file if bare == "curve" else write_metrics(run, tmp_path / "metrics")
    text, numbers = ask(source), told(source)
    assert numbers.keys() == KEYS
    assert numbers["verdict"] == "ON TRACK"
    assert numbers["shares"] == {"mix": None, "noise": None, "rest": None}
    assert (numbers["run"], numbers["source"]) == (
        *(bare, "Lightning's metrics.csv" if bare == "metrics" else "CSV of a loss"),
    )
    lacking = [line for line in numbers["missing"] if "the ledger.csv of the run folder" in line]
    assert lacking
    assert flat(lacking[0]) in flat(text)
    assert ("learning rate: log it as lr" in numbers["missing"]) == (bare == "curve")


def test_the_json_of_a_file_that_is_there_is_replaced(told: Told, healthy: Path) -> None:
    assert told(healthy, "--step", "3").keys() > {"step", "values"}
    assert told(healthy).keys() == KEYS


# -- the picture -----------------------------------------------------------------------------------


def size_of(path: Path) -> tuple[int, int]:
    """Width and height of a PNG in pixels."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("more", [(), ("--baseline", "garbage")])
def test_the_picture_is_written_at_twice_a_screens_width(
    ask: Ask, folder_of: Folder, healthy: Path, tmp_path: Path, more: tuple
) -> None:
    path = tmp_path / "new" / "folder" / "loss.png"
    more = tuple(folder_of(word) if word == "garbage" else word for word in more)
    assert "\nVerdict: ON TRACK." in ask(healthy, "--plot", path, *more)
    assert size_of(path) == (2400, 1600)


# -- one step --------------------------------------------------------------------------------------


def test_a_step_is_told_from_the_ledger_alone(ask: Ask, told: Told, healthy: Path) -> None:
    run = read_run(healthy)
    text, numbers = ask(healthy, "--step", "300"), told(healthy, "--step", "300")
    row, loss = int(run.column("top_row")[300]), run.loss[300]
    assert text.startswith(f"Step 300 of healthy, epoch 1: loss {loss:.4f}, ")
    left = loss - run.column("top_pull")[300]
    assert f"\n* row {row} deviates most: " in text
    assert f"; without it the loss would be {left:.4f}" in flat(text)
    assert "(1,216, 1,728]" in text
    assert (numbers["rows"], numbers["values"]["top_row"], numbers["values"]["loss"]) == (
        *([], row, loss),
    )
    assert "The rows are not named: " in text
    assert numbers["missing"] in flat(text)


def test_a_step_of_a_bare_curve_says_what_would_tell_more(
    ask: Ask, told: Told, tmp_path: Path
) -> None:
    path = write_curve(simulate(1)[0], tmp_path / "curve.csv")
    text = ask(path, "--step", "100")
    assert re.fullmatch(r"Step 100 of curve: loss \d\.\d{4}", text.splitlines()[0])
    assert "the header of a ledger.csv that fit writes does" in flat(text)
    assert told(path, "--step", "100")["values"].keys() == {"loss"}


def test_buckets_beyond_the_headers_edges_are_told_by_number(
    ask: Ask, healthy: Path, tmp_path: Path
) -> None:
    _, *lines = (healthy / "ledger.csv").read_text().splitlines()
    (tmp_path / "ledger.csv").write_text("\n".join(['# {"boundaries": [0, 770]}', *lines, ""]))
    table = ask(tmp_path, "--step", "300").split("\n\n")[1].splitlines()
    assert [line.split()[:3] for line in table[1:3]] == [["0", "(0,", "770]"], ["2", "56", "31%"]]
    assert " in bucket 5" in ask(tmp_path)


def test_the_rows_of_a_step_are_named_where_the_store_is_at_hand(
    ask: Ask, told: Told, trained: Path, store: RowStore, target_folder: Path
) -> None:
    at = int(np.flatnonzero(read_run(trained).column("top_row") == 17)[0])
    text, numbers = ask(trained, "--step", at), told(trained, "--step", at)
    length = int(store.lengths[17])
    assert f"\n* row 17 (source b, line 18, {length} tokens, bucket 0) deviates most: " in text
    assert "\n*17  b         18  " in text
    rows = {row["row"]: row for row in numbers["rows"]}
    assert len(rows) == numbers["values"]["rows"] == 4
    assert (rows[17]["source"], rows[17]["line"], rows[17]["length"]) == ("b", 18, length)
    assert re.fullmatch(r"[\d .]+", rows[17]["answer"])  # the run does not know a tokenizer
    words = ask(trained, "--step", at, "--tokenizer", target_folder)
    assert re.search(r"^\*17 .* 17 +word\d+ word\d+", words, re.MULTILINE)


def test_a_store_that_was_moved_is_given(ask: Ask, folder_of: Folder, store: RowStore) -> None:
    run = run_on(store, epochs=3, world_size=2)
    header = run.headers[0][1] | {"store": "/nowhere/rows"}
    moved = folder_of("moved", replace(run, headers=((0, header),)))
    said = flat(ask(moved, "--step", "2"))
    assert "`--store PATH` names them: the run's data.store, /nowhere/rows when the" in said
    named = ask(moved, "--step", "2", "--store", store.path)
    assert "The rows are not named" not in named
    assert " rank " in named
    assert "`--store PATH`" in flat(ask(moved, "--rows"))
    assert "`--store PATH`" not in flat(ask(moved, "--rows", "--store", store.path))


def test_a_store_that_is_damaged_since_does_not_stop_the_diagnosis(
    told: Told, ask: Ask, trained: Path, store: RowStore, folder_of: Folder, tmp_path: Path
) -> None:
    run = read_run(trained)
    (tmp_path / "meta.json").write_text((store.path / "meta.json").read_text())
    for change in ({"store": str(tmp_path)}, {"plan": "of another version"}):
        header = run.header | change
        folder = write_ledger(replace(run, headers=((0, header),)), tmp_path / next(iter(change)))
        numbers = told(folder)
        assert numbers["verdict"] == told(trained)["verdict"]
        (said,) = [line for line in numbers["missing"] if line.startswith("the sources that steps")]
        assert "".join(said.split()) in "".join(ask(folder).split())  # long paths are broken


# -- rows over the run -----------------------------------------------------------------------------


def test_rows_that_deviate_again_and_again_are_listed_the_worst_first(
    ask: Ask, told: Told, folder_of: Folder
) -> None:
    truth = simulate(1, fault="garbage")[1]
    text, numbers = ask(folder_of("garbage"), "--rows"), told(folder_of("garbage"), "--rows")
    assert numbers.keys() == {"run", "rows", "bound", "missing"}
    assert [row["row"] for row in numbers["rows"] if row["far"]] == list(truth.rows)
    worst = numbers["rows"][0]
    assert worst["row"] == truth.rows[0]
    assert worst["times"] == len(worst["steps"]) == 3
    assert worst["size"] > numbers["bound"]
    lines = text.split("\n\n")[1].splitlines()
    assert lines[0].split() == ["row", "times", "distance", "pull", "steps"]
    assert lines[1].split()[:3] == [str(worst["row"]), "3", f"*{worst['size']:.1f}"]
    assert len(lines) == 1 + 20 + 1
    assert lines[-1] == f"... and {len(numbers['rows']) - 20} more; --json has all"


def test_rows_are_described_where_the_store_is_at_hand(
    ask: Ask, told: Told, trained: Path, target_folder: Path
) -> None:
    text, numbers = ask(trained, "--rows"), told(trained, "--rows")
    assert (numbers["missing"], numbers["rows"][0]["row"]) == ("", 17)
    assert numbers["rows"][0].keys() >= {"source", "line", "length", "bucket", "prompt", "answer"}
    first = text.split("\n\n")[1].splitlines()[1]
    assert first.split()[:3] == ["17", "b", "18"]
    words = told(trained, "--rows", "--tokenizer", target_folder)["rows"][0]
    assert (words["prompt"], words["answer"][:4]) == ("17", "word")


def test_rows_of_a_first_epoch_come_once_and_that_is_said(
    ask: Ask, told: Told, folder_of: Folder, store: RowStore
) -> None:
    young = folder_of("young", run_on(store, epochs=1))
    assert flat(ask(young, "--rows")) == (
        "young: no row was the top row of more than one step. Rows come once an epoch: ask again "
        "after the next."
    )
    assert told(young, "--rows")["rows"] == []


# -- in a notebook ---------------------------------------------------------------------------------


def test_a_notebook_has_the_same_as_the_command(told: Told, ask: Ask, healthy: Path) -> None:
    from dflash_lightning import diagnose

    found = diagnose(healthy)
    assert found.verdict == "ON TRACK"
    assert {name: share.share for name, share in found.shares.items() if share} == {
        name: part["share"] for name, part in told(healthy)["shares"].items()
    }
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == told(healthy)
    assert f"{found}\n" == ask(healthy)
    assert ">ON TRACK</b>" in found._repr_html_()
    assert found.plot().get_size_inches().tolist() == [12, 8]
    assert "diagnose" in dflash_lightning.__all__
