"""The objective: the chunked head against the plain formula, in value, gradient and memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import plain_loss
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_lightning.functional.objective import ChunkedHead, decay_gamma, position_weights

VOCAB, WIDTH, SLOTS = 53, 12, 31
ROW = 4 * VOCAB  # bytes of one row of logits
CHUNKS = [1, ROW, 3 * ROW, 7 * ROW + 1, SLOTS * ROW, 100_000_000]
SEARCH = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def slots(
    count: int = SLOTS, *, seed: int = 0, dtype: torch.dtype = torch.float32, vocab: int = VOCAB
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, labels and uneven weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, WIDTH, generator=generator)
    head = torch.randn(vocab, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(vocab, (count,), generator=generator)
    weights = 2 * torch.rand(count, generator=generator)
    return hidden, head, labels, weights


def relative(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def scale(got: Tensor, expected: Tensor) -> float:
    """Factor of ``expected`` that comes closest to ``got``."""
    got, expected = got.double(), expected.double()
    return ((got * expected).sum() / expected.pow(2).sum()).item()


def constant(cross_entropy: float, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and labels with the same cross-entropy at every slot: log(1 + e^x)."""
    hidden = torch.full((count, 1), math.log(math.expm1(cross_entropy)))
    return hidden, torch.tensor([[0.0], [1.0]]), torch.zeros(count, dtype=torch.int64)


# -- value and gradient ---------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("factor", [1.0, 1 / 3, -7.0])
def test_value_and_gradient_equal_the_plain_formula(chunk_bytes: int, factor: float):
    hidden, head, labels, weights = slots()
    ours, plain = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    out = ChunkedHead(chunk_bytes)(ours, head, labels, weights)
    expected = plain_loss(plain, head, labels, weights)
    (out.numerator * factor).backward()
    (expected * factor).backward()
    assert out.numerator.item() == pytest.approx(expected.item(), rel=1e-5)
    assert relative(ours.grad, plain.grad) < 1e-5
    assert scale(ours.grad, plain.grad) == pytest.approx(1, abs=1e-6)


@SEARCH
@given(st.integers(1, 40), st.integers(1, 45), st.integers(0, 1000))
def test_any_number_of_slots_and_rows_per_chunk_gives_the_same(count: int, rows: int, seed: int):
    hidden, head, labels, weights = slots(count, seed=seed)
    ours, plain = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    out = ChunkedHead(rows * ROW)(ours, head, labels, weights)
    expected = plain_loss(plain, head, labels, weights)
    out.numerator.backward()
    expected.backward()
    assert out.numerator.item() == pytest.approx(expected.item(), rel=1e-5)
    assert relative(ours.grad, plain.grad) < 1e-5


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_each_slot_reports_its_cross_entropy_and_whether_it_is_right(chunk_bytes: int):
    hidden, head, labels, weights = slots()
    logits = hidden @ head.T
    labels[::3] = logits.argmax(1)[::3]
    out = ChunkedHead(chunk_bytes)(hidden.requires_grad_(), head, labels, weights)
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(out.cross_entropy, expected, rtol=1e-5, atol=1e-6)
    assert out.correct.tolist() == (logits.argmax(1) == labels).tolist()
    assert 0 < out.correct.sum() < SLOTS
    assert out.numerator.requires_grad
    assert not out.cross_entropy.requires_grad


def test_the_gradient_agrees_with_differences_of_a_float64_formula():
    hidden, head, labels, weights = slots(5)
    hidden.requires_grad_()
    ChunkedHead(2 * ROW)(hidden, head, labels, weights).numerator.backward()
    slope = torch.zeros(5, WIDTH, dtype=torch.float64)
    for i in range(5):
        for d in range(WIDTH):
            step = torch.zeros(5, WIDTH, dtype=torch.float64)
            step[i, d] = 1e-6
            up, down = (
                plain_loss(hidden.detach() + s, head.double(), labels, weights)
                for s in (step, -step)
            )
            slope[i, d] = (up - down) / 2e-6
    assert relative(hidden.grad, slope) < 1e-5


def test_a_label_of_probability_nearly_one_or_zero_stays_finite_and_exact():
    head = torch.eye(3)
    hidden = torch.tensor([[80.0, 0, 0], [80.0, 0, 0], [-1e4, 0, 0]], requires_grad=True)
    out = ChunkedHead()(hidden, head, torch.tensor([0, 1, 0]), torch.ones(3))
    out.numerator.backward()
    assert out.cross_entropy.tolist() == pytest.approx([0, 80, 1e4 + math.log(2)], abs=1e-3)
    expected = [[0, 0, 0], [1, -1, 0], [-1, 0.5, 0.5]]
    torch.testing.assert_close(hidden.grad, torch.tensor(expected), rtol=0, atol=1e-6)


def test_a_slot_of_weight_zero_teaches_nothing():
    hidden, head, labels, weights = slots()
    weights[4] = 0
    hidden.requires_grad_()
    ChunkedHead(3 * ROW)(hidden, head, labels, weights).numerator.backward()
    assert hidden.grad[4].abs().max() == 0
    assert hidden.grad[5].abs().max() > 0


def test_the_head_is_frozen_even_where_it_asks_for_gradients():
    hidden, head, labels, weights = slots()
    hidden.requires_grad_()
    head.requires_grad_()
    ChunkedHead()(hidden, head, labels, weights).numerator.backward()
    assert head.grad is None


# -- no labels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_without_labels_adds_zero_and_stays_connected_to_the_weights(dtype: torch.dtype):
    # LM-06, DD-03: 0 and not NaN, and every rank has a graph to run backward through
    layer = torch.nn.Linear(WIDTH, WIDTH)
    hidden = layer(torch.randn(6, WIDTH)).index_select(0, torch.zeros(0, dtype=torch.int64))
    _, head, labels, weights = slots(0, dtype=dtype)
    out = ChunkedHead()(hidden, head, labels, weights)
    assert out.numerator.item() == 0
    assert out.cross_entropy.shape == out.correct.shape == (0,)
    (out.numerator / 3).backward()
    assert [p.grad.abs().max().item() for p in layer.parameters()] == [0, 0]


# -- bfloat16 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharpness", [0.01, 0.3])
@pytest.mark.parametrize("weight", [1.0, 1 / 3, "decay"])
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_a_bfloat16_head_keeps_the_scale_of_the_gradient(
    hidden_dtype: torch.dtype, sharpness: float, weight: float | str, factor: float
):
    # A factor rounded to bf16 is off by up to 2e-3 for all slots alike: 1/3 becomes 0.33398.
    # Rounding of single entries is noise: 2^-9 each, and far less in the scale of the whole.
    hidden, head, labels, _ = slots(300, dtype=torch.bfloat16, vocab=4096)
    weights = position_weights(16, 7.0).repeat(20) if weight == "decay" else weight
    weights = torch.as_tensor(weights).expand(300)
    hidden = (sharpness * hidden).to(hidden_dtype)
    ours, plain = hidden.clone().requires_grad_(), hidden.float().requires_grad_()
    out = ChunkedHead(64 * 4 * 4096)(ours, head, labels, weights)
    expected = plain_loss(plain, head.float(), labels, weights)
    (out.numerator * factor).backward()
    (expected * factor).backward()
    assert out.numerator.item() == pytest.approx(expected.item(), rel=1e-3)
    assert ours.grad.dtype == hidden_dtype
    assert relative(ours.grad, plain.grad) < 6e-3
    assert scale(ours.grad, plain.grad) == pytest.approx(1, abs=7e-4)


@pytest.mark.parametrize("label_rank", [0, 3, 40])
def test_behind_bfloat16_logits_all_sums_are_float32(label_rank: int):
    hidden, head, _, weights = slots(dtype=torch.bfloat16)
    logits = (hidden.bfloat16() @ head.T).float().requires_grad_()
    labels = logits.argsort(1, descending=True)[:, label_rank]
    out = ChunkedHead(7 * ROW)(hidden, head, labels, weights)
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(out.cross_entropy, expected.detach(), rtol=1e-5, atol=1e-6)
    assert out.numerator.item() == pytest.approx((expected * weights).sum().item(), rel=1e-5)


def test_autocast_around_it_changes_nothing():
    hidden, head, labels, weights = slots()
    results = []
    for enabled in (False, True):
        x = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = ChunkedHead(7 * ROW)(x, head, labels, weights)
        out.numerator.backward()
        results.append((out.cross_entropy, x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


# -- memory ---------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_chunk_of_logits(dtype: torch.dtype):
    hidden, head, labels, weights = slots(200, dtype=dtype, vocab=1000)
    hidden.requires_grad_()
    with Largest() as largest:
        ChunkedHead(20 * 4 * 1000)(hidden, head, labels, weights).numerator.backward()
    assert largest.elements == 20 * 1000  # the head itself has 12,000
    with Largest() as plain:
        plain_loss(hidden, head.float(), labels, weights).backward()
    assert plain.elements == 200 * 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_made_once_and_reused(dtype: torch.dtype):
    chunked = ChunkedHead(8 * ROW)
    hidden, head, labels, weights = slots(dtype=dtype)
    first = chunked(hidden, head, labels, weights)
    place = chunked.buffer(8, VOCAB, hidden, dtype).data_ptr()
    for count in (31, 5, 1, 30):
        chunked(hidden[:count], head, labels[:count], weights[:count])
        assert chunked.buffer(8, VOCAB, hidden, dtype).data_ptr() == place
    # and nothing of an earlier call is left in a later one
    assert torch.equal(chunked(hidden, head, labels, weights).numerator, first.numerator)


def test_two_calls_before_one_backward_do_not_disturb_each_other():
    chunked, (hidden, head, labels, weights) = ChunkedHead(4 * ROW), slots()
    ours, plain = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    total = chunked(ours[:20], head, labels[:20], weights[:20]).numerator
    total = total + chunked(ours[20:], head, labels[20:], weights[20:]).numerator
    total.backward()
    plain_loss(plain, head, labels, weights).backward()
    assert relative(ours.grad, plain.grad) < 1e-5


# -- weights and ratios ---------------------------------------------------------------------------


def test_position_weights_decay_from_one():
    expected = [1.0, math.exp(-1 / 7), math.exp(-2 / 7)]
    assert position_weights(4, 7.0).tolist() == pytest.approx(expected)
    # peers.md 2.4: gamma 7 and block 16 give a total of 6.63, 58 % of it on the first five slots
    weights = position_weights(16, 7.0)
    assert weights.sum().item() == pytest.approx(6.63, abs=0.005)
    assert (weights[:5].sum() / weights.sum()).item() == pytest.approx(0.58, abs=0.005)


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (32, 7.0)])
def test_decay_follows_the_block_size(block_size: int, gamma: float):
    assert decay_gamma(block_size) == gamma


@pytest.mark.parametrize("gamma", [4.0, 7.0])
def test_a_weighted_mean_of_a_constant_is_the_constant_whatever_the_decay(gamma: float):
    # LM-09: cross-entropy 2.0 everywhere, block 16; over the count it would read 0.59 and 0.88
    weights = position_weights(16, gamma).repeat(3)
    out = ChunkedHead(8 * 10)(*constant(2.0, 45), weights)
    assert (out.numerator / weights.sum()).item() == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("parts", [[1000], [100, 900], [900, 100], [250, 250, 250, 250]])
def test_sums_of_micro_batches_give_one_ratio_and_one_gradient(parts: list[int]):
    # LM-08: 100 tokens at 0.5 and 900 at 0.3 are 0.32 in all, not 0.40
    (low, head, labels), (high, _, _) = constant(0.3, 900), constant(0.5, 100)
    hidden = torch.cat([high, low]).requires_grad_()
    labels = torch.zeros(1000, dtype=torch.int64)
    chunked, weights = ChunkedHead(), torch.ones(1000)
    pieces = zip(hidden.split(parts), labels.split(parts), weights.split(parts), strict=True)
    total = sum(chunked(h, head, y, w).numerator for h, y, w in pieces)
    (total / weights.sum()).backward()
    assert (total / weights.sum()).item() == pytest.approx(0.32, rel=1e-5)
    # by hand: d log(1 + e^x) / dx = 1 - e^-CE
    expected = torch.cat([torch.full((n, 1), -math.expm1(-c)) for n, c in ((100, 0.5), (900, 0.3))])
    torch.testing.assert_close(hidden.grad, expected / 1000, rtol=1e-5, atol=0)
