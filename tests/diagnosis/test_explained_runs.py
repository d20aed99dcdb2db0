"""Curves that people asked about, explained by the command; a test for each field case."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from diagnosis.asking import Ask, Folder, Told, flat
from diagnosis.planted import GROUP_STEPS
from diagnosis.simulate import simulate
from diagnosis.write_ledger import run_on, write_process
from tiny import make_tokenizer, write_chats
from training.chain import KillAt
from training.restarts import last, make_module
from training.restarts import run as fit

from dflash_lightning import Batching
from dflash_lightning.data.prepare import prepare_store
from dflash_lightning.data.store import RowStore, StoredRow, write_store
from dflash_lightning.diagnosis import read_run

# -- ME-07: which rows caused the spike? -----------------------------------------------------------

BAD = 137


def with_random_ids(clean: RowStore, folder: Path) -> RowStore:
    """The store with other ids, drawn at random, in the answer of one row."""
    rng = np.random.default_rng(0)
    rows = []
    for row in range(len(clean)):
        ids, mask = (np.array(values) for values in clean.row(row))
        if row == BAD:
            ids[mask] = rng.integers(4, 260, mask.sum())
        source = clean.meta["sources"][clean.column("source")[row]]
        rows.append(StoredRow(ids, mask, int(clean.column("line")[row]), source))
    key = {"key": clean.meta["key"]}
    return write_store(folder, rows, key, lambda: clean.column("conversation").tolist())


@pytest.mark.slow
def test_me_07_the_row_behind_a_spike_is_named_over_a_stop_and_a_restart(
    ask: Ask, told: Told, tmp_path: Path, target_folder: Path
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 500)
    clean = prepare_store(chats, make_tokenizer(), tmp_path / "clean", max_length=256)
    store = with_random_ids(clean, tmp_path / "store")
    batching = Batching(token_budget=4096, max_rows=10, num_buckets=2)
    settings = {"data": {"batching": batching, "val_fraction": 0.0}, "limit_val_batches": 0}
    folder = tmp_path / "run"
    lr = 2e-2  # learns so much in the first epoch that a row without sense stands out
    fit(store, folder, KillAt(60), module=make_module(lr=lr), **settings)
    fit(store, folder, ckpt=last(folder), module=make_module(lr=lr), **settings)

    found = told(folder)
    causes = {cause["cause"]: cause for cause in found["causes"]}
    assert causes.keys() == {"rows", "restart"}
    assert causes["rows"]["rows"] == [BAD]
    assert 0.05 < causes["rows"]["share"] < 1
    assert f"row {BAD} in 3 steps" in flat(ask(folder))
    steps = causes["rows"]["steps"]
    epochs = read_run(folder).column("epoch")[steps]
    assert epochs.tolist() == [0, 1, 2]
    assert steps[0] < causes["restart"]["steps"][0] < steps[-1]

    length = int(store.lengths[BAD])
    for step in steps:
        text, numbers = ask(folder, "--step", step), told(folder, "--step", step)
        values, (row,) = numbers["values"], [x for x in numbers["rows"] if x["row"] == BAD]
        assert (row["source"], row["line"], row["length"]) == ("b", BAD + 1, length)
        low, high = numbers["boundaries"][row["bucket"] : row["bucket"] + 2]
        assert low < length <= high
        assert (
            f"* row {BAD} (source b, line {BAD + 1}, {length} tokens, bucket {row['bucket']}) "
            f"deviates most: {values['top_share']:.0%} of its bucket's deviations; without it the "
            f"loss would be {values['loss'] - values['top_pull']:.4f}"
        ) in flat(text)
        assert values["top_pull"] > 0.1
    listed = told(folder, "--rows", "--tokenizer", target_folder)["rows"]
    assert [row["row"] for row in listed if row["far"]] == [BAD]
    assert (listed[0]["row"], listed[0]["source"], listed[0]["times"]) == (BAD, "b", 3)
    assert listed[0]["prompt"] == str(BAD)
    assert not listed[0]["answer"].startswith("word")
    assert listed[1]["answer"].startswith("word")


# -- ME-08: a jumpy curve without an explanation ---------------------------------------------------


def causes_of(numbers: dict) -> list[str]:
    return [cause["cause"] for cause in numbers["causes"]]


def test_me_08a_a_loss_that_follows_length_is_called_a_mix_and_adjusted(
    ask: Ask, told: Told, folder_of: Folder
) -> None:
    run, truth = simulate(1, deal="aligned")
    text, numbers = ask(folder_of("a", run)), told(folder_of("a", run))
    mix = numbers["shares"]["mix"]
    assert truth.mix > 0.9 * (truth.mix + truth.noise)
    assert mix["share"] == pytest.approx(truth.mix / (truth.mix + truth.noise), abs=0.05)
    assert (numbers["verdict"], causes_of(numbers)) == ("ON TRACK", [])
    assert f" {round(100 * mix['share'])} %  length mix " in text
    assert "The loss follows the length of the rows that a step drew" in flat(text)
    assert "batching.deal=stratified" in text.split("Verdict: ")[1]
    adjusted = numbers["mix_adjusted"]
    expected = truth.adjusted[-50:].mean()
    assert adjusted["low"] < adjusted["value"] < adjusted["high"]
    assert adjusted["value"] == pytest.approx(expected, abs=np.sqrt(truth.noise))
    assert f"{adjusted['value']:.3f} [{adjusted['low']:.3f}, {adjusted['high']:.3f}]" in flat(text)


def test_me_08b_a_loss_that_follows_the_source_names_the_sources(
    ask: Ask, told: Told, folder_of: Folder, store: RowStore
) -> None:
    from_a = store.column("source") == store.meta["sources"].index("a")
    folder = folder_of("b", run_on(store, epochs=30, harder=1.5 * from_a))
    (found,) = told(folder)["causes"]
    assert found["cause"] == "source"
    assert 0.3 < found["share"] < 1
    low, high = map(float, re.findall(r" ([+-]\d\.\d\d) ", found["says"]))
    assert found["says"].index(" in b, ") < found["says"].index(" in a;")
    assert high - low == pytest.approx(1.5, abs=0.3)
    assert found["says"] in flat(ask(folder))
    even = folder_of("b-even", run_on(store, epochs=30))
    assert causes_of(told(even)) == []


def test_me_08c_a_drop_at_each_epochs_end_is_called_repeated_data(
    ask: Ask, told: Told, folder_of: Folder
) -> None:
    numbers = told(folder_of("epoch_edges"))
    assert (numbers["verdict"], causes_of(numbers)) == ("ON TRACK", ["epoch_edge"])
    assert numbers["causes"][0]["steps"] == [200, 400]
    said = flat(ask(folder_of("epoch_edges")))
    assert "the same rows come again and are remembered" in said
    assert "rows are remembered from one epoch to the next" in said


def test_me_08d_one_outlier_row_is_named(ask: Ask, told: Told, folder_of: Folder) -> None:
    (row,) = simulate(1, fault="garbage")[1].rows
    numbers = told(folder_of("garbage"))
    assert (numbers["verdict"], causes_of(numbers)) == ("WATCH", ["rows"])
    (cause,) = numbers["causes"]
    assert cause["rows"] == [row]
    assert 0 < cause["share"] < 0.2
    text = flat(ask(folder_of("garbage")))
    assert f"row {row} in {len(cause['steps'])} steps" in text
    for step in cause["steps"]:
        assert f"* row {row} deviates most" in ask(folder_of("garbage"), "--step", step)


def test_me_08e_a_rise_where_the_rate_peaks_is_blamed_on_the_rate(
    ask: Ask, told: Told, folder_of: Folder
) -> None:
    numbers = told(folder_of("shift"))
    assert (numbers["verdict"], causes_of(numbers)) == ("INVESTIGATE", ["learning_rate"])
    first, last_step = numbers["causes"][0]["steps"]
    assert first in (99, 100)
    assert last_step < 110
    assert f"at step {first}, where the rate peaks" in flat(ask(folder_of("shift")))


def test_me_08f_few_labels_a_step_are_called_sampling_noise(
    ask: Ask, told: Told, folder_of: Folder
) -> None:
    run, truth = simulate(1, ranks=2, num_buckets=3, rows_per_batch=(4,) * 3, sigma=1.5)
    folder = folder_of("f", run)
    numbers, text = told(folder), ask(folder)
    assert (numbers["verdict"], causes_of(numbers)) == ("ON TRACK", [])
    noise, rest = numbers["shares"]["noise"], numbers["shares"]["rest"]
    assert noise["share"] > 0.8
    assert rest["low"] < 0 < rest["high"]
    labels = np.median(run.column("labels"))
    assert labels < 400
    assert f"about {labels:,.0f} labels of 8 rows a step" in flat(text)
    deviation = numbers["random"]["change"]["twice the rows a step"]
    expected = np.sqrt(truth.mix + truth.noise / 2)
    assert deviation == pytest.approx(expected, rel=0.1)


# -- BS-01: periodic loss from length-ordered batches ----------------------------------------------


def test_bs_01_batches_in_length_order_are_told_by_their_period(
    ask: Ask, told: Told, folder_of: Folder
) -> None:
    numbers, text = told(folder_of("length_ordered")), flat(ask(folder_of("length_ordered")))
    assert (numbers["verdict"], causes_of(numbers)) == ("WATCH", ["period"])
    period = float(numbers["causes"][0]["says"].split("a period of ")[1].split()[0])
    assert period == pytest.approx(GROUP_STEPS, rel=0.05)
    assert "batches come in an order, not shuffled" in text
    assert "order=bucketed" in text.split("Verdict: ")[1]


# -- LG-01: values after a resume are thrown away --------------------------------------------------


def test_lg_01_a_resumed_run_loses_nothing_and_shows_where_it_went_on(
    ask: Ask, told: Told, tmp_path: Path
) -> None:
    run = simulate(1, warmup=40, steps=121)[0]
    header = run.headers[0][1]
    restarts = np.where(run.step >= 100, 1.0, 0.0)
    again = replace(run, columns={**run.columns, "restart": restarts})
    write_process(run.take(run.step <= 130), tmp_path / "run", header)
    write_process(again.take(run.step >= 100), tmp_path / "run", header | {"step": 100})

    read = read_run(tmp_path / "run")
    assert read.step.tolist() == list(range(161))
    assert read.loss == pytest.approx(run.loss, rel=1e-6)
    numbers = told(tmp_path / "run")
    (cause,) = numbers["causes"]
    assert (cause["cause"], cause["steps"]) == ("restart", [100])
    assert (numbers["window"][1], numbers["verdict"]) == (160, "ON TRACK")
    assert "(step 100)" in flat(ask(tmp_path / "run"))
    replaced = (tmp_path / "run" / "ledger-replaced.csv").read_text().splitlines()
    assert len([line for line in replaced if line[0].isdigit()]) == 31
