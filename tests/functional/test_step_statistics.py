"""The statistics of a step: against deleting each row, in any grouping, without a host read."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lightning.functional.step_statistics import StepStatistics
from dflash_lightning.functional.step_totals import StepTotals

BOUNDARIES = (0, 10, 20, 40)
SEARCH = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Row:
    """A row of a step: its number, its length, and what its labels weigh and lose."""

    number: int
    length: int
    weights: tuple[float, ...]
    losses: tuple[float, ...]


def make_rows(count: int, seed: int = 0, labels: int = 9) -> list[Row]:
    """Rows over all buckets with uneven weights; some may have no label."""
    random = np.random.default_rng(seed)
    rows = []
    for number in random.permutation(1000)[:count]:
        m = int(random.integers(labels + 1))
        weights = random.uniform(0.1, 1, m).astype(np.float32)
        losses = random.gamma(2, 2, m).astype(np.float32)
        length = int(random.integers(1, 41))
        rows.append(Row(int(number), length, tuple(weights.tolist()), tuple(losses.tolist())))
    return rows


def add(statistics: StepStatistics, rows: Sequence[Row], device: str = "cpu") -> None:
    """One micro-batch; without rows it is the placeholder: one padding token and no label."""
    lengths = [row.length for row in rows] or [0]
    of_label = [b for b, row in enumerate(rows) for _ in row.weights]
    losses = torch.tensor([x for row in rows for x in row.losses])
    statistics.add(
        rows=torch.tensor([row.number for row in rows], dtype=torch.int64),
        lengths=torch.tensor(lengths).to(device),
        row_of_label=torch.tensor(of_label, dtype=torch.int64).to(device),
        weights=torch.tensor([x for row in rows for x in row.weights]).to(device),
        losses=losses.to(device),
        correct=(losses < 3).to(device),
        padded_tokens=len(lengths) * max(lengths) if rows else 1,
        anchors=torch.tensor([row.weights != () for row in rows], dtype=torch.bool).to(device),
    )


def step(
    ranks: Sequence[StepStatistics],
    groups: Sequence[Sequence[Sequence[Row]]],
    extra: Sequence[float] = (),
) -> tuple[list[StepTotals], list[int]]:
    """One step of several ranks, whose vectors are summed; also the sizes of the reductions.

    Args:
        ranks: The statistics of each rank.
        groups: Rows of each rank's micro-batches.
        extra: Given by every rank.
    """
    sent: list[dict[int, torch.Tensor]] = [{}, {}]
    barrier = Barrier(len(ranks), timeout=20)

    def run(rank: int) -> StepTotals:
        calls: Iterator[dict[int, torch.Tensor]] = iter(sent)

        def sum_over_ranks(own: torch.Tensor) -> torch.Tensor:
            slots = next(calls)
            assert own.dtype == torch.float64
            slots[rank] = own
            barrier.wait()
            return torch.stack([slots[r] for r in range(len(ranks))]).sum(0)

        for rows in groups[rank]:
            add(ranks[rank], rows)
        totals = ranks[rank].reduce(sum_over_ranks, extra)
        assert next(calls, None) is None  # exactly two reductions
        return totals

    with ThreadPoolExecutor(len(ranks)) as pool:
        totals = list(pool.map(run, range(len(ranks))))
    (first,) = {len(vector) for vector in sent[0].values()}
    (second,) = {len(vector) for vector in sent[1].values()}
    return totals, [first, second]


def make_ranks(world_size: int, boundaries: Sequence[int] = BOUNDARIES) -> list[StepStatistics]:
    return [StepStatistics(boundaries, rank=r, world_size=world_size) for r in range(world_size)]


def one_rank(rows: Sequence[Row], statistics: StepStatistics | None = None) -> dict[str, Any]:
    statistics = statistics or make_ranks(1)[0]
    return step([statistics], [[rows]])[0][0].read()


def deal(rows: Sequence[Row], world_size: int, micro: int) -> list[list[list[Row]]]:
    """Deal rows over the places of a step; the last places may stay empty."""
    places = [list(rows[p :: world_size * micro]) for p in range(world_size * micro)]
    return [places[rank::world_size] for rank in range(world_size)]


def assert_same(got: Any, expected: Any, rel: float = 1e-12) -> None:
    """Equal keys, lists and Nones; numbers up to rounding."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_same(got[key], expected[key], rel)
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for pair in zip(got, expected, strict=True):
            assert_same(*pair, rel)
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=rel, abs=1e-13, nan_ok=True)
    else:
        assert got == expected
        assert type(got) is type(expected)


# -- the slow twin --------------------------------------------------------------------------------


def ratio(rows: Sequence[Row]) -> float:
    """Sum of weighted losses over sum of weights."""
    pairs = [(w, x) for row in rows for w, x in zip(row.weights, row.losses, strict=True)]
    return math.fsum(w * x for w, x in pairs) / math.fsum(w for w, _ in pairs)


def without(rows: Sequence[Row], row: Row) -> list[Row]:
    return [other for other in rows if other is not row]


def slow_bucket(rows: Sequence[Row]) -> dict[str, Any]:
    """The ledger's entries of one bucket, by leaving out each row in turn."""
    weighted = [row for row in rows if row.weights]
    n = [math.fsum(row.weights) for row in weighted]
    if not weighted:
        empty = {"loss_k": None, "weight_k": 0.0, "noise_k": None, "eff_k": 0.0, "length_k": None}
        return {**empty, "rows_k": len(rows)}
    total, r, effective = (
        math.fsum(n),
        len(weighted),
        math.fsum(n) ** 2 / math.fsum(x * x for x in n),
    )
    noise = None
    if r >= 2 and effective >= 1.5:
        left_out = [ratio(without(weighted, row)) - ratio(weighted) for row in weighted]
        noise = (r - 1) / r * math.fsum(x * x for x in left_out)
    return {
        "loss_k": ratio(weighted),
        "weight_k": total,
        "rows_k": len(rows),
        "noise_k": noise,
        "eff_k": effective,
        "length_k": math.fsum(x * math.log(row.length) for x, row in zip(n, weighted, strict=True))
        / total,
    }


def slow_step(rows: Sequence[Row], ref: Sequence[float | None]) -> dict[str, Any]:
    """All entries of a step, from the rows alone."""
    edges = list(pairwise(BOUNDARIES))
    members = [[row for row in rows if low < row.length <= high] for low, high in edges]
    buckets = [slow_bucket(m) for m in members]
    labels = [x for row in rows for x in row.losses]
    deviations: dict[int, float] = {}
    sums = []
    for rows_of, bucket, r in zip(members, buckets, ref, strict=True):
        centre = r if r is not None else bucket["loss_k"] or 0.0
        own = {
            row.number: abs(
                math.fsum(w * (x - centre) for w, x in zip(row.weights, row.losses, strict=True))
            )
            for row in rows_of
        }
        sums.append(math.fsum(own.values()))
        deviations |= own
    top = max(deviations, key=lambda number: deviations[number])
    (top_row,) = [row for row in rows if row.number == top]
    (place,) = [k for k, m in enumerate(members) if top_row in m]
    return {
        "loss": ratio(rows),
        "weight": math.fsum(w for row in rows for w in row.weights),
        "rows": len(rows),
        "tokens": sum(row.length for row in rows),
        "anchors": sum(row.weights != () for row in rows),
        "labels": len(labels),
        "correct": sum(x < 3 for x in labels),
        "accuracy": sum(x < 3 for x in labels) / len(labels),
        "top_row": top,
        "top_share": deviations[top] / sums[place],
        "top_pull": ratio(rows) - ratio(without(rows, top_row)),
        "bad_rows": [],
        **{name: [bucket[name] for bucket in buckets] for name in buckets[0]},
    }


@SEARCH
@given(st.integers(4, 30), st.integers(0, 10_000))
def test_a_step_equals_deleting_each_row_in_turn(count: int, seed: int):
    rows = make_rows(count, seed)
    if sum(row.weights != () for row in rows) < 3:
        return
    statistics, ref = make_ranks(1)[0], [3.5, 4.25, 4.0]
    statistics.load_state_dict({"ref": ref})
    got = one_rank(rows, statistics)
    assert got.pop("padded_tokens") == count * max(row.length for row in rows)
    assert got.pop("extra") == []
    assert_same(got, slow_step(rows, ref), rel=1e-9)


def test_later_steps_deviate_from_the_running_mean_of_earlier_ones():
    statistics = make_ranks(1)[0]
    steps = [make_rows(12, seed) for seed in range(4)]
    ref: list[float | None] = [None] * 3
    for rows in steps:
        got = one_rank(rows, statistics)
        expected = slow_step(rows, ref)
        for name in ("top_row", "top_share", "top_pull"):
            assert_same(got[name], expected[name], rel=1e-9)
        ref = [
            r if x is None else x if r is None else 0.9 * r + 0.1 * x
            for r, x in zip(ref, expected["loss_k"], strict=True)
        ]
        assert statistics.state_dict()["ref"] == pytest.approx(ref, rel=1e-12)


# -- grouping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_how_rows_fall_onto_ranks_and_batches_changes_nothing(world_size: int, micro: int):
    single, ranks = make_ranks(1)[0], make_ranks(world_size)
    for seed, count in enumerate([23, 2, 17]):  # two rows: most places hold the placeholder
        rows = [replace(row, weights=(0.5,), losses=(4.0 + i,)) if not row.weights else row
                for i, row in enumerate(make_rows(count, seed))]  # fmt: skip
        expected = one_rank(rows, single)
        totals, _ = step(ranks, deal(rows, world_size, micro), [0.25])
        for got in (t.read() for t in totals):  # the same on every rank
            assert got.pop("extra") == [0.25 * world_size]
            padded = got.pop("padded_tokens")
            assert got["tokens"] <= padded <= 40 * count
            rest = {k: v for k, v in expected.items() if k not in ("extra", "padded_tokens")}
            assert_same(got, rest)
        for statistics in ranks:
            assert statistics.state_dict() == ranks[0].state_dict()
        assert_same(ranks[0].state_dict()["ref"], single.state_dict()["ref"])


def test_the_reduced_vectors_depend_on_buckets_ranks_and_extras_only():
    ranks = make_ranks(3)
    some = (make_rows(30), make_rows(3), [])
    sizes = [step(ranks, deal(rows, 3, 2), [1.0, 2.0])[1] for rows in some]
    assert sizes == [sizes[0]] * 3
    assert sizes[0] == [8 + 2 + 6 * 3, 2 * 3 + 9 * 3]


def test_weight_and_numerator_are_there_before_anything_is_read():
    rows = make_rows(10)
    totals = step(make_ranks(2), deal(rows, 2, 1))[0][1]
    assert float(totals.weight) == pytest.approx(sum(sum(row.weights) for row in rows), rel=1e-12)
    assert float(totals.numerator / totals.weight) == pytest.approx(ratio(rows), rel=1e-12)


@pytest.mark.parametrize("extra_on_device", [False, True])
def test_nothing_is_read_from_the_device_and_no_shape_depends_on_data(extra_on_device: bool):
    # On the meta device there are no values: whatever asks for one fails.
    statistics = StepStatistics(BOUNDARIES, rank=1, world_size=2)
    add(statistics, make_rows(5), device="meta")
    add(statistics, [], device="meta")
    extra = torch.zeros(2, device="meta") if extra_on_device else [1.0, 2.0]
    totals = statistics.reduce(lambda own: own, extra)
    assert totals.weight.device.type == totals.second.device.type == "meta"
    with pytest.raises(NotImplementedError):
        totals.read()


def test_extras_may_be_numbers_or_a_tensor():
    for extra in ([0.5, 3], torch.tensor([0.5, 3.0])):
        totals = make_ranks(1)[0].reduce(lambda own: own, extra)
        assert totals.read()["extra"] == [0.5, 3.0]


def test_anchors_may_be_a_number_or_a_tensor():
    none = torch.zeros(0)
    labels = {"weights": none, "losses": none, "correct": none.bool(), "row_of_label": none.long()}  # fmt: skip # noqa: E501
    for anchors in (3, torch.tensor(3), torch.tensor([[True, True], [True, False]])):
        statistics = make_ranks(1)[0]
        statistics.add(
            rows=torch.tensor([1, 2]),
            lengths=torch.tensor([4, 5]),
            padded_tokens=10,
            anchors=anchors,
            **labels,
        )
        assert statistics.reduce(lambda own: own).read()["anchors"] == 3


# -- little or nothing to learn from --------------------------------------------------------------


def test_a_step_without_rows_counts_nothing_and_says_nothing():
    got = step(make_ranks(2), [[[]], [[]]])[0][0].read()
    assert math.isnan(got["loss"])
    assert math.isnan(got["accuracy"])
    names = ("weight", "rows", "tokens", "padded_tokens", "anchors", "labels", "correct")
    assert [got[name] for name in names] == [0] * 7
    assert [got["top_row"], got["top_share"], got["top_pull"]] == [None] * 3
    assert got["loss_k"] == got["noise_k"] == got["length_k"] == [None] * 3
    assert got["weight_k"] == got["eff_k"] == [0.0] * 3
    assert got["rows_k"] == [0] * 3


def test_rows_without_labels_are_counted_but_are_no_sample_of_the_loss():
    # DD-03: rank 1 has rows, and nothing to learn from
    rows = [Row(i, 5, (1.0,), (float(i),)) for i in range(3)]
    silent = [Row(10 + i, 5, (), ()) for i in range(4)]
    got = step(make_ranks(2), [[rows], [silent]])[0][1].read()
    alone = one_rank(rows)
    assert got["rows_k"] == [7, 0, 0]
    assert got["rows"] == 7
    for name in ("loss_k", "weight_k", "noise_k", "eff_k", "length_k"):
        assert got[name] == alone[name]


def test_one_row_in_a_bucket_has_no_noise_and_deviates_from_earlier_steps_only():
    statistics = make_ranks(1)[0]
    first = [Row(1, 5, (1.0,), (2.0,)), Row(2, 15, (1.0,), (3.0,)), Row(3, 30, (1.0,), (4.0,))]
    got = one_rank(first, statistics)
    assert got["noise_k"] == [None] * 3
    assert got["eff_k"] == [1.0] * 3
    assert got["top_row"] is None
    later = [Row(4, 5, (1.0,), (2.0,)), Row(5, 15, (1.0,), (9.0,)), Row(6, 30, (1.0,), (4.0,))]
    got = one_rank(later, statistics)
    assert [got["top_row"], got["top_share"], got["top_pull"]] == [5, 1.0, 5.0 - 3.0]


def test_the_only_row_of_a_step_pulls_at_nothing():
    statistics = make_ranks(1)[0]
    one_rank([Row(0, 5, (0.3, 0.1), (2.0, 2.5))], statistics)
    got = one_rank([Row(1, 5, (0.7, 0.1), (7.0, 6.0))], statistics)
    assert [got["top_row"], got["top_share"], got["top_pull"]] == [1, 1.0, None]


def test_two_rows_of_which_one_has_nearly_all_the_weight_have_no_noise():
    rows = [Row(1, 5, (1.0,), (2.0,)), Row(2, 5, (0.2,), (3.0,))]
    got = one_rank(rows)
    assert got["eff_k"][0] == pytest.approx(1.44 / 1.04)
    assert got["noise_k"][0] is None


@pytest.mark.parametrize(
    ("length", "bucket"), [(1, 0), (10, 0), (11, 1), (20, 1), (21, 2), (40, 2)]
)
def test_a_row_counts_in_the_bucket_of_its_own_length(length: int, bucket: int):
    got = one_rank([Row(1, length, (1.0,), (2.0,))])
    assert got["rows_k"] == [int(k == bucket) for k in range(3)]


def test_a_single_bucket_holds_all_rows():
    rows = make_rows(6, seed=3)
    got = one_rank(rows, make_ranks(1, (0, 40))[0])
    assert got["rows_k"] == [6]
    assert got["loss_k"] == pytest.approx([ratio(rows)], rel=1e-12)


def test_after_a_step_nothing_of_it_is_left():
    statistics = make_ranks(1)[0]
    one_rank(make_rows(20, seed=1), statistics)
    got, fresh = one_rank(make_rows(9, seed=2), statistics), one_rank(make_rows(9, seed=2))
    for name in ("rows", "tokens", "labels", "loss", "noise_k", "eff_k"):
        assert got[name] == fresh[name]


# -- rows that are not finite ---------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_row_that_is_not_finite_is_named_and_spoils_its_own_bucket_only(
    value: float, world_size: int
):
    rows = [Row(i, 3 + 5 * (i % 8), (1.0, 0.5), (2.0 + i % 3, 3.0)) for i in range(24)]
    bad = replace(rows[7], losses=(2.0, value))  # 38 tokens
    ranks, healthy = make_ranks(world_size), make_ranks(1)[0]
    for now in (rows, [*rows[:7], bad, *rows[8:]], rows):
        totals, _ = step(ranks, deal(now, world_size, 1))
        got, expected = totals[-1].read(), one_rank(rows, healthy)
        assert_same([x[:2] for x in (got["loss_k"], got["noise_k"], got["eff_k"])],
                    [expected[x][:2] for x in ("loss_k", "noise_k", "eff_k")])  # fmt: skip
        if now is not rows:
            assert [got["top_row"], got["top_share"], got["bad_rows"]] == [7, 1.0, [7]]
            assert not math.isfinite(got["loss"])
            assert not math.isfinite(got["loss_k"][2])
            assert got["noise_k"][2] is None
    assert got["bad_rows"] == []
    assert_same(got["loss_k"], expected["loss_k"])
    assert all(math.isfinite(x) for x in ranks[0].state_dict()["ref"])


def test_a_bucket_whose_first_row_is_not_finite_stays_unseen():
    statistics = make_ranks(1)[0]
    one_rank([Row(1, 5, (1.0,), (math.nan,)), Row(2, 15, (1.0,), (3.0,))], statistics)
    assert statistics.state_dict() == {"ref": [None, 3.0, None]}


def test_each_rank_names_up_to_four_rows_that_are_not_finite():
    rows = [Row(100 - i, 5, (1.0,), (math.nan,)) for i in range(12)]
    got = step(make_ranks(2), [[rows[:6]], [rows[6:8], rows[8:9]]])[0][0].read()
    assert got["bad_rows"] == [92, 93, 94, 95, 96, 97, 98]
    assert got["top_row"] == 92


# -- arithmetic -----------------------------------------------------------------------------------


def test_a_large_common_loss_does_not_swallow_a_small_spread():
    # Sums of squares cancel here: 1e6 squared, times 1e-16, is far above the spread of 1e-3.
    random = np.random.default_rng(0)
    rows = [
        Row(i, 5, (float(np.float32(random.uniform(0.2, 1))),), (1e4 + i % 5 / 1024,))
        for i in range(40)
    ]
    pairs = [(Fraction(row.weights[0]), Fraction(row.losses[0])) for row in rows]
    assert len({float(np.float32(x)) for _, x in pairs}) == 5  # exact in float32
    n = sum(w for w, _ in pairs)
    loss = sum(w * x for w, x in pairs) / n
    noise = Fraction(39, 40) * sum((w * (x - loss) / (n - w)) ** 2 for w, x in pairs)
    got = one_rank(rows)
    assert got["noise_k"][0] == pytest.approx(float(noise), rel=1e-6)
    assert got["loss_k"][0] - 1e4 == pytest.approx(float(loss - 10_000), rel=1e-6)


@pytest.mark.parametrize(("count", "bias_of_the_usual"), [(10, 0.9), (3, 0.8)])
def test_noise_is_nearly_unbiased_where_weights_are_uneven(count: int, bias_of_the_usual: float):
    # Log-normal weights of a coefficient of variation of 0.7 and losses of variance 1, so that the
    # variance of their weighted mean is 1 / eff. The usual formula, r / (r - 1), falls short.
    random = np.random.default_rng(1)
    spread = math.sqrt(math.log(1 + 0.7**2))
    statistics, truth, noise, usual = make_ranks(1)[0], 0.0, 0.0, 0.0
    for _ in range(1500):
        weights = random.lognormal(0, spread, count).astype(np.float32).tolist()
        losses = random.normal(5, 1, count).astype(np.float32).tolist()
        pairs = list(zip(weights, losses, strict=True))
        got = one_rank([Row(i, 5, (w,), (x,)) for i, (w, x) in enumerate(pairs)], statistics)
        if got["noise_k"][0] is not None:
            squares = sum((w * (x - got["loss"])) ** 2 for w, x in pairs)
            truth += 1 / got["eff_k"][0]
            noise += got["noise_k"][0]
            usual += count / (count - 1) * squares / got["weight"] ** 2
    assert 0.97 < noise / truth < 1.09
    assert usual / truth < bias_of_the_usual


# -- what a checkpoint keeps ----------------------------------------------------------------------


def test_the_running_means_survive_a_checkpoint_exactly():
    steps = [make_rows(15, seed) for seed in range(3)]
    through, stopped, resumed = (make_ranks(1)[0] for _ in range(3))
    for rows in steps[:2]:
        one_rank(rows, through)
        one_rank(rows, stopped)
    resumed.load_state_dict(stopped.state_dict())
    assert one_rank(steps[2], resumed) == one_rank(steps[2], through)
    assert resumed.state_dict() == through.state_dict()


def test_an_unseen_bucket_survives_a_checkpoint():
    statistics = make_ranks(1)[0]
    assert statistics.state_dict() == {"ref": [None] * 3}
    statistics.load_state_dict({"ref": [1.5, None, 2.0]})
    assert statistics.state_dict() == {"ref": [1.5, None, 2.0]}


def test_means_of_other_buckets_are_refused():
    with pytest.raises(ValueError, match=r"must have 3 buckets, got 2\. Give data\.batching"):
        make_ranks(1)[0].load_state_dict({"ref": [1.0, None]})
