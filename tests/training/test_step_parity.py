"""A whole step against plain formulas: loss and drafter gradients, for every option."""

import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import StepRules, plain_step, random_drafter
from torch import Tensor

from dflash_lightning.data.collate import BatchIndex, RowBatches
from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.functional.objective import decay_gamma
from dflash_lightning.module import DFlashModule
from dflash_lightning.random_target import RandomTarget
from dflash_lightning.step import StepSums

VOCAB = 48
MASK = 3
OBJECTIVES = [
    ("ce", "decay"),
    ("ce", "dpace"),
    ("argmax", "decay"),
    ("argmax", "dpace"),
    ("kl", "decay"),
]
FULL, SLIDING = "full_attention", "sliding_attention"


class Rows:
    """A store in memory."""

    def __init__(self, masks: list[list[bool]], seed: int) -> None:
        self.masks = masks
        generator = np.random.default_rng(seed)
        self.ids = [generator.integers(4, VOCAB, size=len(mask)) for mask in masks]

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.ids[index].astype(np.int32), np.array(self.masks[index])


class Case(NamedTuple):
    """A batch, the model and the objective."""

    masks: list[list[bool]]
    seed: int
    block_size: int
    kinds: tuple[str, ...]
    window: int
    rate: float
    padding: int
    objective: tuple[str, str]
    alpha: float
    holes: bool
    whole: bool


@functools.cache
def target() -> RandomTarget:
    """Four layers, with a final norm that is felt and logits that are not flat."""
    built = RandomTarget(vocab_size=VOCAB, hidden_size=32, num_layers=4).load()
    generator = torch.Generator().manual_seed(2)
    for weight in built.model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + noise / 4 if weight.dim() == 1 else noise / weight.shape[1] ** 0.5)
    return built


def build(case: Case) -> DFlashModule:
    """A module whose drafter has weights that are all felt."""
    goal, weighting = case.objective
    module = DFlashModule(
        target(),
        DrafterConfig(
            num_layers=len(case.kinds),
            block_size=case.block_size,
            target_layer_ids=(0, 2),
            mask_token_id=MASK,
            layer_types=case.kinds,
            sliding_window=case.window if SLIDING in case.kinds else None,
        ),
        goal=goal,
        weighting=weighting,
        dpace_alpha=case.alpha if weighting == "dpace" else 0.5,
    )
    module.drafter.load_state_dict(random_drafter(module.drafter.spec, case.seed).state_dict())
    return module


class Result(NamedTuple):
    """Loss as a ratio, its gradient, and what it is made of."""

    loss: float
    gradient: Tensor
    weights: list[float]
    losses: list[float]


def result(module: DFlashModule, numerator: Tensor, weights: list, losses: list) -> Result:
    """Run the backward pass of a ratio."""
    module.drafter.zero_grad()
    weight = sum(weights) or 1.0
    if numerator.requires_grad:
        numerator.backward()
    parts = [
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
        for p in module.drafter.parameters()
    ]
    return Result(numerator.item() / weight, torch.cat(parts) / weight, weights, losses)


def run(case: Case, *, bfloat16: bool = False) -> tuple[Result, Result]:
    """Ours and the plain one."""
    module, store = build(case), Rows(case.masks, case.seed)
    batches = RowBatches(
        store,
        block_size=case.block_size,
        seed=case.seed,
        anchor_rate=case.rate,
        anchors_per_row=512,
        whole_block=case.block_size if case.whole else None,
        label_holes=case.holes,
    )
    width = max(map(len, case.masks)) + case.padding
    batch = batches[BatchIndex(0, np.arange(len(case.masks)), width)]
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        sums: StepSums = module.sums(batch)
    ours = result(module, sums.numerator, sums.weights.tolist(), sums.losses.tolist())
    goal, weighting = case.objective
    rules = StepRules(goal, weighting, decay_gamma(case.block_size), case.alpha, case.holes)
    anchors = [a[v].tolist() for a, v in zip(batch.anchors, batch.anchor_valid, strict=True)]
    rows = [(i.tolist(), m, a) for i, m, a in zip(store.ids, store.masks, anchors, strict=True)]
    return ours, result(module, *plain_step(module.drafter, target().model, rows, rules))


def relative(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((got - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def scale(got: Tensor, expected: Tensor) -> float:
    """Factor of ``expected`` that comes closest to ``got``."""
    return ((got * expected).sum() / expected.pow(2).sum()).item()


ROW = st.lists(st.booleans() | st.just(True), min_size=2, max_size=14)
CASES = st.builds(
    Case,
    masks=st.lists(ROW, min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    block_size=st.integers(2, 6),
    kinds=st.sampled_from([(FULL,), (SLIDING,), (FULL, SLIDING), (FULL, FULL)]),
    window=st.integers(2, 8),
    rate=st.sampled_from([0.3, 1.0]),
    padding=st.integers(0, 3),
    objective=st.sampled_from(OBJECTIVES),
    alpha=st.sampled_from([0.0, 0.5, 1.0]),
    holes=st.booleans(),
    whole=st.booleans(),
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(CASES)
def test_loss_and_gradients_of_a_step_are_those_of_plain_formulas(case: Case):
    ours, plain = run(case)
    assert len(ours.losses) == len(plain.losses)
    assert ours.loss == pytest.approx(plain.loss, rel=1e-5)
    assert ours.weights == pytest.approx(plain.weights, rel=1e-4, abs=1e-12)
    assert relative(ours.gradient, plain.gradient) < 1e-5


# Two turns with a gap that blocks run over, a short answer, and a row without any.
LITERAL = [
    [False, *[True] * 7, False, *[True] * 5],
    [False] * 2 + [True] * 9,
    [False] * 4,
]
# (label_holes, whole blocks) and the labels that a block of 5 then has, counted by hand
RULES = {
    # anchors 1..6 and 9..12, then 2..9
    (False, False): (4 + 4 + 4 + 3 + 2 + 1) + (4 + 3 + 2 + 1) + (5 * 4 + 3 + 2 + 1),
    (True, False): (4 + 4 + 4 + 3 + 3 + 3) + (4 + 3 + 2 + 1) + (5 * 4 + 3 + 2 + 1),
    # anchors 1..7 and 9, then 2..6
    (False, True): (4 + 4 + 4 + 3 + 2 + 1 + 0) + 4 + 5 * 4,
    (True, True): (4 + 4 + 4 + 3 + 3 + 3 + 3) + 4 + 5 * 4,
}


def literal(objective: tuple[str, str], rules: tuple[bool, bool], seed: int = 0) -> Case:
    """A case in which every rule is felt."""
    return Case(LITERAL, seed, 5, (FULL, SLIDING), 4, 1.0, 2, objective, 0.3, *rules)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_option_is_felt_and_equals_plain_formulas(objective: tuple[str, str]):
    found = []
    for rules, labels in RULES.items():
        ours, plain = run(literal(objective, rules))
        assert len(ours.losses) == labels
        assert ours.loss == pytest.approx(plain.loss, rel=1e-5)
        assert relative(ours.gradient, plain.gradient) < 1e-5
        assert scale(ours.gradient, plain.gradient) == pytest.approx(1, abs=1e-5)
        found.append(ours.loss)
    assert len(set(found)) == 4


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_place_without_rows_adds_zero_and_reaches_every_weight(objective: tuple[str, str]):
    case = literal(objective, (False, False))
    module = build(case)
    rows = RowBatches(Rows([], 0), block_size=5, seed=0, anchor_rate=1.0, anchors_per_row=1)
    sums = module.sums(rows[BatchIndex(0, np.zeros(0, dtype=np.int64), 1)])
    sums.numerator.backward()
    assert sums.numerator.item() == 0
    assert len(sums.weights) == len(sums.losses) == len(sums.correct) == 0
    assert all(p.grad is not None and not p.grad.any() for p in module.drafter.parameters())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_under_bfloat16_autocast_loss_and_gradients_stay_close(objective: tuple[str, str]):
    # Measured over 350 drafters: gradients off by up to 2.9e-2, losses by 2.4e-3, scales by 1.3e-2.
    # The mean scale is 0.9985, also with a plain float32 head: it comes from the drafter's own
    # bfloat16 products. What the head does to the scale is tested on its own, ten times closer.
    scales = []
    for seed, rules in enumerate(RULES):
        ours, plain = run(literal(objective, rules, seed), bfloat16=True)
        assert ours.loss == pytest.approx(plain.loss, rel=5e-3)
        assert ours.weights == pytest.approx(plain.weights, rel=1e-2)
        assert relative(ours.gradient, plain.gradient) < 4e-2
        scales.append(scale(ours.gradient, plain.gradient))
    assert scales == pytest.approx([1] * 4, abs=2e-2)
    assert np.mean(scales) == pytest.approx(1, abs=6e-3)
