"""The script that a GPU has to pass runs, and fails where something does not hold."""

import json
from pathlib import Path

import pytest
from gpu.check_attention import main, wrong


def test_the_script_for_gpus_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture):
    main(["--device", "cpu", "--json", str(tmp_path / "results.json")])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results == json.loads(capsys.readouterr().out)
    assert results["parity"].keys() == {
        f"{name}, {dtype}" for name in ("sdpa", "dense") for dtype in ("float32", "bfloat16")
    }
    assert all(abs(errors["scale"] - 1) < 0.01 for errors in results["parity"].values())
    assert len(results["speed"]) == 4
    assert all(times["seconds"] > 0 for times in results["speed"].values())


def test_it_names_what_does_not_hold():
    right = {
        "parity": {"flex, float32": {"hidden": 1e-6, "gradients": 1e-6}},
        "recompilations": {"at_the_first": 2, "after_the_first": 0, "shapes": [[2048, 4096]]},
        "waits": {"flex": {"waits": 0, "where": []}},
    }
    assert wrong(right) == []
    off = {"flex, bfloat16": {"hidden": float("nan"), "gradients": 0.01}}
    again = {"at_the_first": 2, "after_the_first": 3, "shapes": [[2048, 4096]]}
    waiting = {"flex": {"waits": 1, "where": ["model.py:7"]}}
    assert [line.partition(" ")[0] for line in wrong({**right, "parity": off})] == ["flex,"]
    assert "must compile twice" in wrong({**right, "recompilations": again})[0]
    assert wrong({**right, "waits": waiting}) == ["the step waits for the device at model.py:7"]
