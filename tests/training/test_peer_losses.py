"""Which settings reproduce the losses of other trainers on a given batch: examples by hand.

Rules as in the trainers' own sources, read at these commits: SpecForge a6b6b02 and 0124aa9
(``specforge/algorithms/common/dflash_family_model.py``), TorchSpec 0db7eac
(``torchspec/models/dflash.py``), speculators c05b95b (``speculators/losses``,
``speculators/models/dflash/utils.py``), Model-Optimizer a2fbac7
(``modelopt/torch/speculative/plugins/hf_dflash.py``).

Three words, blocks of four. The row (S = 7; ``+`` is supervised)::

    position   0  1  2  3  4  5  6
    token      0  1  2  0  1  2  0
               .  +  +  .  +  +  .

Pair anchors are 1 and 4: slots 1 and 3 of the first block and slot 1 of the second carry labels
when labels go on behind a hole. Anchors whose block lies inside the row are 1 and 2: slots 1 and 3
of the first and 2 and 3 of the second. Probabilities are powers of 1/2, and L is log 2.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dflash_lightning.data.collate import Batch, BatchIndex, RowBatches
from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.module import DFlashModule
from dflash_lightning.random_target import RandomTarget
from dflash_lightning.step import StepSums

L = math.log(2)
WORDS, K = 3, 4
IDS = [0, 1, 2, 0, 1, 2, 0]
MASK = [False, True, True, False, True, True, False]
E1, E2 = math.exp(-1 / 7), math.exp(-2 / 7)  # decay with gamma 7 at slots 2 and 3

Slot = tuple[int, int]  # anchor and k


class Rows:
    """A store in memory: the row, and one that teaches nothing."""

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        mask = MASK if index == 0 else [False] * len(MASK)
        return np.array(IDS, dtype=np.int32), np.array(mask)


class GivenDrafter(nn.Module):
    """A drafter that gives the probabilities it is told; logits are their logarithms."""

    def __init__(self, module: DFlashModule, probs: dict[Slot, list[float]]) -> None:
        super().__init__()
        self.spec = module.drafter.spec
        self.probs = probs
        self.hidden = torch.zeros(0)

    def forward(self, features: Tensor, blocks: Tensor, anchors: Tensor, valid: Tensor) -> Tensor:
        hidden = torch.zeros(*anchors.shape, K, WORDS)
        for n, anchor in enumerate(anchors[0].tolist()):
            for k in range(1, K):
                if (anchor, k) in self.probs:
                    hidden[0, n, k] = torch.tensor(self.probs[anchor, k]).log()
        self.hidden = hidden.requires_grad_()
        return self.hidden


class GivenTarget:
    """A target that gives the probabilities it is told for the token after each position."""

    head_weight = torch.eye(WORDS)

    def __init__(self, probs: dict[int, list[float]]) -> None:
        rows = [probs.get(t, [1 / WORDS] * WORDS) for t in range(len(IDS))]
        self.states = torch.tensor(rows).log()

    def embed(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, WORDS)

    def context_features(self, ids: Tensor, layer_ids: tuple) -> Tensor:
        return torch.zeros(*ids.shape, WORDS)

    def features_and_final(self, ids: Tensor, layer_ids: tuple, at: Tensor) -> tuple:
        assert (at < len(IDS)).all()  # of the first row
        return self.context_features(ids, layer_ids), self.states[at]


class Example(NamedTuple):
    """Our settings, what drafter and target say, and the other trainer's loss by hand."""

    model: dict[str, object]
    anchor_rule: str
    label_holes: bool
    drafter: dict[Slot, list[float]]
    target: dict[int, list[float]]
    labels: list[Slot]
    theirs: float
    from_ours: Callable[[float, StepSums, Batch], float]


def of_word(word: int, prob: float) -> list[float]:
    """Probability of one word; the others share the rest."""
    rest = (1 - prob) / (WORDS - 1)
    return [prob if w == word else rest for w in range(WORDS)]


def same(ours: float, sums: StepSums, batch: Batch) -> float:
    """The denominator is the sum of weights."""
    return ours


def over_rows(ours: float, sums: StepSums, batch: Batch) -> float:
    """The denominator is the batch size."""
    return ours * sums.weights.sum().item() / len(batch.rows)


def over_labels(ours: float, sums: StepSums, batch: Batch) -> float:
    """The denominator is the number of labels."""
    return ours * sums.weights.sum().item() / len(sums.weights)


PAIR_DRAFTER = {(1, 1): of_word(2, 1 / 2), (1, 3): of_word(1, 1 / 4), (4, 1): of_word(2, 1 / 8)}
PAIR_LABELS = list(PAIR_DRAFTER)
BLOCK_LABELS = [(1, 1), (1, 3), (2, 2), (2, 3)]
# Position t predicts t + 1: slot 1 of anchor 1 is predicted at 1, slot 3 of it at 3, and so on. The
# target would say 0, 2 and 0 where the data have 2, 1 and 2.
LIKELY = {1: of_word(0, 1 / 2), 3: of_word(2, 1 / 2), 4: of_word(0, 1 / 2)}
HALF = [1 / 2, 1 / 4, 1 / 4]  # entropy 1/2 + 2/4 + 2/4 = 3/2 L

EXAMPLES = {
    # Losses L, 2 L and 3 L at slots 1, 3 and 1; weights 1, E2 and 1.
    "SpecForge, decay": Example(
        model={"loss_decay_gamma": 7.0},
        anchor_rule="pair",
        label_holes=True,
        drafter=PAIR_DRAFTER,
        target={},
        labels=PAIR_LABELS,
        theirs=L * (1 + 2 * E2 + 3) / (1 + E2 + 1),
        from_ours=same,
    ),
    # s = (1 + q) / 2: 3/4 and 5/8 in the first block, whose slot 2 is a hole, and 9/16 in the
    # second. Products 3/4, 15/32; 9/16. Weights 39/32, 15/32; 18/32.
    # Numerator (39 + 2 * 15 + 3 * 18) / 32 L; the batch has two rows, one without labels.
    "SpecForge a6b6b02, dpace": Example(
        model={"weighting": "dpace"},
        anchor_rule="pair",
        label_holes=True,
        drafter=PAIR_DRAFTER,
        target={},
        labels=PAIR_LABELS,
        theirs=L * 123 / 32 / 2,
        from_ours=over_rows,
    ),
    # The same over the weights, 72/32.
    "SpecForge 0124aa9, dpace": Example(
        model={"weighting": "dpace"},
        anchor_rule="pair",
        label_holes=True,
        drafter=PAIR_DRAFTER,
        target={},
        labels=PAIR_LABELS,
        theirs=L * 123 / 72,
        from_ours=same,
    ),
    # Losses L, 2 L, 3 L and L at slots 1, 3, 2 and 3.
    "TorchSpec, decay": Example(
        model={"loss_decay_gamma": 7.0},
        anchor_rule="block",
        label_holes=True,
        drafter={
            (1, 1): of_word(2, 1 / 2),
            (1, 3): of_word(1, 1 / 4),
            (2, 2): of_word(1, 1 / 8),
            (2, 3): of_word(2, 1 / 2),
        },
        target={},
        labels=BLOCK_LABELS,
        theirs=L * (1 + 2 * E2 + 3 * E1 + E2) / (1 + E2 + E1 + E2),
        from_ours=same,
    ),
    # The labels are the target's words 0, 2, 2 and 0, at losses L, 2 L, 3 L and L.
    # First block as above: weights 39/32 and 15/32. Second, slot 1 a hole: s = 9/16 and 3/4,
    # products 36/64 and 27/64, weights 63/64 and 27/64.
    # Numerator (78 + 2 * 30 + 3 * 63 + 27) / 64 L over four labels.
    "speculators, dpace": Example(
        model={"goal": "argmax", "weighting": "dpace"},
        anchor_rule="block",
        label_holes=True,
        drafter={
            (1, 1): of_word(0, 1 / 2),
            (1, 3): of_word(2, 1 / 4),
            (2, 2): of_word(2, 1 / 8),
            (2, 3): of_word(0, 1 / 2),
        },
        target=LIKELY,
        labels=BLOCK_LABELS,
        theirs=L * 354 / 64 / 4,
        from_ours=over_labels,
    ),
    # Cross-entropy to the target's distribution (1/2, 1/4, 1/4): 2/2 + 1/4 + 2/4 = 7/4 L where the
    # drafter has one of its quarters at 1/2, else 3/2 L. Ours is that less the entropy.
    "Model-Optimizer, decay": Example(
        model={"goal": "kl", "loss_decay_gamma": 7.0},
        anchor_rule="block",
        label_holes=True,
        drafter={(1, 1): [0.25, 0.5, 0.25], (1, 3): HALF, (2, 2): [0.25, 0.25, 0.5], (2, 3): HALF},
        target=dict.fromkeys(range(len(IDS)), HALF),
        labels=BLOCK_LABELS,
        theirs=L * (7 / 4 + 3 / 2 * E2 + 7 / 4 * E1 + 3 / 2 * E2) / (1 + E2 + E1 + E2),
        from_ours=lambda ours, sums, batch: ours + 1.5 * L,
    ),
}


def step(example: Example) -> tuple[StepSums, Batch, Tensor]:
    """Our own step on the example: sums, batch, and the gradient of the labelled hidden states."""
    config = DrafterConfig(num_layers=1, block_size=K, target_layer_ids=(0,), mask_token_id=3)
    module = DFlashModule(RandomTarget(), config, **example.model)
    module.target = GivenTarget(example.target)
    module.drafter = GivenDrafter(module, example.drafter)
    rows = RowBatches(
        Rows(),
        block_size=K,
        seed=0,
        anchor_rate=1.0,
        anchors_per_row=512,
        whole_block=K if example.anchor_rule == "block" else None,
        label_holes=example.label_holes,
    )
    batch = rows[BatchIndex(0, np.array([0, 1]), len(IDS))]
    sums = module.sums(batch)
    (sums.numerator / sums.weights.sum()).backward()
    return sums, batch, module.drafter.hidden.grad.flatten(0, 2)[batch.label_slots]


def slots_of(batch: Batch) -> list[Slot]:
    """Anchor and k of every label."""
    blocks = [divmod(slot, K) for slot in batch.label_slots.tolist()]
    return [(batch.anchors.flatten()[n].item(), k) for n, k in blocks]


@pytest.mark.parametrize("name", EXAMPLES)
def test_settings_reproduce_the_loss_of(name: str):
    example = EXAMPLES[name]
    sums, batch, _ = step(example)
    assert slots_of(batch) == example.labels
    ours = (sums.numerator / sums.weights.sum()).item()
    assert example.from_ours(ours, sums, batch) == pytest.approx(example.theirs, rel=1e-6)


def test_a_divergence_has_the_gradient_of_the_cross_entropy_to_the_target():
    # by hand, at the first label: weight over the sum of weights, times p - q
    example = EXAMPLES["Model-Optimizer, decay"]
    _, _, gradient = step(example)
    first = torch.tensor([-1 / 4, 1 / 4, 0]) / (1 + E2 + E1 + E2)
    torch.testing.assert_close(gradient[0], first)
    assert gradient[1].abs().max() < 1e-7  # there the drafter equals the target


def test_by_our_own_rules_labels_end_at_the_hole():
    # pair anchors and the prefix: slot 1 of each block, losses L and 3 L
    example = EXAMPLES["SpecForge, decay"]._replace(label_holes=False)
    sums, batch, _ = step(example)
    assert slots_of(batch) == [(1, 1), (4, 1)]
    assert (sums.numerator / sums.weights.sum()).item() == pytest.approx(2 * L)
