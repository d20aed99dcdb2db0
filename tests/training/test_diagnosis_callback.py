"""The diagnosis while a run trains: what loggers and terminal get, what it costs and survives."""

import csv
import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import wandb
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from training.chain import KillAt
from training.faults import Poison
from training.restarts import BATCHING, both_loggers, last, make_module, run, said
from training.test_kill import link, recipe, run_links
from training.wandb_file import history

from dflash_lightning import Batching, DFlashDataModule, EpochPlan
from dflash_lightning.batching.measure import report_plan
from dflash_lightning.batching.report import PlanReport
from dflash_lightning.callbacks import Ledger, RunDiagnosis, RunReport, Stopped
from dflash_lightning.callbacks.diagnosis import because, values_of
from dflash_lightning.callbacks.rate import Stopwatch
from dflash_lightning.data.store import RowStore
from dflash_lightning.diagnosis import deviators, diagnose, read_run, tops_of
from dflash_lightning.diagnosis.result import Cause, Chance, Diagnosis

KEYS = {f"diagnosis/{x}" for x in ("mix", "noise", "rest", "std", "mix_adjusted", "verdict")}
ALWAYS = 1e9  # times the steps' own time: no diagnosis is left out
MODULE = "dflash_lightning.callbacks.diagnosis"


def fit(
    store: RowStore, folder: Path, *callbacks: Callback, loggers: Any = False, **settings: Any
) -> L.Trainer:
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=loggers,
        callbacks=list(callbacks),
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"max_steps": 20, "log_every_n_steps": 1} | settings,
    )
    data = DFlashDataModule(
        str(store.path), batching=Batching(**BATCHING), num_workers=0, val_fraction=0.2
    )
    trainer.fit(make_module(), datamodule=data)
    return trainer


def no_number(values: dict[str, Any]) -> set[str]:
    return {name for name in KEYS if math.isnan(float(values[name]))}


# -- what loggers get -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logged(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 steps with a diagnosis every 40, two loggers, one row of the loggers every 7 steps."""
    folder = tmp_path_factory.mktemp("logged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        loggers = [CSVLogger(folder, name="runs"), WandbLogger(save_dir=folder, offline=True)]
        fit(
            store, folder, Ledger(), RunDiagnosis(40, ALWAYS), LogsAll(),
            loggers=loggers, max_steps=150, log_every_n_steps=7,
        )  # fmt: skip
        wandb.finish()
        wandb.teardown()  # its service, which processes of other tests would inherit
    return folder


class LogsAll(Callback):
    """Lets Lightning log the steps around a diagnosis, too."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        trainer.log_every_n_steps = 1 if trainer.global_step % 40 in (38, 39, 0) else 7


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs" / "version_0" / "metrics.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["diagnosis/verdict"]]


def twins(folder: Path) -> dict[int, Diagnosis]:
    """What the steps up to each that was diagnosed give when they are diagnosed afterwards."""
    whole = read_run(folder / "runs" / "version_0")
    return {step: diagnose(whole.take(whole.step <= step)) for step in (39, 79, 119, 149)}


@pytest.mark.slow
def test_every_n_steps_and_at_the_end_a_csv_file_gets_shares_and_verdict(logged: Path) -> None:
    rows, expected = rows_of(logged), twins(logged)
    assert [int(row["step"]) for row in rows] == list(expected)
    for row, found in zip(rows, expected.values(), strict=True):
        assert {name for name in row if name.startswith("diagnosis/")} == KEYS
        for name, value in values_of(found).items():
            assert float(row[name]) == pytest.approx(value, rel=1e-9, nan_ok=True), name
    assert no_number(rows[0]) == {
        f"diagnosis/{x}" for x in ("mix", "noise", "rest", "mix_adjusted")
    }
    assert no_number(rows[-1]) == set()
    parts = [float(rows[-1][f"diagnosis/{x}"]) for x in ("mix", "noise", "rest")]
    assert sum(parts) == pytest.approx(1)
    assert (
        float(rows[-1]["diagnosis/verdict"])
        == {"ON TRACK": 0, "WATCH": 1, "INVESTIGATE": 2}[expected[149].verdict]
    )


@pytest.mark.slow
def test_wandb_gets_the_same_on_the_axes_of_all_values(logged: Path) -> None:
    _, rows = history(logged)
    found = [row for row in rows if "diagnosis/verdict" in row]
    assert [row["trainer/global_step"] for row in found] == [39, 79, 119, 149]
    tokens = {row["trainer/global_step"]: row["tokens_seen"] for row in rows if "train/loss" in row}
    for row, other in zip(found, rows_of(logged), strict=True):
        assert {name for name in row if name.startswith("diagnosis/")} == KEYS
        for name in KEYS:
            assert float(row[name]) == pytest.approx(float(other[name]), nan_ok=True)
        if row["trainer/global_step"] in tokens:
            assert row["tokens_seen"] == tokens[row["trainer/global_step"]]
    assert {39, 79, 119} <= tokens.keys()


@pytest.mark.slow
def test_lg_03_no_step_of_training_is_lost_beside_a_diagnosis(logged: Path) -> None:
    _, rows = history(logged)
    steps = [row["trainer/global_step"] for row in rows if "train/loss" in row]
    around = {s for n in (40, 80, 120) for s in (n - 2, n - 1, n)}
    expected = sorted({s for s in range(150) if s % 7 == 6} | around)
    assert set(steps) >= set(expected)
    assert steps == sorted(set(steps))
    losses = {row["trainer/global_step"]: row["train/loss"] for row in rows if "train/loss" in row}
    ledger = read_run(logged / "runs" / "version_0")
    for step in expected:
        assert losses[step] == pytest.approx(ledger.loss[step], rel=1e-6)
    own = [row["_step"] for row in rows]
    assert all(a < b for a, b in pairwise(own)), "W&B drops what does not rise"
    assert all("trainer/global_step" in row for row in rows)


@pytest.mark.slow
def test_wandb_gets_a_table_of_the_rows_that_moved_the_loss_most(logged: Path) -> None:
    whole = read_run(logged / "runs" / "version_0")
    wanted = deviators(tops_of(whole))[:20]
    assert len(wanted) > 3
    tables = logged.glob("wandb/offline-run-*/files/media/table/diagnosis/rows_*.table.json")
    newest = max(tables, key=lambda path: path.stat().st_mtime_ns)
    table = json.loads(newest.read_text())
    assert table["columns"] == ["row", "times", "distance", "pull", "far", "last steps"]
    assert [row[0] for row in table["data"]] == [d.row for d in wanted]
    first, best = table["data"][0], wanted[0]
    assert first[1:5] == [best.times, pytest.approx(best.size), pytest.approx(best.pull), best.far]
    assert first[5] == ", ".join(str(step) for step in best.steps)
    _, rows = history(logged)
    at = [row["trainer/global_step"] for row in rows if "diagnosis/rows/path" in row]
    assert at == [39, 79, 119, 149]


# -- what it costs --------------------------------------------------------------------------------


class Clock:
    """A clock that stands still but for what a test adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Takes(Callback):
    """Each step takes a second by the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.clock.now += 1.0


@pytest.mark.parametrize("last_first", [False, True])
def test_the_next_diagnosis_waits_until_steps_have_paid_for_the_last_and_is_no_part_of_a_step(
    store: RowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_first: bool
) -> None:
    clock, at = Clock(), []
    monkeypatch.setattr("dflash_lightning.callbacks.rate.time", clock)

    def dear(run: Any) -> Diagnosis:
        at.append(int(run.step[-1]))
        clock.now += 0.25
        return diagnose(run)

    monkeypatch.setattr(f"{MODULE}.diagnose", dear)
    both = [Ledger(), RunDiagnosis(12)]
    callbacks = [Takes(clock), *(reversed(both) if last_first else both)]
    fit(store, tmp_path, *callbacks, max_steps=95)
    # The first is expected to take 0.1 s, which 10 steps pay for; each takes 0.25 s, which 25 pay.
    seen = [11, 47, 83, 94]
    assert at == [step - last_first for step in seen[:3]] + seen[3:]
    assert read_run(tmp_path / "ledger.csv").column("seconds").tolist() == [1.0] * 95


def test_a_restart_remembers_what_the_last_diagnosis_took() -> None:
    one, other = RunDiagnosis(), RunDiagnosis()
    one.seconds, one.verdict = 3.5, "WATCH"
    other.load_state_dict(one.state_dict())
    assert (other.seconds, other.verdict) == (3.5, "WATCH")


def test_a_stopwatch_that_another_callback_pauses_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("dflash_lightning.callbacks.rate.time", clock)
    watch = Stopwatch()
    watch.start()
    clock.now = 1.0
    watch.pause()
    clock.now = 5.0
    watch.start()
    clock.now = 7.0
    assert watch.take() == 3.0


# -- what it survives -----------------------------------------------------------------------------


class Spoils(Callback):
    """Damages or removes the ledger behind the writer's back after step 8."""

    def __init__(self, path: Path, remove: bool) -> None:
        self.path, self.remove = path, remove

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 8 and self.remove:
            self.path.unlink()
        elif trainer.global_step == 8:
            with self.path.open("a") as file:
                file.write("garbage,in,the,middle\n")


@pytest.mark.parametrize("remove", [False, True])
def test_a_ledger_that_cannot_be_read_is_told_once_and_stops_nothing(
    store: RowStore, tmp_path: Path, capsys: pytest.CaptureFixture, remove: bool
) -> None:
    diagnosis = RunDiagnosis(5, ALWAYS)
    spoils = Spoils(tmp_path / "ledger.csv", remove)
    trainer = fit(store, tmp_path, Ledger(), diagnosis, spoils)
    assert trainer.global_step == 20
    lines = [line for line in capsys.readouterr().out.splitlines() if "no diagnosis" in line]
    assert len(lines) == 1
    assert lines[0].startswith("step 10: no diagnosis, training goes on: ")
    assert str(tmp_path / "ledger.csv") in lines[0]
    assert diagnosis.found is None


def test_a_disk_that_fails_stops_nothing_and_a_mistake_in_the_code_is_not_hidden(
    store: RowStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def failing(error: Exception) -> Any:
        def diagnose(run: Any) -> Diagnosis:
            raise error

        return diagnose

    monkeypatch.setattr(f"{MODULE}.diagnose", failing(OSError("input/output error")))
    assert fit(store, tmp_path / "disk", Ledger(), RunDiagnosis(5, ALWAYS)).global_step == 20
    assert capsys.readouterr().out.count("input/output error") == 1
    monkeypatch.setattr(f"{MODULE}.diagnose", failing(KeyError("a mistake")))
    with pytest.raises(KeyError, match="a mistake"):
        fit(store, tmp_path / "code", Ledger(), RunDiagnosis(5, ALWAYS))


def test_a_restart_is_diagnosed_with_the_steps_before_it(store: RowStore, tmp_path: Path) -> None:
    first = RunDiagnosis(5, ALWAYS)
    error = run(store, tmp_path, KillAt(8), first).error
    assert isinstance(error, Stopped)
    assert first.found is not None
    assert first.found.curves.step.tolist() == list(range(5))
    second = RunDiagnosis(5, ALWAYS)
    done = run(store, tmp_path, second, ckpt=last(tmp_path))
    assert done.error is None
    assert second.found is not None
    assert second.found.curves.step.tolist() == list(range(done.trainer.global_step))
    assert [cause.cause for cause in second.found.causes] == ["restart"]
    assert second.found.causes[0].steps == (9,)


# -- what the terminal gets -----------------------------------------------------------------------


def given(found: Diagnosis, verdict: str, cause: str = "rows") -> Diagnosis:
    """A diagnosis with another verdict, and causes of which one decides it."""
    causes = [Cause(cause=x, steps=(1,), says=f"{x} seen") for x in ("restart", cause)]
    chance = Chance(
        lag1=0.0, lag1_band=0.1, ljung_box=9.0, p_value=0.5, outside=0.05, noticed=0.1, delta=0.1,
        average_adjusted=4, average_raw=5, apart_delta=0.1, apart_steps=6, apart_same_plan=None,
        changes={},
    )  # fmt: skip
    found = dataclasses.replace(found, verdict=verdict, causes=tuple(causes), random=chance)
    return dataclasses.replace(found, remedy="Do it.", because=cause)


def test_only_a_change_to_the_worse_verdicts_is_told_and_the_last_verdict_at_the_end(
    store: RowStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    folder = tmp_path / "a run"
    verdicts = iter(
        [
            *("ON TRACK", "WATCH", "WATCH", "INVESTIGATE", "WATCH", "ON TRACK", "ON TRACK"),
            "INVESTIGATE",
        ]
    )
    causes = {"ON TRACK": "restart", "WATCH": "rows", "INVESTIGATE": "divergence"}

    def judged(run: Any) -> Diagnosis:
        verdict = next(verdicts)
        return given(diagnose(run), verdict, causes[verdict])

    monkeypatch.setattr(f"{MODULE}.diagnose", judged)
    callbacks = [RunReport(), Ledger(), RunDiagnosis(2, ALWAYS)]
    fit(store, folder, *callbacks, max_steps=15)
    lines = capsys.readouterr().out.splitlines()
    more = f"dflash-lightning diagnose '{folder}'"
    assert [line for line in lines if "seen" in line] == [
        f"step 4: WATCH, rows seen; more: {more}",
        f"step 8: INVESTIGATE, divergence seen; more: {more}",
        f"step 10: WATCH, rows seen; more: {more}",
    ]
    last_lines = ["verdict INVESTIGATE. Too early to judge. Do it.", f"why the loss jumps: {more}"]
    assert lines[-2:] == last_lines
    assert lines[-3].startswith("run folder ")


def test_that_it_is_too_early_for_a_verdict_is_logged_but_not_told(
    store: RowStore, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    diagnosis = RunDiagnosis(5, ALWAYS)
    callbacks = [RunReport(), Ledger(), diagnosis]
    fit(store, tmp_path, *callbacks, loggers=CSVLogger(tmp_path, name="runs"), max_steps=10)
    said = capsys.readouterr().out
    assert "diagnose" not in said
    assert said.splitlines()[-1].startswith("run folder ")
    assert [row["diagnosis/verdict"] for row in rows_of(tmp_path)] == ["1.0", "1.0"]
    assert diagnosis.state_dict()["verdict"] == "ON TRACK"


def test_what_decides_a_verdict_is_named_before_what_does_not(
    store: RowStore, tmp_path: Path
) -> None:
    diagnosis = RunDiagnosis(5, ALWAYS)
    fit(store, tmp_path, Ledger(), diagnosis, max_steps=10)
    assert diagnosis.found is not None
    assert because(given(diagnosis.found, "INVESTIGATE", "spread")) == "spread seen"
    assert because(given(diagnosis.found, "WATCH", "period")) == "period seen"
    unexplained = given(diagnosis.found, "WATCH", "rest")
    rest = SimpleNamespace(share=0.234)
    unexplained = dataclasses.replace(unexplained, shares={**unexplained.shares, "rest": rest})
    assert because(unexplained) == "23 % of the variance is unexplained"


def test_a_loss_that_is_no_number_is_told_at_the_next_diagnosis(
    store: RowStore, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    diagnosis = RunDiagnosis(5, ALWAYS)
    fit(store, tmp_path, Ledger(), diagnosis, Poison(7, 7))
    told = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step ")]
    assert len(told) == 1
    assert told[0].startswith("step 10: INVESTIGATE, ")
    assert told[0].endswith(f"; more: dflash-lightning diagnose {tmp_path}")
    assert diagnosis.verdict == "INVESTIGATE"


@pytest.mark.parametrize("every", [0, None])
def test_it_can_be_switched_off_and_needs_no_ledger_then(
    store: RowStore, tmp_path: Path, capsys: pytest.CaptureFixture, every: int | None
) -> None:
    diagnosis = RunDiagnosis(every, ALWAYS)
    fit(store, tmp_path, diagnosis, loggers=CSVLogger(tmp_path, name="runs"), max_steps=5)
    assert diagnosis.found is None
    assert "diagnosis" not in (tmp_path / "runs" / "version_0" / "metrics.csv").read_text()
    assert "verdict" not in capsys.readouterr().out


def test_what_cannot_be_is_refused_in_one_line(store: RowStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"every_n_steps must be at least 1.*got -1 and 0.01\."):
        RunDiagnosis(-1)
    for share in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="time_share positive"):
            RunDiagnosis(time_share=share)
    with pytest.raises(ValueError, match="must stand beside a Ledger"):
        fit(store, tmp_path, RunDiagnosis())


# -- two ranks ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, stopped after 12 steps and after 18, inside an epoch; then one rank alone."""
    folder = tmp_path_factory.mktemp("ranks")
    path = recipe(store, folder, logger=both_loggers(folder), max_epochs=4)
    more = ("--diagnosis.every_n_steps", "5", "--diagnosis.time_share", "1e9")
    links = [
        link(path, more=more, step=11, rank=1),
        link(path, more=more, step=17),
        link(path, 1, more=more),
    ]
    assert run_links(folder, links) == [[75, 0], [75, 0], [0]]
    return folder


@pytest.mark.ddp
@pytest.mark.slow
def test_two_ranks_diagnose_once_and_go_on_after_a_restart(two_ranks: Path) -> None:
    ledger = read_run(two_ranks / "runs" / "version_0")
    total = len(ledger)
    assert total > 20
    assert ledger.step.tolist() == list(range(total))
    expected = sorted({*range(4, total, 5), total - 1})
    rows = rows_of(two_ranks)
    assert [int(row["step"]) for row in rows] == expected
    tokens = [float(row["tokens_seen"]) for row in rows]
    assert tokens == ledger.column("tokens_seen")[expected].tolist()
    _, logged = history(two_ranks)
    at = [row["trainer/global_step"] for row in logged if "diagnosis/verdict" in row]
    assert at == expected
    losses = [row["train/loss"] for row in logged if "train/loss" in row]
    assert losses == pytest.approx(ledger.loss.tolist(), rel=1e-6)


@pytest.mark.ddp
@pytest.mark.slow
def test_the_header_tells_how_deals_differ_as_the_plans_report_does(two_ranks: Path) -> None:
    headers = [header for _, header in read_run(two_ranks / "runs" / "version_0").headers]
    assert [header["step"] for header in headers] == [0, 12, 18]
    for number in (0, 1):
        deals = headers[number]["deals"]
        assert list(deals) == ["stratified", "aligned", "independent"]
        for name, value in deals.items():
            (line,) = [x for x in said(two_ranks, number).splitlines() if x.startswith(name)]
            assert line.rstrip().endswith(f" {value:.4f}")
    assert "deals" not in headers[2], "a few steps are left, dealt anew for one rank"


@pytest.mark.parametrize("reports", [0, 1])
def test_the_report_of_a_plan_is_made_once(
    store: RowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: int
) -> None:
    made = []

    def counted(plan: EpochPlan) -> PlanReport:
        made.append(plan.epoch)
        return report_plan(plan)

    monkeypatch.setattr("dflash_lightning.batching.measure.report_plan", counted)
    fit(store, tmp_path, *[RunReport()] * reports, Ledger(), max_steps=2)
    assert made == [0]
    assert read_run(tmp_path / "ledger.csv").header["deals"]["aligned"] > 0
