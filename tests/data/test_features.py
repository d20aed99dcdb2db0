"""Cached context features: the same numbers as the target's, built once, never stale."""

import json
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dflash_lightning.data import features as features_module
from dflash_lightning.data.features import FeatureCache
from dflash_lightning.data.store import RowStore
from dflash_lightning.random_target import RandomTarget

LAYERS = (0, 2)
HALF_ULP = 2**-8  # largest relative error of rounding to bfloat16


@pytest.fixture
def rows(tmp_path: Path, store: RowStore) -> RowStore:
    """A copy of the store, which a cache may write into."""
    shutil.copytree(store.path, tmp_path / "store")
    return RowStore.open(tmp_path / "store")


class CountingTarget(RandomTarget):
    """A real tiny target that remembers how many rows it was run on."""

    rows_run = 0

    def context_features(self, input_ids: torch.Tensor, layer_ids) -> torch.Tensor:
        self.rows_run += len(input_ids)
        return super().context_features(input_ids, layer_ids)


def cache_of(rows: RowStore, target: RandomTarget | None = None, layers=LAYERS) -> FeatureCache:
    return FeatureCache(rows, (target or CountingTarget()).load(), layers)


def build(cache: FeatureCache) -> FeatureCache:
    cache.build(0, 1, lambda: None)
    return cache


def build_by_two_ranks(first: FeatureCache, second: FeatureCache) -> None:
    """Two threads that meet at a real barrier, as two processes would."""
    barrier = threading.Barrier(2, timeout=60)
    errors = []

    def rank(number: int, cache: FeatureCache, wait: Callable[[], int]) -> None:
        try:
            torch.set_num_threads(1)
            cache.build(number, 2, wait)
        except BaseException as error:  # noqa: BLE001 - told to the main thread
            errors.append(error)

    threads = [
        threading.Thread(target=rank, args=(number, cache, barrier.wait))
        for number, cache in enumerate((first, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_cached_features_are_the_targets_own_to_rounding(rows) -> None:
    cache = build(cache_of(rows))
    for index in range(len(rows)):
        ids = torch.from_numpy(rows.row(index)[0].astype("int64"))[None]
        direct = cache.target.context_features(ids, LAYERS)[0]
        cached = cache.row(index)
        assert cached.dtype == torch.bfloat16
        assert cached.shape == (rows.lengths[index], 2 * 64)
        torch.testing.assert_close(cached.float(), direct, rtol=1.01 * HALF_ULP, atol=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 300, 100_000])
def test_two_ranks_share_the_work_and_write_the_same_file(
    tmp_path, rows, monkeypatch, batch_tokens: int
) -> None:
    monkeypatch.setattr(FeatureCache, "BATCH_TOKENS", batch_tokens)
    alone = build(cache_of(rows))
    expected = (alone.folder / "features.bin").read_bytes()
    assert alone.target.rows_run == len(rows)
    shutil.rmtree(alone.folder)
    first, second = cache_of(rows), cache_of(rows)
    build_by_two_ranks(first, second)
    assert (first.folder / "features.bin").read_bytes() == expected
    assert first.target.rows_run + second.target.rows_run == len(rows)
    if batch_tokens < 100_000:
        assert min(first.target.rows_run, second.target.rows_run) > 0


def test_a_finished_cache_is_not_computed_again(rows) -> None:
    build(cache_of(rows))
    again = build(cache_of(rows))
    assert again.target.rows_run == 0
    assert again.row(3).abs().sum() > 0
    build_by_two_ranks(one := cache_of(rows), two := cache_of(rows))
    assert one.target.rows_run == two.target.rows_run == 0


def test_a_cache_that_was_never_finished_is_computed_again(rows) -> None:
    cache = build(cache_of(rows))
    whole = (cache.folder / "features.bin").read_bytes()
    (cache.folder / "meta.json").unlink()
    (cache.folder / "features.bin").write_bytes(whole[: len(whole) // 2])
    again = build(cache_of(rows))
    assert again.target.rows_run == len(rows)
    assert (again.folder / "features.bin").read_bytes() == whole


def test_the_cache_counts_as_finished_only_when_all_rows_are_in_it(rows, monkeypatch) -> None:
    monkeypatch.setattr(FeatureCache, "BATCH_TOKENS", 300)
    target = CountingTarget()
    whole = target.context_features

    def fails_late(*args: object) -> torch.Tensor:
        if target.rows_run > 20:
            raise RuntimeError("device lost")
        return whole(*args)

    monkeypatch.setattr(target, "context_features", fails_late)
    with pytest.raises(RuntimeError, match="device lost"):
        build(cache_of(rows, target))
    assert build(cache_of(rows)).target.rows_run == len(rows)


@pytest.mark.parametrize("name", ["target", "dtype", "layer_ids", "store"])
def test_a_stale_cache_is_refused_by_the_name_of_what_differs(rows, name: str) -> None:
    cache = build(cache_of(rows))
    meta = cache.folder / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), name: "other"}))
    with pytest.raises(ValueError, match=rf"made with another {name}\. Delete that folder"):
        build(cache_of(rows))


def test_features_of_another_target_dtype_are_refused(rows) -> None:
    build(cache_of(rows))
    target = CountingTarget()
    target.dtype = "bfloat16"
    with pytest.raises(ValueError, match=r"features in .* were made with another dtype\. Delete"):
        build(cache_of(rows, target))


def test_other_layers_and_other_targets_have_folders_of_their_own(rows) -> None:
    caches = [cache_of(rows), cache_of(rows, layers=(0, 3)), cache_of(rows, CountingTarget(seed=1))]
    folders = {build(cache).folder for cache in caches}
    assert len(folders) == 3
    assert all(cache.target.rows_run == len(rows) for cache in caches)
    assert not torch.equal(caches[0].row(0), caches[2].row(0))


def test_the_size_is_stated_before_it_is_taken(rows, capsys) -> None:
    cache = cache_of(rows)
    size = int(rows.lengths.sum()) * (2 * 64) * 2
    assert cache.num_bytes == size
    build(cache)
    assert (cache.folder / "features.bin").stat().st_size == size
    stated = f"features: {size / 1e6:,.0f} MB of bfloat16 in {cache.folder}\n"
    assert capsys.readouterr().err.startswith(stated)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(rows, monkeypatch) -> None:
    free = cache_of(rows).num_bytes
    monkeypatch.setattr(
        features_module.shutil, "disk_usage", lambda _path: SimpleNamespace(free=free)
    )
    cache = cache_of(rows)
    with pytest.raises(ValueError, match=r"data\.cache_features needs 0\.0 GB .* Set it to false"):
        build(cache)
    assert not cache.folder.exists()
    assert cache.target.rows_run == 0


def test_a_worker_gets_the_features_without_the_weights(rows) -> None:
    cache = build(cache_of(rows))
    assert cache.row(0).shape[0] == rows.lengths[0]  # the file is open when it is sent
    sent = pickle.dumps(cache)
    weights = sum(p.numel() * p.element_size() for p in cache.target.model.parameters())
    assert len(sent) < weights / 10
    worker = pickle.loads(sent)
    assert worker.target is None
    for index in range(len(rows)):
        assert torch.equal(worker.row(index), cache.row(index))
