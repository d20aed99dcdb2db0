"""The chunked head against the plain formula of every goal: value, gradient and memory."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import plain_losses
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_lightning.functional.head import ChunkedHead, Goal, SlotLosses
from dflash_lightning.functional.objective import position_weights

VOCAB, WIDTH, SLOTS = 53, 12, 31
ROW = 4 * VOCAB  # bytes of one row of logits
CHUNKS = [1, ROW, 3 * ROW, 7 * ROW + 1, SLOTS * ROW, 100_000_000]
SEARCH = settings(max_examples=60, deadline=None, derandomize=True, database=None)
GOALS: list[Goal] = ["ce", "argmax", "kl"]
EVERY_GOAL = pytest.mark.parametrize("goal", GOALS)


class Slots(NamedTuple):
    """Hidden states, head, labels, the target's hidden states and uneven weights."""

    hidden: Tensor
    head: Tensor
    labels: Tensor
    teacher: Tensor
    weights: Tensor

    def rows(self, part: slice) -> "Slots":
        """Some of the slots."""
        return self._replace(
            **{x: getattr(self, x)[part] for x in ("hidden", "labels", "teacher", "weights")}
        )


def slots(
    count: int = SLOTS, *, seed: int = 0, dtype: torch.dtype = torch.float32, vocab: int = VOCAB
) -> Slots:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, WIDTH, generator=generator)
    head = torch.randn(vocab, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(vocab, (count,), generator=generator)
    weights = 2 * torch.rand(count, generator=generator)
    teacher = (hidden + torch.randn(count, WIDTH, generator=generator)).to(dtype)
    return Slots(hidden, head, labels, teacher, weights)


def evaluate(chunked: ChunkedHead, x: Slots) -> tuple[Tensor, SlotLosses]:
    """Sum of weighted losses, and what the head says."""
    out = chunked(x.hidden, x.head, x.labels, x.teacher)
    return (x.weights * out.losses).sum(), out


def plain(x: Slots, goal: Goal) -> Tensor:
    """Losses from all logits at once, in the dtype of the hidden states."""
    logits = x.hidden @ x.head.to(x.hidden.dtype).T
    target = (x.teacher @ x.head.T).to(x.hidden.dtype)  # its own, rounded as it rounds them
    return plain_losses(logits, x.labels, target, goal)


def both(x: Slots, goal: Goal, chunk_bytes: int, factor: float = 1.0) -> tuple[Tensor, ...]:
    """Value and gradient, from the head and from the plain formula."""
    ours = x._replace(hidden=x.hidden.clone().requires_grad_())
    theirs = x._replace(hidden=x.hidden.float().requires_grad_())
    value, _ = evaluate(ChunkedHead(chunk_bytes, goal), ours)
    expected = (x.weights * plain(theirs, goal)).sum()
    (value * factor).backward()
    (expected * factor).backward()
    return value, expected, ours.hidden.grad, theirs.hidden.grad


def relative(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def scale(got: Tensor, expected: Tensor) -> float:
    """Factor of ``expected`` that comes closest to ``got``."""
    got, expected = got.double(), expected.double()
    return ((got * expected).sum() / expected.pow(2).sum()).item()


# -- value and gradient ---------------------------------------------------------------------------


@EVERY_GOAL
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("factor", [1.0, 1 / 3, -7.0])
def test_value_and_gradient_equal_the_plain_formula(goal: Goal, chunk_bytes: int, factor: float):
    value, expected, gradient, slope = both(slots(), goal, chunk_bytes, factor)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert relative(gradient, slope) < 1e-5
    assert scale(gradient, slope) == pytest.approx(1, abs=1e-6)


@SEARCH
@given(st.integers(1, 40), st.integers(1, 45), st.integers(0, 1000), st.sampled_from(GOALS))
def test_any_number_of_slots_and_rows_per_chunk_gives_the_same(
    count: int, rows: int, seed: int, goal: Goal
):
    value, expected, gradient, slope = both(slots(count, seed=seed), goal, rows * ROW)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert relative(gradient, slope) < 1e-5


@EVERY_GOAL
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_each_slot_reports_its_loss_and_whether_it_is_right(goal: Goal, chunk_bytes: int):
    x = slots()
    likely, wanted = (x.hidden @ x.head.T).argmax(1), (x.teacher @ x.head.T).argmax(1)
    x.labels[::3] = likely[::3]
    out = ChunkedHead(chunk_bytes, goal)(x.hidden.requires_grad_(), x.head, x.labels, x.teacher)
    torch.testing.assert_close(out.losses, plain(x, goal), rtol=1e-5, atol=1e-6)
    assert out.losses.dtype == torch.float32
    # ce: the label; argmax and kl: what a greedy verifier would accept
    right = likely == (x.labels if goal == "ce" else wanted)
    assert out.correct.tolist() == right.tolist()
    assert 0 < out.correct.sum() < SLOTS
    assert out.losses.requires_grad
    assert not out.correct.requires_grad


@EVERY_GOAL
def test_the_gradient_agrees_with_differences_of_a_float64_formula(goal: Goal):
    x = slots(5)
    exact = x._replace(hidden=x.hidden.double())
    x.hidden.requires_grad_()
    evaluate(ChunkedHead(2 * ROW, goal), x)[0].backward()
    slope = torch.zeros(5, WIDTH, dtype=torch.float64)
    for i in range(5):
        for d in range(WIDTH):
            step = torch.zeros(5, WIDTH, dtype=torch.float64)
            step[i, d] = 1e-6
            up, down = (
                (x.weights * plain(exact._replace(hidden=exact.hidden + s), goal)).sum()
                for s in (step, -step)
            )
            slope[i, d] = (up - down) / 2e-6
    assert relative(x.hidden.grad, slope) < 1e-5


def test_a_label_of_probability_nearly_one_or_zero_stays_finite_and_exact():
    head = torch.eye(3)
    hidden = torch.tensor([[80.0, 0, 0], [80.0, 0, 0], [-1e4, 0, 0]], requires_grad=True)
    out = ChunkedHead()(hidden, head, torch.tensor([0, 1, 0]))
    out.losses.sum().backward()
    assert out.losses.tolist() == pytest.approx([0, 80, 1e4 + math.log(2)], abs=1e-3)
    expected = [[0, 0, 0], [1, -1, 0], [-1, 0.5, 0.5]]
    torch.testing.assert_close(hidden.grad, torch.tensor(expected), rtol=0, atol=1e-6)


def test_a_divergence_stays_finite_and_exact_where_probabilities_vanish():
    # the target is sure of token 0, torn between 0 and 2, sure of 1; the drafter knows nothing, is
    # sure of 0, and is sure of 0
    teacher = torch.tensor([[90.0, 0, 0], [0, -1e4, 0], [0, 1e4, 0]])
    hidden = torch.tensor([[0.0, 0, 0], [80, 0, 0], [1e4, 0, 0]], requires_grad=True)
    none = torch.zeros(3, dtype=torch.int64)
    out = ChunkedHead(goal="kl")(hidden, torch.eye(3), none, teacher)
    out.losses.sum().backward()
    # by hand: log 3; 1/2 log 1/2 + 1/2 (log 1/2 + 80); 1e4
    assert out.losses.tolist() == pytest.approx([math.log(3), 40 - math.log(2), 1e4], rel=1e-6)
    expected = [[-2 / 3, 1 / 3, 1 / 3], [0.5, 0, -0.5], [1, -1, 0]]
    torch.testing.assert_close(hidden.grad, torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafter_that_equals_the_target_has_no_divergence_and_no_gradient(dtype: torch.dtype):
    x = slots(dtype=dtype)
    hidden = x.teacher.float().requires_grad_()
    out = ChunkedHead(6 * ROW, "kl")(hidden, x.head, x.labels, x.teacher)
    out.losses.sum().backward()
    assert out.losses.abs().max() == 0
    assert hidden.grad.abs().max() == 0
    assert out.correct.all()


def test_of_two_equally_likely_tokens_the_target_means_the_first():
    # as a greedy argmax over its own logits would
    head, teacher = torch.eye(3), torch.tensor([[0.0, 2, 2]])
    out = ChunkedHead(goal="argmax")(torch.zeros(1, 3), head, torch.tensor([0]), teacher)
    ours = ChunkedHead(goal="argmax")(torch.tensor([[0.0, 9, 0]]), head, torch.tensor([0]), teacher)
    assert out.losses.item() == pytest.approx(math.log(3))
    assert ours.correct.item()


@EVERY_GOAL
def test_a_slot_of_weight_zero_teaches_nothing(goal: Goal):
    x = slots()
    x.weights[4] = 0
    x.hidden.requires_grad_()
    evaluate(ChunkedHead(3 * ROW, goal), x)[0].backward()
    assert x.hidden.grad[4].abs().max() == 0
    assert x.hidden.grad[5].abs().max() > 0


def test_weights_made_of_the_losses_themselves_are_plain_factors_when_detached():
    x = slots()
    x.hidden.requires_grad_()
    losses = ChunkedHead(3 * ROW)(x.hidden, x.head, x.labels).losses
    weights = torch.exp(-losses.detach())
    (weights * losses).sum().backward()
    fixed = x._replace(hidden=x.hidden.detach().requires_grad_(), weights=weights)
    (weights * plain(fixed, "ce")).sum().backward()
    assert relative(x.hidden.grad, fixed.hidden.grad) < 1e-5


@EVERY_GOAL
def test_head_and_target_are_frozen_even_where_they_ask_for_gradients(goal: Goal):
    x = slots()
    for tensor in (x.hidden, x.head, x.teacher):
        tensor.requires_grad_()
    evaluate(ChunkedHead(goal=goal), x)[0].backward()
    assert x.head.grad is None
    assert x.teacher.grad is None
    assert x.hidden.grad is not None


@pytest.mark.parametrize("goal", ["argmax", "kl"])
def test_a_goal_of_the_target_is_refused_without_its_hidden_states(goal: Goal):
    x = slots()
    with pytest.raises(ValueError, match=f"goal {goal} needs the target's hidden states, got none"):
        ChunkedHead(goal=goal)(x.hidden, x.head, x.labels)


# -- no labels ------------------------------------------------------------------------------------


@EVERY_GOAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_without_labels_adds_zero_and_stays_connected_to_the_weights(
    goal: Goal, dtype: torch.dtype
):
    # LM-06, DD-03: 0 and not NaN, and every rank has a graph to run backward through
    layer = torch.nn.Linear(WIDTH, WIDTH)
    hidden = layer(torch.randn(6, WIDTH)).index_select(0, torch.zeros(0, dtype=torch.int64))
    value, out = evaluate(ChunkedHead(goal=goal), slots(0, dtype=dtype)._replace(hidden=hidden))
    assert value.item() == 0
    assert out.losses.shape == out.correct.shape == (0,)
    (value / 3).backward()
    assert [p.grad.abs().max().item() for p in layer.parameters()] == [0, 0]


# -- bfloat16 -------------------------------------------------------------------------------------


@EVERY_GOAL
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharpness", [0.01, 0.3])
@pytest.mark.parametrize("weight", [1.0, 1 / 3, "decay"])
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_a_bfloat16_head_keeps_the_scale_of_the_gradient(
    goal: Goal, hidden_dtype: torch.dtype, sharpness: float, weight: float | str, factor: float
):
    # A factor rounded to bf16 is off by up to 2e-3 for all slots alike: 1/3 becomes 0.33398.
    # Rounding of single entries is noise: 2^-9 each, and far less in the scale of the whole.
    x = slots(300, dtype=torch.bfloat16, vocab=4096)
    weights = position_weights(16, 7.0).repeat(20) if weight == "decay" else weight
    x = x._replace(
        hidden=(sharpness * x.hidden).to(hidden_dtype),
        weights=torch.as_tensor(weights).expand(300),
    )
    value, expected, gradient, slope = both(x, goal, 64 * 4 * 4096, factor)
    assert value.item() == pytest.approx(expected.item(), rel=1e-3)
    assert gradient.dtype == hidden_dtype
    assert relative(gradient, slope) < 6e-3
    assert scale(gradient, slope) == pytest.approx(1, abs=7e-4)


@EVERY_GOAL
@pytest.mark.parametrize("label_rank", [0, 3, 40])
def test_behind_bfloat16_logits_all_sums_are_float32(goal: Goal, label_rank: int):
    x = slots(dtype=torch.bfloat16)
    logits = (x.hidden.bfloat16() @ x.head.T).float()
    target = (x.teacher @ x.head.T).float()
    x = x._replace(labels=logits.argsort(1, descending=True)[:, label_rank])
    value, out = evaluate(ChunkedHead(7 * ROW, goal), x)
    expected = plain_losses(logits, x.labels, target, goal)
    torch.testing.assert_close(out.losses, expected, rtol=1e-5, atol=1e-6)
    assert value.item() == pytest.approx((expected * x.weights).sum().item(), rel=1e-5)


@EVERY_GOAL
def test_autocast_around_it_changes_nothing(goal: Goal):
    x = slots()
    results = []
    for enabled in (False, True):
        ours = x._replace(hidden=x.hidden.clone().requires_grad_())
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value, out = evaluate(ChunkedHead(7 * ROW, goal), ours)
        value.backward()
        results.append((out.losses, ours.hidden.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


# -- memory ---------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation gives, and counts products."""

    elements = 0
    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func._overloadpacket is torch.ops.aten.mm
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@EVERY_GOAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_chunk_of_logits(goal: Goal, dtype: torch.dtype):
    x = slots(200, dtype=dtype, vocab=1000)
    x.hidden.requires_grad_()
    with Largest() as largest:
        evaluate(ChunkedHead(20 * 4 * 1000, goal), x)[0].backward()
    # 20 rows; kl needs three tensors at once, which are parts of one of 3 * 6 rows
    assert largest.elements == (18 if goal == "kl" else 20) * 1000  # the head itself has 12,000
    with Largest() as all_at_once:
        plain(x, goal).sum().backward()
    assert all_at_once.elements == 200 * 1000


@EVERY_GOAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_made_once_and_reused(goal: Goal, dtype: torch.dtype):
    chunked, x = ChunkedHead(9 * ROW, goal), slots(dtype=dtype)
    rows = 9 if dtype == torch.float32 or goal != "kl" else 3
    first = chunked(x.hidden, x.head, x.labels, x.teacher)
    place = chunked.buffer(rows, VOCAB, x.hidden, dtype).data_ptr()
    for count in (31, 5, 1, 30):
        part = x.rows(slice(count))
        chunked(part.hidden, x.head, part.labels, part.teacher)
        assert chunked.buffer(rows, VOCAB, x.hidden, dtype).data_ptr() == place
    # and nothing of an earlier call is left in a later one
    assert torch.equal(chunked(x.hidden, x.head, x.labels, x.teacher).losses, first.losses)


@EVERY_GOAL
def test_without_a_gradient_the_slopes_are_not_multiplied_back(goal: Goal):
    x, products = slots(), []
    for learns in (True, False):
        x.hidden.requires_grad_(learns)
        with Largest() as counted:
            out = ChunkedHead(3 * 4 * ROW, goal)(x.hidden, x.head, x.labels, x.teacher)
        products.append(counted.products)
        assert out.losses.requires_grad is learns
    chunks = math.ceil(SLOTS / (4 if goal == "kl" else 12))
    forward = 1 if goal == "ce" else 2
    assert products == [(forward + 1) * chunks, forward * chunks]


def test_two_calls_before_one_backward_do_not_disturb_each_other():
    for goal in GOALS:
        chunked, x = ChunkedHead(4 * ROW, goal), slots()
        ours = x._replace(hidden=x.hidden.clone().requires_grad_())
        theirs = x._replace(hidden=x.hidden.clone().requires_grad_())
        total = evaluate(chunked, ours.rows(slice(20)))[0]
        total = total + evaluate(chunked, ours.rows(slice(20, None)))[0]
        total.backward()
        (x.weights * plain(theirs, goal)).sum().backward()
        assert relative(ours.hidden.grad, theirs.hidden.grad) < 1e-5
