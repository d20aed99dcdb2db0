"""Where the time of a step goes: what ``fit --profile`` leaves, and what every run says."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.profilers import PyTorchProfiler
from training.test_fit import make_data, make_module, make_trainer, recipe

from dflash_lightning.callbacks import Ledger, Profile
from dflash_lightning.callbacks.profile import NAMES, profile_of
from dflash_lightning.cli import build_cli
from dflash_lightning.data.store import RowStore
from dflash_lightning.phases import PHASES

SECONDS = ["wait_seconds", *(f"{phase}_seconds" for phase in PHASES)]


class Recorder(PyTorchProfiler):
    """Lightning's, which fails when it goes without having recorded anything."""

    def teardown(self, stage: str | None) -> None:
        """Nothing was begun."""


def ledger(folder: Path) -> dict[str, np.ndarray]:
    """The columns of a ledger."""
    lines = [x for x in (folder / "ledger.csv").read_text().splitlines() if not x.startswith("#")]
    rows = list(csv.DictReader(lines))
    return {name: np.array([float(row[name] or "nan") for row in rows]) for name in rows[0]}


def fit(store: RowStore, target: Path, folder: Path, **settings: Any) -> Profile:
    """A small fit with its operators recorded."""
    found = Profile(enabled=True)
    trainer = make_trainer(folder, callbacks=[Ledger(), found], max_epochs=3, **settings)
    trainer.fit(make_module(target), datamodule=make_data(store))
    return found


def test_a_profile_is_said_and_written_and_the_run_goes_on(
    store: RowStore, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    found = fit(store, target_folder, tmp_path, max_steps=18, val_check_interval=4).found
    assert found is not None
    assert (found.steps, found.recorded) == (list(range(3, 10)), list(range(10, 16)))
    values = ledger(tmp_path)
    assert values["step"].tolist() == list(range(18))
    some = slice(3, 10)
    for phase, name in zip(["wait", *PHASES], SECONDS, strict=True):
        assert found.phases[phase] == pytest.approx(values[name][some].mean(), rel=1e-5)
    assert sum(found.phases.values()) == pytest.approx(found.seconds, rel=1e-5)
    speed = values["tokens"][some].sum() / values["seconds"][some].sum()
    assert found.tokens_per_second == pytest.approx(speed, rel=1e-5)
    names = [x.name for x in found.operators]
    assert len(names) == 10
    assert found.recorded_seconds == pytest.approx(values["seconds"][10:16].mean(), rel=1e-5)
    assert 0 < sum(x.seconds for x in found.operators) < found.recorded_seconds
    assert "aten::mm" in names
    update = [x.calls for x in found.operators if x.name == "aten::_fused_adamw_"]
    assert update in ([], [2.0])  # a kernel for matrices, one for vectors
    text = (tmp_path / "profile.txt").read_text()
    assert text == f"{found}\n"
    assert max(map(len, text.splitlines())) <= 100
    assert all(words in text for words in NAMES.values())
    said = capsys.readouterr().out
    assert text in said
    assert "\ntime of the steps: waiting for data " in said
    written = json.loads((tmp_path / "profile.json").read_text())
    assert written["phases"] == dict(found.phases)
    assert written["operators"][0]["name"] == names[0]
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert sum(event.get("name") == "aten::_fused_adamw_" for event in trace["traceEvents"]) == 2


def test_phases_are_parts_of_every_step_and_none_is_empty(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(
        tmp_path, callbacks=[Ledger()], max_steps=4, accumulate_grad_batches=2, val_check_interval=2
    )
    trainer.fit(make_module(target_folder), datamodule=make_data(store))
    values = ledger(tmp_path)
    parts = np.stack([values[name] for name in SECONDS])
    assert np.all(parts[1:] > 0)
    assert np.all(parts.sum(0) < values["seconds"])
    assert np.all(parts.sum(0) > 0.5 * values["seconds"])


@pytest.mark.parametrize(
    ("steps", "phases", "recorded"),
    [(1, [0], [0]), (2, [1], [1]), (9, [3], [4, 5, 6, 7, 8])],
)
def test_a_short_run_is_recorded_in_its_second_half(
    store: RowStore,
    target_folder: Path,
    tmp_path: Path,
    steps: int,
    phases: list[int],
    recorded: list[int],
) -> None:
    found = fit(store, target_folder, tmp_path, max_steps=steps, limit_val_batches=0).found
    assert found is not None
    assert (found.steps, found.recorded) == (phases, recorded)


def test_recording_changes_no_loss(store: RowStore, target_folder: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 5, "limit_val_batches": 0}
    fit(store, target_folder, tmp_path / "with", **settings)
    trainer = make_trainer(tmp_path / "without", callbacks=[Ledger()], max_epochs=3, **settings)
    trainer.fit(make_module(target_folder), datamodule=make_data(store))
    one, two = ledger(tmp_path / "with"), ledger(tmp_path / "without")
    for name in ("loss", "grad_norm", "tokens"):
        assert one[name].tolist() == two[name].tolist()


def test_a_second_recorder_and_a_missing_ledger_are_refused(
    store: RowStore, target_folder: Path, tmp_path: Path
) -> None:
    module, data = make_module(target_folder), make_data(store)
    both = [Ledger(), Profile(enabled=True)]
    alone = make_trainer(tmp_path, callbacks=both[1:])
    with pytest.raises(ValueError, match="Profile must stand beside a Ledger"):
        alone.fit(module, datamodule=data)
    twice = make_trainer(tmp_path, callbacks=both, profiler=Recorder())
    with pytest.raises(ValueError, match=r"trainer\.profiler is one, too"):
        twice.fit(module, datamodule=data)


def test_means_of_a_few_steps_by_hand() -> None:
    row = {"tokens": 300, "seconds": 2.0, "wait_seconds": 0.1, "target_seconds": 0.5}
    row |= {"drafter_seconds": 0.25, "head_seconds": 0.05, "backward_seconds": 0.6}
    rows = [{**row, "step": 3, "optimizer_seconds": 0.0}]
    rows += [{**row, "step": 4, "seconds": 4.0, "tokens": 600, "optimizer_seconds": 1.0}]
    found = profile_of(rows, rows[:1], {"a": (4, 0.5), "b": (2, 1.0)})
    assert (found.seconds, found.recorded_seconds, found.tokens_per_second) == (3.0, 2.0, 150.0)
    assert dict(found.phases) == pytest.approx(
        {
            "wait": 0.1,
            "target": 0.5,
            "drafter": 0.25,
            "head": 0.05,
            "backward": 0.6,
            "optimizer": 0.5,
            "rest": 1.0,
        }
    )
    assert [tuple(x) for x in found.operators] == [("b", 2, 1.0), ("a", 4, 0.5)]
    assert found.dominates() == (
        "Most of a step is rest, 33.3 %; the dearest operator is b. What helps: it is the host's "
        "own work: give a step more rows, or log less often."
    )


def test_the_option_of_fit_switches_it_on(
    store: RowStore, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["dflash-lightning"])
    path = str(recipe(store, target_folder, tmp_path))
    for words, expected in (["--profile"], True), ([], False):
        cli = build_cli(["--config", path, *words], run=False)
        (found,) = (x for x in vars(cli.trainer)["callbacks"] if isinstance(x, Profile))
        assert found.enabled is expected
