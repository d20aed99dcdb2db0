"""Batches of anchors for the tests of the drafter, and what a forward makes of them."""

from collections.abc import Callable

import torch
from hypothesis import settings
from hypothesis import strategies as st
from oracles import make_spec
from torch import Tensor

from dflash_lightning.drafter.model import Drafter

FULL, SLIDING = "full_attention", "sliding_attention"
SEARCH = settings(max_examples=120, deadline=None, derandomize=True, database=None)
FEW = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@st.composite
def cases(draw):
    """A drafter's shape and the anchors of a batch: sorted, filled up with empty slots."""
    size, width = draw(st.integers(2, 5)), draw(st.integers(1, 14))
    kinds = draw(st.sampled_from([(FULL,), (SLIDING,), (SLIDING, FULL), (FULL, SLIDING)]))
    window = draw(st.integers(size, 9)) if SLIDING in kinds else None
    spec = make_spec(
        block_size=size, layer_types=kinds, num_layers=len(kinds), sliding_window=window
    )
    rows = [
        sorted(row)
        for row in draw(
            st.lists(
                st.sets(st.integers(0, width - 1), max_size=min(width, 8)), min_size=1, max_size=3
            )
        )
    ]
    slots = max(map(len, rows)) + draw(st.integers(0, 3))
    place = draw(st.sampled_from([0, width - 1]))
    return spec, width, *pad(rows, slots, place), draw(st.integers(1, 5))


def pad(rows: list[list[int]], slots: int, place: int = 0) -> tuple[Tensor, Tensor]:
    """Anchors and their validity; empty slots stand at 0 in a batch, and may stand anywhere."""
    anchors = torch.tensor([row + [place] * (slots - len(row)) for row in rows])
    return anchors.long(), torch.arange(slots) < torch.tensor([[len(row)] for row in rows])


def inputs(spec, anchors: Tensor, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random context features and block embeddings."""
    generator = torch.Generator().manual_seed(seed)
    batch, count = anchors.shape
    features = len(spec.target_layer_ids) * spec.hidden_size
    return (
        torch.randn(batch, width, features, generator=generator),
        torch.randn(batch, count, spec.block_size, spec.hidden_size, generator=generator),
    )


def run(forward: Callable, drafter: Drafter, case: tuple, seed: int = 9) -> tuple[Tensor, ...]:
    """Hidden states of real blocks, and the gradient of a random mixture of them, all in one."""
    features, embeddings, anchors, valid = case
    features, embeddings = (x.detach().clone().requires_grad_() for x in (features, embeddings))
    hidden = forward(features, embeddings, anchors, valid)
    probe = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed))
    wanted = [features, embeddings, *drafter.parameters()]
    gradients = torch.autograd.grad((hidden * probe)[valid].sum(), wanted)
    return hidden[valid].detach(), *gradients


def close(got: Tensor, expected: Tensor) -> bool:
    """Equal to 1e-5 of the norm; where the norm is nothing, equal."""
    return (got - expected).norm() <= 1e-5 * expected.norm()
