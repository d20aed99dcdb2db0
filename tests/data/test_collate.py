"""Rows to a batch: literal batches, a slow twin, and what anchors may depend on."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dflash_lightning.data.collate import Batch, BatchIndex, RowBatches
from dflash_lightning.data.features import FeatureCache
from dflash_lightning.data.store import RowStore, StoredRow, write_store
from dflash_lightning.random_target import RandomTarget

MASKS = [[0, 1, 1, 1, 0, 1], [0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]]
IDS = [[10, 11, 12, 13, 14, 15], [20, 21, 22], [30, 31, 32, 33, 34, 35, 36, 37]]


def stored(folder: Path, ids: list[list[int]], masks: list[list[int]]) -> RowStore:
    rows = [
        StoredRow(np.array(i, dtype=np.int32), np.array(m, dtype=bool), n, "")
        for n, (i, m) in enumerate(zip(ids, masks, strict=True))
    ]
    return write_store(folder / "literal", rows, {"key": {}}, lambda: list(range(len(rows))))


def batches(store: RowStore, **options) -> RowBatches:
    defaults = {"block_size": 4, "seed": 0, "anchor_rate": 1.0, "anchors_per_row": 512}
    return RowBatches(store, **{**defaults, **options})


def index(rows, width: int = 0, epoch: int | None = 0, store: RowStore | None = None) -> BatchIndex:
    rows = np.array(rows, dtype=np.int64)
    return BatchIndex(epoch, rows, width or int(store.lengths[rows].max()))


def anchors_of(batch: Batch, row: int) -> list[int]:
    """Anchors of a row of the store, wherever it stands in the batch."""
    at = batch.rows.tolist().index(row)
    return batch.anchors[at][batch.anchor_valid[at]].tolist()


def labels_of(batch: Batch, row: int, block_size: int = 4) -> dict[tuple[int, int], int]:
    """A row's labels as (anchor, slot in the block) -> token."""
    at, slots = batch.rows.tolist().index(row), batch.anchors.shape[1]
    found = {}
    for flat, label in zip(batch.label_slots.tolist(), batch.labels.tolist(), strict=True):
        block, slot = divmod(flat, block_size)
        if block // slots == at:
            found[int(batch.anchors[at, block % slots]), slot] = label
    return found


# -- literal batches -------------------------------------------------------------------------------


def test_every_field_of_a_small_batch(tmp_path) -> None:
    batch = batches(stored(tmp_path, IDS, MASKS))[index([1, 0], width=8)]
    assert batch.rows.tolist() == [1, 0]
    assert batch.lengths.tolist() == [3, 6]
    assert batch.input_ids.tolist() == [
        [20, 21, 22, 0, 0, 0, 0, 0],
        [10, 11, 12, 13, 14, 15, 0, 0],
    ]
    assert batch.anchors.tolist() == [[1, 0], [1, 2]]
    assert batch.anchor_valid.tolist() == [[True, False], [True, True]]
    # Flat slots of [2 rows, 2 blocks, 4 tokens]; the tokens after the gap at 4 carry no label.
    assert batch.label_slots.tolist() == [1, 9, 10, 13]
    assert batch.labels.tolist() == [22, 12, 13, 13]
    assert batch.features is None
    kinds = {field: value.dtype for field, value in batch._asdict().items() if value is not None}
    assert kinds.pop("anchor_valid") == torch.bool
    assert set(kinds.values()) == {torch.int64}


def test_a_block_is_never_labelled_beyond_its_size(tmp_path) -> None:
    batch = batches(stored(tmp_path, IDS, MASKS), block_size=3)[index([2], width=8)]
    assert batch.anchors.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert labels_of(batch, 2, block_size=3) == {
        (0, 1): 31, (0, 2): 32, (1, 1): 32, (1, 2): 33, (2, 1): 33, (2, 2): 34, (3, 1): 34,
        (3, 2): 35, (4, 1): 35, (4, 2): 36, (5, 1): 36, (5, 2): 37, (6, 1): 37,
    }  # fmt: skip


def test_slot_k_of_a_block_is_labelled_with_the_token_k_after_its_anchor(tmp_path) -> None:
    mask = [0] * 8 + [1] * 32  # LM-03: the answer stands on 8..39
    batch = batches(stored(tmp_path, [list(range(100, 140))], [mask]))[index([0], width=40)]
    found = labels_of(batch, 0)
    assert {slot: label for (anchor, slot), label in found.items() if anchor == 37} == {
        1: 138,
        2: 139,
    }
    assert anchors_of(batch, 0) == list(range(8, 39))


def test_labels_behind_a_gap_on_request(tmp_path) -> None:
    rows = batches(stored(tmp_path, IDS, MASKS), block_size=5, label_holes=True)
    assert labels_of(rows[index([0], width=6)], 0, block_size=5) == {
        (1, 1): 12, (1, 2): 13, (1, 4): 15, (2, 1): 13, (2, 3): 15,
    }  # fmt: skip


def test_anchors_whose_block_lies_in_the_row_need_no_supervised_successor(tmp_path) -> None:
    rows = batches(stored(tmp_path, IDS, MASKS), block_size=3, whole_block=3)
    batch = rows[index([0, 1], width=9)]  # padding does not let blocks reach further
    assert anchors_of(batch, 0) == [1, 2, 3]
    assert anchors_of(batch, 1) == []
    assert labels_of(batch, 0, block_size=3) == {(1, 1): 12, (1, 2): 13, (2, 1): 13}


def test_a_place_without_rows_is_one_padding_token_that_counts_for_nothing(tmp_path) -> None:
    batch = batches(stored(tmp_path, IDS, MASKS))[BatchIndex(None, np.zeros(0, np.int64), 1)]
    assert batch.rows.shape == batch.labels.shape == batch.label_slots.shape == (0,)
    assert batch.input_ids.tolist() == [[0]]
    assert batch.lengths.tolist() == [0]
    assert batch.anchors.tolist() == [[0]]
    assert batch.anchor_valid.tolist() == [[False]]
    assert batch.features is None


def test_cached_features_stand_beside_their_tokens(tmp_path) -> None:
    store = stored(tmp_path, IDS, MASKS)
    cache = FeatureCache(store, RandomTarget().load(), (1, 2))
    cache.build(0, 1, lambda: None)
    rows = batches(store, features=cache)
    batch = rows[index([1, 2], width=9)]
    assert batch.features.shape == (2, 9, 128)
    assert batch.features.dtype == torch.bfloat16
    for at, row in enumerate((1, 2)):
        length = len(IDS[row])
        assert torch.equal(batch.features[at, :length], cache.row(row))
        assert not batch.features[at, length:].any()
    placeholder = rows[BatchIndex(None, np.zeros(0, np.int64), 1)].features
    assert placeholder.shape == (1, 1, 128)
    assert placeholder.dtype == torch.bfloat16


# -- a slow twin -----------------------------------------------------------------------------------


def walk(
    ids: list[int], mask: list[bool], anchors: list[int], block_size: int, *, holes: bool
) -> dict:
    """Walk from each anchor over supervised tokens until the row's end, the block's or a gap.

    With holes a gap is stepped over.
    """
    found = {}
    for anchor in anchors:
        for slot in range(1, block_size):
            position = anchor + slot
            if position >= len(ids) or not (mask[position] or holes):
                break
            if not mask[position]:
                continue
            found[anchor, slot] = ids[position]
    return found


ROW = st.integers(0, 12).flatmap(
    lambda tail: st.lists(st.booleans(), min_size=0, max_size=30).map(
        lambda mask: [*mask, True, True, *[False] * tail]
    )
)


@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    masks=st.lists(ROW, min_size=1, max_size=5),
    block_size=st.integers(2, 9),
    rate=st.sampled_from([0.05, 0.25, 1.0]),
    limit=st.sampled_from([1, 3, 512]),
    epoch=st.sampled_from([None, 0, 7]),
    extra=st.integers(0, 5),
    whole=st.booleans(),
    holes=st.booleans(),
)
def test_a_batch_is_what_a_walk_over_its_rows_gives(
    tmp_path_factory, masks, block_size, rate, limit, epoch, extra, whole, holes
) -> None:
    ids = [[100 * n + t for t in range(len(mask))] for n, mask in enumerate(masks)]
    store = stored(tmp_path_factory.mktemp("twin"), ids, masks)
    rules = {"whole_block": block_size if whole else None, "label_holes": holes}
    rows = batches(store, block_size=block_size, anchor_rate=rate, anchors_per_row=limit, **rules)
    width = max(map(len, masks)) + extra
    batch = rows[index(range(len(masks)), width=width, epoch=epoch)]
    for n, mask in enumerate(masks):
        anchors = anchors_of(batch, n)
        if whole:
            valid = [t for t in range(len(mask) - block_size + 1) if mask[t]]
        else:
            valid = [t for t in range(len(mask) - 1) if mask[t] and mask[t + 1]]
        assert anchors == sorted(set(anchors))
        assert set(anchors) <= set(valid)
        assert len(anchors) == min(len(valid), limit, int(np.ceil(rate * sum(mask))))
        assert labels_of(batch, n, block_size) == walk(
            ids[n], mask, anchors, block_size, holes=holes
        )
        assert batch.input_ids[n].tolist() == ids[n] + [0] * (width - len(ids[n]))
    assert batch.anchors.shape == (len(masks), int(batch.anchor_valid.sum(1).max()))
    assert (batch.label_slots.diff() > 0).all()
    assert not (batch.label_slots % block_size == 0).any()  # slot 0 is the anchor itself


# -- promise 6: what anchors depend on -------------------------------------------------------------


def few(store: RowStore, **options) -> RowBatches:
    """Batches with so few anchors that two draws of a row hardly ever agree."""
    return batches(store, anchor_rate=0.3, **options)


def everything_of(batch: Batch, row: int) -> tuple:
    return anchors_of(batch, row), labels_of(batch, row)


@pytest.mark.parametrize("epoch", [None, 0, 3])
def test_a_row_has_the_same_anchors_and_labels_in_any_company(store, epoch) -> None:
    rows = few(store)
    company = [
        [7],
        [7, 8],
        [12, 7, 0],
        [3, 1, 4, 15, 9, 7],
        list(range(40)),
        list(range(39, -1, -1)),
    ]
    found = [everything_of(rows[index(c, epoch=epoch, store=store)], 7) for c in company]
    assert found == [found[0]] * len(company)
    assert 1 < len(found[0][0]) < store.row(7)[1].sum() - 1


def test_padding_changes_no_entry_of_a_row(store) -> None:
    rows = few(store)
    narrow = rows[index([2, 5, 9], store=store)]
    width = narrow.input_ids.shape[1]
    wide = rows[index([2, 5, 9], width=width + 37)]
    assert torch.equal(wide.input_ids[:, :width], narrow.input_ids)
    assert not wide.input_ids[:, width:].any()
    for field in ("rows", "lengths", "anchors", "anchor_valid", "label_slots", "labels"):
        assert torch.equal(getattr(wide, field), getattr(narrow, field)), field


def test_training_anchors_follow_seed_epoch_and_row(store) -> None:
    def drawn(seed: int, epoch: int | None) -> list[list[int]]:
        batch = few(store, seed=seed)[index(range(40), epoch=epoch, store=store)]
        return [anchors_of(batch, row) for row in range(40)]

    base = drawn(0, 0)
    assert drawn(0, 0) == base
    assert drawn(0, 1) != base
    assert drawn(1, 0) != base
    assert drawn(1, 0) != drawn(0, 1)


def test_validation_anchors_follow_the_row_only(store) -> None:
    def drawn(seed: int) -> list[list[int]]:
        batch = few(store, seed=seed)[index(range(40), epoch=None, store=store)]
        return [anchors_of(batch, row) for row in range(40)]

    assert drawn(0) == drawn(1) == drawn(99)


def test_equal_rows_draw_apart(tmp_path) -> None:
    ids, mask = list(range(50)), [1] * 50
    store = stored(tmp_path, [ids] * 6, [mask] * 6)
    for epoch in (None, 0):
        batch = few(store)[index(range(6), width=50, epoch=epoch)]
        assert len({tuple(anchors_of(batch, row)) for row in range(6)}) == 6


def test_building_a_batch_touches_no_global_generator(store) -> None:
    rows, at = few(store), index([4, 8], store=store)
    first = rows[at]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global generator is the point
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    second = rows[at]
    assert states == (
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        torch.get_rng_state().tolist(),
    )
    assert torch.equal(first.anchors, second.anchors)
    assert torch.equal(first.labels, second.labels)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_build_the_batches_that_the_main_process_would(store, workers: int) -> None:
    order = [index([r, (r * 7 + 3) % 40], epoch=2, store=store) for r in range(0, 40, 4)]
    loader = DataLoader(few(store), sampler=order, batch_size=None, num_workers=workers)
    for built, at in zip(loader, order, strict=True):
        expected = few(store)[at]
        for field, value in expected._asdict().items():
            assert field == "features" or torch.equal(getattr(built, field), value), field
