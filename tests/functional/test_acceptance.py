"""Acceptance: the prefix that a verifier keeps, its mean with an interval, lossless sampling."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import prefix_by_walking
from torch import Tensor

from dflash_lightning.functional.acceptance import (
    accepted_length,
    ratio_interval,
    sample_acceptance,
)

SEARCH = settings(max_examples=100, deadline=None, derandomize=True, database=None)
# Ratios target / draft of the ids of a slot: 2.5, 1 and 0.4; all of tenths.
DRAFT = torch.tensor([[0.2, 0.3, 0.5], [0.5, 0.2, 0.3]])
TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])


# -- accepted length ------------------------------------------------------------------------------


@SEARCH
@given(st.integers(1, 15), st.integers(1, 6), st.randoms(use_true_random=False))
def test_accepted_length_matches_a_walk_along_the_block(slots: int, blocks: int, rng):
    right = [[rng.random() < 0.7 for _ in range(slots)] for _ in range(blocks)]
    labels = [rng.randint(0, slots) for _ in range(blocks)]
    valid = [[k < n for k in range(slots)] for n in labels]
    expected = [prefix_by_walking(r, v) for r, v in zip(right, valid, strict=True)]
    assert accepted_length(torch.tensor(right), torch.tensor(valid)).tolist() == expected


def test_slots_without_a_label_end_the_count_and_are_no_failures():
    # ME-05: block A has 7 labels, block B three, and every one is right
    valid = torch.tensor([[True] * 7, [True] * 3 + [False] * 4])
    assert accepted_length(valid, valid).tolist() == [7, 3]
    assert accepted_length(torch.ones_like(valid), valid).tolist() == [7, 3]


def test_a_right_token_behind_a_wrong_one_does_not_count():
    right = torch.tensor([[True, False, True, True], [False, True, True, True]])
    assert accepted_length(right, torch.ones_like(right)).tolist() == [1, 0]


@SEARCH
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=15))
def test_a_hole_in_the_labels_ends_the_count_whatever_follows(block: list[tuple[bool, bool]]):
    right, valid = map(list, zip(*block, strict=True))
    found = accepted_length(torch.tensor(right), torch.tensor(valid)).item()
    assert found == prefix_by_walking(right, valid)


def test_means_over_all_blocks_come_from_sums_however_blocks_are_batched():
    # LM-08 for acceptance: 1 block that keeps 2 beside 9 that keep nothing is 0.2, not 1.0
    right = torch.tensor([[True, True]] + [[False, True]] * 9)
    valid = torch.ones_like(right)
    for cuts in ([10], [1, 9], [3, 3, 4]):
        parts = [
            accepted_length(r, v) for r, v in zip(right.split(cuts), valid.split(cuts), strict=True)
        ]
        assert sum(p.sum().item() for p in parts) / sum(map(len, parts)) == 0.2


def test_any_leading_shape_works():
    right = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0)) < 0.8
    valid = torch.ones_like(right)
    flat = accepted_length(right.flatten(0, 1), valid.flatten(0, 1))
    assert torch.equal(accepted_length(right, valid).flatten(), flat)
    assert accepted_length(right[:0], valid[:0]).shape == (0, 3)


# -- the interval ---------------------------------------------------------------------------------


def test_a_ratio_is_of_sums_and_lies_in_its_interval():
    ratio, low, high = ratio_interval([1.0, 9.0, 0.0], [1.0, 3.0, 1.0])
    assert ratio == 2.0
    assert 0.0 <= low < ratio < high <= 3.0


def test_an_interval_is_reproducible_and_leaves_the_global_generator_alone():
    np.random.seed(3)  # noqa: NPY002 - the global state is what must not matter
    before = str(np.random.get_state())  # noqa: NPY002
    first = ratio_interval([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    assert str(np.random.get_state()) == before  # noqa: NPY002
    assert ratio_interval([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]) == first


def test_an_interval_of_one_row_is_a_point():
    assert ratio_interval([3.0], [2.0]) == (1.5, 1.5, 1.5)


def test_an_interval_narrows_like_the_root_of_the_number_of_rows():
    rng = np.random.default_rng(1)
    top, bottom = rng.gamma(2.0, size=1600), rng.gamma(4.0, size=1600)
    widths = []
    for rows in (100, 1600):
        _, low, high = ratio_interval(top[:rows], bottom[:rows])
        widths.append(high - low)
    assert 3.0 < widths[0] / widths[1] < 5.3  # 4 for sixteen times the rows


def test_an_interval_covers_the_truth_about_19_times_out_of_20():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        blocks = rng.integers(1, 9, size=60)
        # Long rows keep more, as chats do: 88 of 36 in expectation, while a mean of ratios is 2.
        kept = rng.poisson(blocks * np.where(blocks < 5, 1, 3))
        _, low, high = ratio_interval(kept, blocks, draws=500)
        hits += low <= 88 / 36 <= high
    assert (
        178 <= hits <= 198
    )  # 190 expected; a percentile bootstrap of 60 rows covers a little less


# -- sampling -------------------------------------------------------------------------------------


def emitted(first: int) -> Tensor:
    """Distribution of the next token when ``first`` is drafted, over 10 equally likely numbers."""
    total = torch.zeros(3)
    for u in range(10):
        accepted, rest = sample_acceptance(
            DRAFT[:1], TARGET[:2], torch.tensor([first]), torch.tensor([u / 10 + 0.05])
        )
        total += torch.eye(3)[first] if accepted else rest
    return total / 10


def test_the_next_token_is_exactly_the_targets_whatever_is_drafted():
    # By hand: ids 0 and 1 are always kept, id 2 in 4 of 10 cases, else id 0 replaces it.
    assert emitted(0).tolist() == [1, 0, 0]
    assert emitted(1).tolist() == [0, 1, 0]
    assert emitted(2).tolist() == pytest.approx([0.6, 0, 0.4])
    marginal = sum(DRAFT[0, d] * emitted(d) for d in range(3))
    assert marginal.tolist() == pytest.approx(TARGET[0].tolist())


def test_a_rejected_token_is_replaced_from_what_the_target_has_more_of():
    accepted, rest = sample_acceptance(
        DRAFT, TARGET, torch.tensor([0, 0]), torch.tensor([0.99, 0.99])
    )
    assert accepted == 1
    assert rest.tolist() == pytest.approx([0, 1, 0])  # (0.2, 0.5, 0.3) - (0.5, 0.2, 0.3)


def test_a_whole_accepted_block_is_followed_by_the_targets_own_token():
    accepted, rest = sample_acceptance(
        DRAFT, TARGET, torch.tensor([0, 1]), torch.tensor([0.99, 0.99])
    )
    assert accepted == 2
    assert torch.equal(rest, TARGET[2])


def test_acceptance_stops_at_the_first_rejection():
    accepted, _ = sample_acceptance(DRAFT, TARGET, torch.tensor([2, 1]), torch.tensor([0.41, 0.0]))
    assert accepted == 0


def test_a_perfect_drafter_is_never_rejected():
    accepted, rest = sample_acceptance(
        TARGET[:2], TARGET, torch.tensor([2, 0]), torch.tensor([0.999999, 0.999999])
    )
    assert accepted == 2
    assert torch.equal(rest, TARGET[2])


def test_a_token_that_the_target_cannot_say_is_never_accepted():
    target = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    accepted, rest = sample_acceptance(
        torch.tensor([[1.0, 0.0]]), target, torch.tensor([0]), torch.tensor([0.0])
    )
    assert accepted == 0
    assert rest.tolist() == [0, 1]


def chi_squared(counts: Tensor, probs: Tensor) -> float:
    """Pearson's statistic of counts against a distribution."""
    expected = counts.sum() * probs
    return ((counts - expected) ** 2 / expected).sum().item()


def test_many_draws_follow_the_targets_distribution_at_every_place():
    generator = torch.Generator().manual_seed(0)
    draft, target = (
        torch.softmax(0.7 * torch.randn(n, 5, generator=generator), -1) for n in (3, 4)
    )
    counts = torch.zeros(4, 5)
    for _ in range(6000):
        ids = torch.multinomial(draft, 1, generator=generator)[:, 0]
        uniform = torch.rand(3, generator=generator)
        accepted, rest = sample_acceptance(draft, target, ids, uniform)
        for place in range(accepted):
            counts[place, ids[place]] += 1
        counts[accepted, torch.multinomial(rest, 1, generator=generator)] += 1
    assert counts[0].sum() == 6000
    assert counts[3].sum() > 300
    # 18.5 is exceeded once in a thousand with four degrees of freedom
    assert max(chi_squared(c, p) for c, p in zip(counts, target, strict=True)) < 18.5
    # and the test can tell: the drafter's own distribution is far away
    assert chi_squared(counts[0], draft[0]) > 200
