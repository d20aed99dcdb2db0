"""The row store: what was written is what is read, whole or not at all."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lightning.data.store import RowStore, StoredRow, split_rows, write_store

ROWS = [
    StoredRow(np.array([5, 9, 9]), np.array([False, True, True]), 1, "web"),
    StoredRow(np.array([2, 5]), np.array([True, True]), 4, ""),
    StoredRow(np.array([9, 0, 1, 5]), np.array([False, False, True, True]), 6, "web"),
]


def written(folder: Path, rows=ROWS, **key: object) -> RowStore:
    return write_store(folder / "store", rows, {"key": key}, lambda: [0, 1, 0])


def test_rows_and_columns_come_back_as_they_were(tmp_path) -> None:
    store = RowStore.open(written(tmp_path).path)
    assert len(store) == 3
    assert store.lengths.tolist() == [3, 2, 4]
    for index, row in enumerate(ROWS):
        ids, mask = store.row(index)
        assert ids.dtype == np.int32
        assert mask.dtype == np.bool_
        assert ids.tolist() == row.ids.tolist()
        assert mask.tolist() == row.loss_mask.tolist()
    assert store.column("line").tolist() == [1, 4, 6]
    assert store.column("conversation").tolist() == [0, 1, 0]
    assert [store.meta["sources"][s] for s in store.column("source")] == ["web", "", "web"]
    assert (store.meta["rows"], store.meta["tokens"], store.meta["supervised"]) == (3, 9, 6)


def test_used_ids_are_those_that_occur(tmp_path) -> None:
    used = written(tmp_path).used_ids
    assert used.tolist() == [i in {0, 1, 2, 5, 9} for i in range(10)]


def test_rows_are_read_through_and_cannot_be_changed(tmp_path) -> None:
    ids, mask = written(tmp_path).row(0)
    assert isinstance(ids, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 7
    with pytest.raises(ValueError, match="read-only"):
        mask[0] = True


def test_a_copy_in_another_process_reads_the_same(tmp_path) -> None:
    store = written(tmp_path)
    copy = pickle.loads(pickle.dumps(store))
    assert copy.row(2)[0].tolist() == store.row(2)[0].tolist()
    assert copy.fingerprint == store.fingerprint


def test_the_fingerprint_changes_with_ids_mask_and_settings(tmp_path) -> None:
    other_id = [ROWS[0]._replace(ids=np.array([5, 9, 8])), *ROWS[1:]]
    other_mask = [ROWS[0]._replace(loss_mask=np.array([True, True, True])), *ROWS[1:]]
    cases = {"a": (ROWS, {}), "b": (other_id, {}), "c": (other_mask, {}), "d": (ROWS, {"max": 1})}
    found = {n: written(tmp_path / n, rows, **key).fingerprint for n, (rows, key) in cases.items()}
    assert len(set(found.values())) == 4
    assert written(tmp_path / "again").fingerprint == found["a"]


@pytest.mark.parametrize("name", ["nothing", "a folder", "half a store"])
def test_what_is_no_finished_store_is_refused(tmp_path, name: str) -> None:
    folder = tmp_path / "store"
    if name == "a folder":
        folder.mkdir()
    if name == "half a store":
        (written(tmp_path).path / "meta.json").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=rf"^data\.store must be a folder written by .*prepare.*{folder} holds no finished",
    ):
        RowStore.open(folder)


@pytest.mark.parametrize("name", ["ids.bin", "loss_mask.bin"])
def test_a_store_that_lost_its_end_is_refused(tmp_path, name: str) -> None:
    file = written(tmp_path).path / name
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"is damaged: its files disagree .* Prepare it again"):
        RowStore.open(file.parent)


def test_a_store_of_another_format_is_refused(tmp_path) -> None:
    file = written(tmp_path).path / "meta.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(ValueError, match=r"has format 99, this version reads 1\. Prepare it again"):
        RowStore.open(file.parent)


def test_a_failure_halfway_leaves_nothing_behind(tmp_path) -> None:
    def rows():
        yield ROWS[0]
        raise RuntimeError("out of chats")

    with pytest.raises(RuntimeError, match="out of chats"):
        written(tmp_path, rows())
    assert list(tmp_path.iterdir()) == []


def test_a_store_without_rows_is_not_written(tmp_path) -> None:
    with pytest.raises(ValueError, match="no row was kept"):
        written(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


def test_a_store_appears_only_when_it_is_complete(tmp_path) -> None:
    def rows():
        for row in ROWS:
            assert not (tmp_path / "store").exists()
            yield row

    assert RowStore.open(written(tmp_path, rows()).path).meta["rows"] == 3


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=80), st.floats(0, 0.99))
def test_a_split_keeps_conversations_whole(numbers: list[int], val_fraction: float) -> None:
    conversation = np.array(numbers, dtype=np.int32)
    train, val = split_rows(conversation, val_fraction)
    assert sorted([*train, *val]) == list(range(len(numbers)))
    assert train.tolist() == sorted(train)
    assert val.tolist() == sorted(val)
    assert not set(conversation[train]) & set(conversation[val])
    assert len(set(conversation[val])) == round(val_fraction * len(set(numbers)))
    again = split_rows(conversation.astype(np.int64), val_fraction)
    assert [part.tolist() for part in again] == [train.tolist(), val.tolist()]


def test_a_larger_validation_share_only_adds_conversations() -> None:
    conversation = np.arange(500)
    small, large = (set(split_rows(conversation, f)[1].tolist()) for f in (0.1, 0.3))
    assert small < large
    assert 100 < np.mean(list(large)) < 400  # spread over the file, not its head or tail
