"""The rest of an epoch, under the same layout or another: what is delivered, and in which steps."""

import itertools
import pickle

import numpy as np
import pytest
from batching.plans import (
    DEALS,
    FEW,
    LAYOUTS,
    MANY,
    batches_of,
    family,
    fits,
    grid,
    members,
    plan_of,
    plannable_cases,
    rows_of,
    steps_of,
)
from hypothesis import given
from hypothesis import strategies as st

from dflash_lightning.batching import Batching, EpochPlan, plan_epoch

# How far a plan is trained, and the layout that takes over.
RESTARTS = st.lists(st.tuples(st.floats(0, 1), LAYOUTS), min_size=1, max_size=4)
SMALL = Batching(token_budget=500, max_rows=8)
LENGTHS = [10 + (i * 7) % 90 for i in range(400)]


def restarted(plan: EpochPlan, restarts) -> tuple[EpochPlan, list[int]]:
    """The last plan of a chain of restarts, and the rows delivered before it."""
    before = []
    for share, layout in restarts:
        steps = round(share * plan.num_steps)
        before += rows_of(steps_of(plan)[:steps])
        plan = plan.resume(steps, **layout)
    return plan, before


# What is delivered


@MANY
@given(plannable_cases(), RESTARTS)
def test_a_chain_of_restarts_delivers_every_row_once_within_every_limit(case, restarts):
    lengths, batching, arguments = case
    plan, before = restarted(plan_epoch(lengths, batching, **arguments), restarts)
    assert plan.remaining(0).tolist() == rows_of(steps_of(plan))
    assert sorted([*before, *plan.remaining(0).tolist()]) == list(range(len(lengths)))
    layout = restarts[-1][1]
    batches = batches_of(plan)
    assert len(batches) == plan.num_steps * layout["world_size"] * layout["accumulate"]
    for place, batch in zip(grid(plan), batches, strict=True):
        assert fits(len(batch), plan.width(*place), batching)
        longest = max([lengths[row] for row in batch], default=1)
        assert plan.width(*place) == int(batching.padded(np.array(longest)))


@FEW
@given(plannable_cases(), RESTARTS)
def test_places_stay_empty_only_at_the_end_and_only_where_rows_are_too_few(case, restarts):
    lengths, batching, arguments = case
    plan, _ = restarted(plan_epoch(lengths, batching, **arguments), restarts)
    sizes = list(map(len, batches_of(plan)))
    empty = sizes.count(0)
    assert empty < plan.world_size * plan.accumulate
    assert all(sizes[: len(sizes) - empty])
    for place in grid(plan)[len(sizes) - empty :]:
        assert place[0] == plan.num_steps - 1
        assert plan.width(*place) == batching.pad_to
        assert plan.rows(*place).dtype == np.int64
    assert empty == 0 or set(sizes) == {0, 1}


@FEW
@given(plannable_cases(), st.floats(0, 1), LAYOUTS)
def test_batches_of_the_rest_are_those_of_the_epoch_some_halved(case, share, layout):
    lengths, batching, arguments = case
    plan = plan_epoch(lengths, batching, **arguments)
    steps = round(share * plan.num_steps)
    places = layout["world_size"] * layout["accumulate"]
    undone = {frozenset(batch) for step in steps_of(plan)[steps:] for batch in step}
    rest = members(plan.resume(steps, **layout)) - {frozenset()}
    assert all(any(part <= batch for batch in undone) for part in rest)
    assert len(undone - rest) <= -len(undone) % places


@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 15])
def test_a_rest_smaller_than_a_step_leaves_places_without_rows(rows, deal):
    batching = Batching(max_rows=1, pad_to=16, deal=deal)
    plan = plan_of([33] * 15, batching)
    rest = plan.resume(15 - rows, world_size=4, accumulate=2)
    assert rest.num_steps == -(-rows // 8)
    delivered = [rest.rows(*place).tolist() for place in grid(rest)]
    empty = -rows % 8
    assert all(len(batch) == 1 for batch in delivered[: len(delivered) - empty])
    assert delivered[len(delivered) - empty :] == [[]] * empty
    widths = [rest.width(*place) for place in grid(rest)]
    assert widths == [48] * rows + [16] * empty
    assert sorted(row for batch in delivered for row in batch) == sorted(plan.remaining(15 - rows))


def test_a_batch_is_halved_rather_than_a_place_left_empty():
    plan = plan_of([5] * 16, Batching(max_rows=8))
    rest = plan.resume(1, world_size=8, accumulate=1)
    assert list(map(len, batches_of(rest))) == [1] * 8
    fewer = plan.resume(1, world_size=9, accumulate=1)
    assert list(map(len, batches_of(fewer))) == [1] * 8 + [0]


# In which steps


@FEW
@given(plannable_cases(), st.floats(0, 1))
def test_steps_stay_where_the_product_of_ranks_and_accumulation_does(case, share):
    lengths, batching, arguments = case
    plan = plan_epoch(lengths, batching, **arguments)
    places = arguments["world_size"] * arguments["accumulate"]
    steps = round(share * plan.num_steps)
    for world_size in [size for size in range(1, places + 1) if places % size == 0]:
        rest = plan.resume(steps, world_size=world_size, accumulate=places // world_size)
        assert steps_of(rest) == steps_of(plan)[steps:]


def test_two_ranks_then_one_that_accumulates_then_three():
    plan = plan_of(LENGTHS, SMALL, world_size=2)
    one = plan.resume(10, world_size=1, accumulate=2)
    assert steps_of(one) == steps_of(plan)[10:]
    three = one.resume(5, world_size=3, accumulate=1)
    assert three.done == ((2, 1, 10), (1, 2, 5))
    assert three.places == 3
    done = rows_of(steps_of(plan)[:15])
    assert sorted(done + rows_of(steps_of(three))) == list(range(400))
    assert all(len(step) == 3 and all(step) for step in steps_of(three))


def test_one_rank_then_many_then_one():
    plan = plan_of(LENGTHS, SMALL)
    half = plan.num_steps // 2
    eight = plan.resume(half, world_size=4, accumulate=2)
    one = eight.resume(2, world_size=1, accumulate=1)
    done = rows_of(steps_of(plan)[:half] + steps_of(eight)[:2])
    assert sorted(done + rows_of(steps_of(one))) == list(range(400))
    assert members(one) == {frozenset(b) for step in steps_of(eight)[2:] for b in step}


def test_places_without_rows_are_given_up_where_the_next_layout_does_not_need_them():
    plan = plan_of([33] * 10, Batching(max_rows=1))
    wide = plan.resume(0, world_size=8, accumulate=1)
    assert [len(batch) for batch in batches_of(wide)] == [1] * 10 + [0] * 6
    narrow = wide.resume(1, world_size=2, accumulate=1)
    assert [len(batch) for batch in batches_of(narrow)] == [1, 1]
    assert sorted(rows_of(steps_of(narrow))) == sorted(wide.remaining(1))


@pytest.mark.parametrize("deal", DEALS)
def test_the_rest_is_dealt_as_the_settings_say(deal):
    lengths = family("log-normal", 8000)
    plan = plan_of(lengths, Batching(token_budget=16_384, deal=deal), world_size=2)
    rest = plan.resume(40, world_size=8, accumulate=1)
    longest = rest.longest[: -2 * 8].reshape(-1, 8)
    spread = float(np.ptp(np.log(longest), axis=1).mean())
    least, most = {"aligned": (0, 0.1), "independent": (1, 9), "stratified": (1.5, 9)}[deal]
    assert least < spread < most
    mean = longest.mean(1)
    assert abs(np.corrcoef(mean[1:], mean[:-1])[0, 1]) < 0.3


def test_every_restart_deals_anew():
    plan = plan_of(LENGTHS, SMALL, world_size=2)
    first = plan.resume(0, world_size=3, accumulate=1)
    again = first.resume(0, world_size=2, accumulate=1)
    assert first.num_steps > 10
    assert members(first) & members(plan)
    # The same batches under the same layout as at first, and yet in other steps.
    steps = [{frozenset(map(frozenset, step)) for step in steps_of(p)} for p in (plan, again)]
    assert len(steps[0] & steps[1]) <= 3


# The object


@FEW
@given(plannable_cases(), RESTARTS)
def test_a_restart_is_pure_and_keeps_settings_and_boundaries(case, restarts):
    lengths, batching, arguments = case
    plan = plan_epoch(lengths, batching, **arguments)
    before = batches_of(plan)
    np.random.seed(1)  # noqa: NPY002 (the global state is what must not matter)
    first, _ = restarted(plan, restarts)
    np.random.seed(2)  # noqa: NPY002
    second, _ = restarted(pickle.loads(pickle.dumps(plan)), restarts)
    assert batches_of(first) == batches_of(second)
    assert first.fingerprint == second.fingerprint
    assert batches_of(plan) == before
    assert plan.done == ()
    for name in ("batching", "boundaries", "seed", "epoch"):
        assert getattr(first, name) == getattr(plan, name)
    assert np.array_equal(first.lengths, plan.lengths)


def test_the_rest_of_another_epoch_or_seed_is_another():
    rests = [
        plan_of(LENGTHS, SMALL, **changed).resume(3, world_size=3, accumulate=1)
        for changed in ({}, {"epoch": 1}, {"seed": 1})
    ]
    assert len({str(batches_of(rest)) for rest in rests}) == 3


def test_what_is_left_of_rows_is_counted_in_steps():
    plan = plan_of(LENGTHS, SMALL, world_size=2)
    steps = steps_of(plan)
    for after_step in (0, 1, plan.num_steps - 1, plan.num_steps):
        assert plan.remaining(after_step).tolist() == rows_of(steps[after_step:])
    assert plan.remaining(plan.num_steps).dtype == np.int64


def test_a_restart_before_the_first_step_holds_the_whole_epoch():
    plan = plan_of(LENGTHS, SMALL, world_size=2)
    rest = plan.resume(0, world_size=5, accumulate=1)
    assert sorted(rest.remaining(0)) == list(range(400))
    assert rest.num_steps == -(-len(members(rest)) // 5)


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (1, 2), (3, 1), (8, 4)])
def test_a_restart_after_the_last_step_has_no_steps(world_size, accumulate):
    plan = plan_of(LENGTHS, SMALL, world_size=2)
    over = plan.resume(plan.num_steps, world_size=world_size, accumulate=accumulate)
    assert over.num_steps == 0
    assert over.remaining(0).tolist() == []
    assert over.resume(0, world_size=1, accumulate=1).num_steps == 0
    with pytest.raises(ValueError, match=r"step must lie in 0\.\.-1, got 0\. The plan has 0 steps"):
        over.rows(0, 0)


def test_the_fingerprint_tells_apart_what_was_done_before():
    plan = plan_of(LENGTHS, SMALL, world_size=2)
    rests = [
        plan,
        plan.resume(0, world_size=2, accumulate=1),
        plan.resume(1, world_size=2, accumulate=1),
        plan.resume(2, world_size=2, accumulate=1),
        plan.resume(1, world_size=1, accumulate=2),
        plan.resume(1, world_size=1, accumulate=1),
        plan.resume(1, world_size=2, accumulate=1).resume(1, world_size=2, accumulate=1),
        plan.resume(1, world_size=1, accumulate=2).resume(1, world_size=2, accumulate=1),
        plan_of(LENGTHS, SMALL, accumulate=2).resume(1, world_size=2, accumulate=1),
    ]
    prints = [rest.fingerprint for rest in rests]
    assert len(set(prints)) == len(prints)
    assert rests[6].done == ((2, 1, 1), (2, 1, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"after_step": 4}, r"after_step must be an integer in 0\.\.3, got 4"),
        ({"after_step": -1}, r"after_step must be an integer in 0\.\.3, got -1"),
        ({"after_step": 1.0}, r"after_step must be an integer in 0\.\.3, got 1\.0"),
        ({"world_size": 0}, r"world_size must be an integer in 1\.\.2147483647, got 0"),
        ({"accumulate": None}, r"accumulate must be an integer in 1\.\.2147483647, got None"),
    ],
)
def test_a_restart_out_of_range_is_refused(arguments, message):
    plan = plan_of([5] * 6, Batching(max_rows=1), world_size=2)
    with pytest.raises(ValueError, match=message):
        plan.resume(**({"after_step": 1, "world_size": 1, "accumulate": 1} | arguments))
    if "after_step" in arguments:
        with pytest.raises(ValueError, match=message):
            plan.remaining(arguments["after_step"])


def test_numpy_integers_resume_as_plain_ones():
    plan = plan_of(LENGTHS, SMALL)
    plain = plan.resume(3, world_size=2, accumulate=1)
    numpy = plan.resume(np.int64(3), world_size=np.int32(2), accumulate=np.int64(1))
    assert numpy.fingerprint == plain.fingerprint
    assert {type(value) for value in itertools.chain(*numpy.done)} == {int}
