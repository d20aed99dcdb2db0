"""What the goals read of the target: its own logits, in the pass that gives the features."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash_lightning.random_target import RandomTarget
from dflash_lightning.target import HFTarget

KINDS = pytest.mark.parametrize("kind", ["llama", "qwen3"])
AT = torch.tensor([0, 4, 16, 17, 17, 49, 20])  # flat into [3, 17]; some twice, in no order


def loaded(kind: str = "qwen3") -> HFTarget:
    """A target whose final norm is felt."""
    target = RandomTarget(kind).load()
    norm = target.model.get_decoder().norm.weight
    norm.copy_(1 + torch.randn(norm.shape, generator=torch.Generator().manual_seed(1)) / 2)
    return target


def some_ids(rows: int = 3, length: int = 17, vocab: int = 512) -> Tensor:
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(0))


@KINDS
@pytest.mark.parametrize("layer_ids", [(0,), (1, 2), (3, 0)])
def test_final_states_times_the_head_are_the_targets_own_logits(kind: str, layer_ids: tuple):
    target, ids = loaded(kind), some_ids()
    with torch.no_grad():
        logits = target.model(input_ids=ids).logits.flatten(0, 1)[AT]
    features, final = target.features_and_final(ids, layer_ids, AT)
    assert final.shape == (len(AT), 64)
    torch.testing.assert_close(final @ target.head_weight.T, logits)
    assert torch.equal(features, target.context_features(ids, layer_ids))
    assert not final.requires_grad


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bfloat16_targets_logits_are_its_own_to_the_bit(dtype: str, target_folder: Path):
    target, ids = HFTarget(str(target_folder), dtype).load(), some_ids(vocab=272)
    with torch.no_grad():
        logits = target.model(input_ids=ids).logits.flatten(0, 1)
    with torch.autocast("cpu", torch.bfloat16):  # as in a step, and without effect
        _, final = target.features_and_final(ids, [1], torch.arange(3 * 17))
    assert final.dtype == target.head_weight.dtype
    assert torch.equal(final @ target.head_weight.T, logits)


def test_one_pass_over_all_layers_and_no_head():
    target, calls = loaded(), Counter()
    decoder = target.model.get_decoder()
    parts = {str(i): layer for i, layer in enumerate(decoder.layers)}
    parts |= {"norm": decoder.norm, "head": target.model.get_output_embeddings()}
    for name, part in parts.items():
        part.register_forward_hook(lambda *_, name=name: calls.update([name]))
    target.features_and_final(some_ids(), [1], AT)
    assert calls == {"0": 1, "1": 1, "2": 1, "3": 1, "norm": 1}
    target.context_features(some_ids(), [1])  # and a shallower request stays shallow
    assert calls == {"0": 2, "1": 2, "2": 1, "3": 1, "norm": 1}


def test_padding_and_batch_mates_change_no_final_state():
    target, ids = loaded(), some_ids(3, 12)
    at = torch.tensor([0, 4, 12, 23, 24])  # rows of 5, 12 and 1 real tokens
    _, together = target.features_and_final(ids, [1], at)
    for i, (row, length, t) in enumerate(
        [(0, 5, 0), (0, 5, 4), (1, 12, 0), (1, 12, 11), (2, 1, 0)]
    ):
        _, alone = target.features_and_final(ids[row : row + 1, :length], [1], torch.tensor([t]))
        torch.testing.assert_close(together[i], alone[0])


def test_no_position_asked_for_gives_none():
    _, final = loaded().features_and_final(some_ids(1, 1), [1], AT[:0])
    assert final.shape == (0, 64)


def test_a_padded_vocabulary_is_the_targets_own(target_folder: Path, tmp_path: Path):
    # 272 ids in a table of 320 rows, as Qwen pads to a multiple: no row is cut, none is added
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.resize_token_embeddings(320)
    model.save_pretrained(tmp_path)
    target, ids = HFTarget(str(tmp_path), "float32").load(), some_ids(vocab=272)
    with torch.no_grad():
        logits = target.model(input_ids=ids).logits.flatten(0, 1)[AT]
    _, final = target.features_and_final(ids, [1], AT)
    assert logits.shape[1] == 320
    torch.testing.assert_close(final @ target.head_weight.T, logits)
