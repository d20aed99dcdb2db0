"""Memory against the plain way, counted; and that both ways are the same computation."""

import dataclasses

import pytest
import torch
from oracles import make_spec
from speed.cases import NARROW, largest_gap, make_case, oracle_sums, own_sums
from speed.lines import all_hidden_states, chunked_loss, head_inputs, plain_formula
from speed.live_bytes import peak_bytes
from speed.peer_step import peer_sums
from speed.step_memory import peaks_at_size
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash_lightning.budget import BatchLoad, Setup
from dflash_lightning.functional.head import ChunkedHead
from dflash_lightning.random_target import RandomTarget


@pytest.mark.parametrize("filled", [True, False])
def test_the_step_of_the_benchmark_is_the_peers_in_value_and_gradient(filled: bool) -> None:
    sizes = {**NARROW, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "vocab_size": 9}
    case = make_case(sizes, rows=2, width=60, anchors=40, block_size=4)
    if not filled:
        case.anchor_valid[1, 30:] = False
    assert int(own_sums(case, ChunkedHead())[1]) > 10
    assert largest_gap(case, peer_sums) < 1e-5
    assert largest_gap(case, oracle_sums) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_takes_a_sixteenth_of_the_plain_formulas_memory(dtype: torch.dtype) -> None:
    with FakeTensorMode():  # at full size, without memory
        ours, plain = (
            peak_bytes(lambda work=work: work(*head_inputs(2048, 1024, 151_936, dtype)))
            - 151_936 * 1024 * dtype.itemsize
            for work in (chunked_loss, plain_formula)
        )
    assert plain > 2 * 4 * 2048 * 151_936  # logits and their gradient
    assert 16 * ours < plain


def test_counting_without_memory_gives_the_same_bytes() -> None:
    counts = []
    for fake in (True, False):
        with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.enable_grad():
            counts.append(peak_bytes(lambda: chunked_loss(*head_inputs(64, 32, 5000))))
    assert counts[0] == counts[1]


def test_features_take_a_third_of_the_memory_of_all_hidden_states() -> None:
    target = RandomTarget(vocab_size=4096, num_layers=12).load()
    ids, layer_ids = torch.randint(4096, (2, 64)), (0, 2, 5, 7, 9)
    features = target.context_features(ids, layer_ids)
    assert torch.equal(features, all_hidden_states(target, ids, layer_ids))
    ours = peak_bytes(lambda: target.context_features(ids, layer_ids))
    assert 3 * ours < peak_bytes(lambda: all_hidden_states(target, ids, layer_ids))


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("attention", ["flex", "sdpa"])
def test_steps_without_memory_are_counted_as_those_that_run(size: int, attention: str) -> None:
    spec = make_spec(block_size=8, hidden_size=64, intermediate_size=96)
    setup = Setup(target_bytes=size, compute_bytes=size, attention=attention)
    for again in (False, True):
        setup = dataclasses.replace(setup, activation_checkpointing=again)
        load = BatchLoad(300, 3, 60, 100)
        sized, run = (peaks_at_size(spec, load, setup, fake=fake) for fake in (True, False))
        assert sized == run
