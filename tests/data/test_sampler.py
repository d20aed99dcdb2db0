"""What a real fit receives, step by step, against the plan; and validation that never changes."""

import shutil
from collections import Counter

import lightning as L
import numpy as np
import pytest
import torch
from tiny import write_chats
from torch.utils.data import DistributedSampler

from dflash_lightning.batching import Batching, EpochPlan, plan_epoch
from dflash_lightning.data.collate import Batch
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.data.features import FeatureCache
from dflash_lightning.data.prepare import prepare_store
from dflash_lightning.data.sampler import BucketSampler, ValidationSampler
from dflash_lightning.data.store import RowStore, split_rows
from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.module import DFlashModule
from dflash_lightning.random_target import RandomTarget

VAL_FRACTION = 0.2
SMALL = Batching(token_budget=400, max_rows=8, num_buckets=3)


class Recorder(L.Callback):
    """Keeps every batch that the module is given."""

    def __init__(self) -> None:
        self.train: dict[int, list[Batch]] = {}
        self.val: list[list[Batch]] = []
        self.stated: list[int] = []

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        self.stated.append(trainer.num_training_batches)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.train.setdefault(trainer.current_epoch, []).append(batch)

    def on_validation_epoch_start(self, trainer, pl_module) -> None:
        self.val.append([])

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, **_) -> None:
        self.val[-1].append(batch)


def new_module() -> DFlashModule:
    drafter = DrafterConfig(num_layers=1, block_size=4, target_layer_ids=(0, 2), mask_token_id=500)
    return DFlashModule(RandomTarget(), drafter, lr=1e-3)


def new_data(store: RowStore, batching: Batching = SMALL, **options) -> DFlashDataModule:
    defaults = {"num_workers": 0, "val_fraction": VAL_FRACTION}
    return DFlashDataModule(str(store.path), batching, **{**defaults, **options})


def new_trainer(recorder: Recorder, **options) -> L.Trainer:
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**quiet, callbacks=[recorder], **options)


def fit(data: DFlashDataModule, **options) -> tuple[Recorder, L.Trainer]:
    recorder = Recorder()
    trainer = new_trainer(recorder, **{"max_epochs": 2, **options})
    trainer.fit(new_module(), data)
    return recorder, trainer


def planned(store: RowStore, batching: Batching, **key: int) -> tuple[EpochPlan, np.ndarray]:
    """The plan made by hand, and the store rows behind its row numbers."""
    rows, _ = split_rows(store.column("conversation"), VAL_FRACTION)
    return plan_epoch(store.lengths[rows], batching, **{"seed": 0, **key}), rows


def rows_by_batch(store: RowStore, batching: Batching, **key: int) -> list[list[int]]:
    plan, rows = planned(store, batching, **key)
    return [
        rows[plan.rows(step, 0, micro)].tolist()
        for step in range(plan.num_steps)
        for micro in range(plan.accumulate)
    ]


def rows_of(batches: list[Batch]) -> list[list[int]]:
    return [batch.rows.tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def uneven_seed(store: RowStore, sign: int) -> int:
    """A seed whose second epoch has more (1), fewer (-1) or as many (0) batches as its first."""
    for seed in range(200):
        sizes = [planned(store, SMALL, seed=seed, epoch=e)[0].num_steps for e in (0, 1)]
        if np.sign(sizes[1] - sizes[0]) == sign:
            return seed
    raise AssertionError("no such seed: choose other settings")


# -- BS-10, BS-11, BS-12: real fits ----------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sign", [-1, 0, 1], ids=["shrinks", "same", "grows"])
def test_a_fit_receives_the_plan_of_every_epoch(store, workers: int, sign: int) -> None:
    seed = uneven_seed(store, sign)
    data = new_data(store, seed=seed, num_workers=workers)
    received, trainer = fit(data)
    train, _ = split_rows(store.column("conversation"), VAL_FRACTION)
    expected = [rows_by_batch(store, SMALL, seed=seed, epoch=epoch) for epoch in (0, 1)]
    for epoch in (0, 1):
        assert rows_of(received.train[epoch]) == expected[epoch]
        assert sorted(flat(expected[epoch])) == train.tolist()
    assert {frozenset(b) for b in expected[0]} != {frozenset(b) for b in expected[1]}
    assert received.stated == [len(batches) for batches in expected]
    assert trainer.global_step == data.num_steps(2) == sum(received.stated)


def test_accumulated_batches_come_in_the_order_of_the_plan(store) -> None:
    received, trainer = fit(new_data(store), accumulate_grad_batches=3)
    for epoch in (0, 1):
        expected = rows_by_batch(store, SMALL, epoch=epoch, accumulate=3)
        assert rows_of(received.train[epoch]) == expected
    assert trainer.global_step * 3 == sum(len(b) for b in received.train.values())


def test_batches_are_as_wide_as_the_plan_says_and_hold_the_stores_rows(store) -> None:
    wide = Batching(token_budget=1024, max_rows=4, pad_to=16)
    received, _ = fit(new_data(store, wide), max_epochs=1)
    plan, _ = planned(store, wide, epoch=0)
    for step, batch in enumerate(received.train[0]):
        assert batch.input_ids.shape == (len(plan.rows(step, 0)), plan.width(step, 0))
        assert batch.input_ids.numel() <= 1024
        for at, row in enumerate(batch.rows.tolist()):
            ids = store.row(row)[0].tolist()
            assert batch.lengths[at] == len(ids)
            assert batch.input_ids[at].tolist() == ids + [0] * (plan.width(step, 0) - len(ids))


def test_anchors_are_drawn_anew_every_epoch_and_do_not_depend_on_workers(store) -> None:
    alone, _ = fit(new_data(store, anchor_rate=0.3))
    helped, _ = fit(new_data(store, anchor_rate=0.3, num_workers=2))
    for epoch in (0, 1):
        for a, b in zip(alone.train[epoch], helped.train[epoch], strict=True):
            assert torch.equal(a.anchors, b.anchors)
            assert torch.equal(a.label_slots, b.label_slots)

    def anchors(epoch: int) -> dict[int, list[int]]:
        return {
            row: places[valid].tolist()
            for b in alone.train[epoch]
            for row, places, valid in zip(b.rows.tolist(), b.anchors, b.anchor_valid, strict=True)
        }

    first, second = anchors(0), anchors(1)
    assert first.keys() == second.keys()
    assert sum(first[row] != second[row] for row in first) > len(first) / 2


@pytest.mark.parametrize("workers", [0, 2])
def test_cached_features_reach_the_module(tmp_path, store, workers: int) -> None:
    shutil.copytree(store.path, tmp_path / "store")
    copy = RowStore.open(tmp_path / "store")
    received, _ = fit(new_data(copy, cache_features=True, num_workers=workers), max_epochs=1)
    cache = FeatureCache(copy, RandomTarget().load(), (0, 2))
    cache.build(0, 1, lambda: None)
    batches = [*received.train[0], *flat(received.val)]
    assert sorted(flat(rows_of(batches))) == list(range(40))
    for batch in batches:
        for at, row in enumerate(batch.rows.tolist()):
            length = int(batch.lengths[at])
            assert torch.equal(batch.features[at, :length], cache.row(row))
            assert not batch.features[at, length:].any()


# -- the sampler of one rank -----------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (2, 1), (3, 2), (5, 1)])
def test_ranks_share_an_epoch_without_gap_or_overlap(store, world_size, accumulate) -> None:
    train, _ = split_rows(store.column("conversation"), VAL_FRACTION)
    data = []
    for rank in range(world_size):
        part = new_data(store)
        part.rank, part.world_size, part.accumulate = rank, world_size, accumulate
        part.setup("fit")
        data.append(part)
    for epoch in (0, 1, 2):
        for part in data:
            part.set_epoch(epoch)
        shares = [rows_of(list(part.train_dataloader())) for part in data]
        assert len({len(share) for share in shares}) == 1
        assert all(len(s) == len(BucketSampler(d)) for s, d in zip(shares, data, strict=True))
        assert sorted(flat(flat(shares))) == train.tolist()


def test_lightning_takes_the_sampler_for_a_distributed_one(store) -> None:
    data = new_data(store)
    data.setup("fit")
    assert isinstance(data.train_dataloader().sampler, DistributedSampler)
    assert isinstance(data.val_dataloader().sampler, DistributedSampler)


# -- the data module by hand, as in a notebook -----------------------------------------------------


def test_set_epoch_reshuffles_and_is_the_same_every_time(store) -> None:
    data = new_data(store)
    with pytest.raises(RuntimeError, match=r"setup\(\) must run before its plan is used"):
        _ = data.plan
    data.setup("fit")
    assert data.plan.fingerprint == planned(store, SMALL, epoch=0)[0].fingerprint
    first = rows_of(list(data.train_dataloader()))
    data.set_epoch(1)
    assert data.plan.fingerprint == planned(store, SMALL, epoch=1)[0].fingerprint
    assert rows_of(list(data.train_dataloader())) != first
    data.set_epoch(0)
    assert rows_of(list(data.train_dataloader())) == first
    assert data.report().rows == len(flat(first)) == 32
    assert data.tokens_per_epoch == store.lengths[flat(first)].sum()


def test_no_epoch_beyond_the_end_of_the_run_is_planned(store, monkeypatch) -> None:
    data = new_data(store)
    data.setup("fit")
    planned = []

    def counted(lengths, batching, *, epoch, **key):
        planned.append(epoch)
        return plan_epoch(lengths, batching, epoch=epoch, **key)

    monkeypatch.setattr("dflash_lightning.data.run_plan.plan_epoch", counted)
    first = data.plan.num_steps
    assert data.num_steps(1000, at_most=first + 1) == first + 1
    assert planned == [1]
    both = data.num_steps(2)
    assert data.num_tokens(both) == 2 * data.tokens_per_epoch
    assert data.num_tokens(first) == data.tokens_per_epoch
    assert 0 < data.num_tokens(1) < data.tokens_per_epoch
    assert planned == [1]
    data.seed = 7  # another seed, other steps: nothing is taken from the old one
    data.setup("fit")
    data.num_steps(2)
    assert planned == [1, 0, 1]


def test_a_validation_row_over_the_budget_is_refused_before_the_first_step(
    store, tokenizer, tmp_path
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 3)
    short = prepare_store(chats, tokenizer, tmp_path / "short", max_length=256)
    longest = int(short.lengths.max())
    assert longest < store.lengths.max()
    batching = Batching(token_budget=longest)
    new_data(short, batching, val_fraction=0.0).setup("fit")
    message = (
        rf"validation rows: token_budget must hold every row: \d+ of 40 rows do not fit, the "
        rf"longest has \d+ tokens .* got token_budget={longest}\."
    )
    with pytest.raises(ValueError, match=message):
        new_data(short, batching, val_store=str(store.path)).setup("fit")


def test_validation_widths_lie_on_the_grid_too(store) -> None:
    received, _ = fit(new_data(store, Batching(pad_to=32, max_rows=4)), max_epochs=1)
    assert {batch.input_ids.shape[1] % 32 for batch in received.val[0]} == {0}


@pytest.mark.parametrize("use", ["plan", "report", "set_epoch", "num_steps"])
def test_what_needs_a_plan_says_how_to_get_one(store, use: str) -> None:
    data = new_data(store)
    calls = {"report": data.report, "set_epoch": lambda: data.set_epoch(1)}
    calls |= {"num_steps": lambda: data.num_steps(1), "plan": lambda: data.plan}
    with pytest.raises(RuntimeError, match=r"call setup\('fit'\), or give it to trainer\.fit"):
        calls[use]()


def test_the_quick_start_needs_a_trainer() -> None:
    with pytest.raises(ValueError, match=r"store 'quickstart' needs a trainer.*In a notebook: "):
        DFlashDataModule("quickstart").setup("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.0}, r"val_fraction must be at least 0 and below 1, got 1\.0"),
        ({"val_fraction": -0.1}, r"val_fraction must be at least 0 and below 1, got -0\.1"),
        ({"anchor_rate": 0.0}, r"anchor_rate must be in \(0, 1\].* got 0\.0 and 512"),
        ({"anchors_per_row": 0}, r"anchors_per_row at least 1, got 0\.25 and 0"),
        ({"num_workers": -1}, r"num_workers must be at least 0, got -1\."),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DFlashDataModule("anywhere", **options)


# -- validation ------------------------------------------------------------------------------------


def entries(batches: list[Batch]) -> dict[int, tuple]:
    """What validation holds of every row: ids, anchors and labels, wherever they stand."""
    found = {}
    for batch in batches:
        slots = batch.anchors.shape[1]
        for at, row in enumerate(batch.rows.tolist()):
            block = batch.label_slots // 4
            mine = block // slots == at
            anchors = batch.anchors[at][batch.anchor_valid[at]].tolist()
            at_anchor = batch.anchors[at][block[mine] % slots]
            labels = torch.stack([at_anchor, batch.label_slots[mine] % 4, batch.labels[mine]])
            ids = batch.input_ids[at, : batch.lengths[at]].tolist()
            assert row not in found
            found[row] = (ids, anchors, labels.tolist())
    return found


def test_validation_is_the_same_every_time_and_at_any_batch_size(store) -> None:
    _, val = split_rows(store.column("conversation"), VAL_FRACTION)
    received, _ = fit(new_data(store))
    other, _ = fit(new_data(store, Batching(token_budget=200, max_rows=2), seed=5), max_epochs=1)
    first, *rest = [entries(batches) for batches in (*received.val, *other.val)]
    assert sorted(first) == val.tolist()
    assert len(rest) == 2
    assert all(again == first for again in rest)
    assert rows_of(received.val[0]) == rows_of(received.val[1]) != rows_of(other.val[0])


def test_validated_numbers_do_not_depend_on_the_batch_size(store) -> None:
    found = []
    for batching in (SMALL, Batching(token_budget=200, max_rows=1), Batching(pad_to=32)):
        trainer = new_trainer(Recorder())
        found += trainer.validate(new_module(), new_data(store, batching), verbose=False)
    assert found[0]["val/loss"] > 1
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 50])
def test_every_validation_row_is_dealt_once_also_to_more_ranks_than_rows(world_size: int) -> None:
    rows = np.array([3, 5, 8, 13, 21, 34])
    plan = plan_epoch(
        [4, 9, 2, 7, 5, 5], Batching(order="sorted", token_budget=10), seed=0, epoch=0
    )
    shares = [
        list(ValidationSampler(plan, rows, lambda r=rank: r, lambda: world_size))
        for rank in range(world_size)
    ]
    lengths = dict(zip(rows.tolist(), (4, 9, 2, 7, 5, 5), strict=True))
    dealt = Counter(row for share in shares for place in share for row in place.rows.tolist())
    assert dealt == Counter(rows.tolist())
    for share in shares:
        assert len(share) == len(shares[0]) == -(-plan.num_steps // world_size)
        for index in share:
            assert index.epoch is None
            assert index.width == max([lengths[r] for r in index.rows.tolist()], default=1)


def test_an_empty_place_adds_nothing_to_validation(store) -> None:
    module = new_module()
    module.target.load()
    data = new_data(store)
    data.block_size = 4
    data.setup("validate")
    plan = plan_epoch([3], Batching(token_budget=10), seed=0, epoch=0)
    (place,) = ValidationSampler(plan, np.array([0]), lambda: 1, lambda: 2)
    sums = module.sums(data.val_dataloader().dataset[place])
    assert len(place.rows) == 0
    assert sums.numerator == 0
    assert len(sums.weights) == len(sums.losses) == len(sums.correct) == 0


def test_without_validation_rows_a_fit_runs_without_validation(store) -> None:
    received, trainer = fit(new_data(store, val_fraction=0.0), max_epochs=1)
    assert received.val == []
    assert sorted(flat(rows_of(received.train[0]))) == list(range(40))
    assert trainer.global_step > 0


def test_a_separate_validation_store_leaves_all_rows_for_training(tmp_path, store) -> None:
    shutil.copytree(store.path, tmp_path / "val")
    data = new_data(store, val_store=str(tmp_path / "val"))
    received, _ = fit(data, max_epochs=1)
    assert sorted(flat(rows_of(received.train[0]))) == list(range(40))
    assert sorted(entries(received.val[0])) == list(range(40))
