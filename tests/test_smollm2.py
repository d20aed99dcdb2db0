"""The quick start's real target: training and serving agree; its data are as they should be."""

import math
import os

import pytest
import torch

from dflash_lightning import DFlashModule, DrafterConfig, HFTarget
from dflash_lightning.assets import CHATS
from dflash_lightning.data.collate import BatchIndex, RowBatches
from dflash_lightning.data.prepare import prepare_store
from dflash_lightning.data.store import RowStore
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.drafter.start import init_from_target, init_random
from dflash_lightning.functional.anchors import block_ids

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> HFTarget:
    with pytest.MonkeyPatch.context() as patch:
        if "DFLASH_CACHE" not in os.environ:
            patch.setenv("DFLASH_CACHE", str(tmp_path_factory.mktemp("cache")))
        target = HFTarget("smollm2", "float32").load()
        yield target


@pytest.fixture(scope="module")
def rows(smollm2: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> RowStore:
    folder = tmp_path_factory.mktemp("rows") / "store"
    return prepare_store(CHATS, smollm2.tokenizer, folder, max_length=1024)


def test_parallel_training_computes_the_serving_logits(smollm2: HFTarget, rows: RowStore) -> None:
    dials = DrafterConfig(
        num_layers=2, block_size=8, target_layer_ids=(1, 8, 14, 21, 27), mask_token_id=3
    )
    drafter = Drafter(dials.for_target(smollm2.config)).eval()
    init_random(drafter, seed=0)
    init_from_target(drafter, list(smollm2.layers), smollm2.norm_weight)
    batches = RowBatches(rows, block_size=8, seed=0, anchor_rate=0.5, anchors_per_row=64)
    order = rows.lengths.argsort()[len(rows) // 2 :]
    compared, worst = 0, 0.0
    for start in range(0, 64, 4):
        ids = order[start : start + 4]
        batch = batches[BatchIndex(0, ids, int(rows.lengths[ids].max()))]
        with torch.inference_mode():
            features = smollm2.context_features(batch.input_ids, drafter.spec.target_layer_ids)
            blocks = smollm2.embed(
                block_ids(batch.input_ids, batch.anchors, block_size=8, mask_token_id=3)
            )
            hidden = drafter(features, blocks, batch.anchors, batch.anchor_valid)
            for b, n in batch.anchor_valid.nonzero()[::4].tolist():
                anchor = int(batch.anchors[b, n])
                alone = smollm2.context_features(
                    batch.input_ids[b : b + 1, :anchor], drafter.spec.target_layer_ids
                )
                served = drafter.draft_block(alone, blocks[b : b + 1, n])[0]
                difference = (served - hidden[b, n]) @ smollm2.head_weight.T
                worst = max(worst, float(difference.abs().max()))
                compared += 1
        if compared >= 200:
            break
    assert compared >= 200
    assert worst < 1e-3


def test_the_first_loss_is_about_that_of_knowing_nothing(smollm2: HFTarget, rows: RowStore) -> None:
    dials = DrafterConfig(
        num_layers=2, block_size=4, target_layer_ids=(1, 8, 14, 21, 27), mask_token_id=3
    )
    batches = RowBatches(rows, block_size=4, seed=0, anchor_rate=0.2, anchors_per_row=16)
    ids = rows.lengths.argsort()[len(rows) // 4 :][:8]
    batch = batches[BatchIndex(0, ids, int(rows.lengths[ids].max()))]
    features = smollm2.context_features(batch.input_ids, (1, 8, 14, 21, 27))
    for init, most in (("target", 0.0), ("random", 2.0)):  # nats above log V
        module = DFlashModule(smollm2, dials, init=init, loss_decay_gamma=1.2)
        module._start_weights()
        with torch.no_grad():
            sums = module.sums(batch._replace(features=features))
        assert sums.numerator / sums.weights.sum() < math.log(smollm2.config.vocab_size) + most


def test_the_embedded_rows_are_kept_and_vary_in_length(rows: RowStore) -> None:
    report = rows.meta["report"]
    assert report["kept"] == len(rows) >= 600
    assert sum(report["rejected"].values()) <= 0.02 * len(rows)
    supervised = [int(rows.row(i)[1].sum()) for i in range(len(rows))]
    assert max(supervised) >= 20 * 24
    assert set(report["sources"]) == {
        "explain",
        "list",
        "story",
        "code",
        "arithmetic",
        "mail",
        "summary",
    }


def test_the_mask_token_of_the_quick_start_never_occurs(rows: RowStore) -> None:
    assert not rows.used_ids[3]
