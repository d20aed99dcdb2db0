"""The rows behind a step, named from a ledger and a store: those that a real fit trained."""

import json
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import make_tokenizer, write_chats
from training.chain import KillAt, RecordRows
from training.faults import Crash
from training.restarts import BATCHING, last
from training.restarts import run as fit
from training.test_kill import link, recipe, run_links, trained

from dflash_lightning import Batching
from dflash_lightning.data.prepare import prepare_store
from dflash_lightning.data.row_facts import describe_rows
from dflash_lightning.data.run_plan import RunPlan
from dflash_lightning.data.sources import sources_of
from dflash_lightning.data.step_text import wide
from dflash_lightning.data.steps import StepRows, find_store, rows_of_step
from dflash_lightning.data.store import RowStore, StoredRow, split_rows, write_store
from dflash_lightning.diagnosis import Run, read_run


def read(folder: Path) -> Run:
    return read_run(folder, name="purple")


def with_header(run: Run, **changes: Any) -> Run:
    return replace(run, headers=tuple((at, header | changes) for at, header in run.headers))


def places_of(named: StepRows) -> dict[tuple[int, int], list[int]]:
    """Rows by rank and micro batch."""
    found: dict[tuple[int, int], list[int]] = {}
    for place, facts in zip(named.places, named.rows, strict=True):
        found.setdefault(place, []).append(facts.row)
    return found


def check(run: Run, batches: dict[tuple[int, int, int], dict]) -> None:
    """Every step of a run names the rows that were trained, each where it was."""
    assert sorted({step for step, _, _ in batches}) == run.step.tolist()
    for step in run.step.tolist():
        named = rows_of_step(run, step)
        lines = {key[1:]: line for key, line in batches.items() if key[0] == step}
        assert places_of(named) == {k: line["rows"] for k, line in lines.items() if line["rows"]}
        assert {line["epoch"] for line in lines.values()} == {named.epoch}
        assert named.missing == ""


# -- real fits -----------------------------------------------------------------------------------


def recorded(folder: Path) -> dict[tuple[int, int, int], dict]:
    """The batches of a run in this process that made its final weights."""
    lines = [json.loads(line) for line in (folder / "rows-0.jsonl").read_text().splitlines()]
    newest = {line["step"]: line["restart"] for line in lines}
    kept = [line for line in lines if line["restart"] == newest[line["step"]]]
    return {(line["step"], 0, line["micro"]): line for line in kept}


@pytest.fixture(scope="module")
def folder(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs in four processes: stopped, crashed behind a save, other layouts and limits."""
    path = tmp_path_factory.mktemp("steps")
    fit(store, path, RecordRows(), KillAt(6))
    fit(store, path, RecordRows(), KillAt(9), ckpt=last(path), accumulate_grad_batches=3)
    crash = {"saves": 3, "accumulate_grad_batches": 2}
    fit(store, path, RecordRows(), Crash(14), ckpt=last(path), **crash)
    fit(store, path, RecordRows(), ckpt=last(path), accumulate_grad_batches=2)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return read(folder)


def test_the_rows_named_are_those_that_were_trained_across_restarts_and_layouts(
    run: Run, folder: Path
) -> None:
    batches = recorded(folder)
    assert [(at, header["accumulate"]) for at, header in run.headers] == [
        *((0, 1), (7, 3), (10, 2), (12, 2))
    ]
    assert {line["epoch"] for line in batches.values()} == {0, 1, 2}
    check(run, batches)


def test_a_batching_that_changed_at_an_epochs_end_is_followed(
    store: RowStore, tmp_path: Path
) -> None:
    smaller = {"batching": Batching(**BATCHING | {"token_budget": 300, "max_rows": 1})}
    fit(store, tmp_path, RecordRows(), max_epochs=1)
    fit(store, tmp_path, RecordRows(), ckpt=last(tmp_path), data=smaller)
    run = read(tmp_path)
    assert run.header["position"] == {"epoch": 1, "segments": [], "finished": False}
    assert run.header["settings"]["data.batching.max_rows"] == 1
    check(run, recorded(tmp_path))


@pytest.mark.ddp
@pytest.mark.slow
def test_rows_are_named_over_several_ranks_that_are_killed(store: RowStore, tmp_path: Path) -> None:
    path = recipe(store, tmp_path, max_epochs=2)
    links = [
        link(path, 2, 1, step=5, rank=-1, name="SIGKILL"),  # falls back to step 4
        link(path, 3, 1, step=7, rank=-1),
        link(path, 1, 2, step=9, rank=-1),
        link(path, 2, 2),
    ]
    codes = run_links(tmp_path, links)
    assert [code[0] for code in codes] == [-9, 75, 75, 0]
    run = read(tmp_path / "runs" / "version_0")
    layouts = [(header["world_size"], header["accumulate"]) for _, header in run.headers]
    assert layouts == [(2, 1), (3, 1), (1, 2), (2, 2)]
    check(run, trained(tmp_path))


def test_the_sources_of_each_step_are_counted_over_its_rows(run: Run, store: RowStore) -> None:
    found = sources_of(run)
    assert found is not None
    assert found.step.tolist() == run.step.tolist()
    assert found.names == tuple(store.meta["sources"])
    for step, portion in zip(run.step.tolist(), found.portion, strict=True):
        tokens = Counter()
        for facts in rows_of_step(run, step).rows:
            tokens[facts.source] += int(store.row(facts.row)[1].sum())
        expected = [tokens[name] / tokens.total() for name in found.names]
        assert portion.tolist() == pytest.approx(expected)


def test_sources_are_not_counted_without_the_store_or_the_settings(run: Run) -> None:
    assert sources_of(with_header(run, store="gone")) is None
    assert sources_of(replace(run, headers=((0, {"store": run.header["store"]}),))) is None


# -- what is said --------------------------------------------------------------------------------


def test_each_row_is_described(run: Run, store: RowStore, target_folder: Path) -> None:
    named = rows_of_step(run, 8, tokenizer=str(target_folder))
    lines, sources = store.column("line"), store.column("source")
    assert len(named.rows) == run.column("rows")[8] == len(named.places) > 1
    for facts in named.rows:
        ids, _ = store.row(facts.row)
        assert (facts.line, facts.length) == (lines[facts.row], len(ids))
        assert facts.source == ["a", "b"][sources[facts.row]]
        low, high = named.boundaries[facts.bucket : facts.bucket + 2]
        assert low < len(ids) <= high
        # write_chats: row i asks "question i" and is answered by words that begin with number 7 i
        assert facts.prompt == str(facts.row)
        assert facts.answer.startswith(f"word{facts.row * 7 % 13} ")
        assert facts.answer.endswith(" ...")


def test_plain_types_say_all_that_is_known(run: Run) -> None:
    named = rows_of_step(run, 8)
    told = json.loads(json.dumps(named.to_dict(), allow_nan=False))
    assert (told["run"], told["step"], told["epoch"], told["missing"]) == ("purple", 8, 0, "")
    assert told["values"]["rows"] == len(told["rows"])
    assert told["values"]["loss"] == run.loss[8]
    assert told["values"]["top_row"] in [row["row"] for row in told["rows"]]
    assert [(row["rank"], row["micro"]) for row in told["rows"]] == list(named.places)
    assert sorted({row["micro"] for row in told["rows"]}) == [0, 1, 2]
    counts = Counter(row["bucket"] for row in told["rows"])
    assert [bucket["rows"] for bucket in told["buckets"]] == [counts[0], counts[1]]


def test_the_text_names_the_rows_and_marks_the_one_that_deviates(run: Run) -> None:
    named = rows_of_step(run, 8)
    text = str(named)
    assert text.startswith("Step 8 of purple, epoch 0: loss ")
    top = int(named.values["top_row"])
    listed = [line.split()[0] for line in text.splitlines() if line.split()]
    for facts in named.rows:
        assert ("*" * (facts.row == top) + str(facts.row)) in listed
    facts = next(facts for facts in named.rows if facts.row == top)
    assert f"* row {top} (source {facts.source}, line {facts.line}, {facts.length} tokens" in text
    assert max(map(len, text.splitlines())) <= 100


# -- the store -----------------------------------------------------------------------------------


def test_a_store_at_another_place_can_be_given(run: Run, store: RowStore) -> None:
    moved = with_header(run, store="/nowhere/store")
    given = rows_of_step(moved, 8, store=store.path)
    assert given == rows_of_step(run, 8)
    assert given.rows


def test_without_the_store_the_ledger_speaks_and_what_would_help_is_said(run: Run) -> None:
    named = rows_of_step(with_header(run, store="/nowhere/store"), 8)
    assert named.rows == named.places == ()
    fingerprint = run.header["settings"]["data.store"]
    assert named.missing == (
        "The rows are not named: their store is not here. `--store PATH` names them: the run's "
        f"data.store, /nowhere/store when the run began (fingerprint {fingerprint})."
    )
    text = str(named)
    assert f"* row {named.values['top_row']} deviates most: " in text
    assert "without it the loss would be" in text
    assert "--store PATH" in text
    assert named.to_dict()["rows"] == []
    assert len(named.buckets) == 2


def other_store(store: RowStore, folder: Path) -> Path:
    chats = write_chats(folder / "chats.jsonl", 41)
    return prepare_store(chats, make_tokenizer(), folder / "store", max_length=256).path


def test_another_store_is_refused_where_it_is_given_and_said_where_it_is_found(
    run: Run, store: RowStore, tmp_path: Path
) -> None:
    path = other_store(store, tmp_path)
    message = rf"^store must be the one .* trained on \(fingerprint {store.fingerprint}\), got"
    with pytest.raises(ValueError, match=message):
        rows_of_step(run, 8, store=path)
    named = rows_of_step(with_header(run, store=str(path)), 8)
    assert named.rows == ()
    assert named.missing.startswith("The rows are not named: their store was made anew since. `--s")
    with pytest.raises(FileNotFoundError, match="holds no finished store"):
        rows_of_step(run, 8, store=tmp_path)


def test_rows_that_return_are_described_without_a_step(run: Run) -> None:
    store, missing = find_store(run.header)
    assert missing == ""
    assert store is not None
    facts = describe_rows(store, [7, 3], boundaries=run.header["boundaries"])
    assert [(f.row, f.line, f.length) for f in facts] == [
        (row, row + 1, len(store.row(row)[0])) for row in (7, 3)
    ]
    assert describe_rows(store, []) == []
    assert describe_rows(store, [3])[0].bucket is None
    with pytest.raises(ValueError, match=r"^row 40 is not in the store .* rows 0 to 39\. Give"):
        describe_rows(store, [3, 40])


# -- what cannot be made again -------------------------------------------------------------------


@pytest.mark.parametrize("step", [-1, 10**6])
def test_a_step_that_the_run_has_not_is_refused(run: Run, step: int) -> None:
    span = f"0 to {run.step[-1]}"
    with pytest.raises(ValueError, match=rf"^step must be one that purple has .*{span}.*{step}\."):
        rows_of_step(run, step)


def test_a_plan_that_is_not_the_headers_is_refused(run: Run) -> None:
    message = r"^the plan of the run \(fingerprint 0123\) cannot be .* which gives \w{16}\. Take"
    with pytest.raises(ValueError, match=message):
        rows_of_step(with_header(run, plan="0123"), 8)
    settings = run.header["settings"]
    other = {"data.seed": 1, "data.val_fraction": 0.1, "data.batching.pad_to": 8}
    for name, value in other.items():
        with pytest.raises(ValueError, match="cannot be made again from its ledger"):
            rows_of_step(with_header(run, settings=settings | {name: value}), 8)


@pytest.mark.parametrize("name", ["rows", "tokens", "padded_tokens", "epoch"])
def test_a_step_of_another_size_than_was_trained_is_refused(run: Run, name: str) -> None:
    values = run.columns[name].copy()
    values[8] += 1
    wrong = replace(run, columns={**run.columns, name: values})
    with pytest.raises(ValueError, match=r"^step 8 of purple trained .* Take the run folder"):
        rows_of_step(wrong, 8)
    assert rows_of_step(wrong, 9).rows


def test_a_ledger_that_lost_its_first_lines_still_names_the_right_rows(run: Run) -> None:
    cut = run.take(run.step >= 3)
    assert [at for at, _ in cut.headers] == [0, 4, 7, 9]
    for step in (3, 8, 14):
        assert rows_of_step(cut, step) == rows_of_step(run, step)


def test_one_header_for_a_run_of_several_processes_names_no_wrong_rows(run: Run) -> None:
    of_last = replace(run, headers=((0, run.header),))  # as a tracker keeps it
    assert run.header["step"] == 12
    named = rows_of_step(of_last, 8)
    assert named.rows == ()
    assert "says only how steps from 12 on were planned; the run folder's" in named.missing
    assert rows_of_step(of_last, 13) == rows_of_step(run, 13)
    with pytest.raises(ValueError, match=r"^step 8 of purple trained .* Take the run folder"):
        rows_of_step(replace(run, headers=run.headers[:1]), 8)


def test_a_curve_without_a_header_says_what_would_name_its_rows() -> None:
    steps = np.arange(5)
    bare = Run(name="x", kind="a bare curve", step=steps, columns={"loss": steps / 2}, buckets={})
    named = rows_of_step(bare, 3)
    assert (named.values, named.epoch, named.rows) == ({"loss": 1.5}, None, ())
    assert named.missing == (
        "The rows are not named: what was read (a bare curve) does not say how they were planned; "
        "the header of a ledger.csv that fit writes does."
    )
    assert str(named).startswith("Step 3 of x: loss 1.5000\n\nThe rows are not named")


# -- words ---------------------------------------------------------------------------------------


def test_what_the_template_puts_around_every_prompt_is_left_out(
    target_folder: Path, tmp_path: Path
) -> None:
    say = make_tokenizer()
    prompts = ["Why is the sky blue?", "Name a river in France.", "Add two and two", "Who sings?"]
    rows = []
    for line, prompt in enumerate(prompts, 1):
        asked = say(f"<|start|>user\n{prompt}<|end|>\n<|start|>assistant\n")["input_ids"]
        answer = say(f"Answer {line}!<|end|>")["input_ids"]
        mask = [False] * len(asked) + [True] * len(answer) + [False]
        ids = [*asked, *answer, *say("\n")["input_ids"]]
        rows.append(StoredRow(np.array(ids), np.array(mask), line, ""))
    garbage = np.array([*say("\x1b[2J\u202e zzz")["input_ids"]] * 2)
    rows.append(StoredRow(garbage, np.arange(len(garbage)) > 2, 5, ""))
    rows.append(StoredRow(garbage, np.zeros(len(garbage), bool), 6, ""))
    meta = {"key": {"tokenizer": prepared_with(target_folder)}}
    store = write_store(tmp_path / "store", rows, meta, lambda: list(range(6)))
    facts = describe_rows(store, range(6), tokenizer=str(target_folder))
    assert [f.prompt for f in facts[:4]] == [
        *("Why is the s ...", "Name a river ...", "Add two and ...", "Who sings?"),
    ]
    assert [f.answer for f in facts[:4]] == [f"Answer {line}!" for line in (1, 2, 3, 4)]
    assert facts[4].prompt == "\N{MIDDLE DOT}[2"
    assert facts[4].answer.startswith("J\N{MIDDLE DOT} zzz")
    assert facts[5].answer == ""
    shown = " ".join(map(str, garbage[:3]))
    assert describe_rows(store, [4])[0].prompt == shown
    assert describe_rows(store, [4], tokenizer=str(tmp_path))[0].prompt == shown
    assert describe_rows(store, [4], tokenizer="nobody/has-this")[0].prompt == shown


def prepared_with(target_folder: Path) -> str:
    from dflash_lightning.target import load_tokenizer, tokenizer_fingerprint

    return tokenizer_fingerprint(load_tokenizer(str(target_folder)))


def test_words_of_another_tokenizer_are_not_shown(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    other = make_tokenizer()
    other.chat_template = "{{ messages }}"
    other.save_pretrained(tmp_path)
    assert describe_rows(store, [3], tokenizer=str(tmp_path))[0].prompt.split()[0].isdigit()
    words = describe_rows(store, [3], tokenizer=str(target_folder))[0]
    assert (words.prompt, words.answer[:6]) == ("3", "word8 ")


def test_a_large_step_fits_the_terminal_whatever_its_rows_say(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(2, 60, size=600)
    sources = ["网页" * 20, "a", "a very long name of a source that does not fit"]
    rows = [
        StoredRow(np.full(n, 120_000 + n), np.arange(n) > n // 2, 10**6 + i, sources[i % 3])
        for i, n in enumerate(lengths)
    ]
    meta = {"key": {"tokenizer": ""}}
    store = write_store(tmp_path / "store", rows, meta, lambda: list(range(600)))
    batching = Batching(token_budget=60 * 64, max_rows=64, num_buckets=2)
    plan = RunPlan(store.lengths, batching, seed=3, world_size=8)
    settings = {f"data.batching.{k}": v for k, v in asdict(batching).items()}
    settings |= {"data.batching.boundaries": list(plan.plan.boundaries)}
    settings |= {"data.seed": 3, "data.store": store.fingerprint, "data.val_fraction": 0.0}
    header = {
        "boundaries": plan.plan.boundaries,
        "position": plan.position(0).to_dict(),
        "settings": settings,
        "world_size": 8,
        "accumulate": 1,
        "plan": plan.plan.fingerprint,
    }
    run = Run(
        name="large",
        kind="ledger",
        headers=((0, header),),
        step=np.arange(1),
        columns={"top_row": np.array([599.0])},
        buckets={},
    )
    named = rows_of_step(run, 0, store=store.path)
    assert len(named.rows) > 100
    expected = [row for rank in range(8) for row in plan.plan.rows(0, rank).tolist()]
    assert [facts.row for facts in named.rows] == expected
    words = tuple(f._replace(prompt="漢字 " * 30, answer="a word " * 9) for f in named.rows)
    for shown in (named, replace(named, rows=words), replace(named, rows=words[:1])):
        shown = replace(shown, places=shown.places[: len(shown.rows)])
        assert max(map(wide, shown.text().splitlines())) <= 100
    lines = named.text().splitlines()
    assert lines[-1] == f"... and {len(named.rows) - 40:,} more; --json has all"
    listed = [line.split()[0].lstrip("*") for line in lines if " 1200" in line]
    assert listed == [str(row) for row in expected[:40]]
    assert len(named.text(at_most=1000).splitlines()) == len(lines) - 1 + len(named.rows) - 40
    assert len(named.to_dict()["rows"]) == len(named.rows)


# -- without torch -------------------------------------------------------------------------------

ALONE = """
import json, pickle, sys
for name in ("torch", "lightning", "transformers", "torchmetrics", "wandb", "scipy"):
    sys.modules[name] = None
from dflash_lightning.data.steps import rows_of_step
run = pickle.load(sys.stdin.buffer)
print(json.dumps([rows_of_step(run, int(step)).to_dict() for step in run.step]))
"""


def test_rows_are_named_where_torch_is_missing(run: Run, store: RowStore) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], input=pickle.dumps(run), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    told = json.loads(done.stdout)
    assert [step["step"] for step in told] == run.step.tolist()
    for epoch in range(3):
        rows = [row["row"] for step in told if step["epoch"] == epoch for row in step["rows"]]
        assert sorted(rows) == split_rows(store.column("conversation"), 0.2)[0].tolist()
