"""Goals, weights and label rules as settings: what a run does with them, keeps and refuses."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from training.restarts import last, make_module, run

from dflash_lightning import Batching, DFlashDataModule
from dflash_lightning.callbacks.ledger import weight_shares
from dflash_lightning.data.collate import BatchIndex
from dflash_lightning.data.features import FeatureCache
from dflash_lightning.data.store import RowStore, StoredRow, write_store
from dflash_lightning.functional.objective import position_weights

PARITY = {"anchor_rule": "block", "label_holes": True}
ALL_RULES = [{}, {"label_holes": True}, {"anchor_rule": "block"}, PARITY]


def ledger(folder: Path) -> list[dict[str, str]]:
    """Rows of a run's ledger, without its header."""
    (file,) = folder.rglob("ledger.csv")
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def header(folder: Path) -> dict:
    """The first header of a run's ledger."""
    (file,) = folder.rglob("ledger.csv")
    line = next(line for line in file.read_text().splitlines() if line.startswith("#"))
    return json.loads(line[line.index("{") :])


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ({"goal": "argmax", "weighting": "dpace"}, PARITY),
        ({"goal": "kl"}, {}),
        ({"weighting": "dpace", "dpace_alpha": 0.0}, {}),
    ],
)
def test_every_objective_trains_and_logs_the_same_keys(
    model: dict, data: dict, store: RowStore, tmp_path: Path
) -> None:
    ours = run(store, tmp_path, module=make_module(**model), data=data, max_epochs=2)
    assert ours.error is None
    losses = [float(row["loss"]) for row in ledger(tmp_path)]
    assert np.mean(losses[-8:]) < np.mean(losses[:8])
    found = {k: v for k, v in ours.trainer.callback_metrics.items() if k.startswith("val/")}
    names = ["loss", "cross_entropy", "est_tau", "est_tau_all", "cut_short"]
    assert set(found) == {f"val/{n}" for n in [*names, *(f"accuracy/pos_0{k}" for k in (1, 2, 3))]}
    assert all(torch.isfinite(x) for x in found.values())
    shares = header(tmp_path)["weight_share"]
    assert sum(shares) == pytest.approx(1)
    assert min(shares) > 0


def test_a_checkpoint_and_a_restart_know_the_objective(store: RowStore, tmp_path: Path) -> None:
    first = run(store, tmp_path, module=make_module(goal="argmax", weighting="dpace"), max_epochs=1)
    assert first.error is None
    saved = torch.load(last(tmp_path), weights_only=True)["dflash"]["settings"]
    expected = {
        "model.goal": "argmax",
        "model.weighting": "dpace",
        "model.loss_decay_gamma": None,
        "model.dpace_alpha": 0.5,
        "data.anchor_rule": "pair",
        "data.label_holes": False,
    }
    assert {name: saved[name] for name in expected} == expected
    module = make_module(goal="argmax", weighting="decay", loss_decay_gamma=3.0)
    more = run(store, tmp_path, ckpt=last(tmp_path), module=module, data=PARITY, max_epochs=2)
    assert more.error is None
    changed = {c.setting: (c.saved, c.given, c.used) for c in module.changes}
    assert changed["model.weighting"] == ("dpace", "decay", "decay")
    assert changed["model.loss_decay_gamma"] == (None, 3.0, "3")
    assert changed["data.anchor_rule"] == ("pair", "block", "block")
    assert changed["data.label_holes"] == (False, True, "True")
    assert "model.goal" not in changed


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("goal", ["argmax", "kl"])
def test_cached_features_hold_no_logits(
    goal: str, store: RowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FeatureCache, "build", None)  # nothing is computed before
    text = f"model.goal must be ce where data.cache_features is true, got {goal}: "
    with pytest.raises(ValueError, match=re.escape(text)):
        run(store, tmp_path, module=make_module(goal=goal), data={"cache_features": True})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"weighting": "dpace", "loss_decay_gamma": 7.0}, "null with weighting dpace"),
        ({"goal": "kl", "weighting": "dpace"}, "weighting must be decay with goal kl, got dpace"),
        ({"dpace_alpha": 0.2}, "0.5 with weighting decay, which does not read it, got 0.2"),
    ],
)
def test_settings_that_would_not_be_honoured_are_refused(settings: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_module(**settings)


# -- weights before training -----------------------------------------------------------------------


def test_position_weights_stand_where_they_are_read() -> None:
    decay = make_module(loss_decay_gamma=2.0).objective
    assert decay.slot_weights.tolist() == [0, *position_weights(4, 2.0).tolist()]
    assert make_module().objective.loss_decay_gamma == 4.0  # the paper's for small blocks
    # of 512 equally likely words: nearly 1/2 + 1/4 + 1/8 and so on
    dpace = make_module(weighting="dpace").objective
    assert dpace.slot_weights.tolist() == pytest.approx([0, 7 / 8, 3 / 8, 1 / 8], abs=0.01)
    assert dpace.loss_decay_gamma is None
    assert not decay.state_dict()


@pytest.fixture(scope="module")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> RowStore:
    """Rows of several short turns: nearly every block meets a gap."""
    generator = np.random.default_rng(0)
    rows = []
    for n in range(40):
        length = 6 + 2 * n
        ids = generator.integers(4, 200, size=length).astype(np.int32)
        rows.append(StoredRow(ids, generator.random(length) < 0.7, n, ""))
    folder = tmp_path_factory.mktemp("gaps")
    return write_store(folder / "store", rows, {"key": {}}, lambda: list(range(40)))


def rules_data(store: RowStore, rules: dict) -> DFlashDataModule:
    """A data module under some rules, ready to build batches."""
    data = DFlashDataModule(
        str(store.path),
        Batching(token_budget=400, max_rows=2, num_buckets=3),
        block_size=4,
        num_workers=0,
        anchor_rate=0.5,
        **rules,
    )
    data.setup("fit")
    return data


def test_the_rules_reach_the_batches(gaps: RowStore) -> None:
    found = []
    for rules in ALL_RULES:
        data = rules_data(gaps, rules)
        batch = data.train_dataloader().dataset[BatchIndex(0, data.train_rows[-5:], 90)]
        found.append((int(batch.anchor_valid.sum()), len(batch.labels)))
    (pair, plain), (pair_too, holes), (block, of_block), (block_too, most) = found
    assert pair == pair_too
    assert block == block_too
    assert plain < holes
    assert of_block < most
    assert len({plain, holes, of_block, most}) == 4


@pytest.mark.parametrize("rules", ALL_RULES)
def test_bucket_shares_are_those_of_the_batches(rules: dict, gaps: RowStore) -> None:
    data = rules_data(gaps, rules)
    weights = torch.tensor([0.0, 1.0, 0.5, 0.1])
    totals = np.zeros(data.plan.num_buckets)
    dataset = data.train_dataloader().dataset
    for bucket, row in zip(
        data.plan.row_buckets(np.arange(len(data.train_rows))), data.train_rows, strict=True
    ):
        width = int(data.train_store.lengths[row])
        batch = dataset[BatchIndex(0, np.array([row]), width)]
        totals[bucket] += weights[batch.label_slots % 4].sum().item()
    assert weight_shares(data, weights.numpy()) == pytest.approx(totals / totals.sum())
