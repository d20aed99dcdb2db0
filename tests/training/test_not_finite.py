"""Updates that are not finite, on several ranks: skipped by all, counted, and the end at last."""

import json
import re
from pathlib import Path

import pytest
import torch
from training.restarts import (
    RECORD,
    fault,
    said,
)
from training.test_kill import final, ledger, link, recipe, run_links, trained

from dflash_lightning.data.store import RowStore

pytestmark = pytest.mark.slow


@pytest.mark.ddp
def test_a_run_whose_updates_stay_not_finite_ends_with_a_checkpoint_and_names_the_rows(
    store: RowStore, tmp_path: Path
) -> None:
    poison = fault("Poison", first=4, rank=1)
    path = recipe(store, tmp_path, callbacks=[RECORD, poison])
    limit = ("--model.max_skipped_steps", "3")
    healed = recipe(store, tmp_path / "healed")
    assert run_links(tmp_path, [link(path, more=limit)]) == [[1, 0]]
    log = said(tmp_path)
    (line,) = (x for x in log.splitlines() if x.startswith("dflash-lightning fit: "))
    assert "stopped after step 7, as 3 updates in a row were not finite; saved " in line
    assert "Traceback" not in log
    batches = trained(tmp_path)
    skips = re.findall(r"step (\d+): update skipped.*loss of rows (\[.*?\]) is not finite", log)
    assert [int(step) for step, _ in skips] == [4, 5, 6]
    for step, rows in skips:
        assert sorted(json.loads(rows)) == sorted(batches[int(step), 1, 0]["rows"])
    assert [row["skipped"] for row in ledger(tmp_path)] == ["0"] * 4 + ["1"] * 3
    saved = final(tmp_path)
    assert saved["global_step"] == 7
    assert all(torch.isfinite(weight).all() for weight in saved["state_dict"].values())
    moments = saved["optimizer_states"][0]["state"].values()
    assert {int(state["step"]) for state in moments} == {4}
    cured = link(
        healed, more=("--ckpt_path", str(tmp_path / "runs/version_0/checkpoints/last.ckpt"))
    )
    assert run_links(tmp_path / "healed", [cured]) == [[0, 0]]


@pytest.mark.ddp
def test_both_ranks_skip_together_where_only_one_has_a_bad_gradient(
    store: RowStore, tmp_path: Path
) -> None:
    poison = fault("Poison", first=3, last=4, rank=1, what="gradient")
    path = recipe(store, tmp_path, max_epochs=1, callbacks=[RECORD, poison])
    assert run_links(tmp_path, [link(path)]) == [[0, 0]]
    rows = ledger(tmp_path)
    assert [int(row["step"]) for row in rows if row["skipped"] == "1"] == [3, 4]
    assert all(float(row["loss"]) > 0 for row in rows)
    batches = trained(tmp_path)
    for step, numbers in re.findall(
        r"step (\d+): update skipped, gradient norm nan; it is from rows (\[.*?\])", said(tmp_path)
    ):
        both = batches[int(step), 0, 0]["rows"] + batches[int(step), 1, 0]["rows"]
        assert sorted(json.loads(numbers)) == sorted(both)
    assert said(tmp_path).count("update skipped") == 2
    moments = final(tmp_path)["optimizer_states"][0]["state"].values()
    assert {int(state["step"]) for state in moments} == {len(rows) - 2}
