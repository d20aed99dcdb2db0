"""The optimizer: what decays, what a restart gives back, and the same updates when sharded."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import LambdaLR

from dflash_lightning.functional.optimizer import (
    check_rates,
    make_optimizer,
    scale_and_clip,
    set_rates,
)
from dflash_lightning.functional.schedule import schedule_factor

DIALS = {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.01}
CHANGED = {"lr": 3e-4, "betas": (0.8, 0.99), "weight_decay": 0.1}
FEW = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def factor(step: int) -> float:
    return schedule_factor(step, warmup_steps=3, total_steps=12)


class Training:
    """A small model with matrices and vectors, its optimizer and its schedule."""

    def __init__(self, *, shard: bool = False, **changed: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
        self.optimizer = make_optimizer(self.model, shard=shard, **{**DIALS, **changed})
        self.schedule = LambdaLR(self.optimizer, factor)

    def train(self, steps: int) -> None:
        """Steps whose gradients follow from the number of the step."""
        for _ in range(steps):
            draw = torch.Generator().manual_seed(self.schedule.last_epoch)
            for weight in self.model.parameters():
                weight.grad = torch.randn(weight.shape, generator=draw)
            self.optimizer.step()
            self.schedule.step()

    def state(self) -> dict:
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def restore(self, state: dict) -> None:
        state = copy.deepcopy(state)  # an optimizer trains on in the tensors that it is given
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def weights(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self.model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rates(optimizer: torch.optim.Optimizer) -> list[dict]:
    names = ("lr", "initial_lr", "betas", "weight_decay")
    return [{name: group[name] for name in names} for group in optimizer.param_groups]


def test_matrices_decay_and_vectors_do_not() -> None:
    training = Training()
    matrices, vectors = training.optimizer.param_groups
    assert [p.dim() for p in matrices["params"]] == [2, 2]
    assert [p.dim() for p in vectors["params"]] == [1, 1, 1]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.01, 0.0)
    assert {group["betas"] for group in (matrices, vectors)} == {(0.9, 0.95)}
    before = training.weights()
    for weight in training.model.parameters():
        weight.grad = torch.zeros_like(weight)
    training.optimizer.step()
    rate = DIALS["lr"] * factor(0)
    for old, weight in zip(before, training.model.parameters(), strict=True):
        decayed = old * (1 - rate * 0.01) if weight.dim() == 2 else old
        torch.testing.assert_close(weight.detach(), decayed, rtol=1e-7, atol=0)


@FEW
@given(before=st.integers(0, 12), after=st.integers(1, 4))
def test_giving_the_same_rates_again_changes_no_bit(before: int, after: int) -> None:
    whole, again = Training(), Training()
    whole.train(before)
    again.restore(whole.state())
    set_rates(again.optimizer, again.schedule, **DIALS)
    assert rates(again.optimizer) == rates(whole.optimizer)
    assert again.schedule.get_last_lr() == whole.schedule.get_last_lr()
    whole.train(after)
    again.train(after)
    assert equal(again.weights(), whole.weights())
    assert rates(again.optimizer) == rates(whole.optimizer)


@FEW
@given(before=st.integers(0, 12), after=st.integers(1, 4))
def test_changed_rates_are_those_of_a_run_that_always_had_them(before: int, after: int) -> None:
    old, fresh = Training(), Training(**CHANGED)
    old.train(before)
    fresh.train(before)
    resumed = Training(**CHANGED)
    resumed.restore(old.state())
    assert rates(resumed.optimizer) == rates(old.optimizer)  # the state brings old rates back
    set_rates(resumed.optimizer, resumed.schedule, **CHANGED)
    moments = [state["exp_avg"] for state in old.optimizer.state.values()]
    assert equal([s["exp_avg"] for s in resumed.optimizer.state.values()], moments)
    for _ in range(after):
        assert resumed.schedule.get_last_lr() == fresh.schedule.get_last_lr()
        assert rates(resumed.optimizer) == rates(fresh.optimizer)
        resumed.train(1)
        fresh.train(1)


@pytest.mark.parametrize("name", ["lr", "betas", "weight_decay"])
def test_one_changed_rate_leaves_the_others(name: str) -> None:
    training = Training()
    training.train(5)
    before = rates(training.optimizer)
    set_rates(training.optimizer, training.schedule, **{**DIALS, name: CHANGED[name]})
    own = {"lr": ("lr", "initial_lr")}.get(name, (name,))
    for old, new in zip(before, rates(training.optimizer), strict=True):
        assert {k: v for k, v in new.items() if k not in own} == {
            k: v for k, v in old.items() if k not in own
        }
    matrices, vectors = rates(training.optimizer)
    assert matrices[name] == (CHANGED[name] if name != "lr" else CHANGED["lr"] * factor(5))
    assert vectors["weight_decay"] == 0.0


# -- kernels ---------------------------------------------------------------------------------------


def test_updates_are_those_of_the_plain_formula() -> None:
    # Decoupled weight decay, arXiv 1711.05101, algorithm 2.
    training = Training()
    expected = [weight.double() for weight in training.weights()]
    first = [torch.zeros_like(x) for x in expected]
    second = [torch.zeros_like(x) for x in expected]
    for step in range(1, 7):
        rate = DIALS["lr"] * factor(step - 1)
        training.train(1)
        for i, weight in enumerate(training.model.parameters()):
            gradient, (b1, b2) = weight.grad.double(), DIALS["betas"]
            first[i] = b1 * first[i] + (1 - b1) * gradient
            second[i] = b2 * second[i] + (1 - b2) * gradient**2
            root = (second[i] / (1 - b2**step)).sqrt() + 1e-8
            decay = 0.01 if weight.dim() == 2 else 0.0
            expected[i] *= 1 - rate * decay
            expected[i] -= rate * first[i] / (1 - b1**step) / root
    for weight, value in zip(training.weights(), expected, strict=True):
        torch.testing.assert_close(weight.double(), value, rtol=1e-6, atol=1e-8)


def test_one_kernel_updates_all_and_a_state_of_another_does_not_change_that() -> None:
    training = Training()
    training.train(3)
    assert [group["fused"] for group in training.optimizer.param_groups] == [True, True]
    state = training.state()
    for group in state["optimizer"]["param_groups"]:
        group.update(fused=None, foreach=False)  # as an earlier version saved it
    resumed = Training()
    resumed.restore(state)
    assert [group["fused"] for group in resumed.optimizer.param_groups] == [True, True]
    assert [group["foreach"] for group in resumed.optimizer.param_groups] == [None, None]
    training.train(3)
    resumed.train(3)
    assert equal(resumed.weights(), training.weights())


@pytest.mark.parametrize("shard", [False, True])
def test_without_gradients_a_step_changes_nothing(alone: None, shard: bool) -> None:
    training = Training(shard=shard)
    training.train(2)
    before = training.weights()
    inner = training.optimizer.optim if shard else training.optimizer
    moments = [s["exp_avg"].clone() for s in inner.state.values()]
    for weight in training.model.parameters():
        weight.grad = None
    training.optimizer.step()
    assert equal(training.weights(), before)
    assert equal([s["exp_avg"] for s in inner.state.values()], moments)
    assert {int(s["step"]) for s in inner.state.values()} == {2}


# -- scaling and clipping --------------------------------------------------------------------------


@FEW
@given(
    scale=st.sampled_from([1e-3, 0.25, 1.0, 40.0]),
    max_norm=st.sampled_from([None, 0.0, 1e-3, 1.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_scaling_and_clipping_at_once_are_one_after_the_other(
    scale: float, max_norm: float | None, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    ours, theirs = Training().model, Training().model
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        one.grad = torch.randn(one.shape, generator=draw)
        two.grad = one.grad * scale
    norm = scale_and_clip(ours.parameters(), torch.tensor(scale, dtype=torch.float64), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or math.inf)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=2e-6, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_has_such_a_norm(value: float) -> None:
    model = Training().model
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    model[2].weight.grad[1, 2] = value
    norm = scale_and_clip(model.parameters(), torch.tensor(0.5), 1.0)
    assert not math.isfinite(norm)


def test_parameters_without_a_gradient_are_left_out() -> None:
    model = Training().model
    model[2].weight.grad = torch.full((3, 7), 2.0)
    norm = scale_and_clip(model.parameters(), torch.tensor(0.5), 1.0)
    assert float(norm) == pytest.approx(21**0.5)
    torch.testing.assert_close(model[2].weight.grad, torch.full((3, 7), 21**-0.5))
    assert model[0].weight.grad is None


# -- sharded ---------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process only."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_sharded_optimizer_makes_the_same_updates(alone: None) -> None:
    whole, sharded = Training(), Training(shard=True)
    assert isinstance(sharded.optimizer, ZeroRedundancyOptimizer)
    for _ in range(6):
        whole.train(1)
        sharded.train(1)
        assert equal(sharded.weights(), whole.weights())
        assert rates(sharded.optimizer) == rates(whole.optimizer)


def test_the_sharded_optimizer_takes_changed_rates(alone: None) -> None:
    whole, sharded = Training(), Training(shard=True)
    for training in (whole, sharded):
        training.train(4)
        set_rates(training.optimizer, training.schedule, **CHANGED)
        training.train(3)
    assert equal(sharded.weights(), whole.weights())


def test_the_state_of_a_sharded_optimizer_goes_on_in_either(alone: None) -> None:
    sharded = Training(shard=True)
    sharded.train(4)
    sharded.optimizer.consolidate_state_dict()
    state = sharded.state()
    sharded.train(3)
    for shard in (False, True):
        resumed = Training(shard=shard)
        resumed.restore(state)
        set_rates(resumed.optimizer, resumed.schedule, **DIALS)
        resumed.train(3)
        assert equal(resumed.weights(), sharded.weights())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("warmup_ratio", 1.0),
        ("warmup_steps", -1),
        ("weight_decay", -1e-9),
        ("betas", (1.0, 0.95)),
    ],
)
def test_rates_that_mean_nothing_are_refused_by_name(name: str, value: object) -> None:
    good = {
        "lr": 6e-4,
        "warmup_ratio": 0.04,
        "warmup_steps": None,
        "weight_decay": 0.0,
        "betas": (0.9, 0.95),
    }
    check_rates(**good)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        check_rates(**{**good, name: value})
