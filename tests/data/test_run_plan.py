"""A run over its processes: every row once per epoch, and totals that say what will come."""

import itertools
import json
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from batching.plans import FEW, LENGTHS, batchings, plannable, rows_of, steps_of
from hypothesis import assume, given
from hypothesis import strategies as st

from dflash_lightning.batching import Batching
from dflash_lightning.data import run_plan
from dflash_lightning.data.run_plan import Position, RunPlan

EPOCHS = 3
LAYOUTS = st.tuples(st.integers(1, 4), st.integers(1, 3))
# A process: its layout, and after how many steps it is stopped.
LINKS = st.lists(st.tuples(LAYOUTS, st.integers(0, 14)), max_size=5)
STOPS = st.lists(st.integers(0, 14), max_size=5)
SMALL = Batching(token_budget=100, max_rows=4)
ROWS = np.array([3 + (i * 7) % 40 for i in range(60)])


class Rows(NamedTuple):
    """What the plans of a run are made of."""

    lengths: np.ndarray
    batching: Batching
    seed: int

    def run(self, layout: tuple[int, int], **more: int) -> RunPlan:
        world_size, accumulate = layout
        shape = {"world_size": world_size, "accumulate": accumulate}
        return RunPlan(self.lengths, self.batching, seed=self.seed, **shape, **more)


SOME = Rows(ROWS, SMALL, 5)


@st.composite
def data(draw) -> Rows:
    lengths = draw(LENGTHS)
    batching = draw(batchings(max(lengths)))
    return Rows(np.array(lengths), batching, draw(st.integers(0, 2**40)))


def can_be_planned(rows: Rows, layout: tuple[int, int]) -> bool:
    shape = dict(zip(("world_size", "accumulate"), layout, strict=True))
    return plannable(rows.lengths.tolist(), rows.batching, shape)


def written(position: Position) -> Position:
    """A position as another process reads it: through JSON."""
    return Position.from_dict(json.loads(json.dumps(position.to_dict())))


class Process:
    """One process of a run: takes it up at a position, trains some steps, writes a position."""

    def __init__(self, rows: Rows, layout: tuple[int, int], position: Position, step: int) -> None:
        self.step = step
        self.run = rows.run(layout)
        self.same = self.run.resume(position, step)
        self.delivered: dict[int, list[list[list[int]]]] = {}

    def train(self, most: int | None = None) -> Position:
        """Train, over the ends of epochs, until all are done or ``most`` steps are."""
        for _ in itertools.count() if most is None else range(most):
            if self.run.step_in_plan(self.step) == self.run.plan.num_steps:
                if self.run.epoch + 1 >= EPOCHS:
                    break
                assert self.run.set_epoch(self.run.epoch + 1, self.step)
            if self.run.epoch >= EPOCHS:
                break
            step = steps_of(self.run.plan)[self.run.step_in_plan(self.step)]
            self.delivered.setdefault(self.run.epoch, []).append(step)
            self.step += 1
        return written(self.run.position(self.step))


def chain(rows: Rows, links: list[tuple[tuple[int, int], int | None]]) -> list[Process]:
    """Processes one after the other, each of which only knows what the last one wrote."""
    position, step, processes = Position(epoch=0), 0, []
    for layout, stop in links:
        process = Process(rows, layout, position, step)
        position = process.train(stop)
        step = process.step
        processes.append(process)
    return processes


def epoch_steps(processes: list[Process], epoch: int) -> list[list[list[int]]]:
    return [step for process in processes for step in process.delivered.get(epoch, [])]


# -- every row once --------------------------------------------------------------------------------


@FEW
@given(data(), LINKS, LAYOUTS)
def test_any_chain_of_layouts_and_stops_delivers_every_row_once_per_epoch(rows, links, last):
    assume(all(can_be_planned(rows, layout) for layout in [*(x for x, _ in links), last]))
    processes = chain(rows, [*links, (last, None)])
    for epoch in range(EPOCHS):
        assert sorted(rows_of(epoch_steps(processes, epoch))) == list(range(len(rows.lengths)))
    for process in processes:
        assert set(process.delivered) <= set(range(EPOCHS))


@FEW
@given(data(), LINKS, LAYOUTS)
def test_the_steps_foretold_at_the_start_of_a_process_are_those_that_it_delivers(rows, links, last):
    assume(all(can_be_planned(rows, layout) for layout in [*(x for x, _ in links), last]))
    *_, process = chain(rows, [*links, (last, None)])
    started = process.step - sum(map(len, process.delivered.values()))
    assert process.run.num_steps(EPOCHS) == process.step
    *_, fresh = chain(rows, [*links, (last, 0)])
    assert fresh.step == started
    foretold = [fresh.run.num_steps(epochs) for epochs in range(EPOCHS + 1)]
    assert foretold[-1] == process.step
    for epoch, (a, b) in enumerate(itertools.pairwise(foretold)):
        if epoch > fresh.run.epoch:
            assert b - a == len(process.delivered[epoch])


@FEW
@given(data(), LAYOUTS, STOPS)
def test_restarts_under_the_same_layout_change_nothing(rows, layout, stops):
    assume(can_be_planned(rows, layout))
    (whole,) = chain(rows, [(layout, None)])
    processes = chain(rows, [*((layout, stop) for stop in stops), (layout, None)])
    for epoch in range(EPOCHS):
        assert epoch_steps(processes, epoch) == whole.delivered[epoch]
    total = whole.run.num_steps(EPOCHS)
    assert total == whole.step
    tokens = EPOCHS * int(rows.lengths.sum())
    for process in processes:
        assert process.run.num_steps(EPOCHS) == total
        assert process.run.num_tokens(total) == whole.run.num_tokens(total) == tokens


# -- tokens ----------------------------------------------------------------------------------------


@FEW
@given(data(), LINKS)
def test_tokens_rise_with_steps_and_end_at_all_of_them(rows, links):
    assume(links)
    assume(all(can_be_planned(rows, layout) for layout, _ in links))
    *_, last = chain(rows, links)
    total = last.run.num_steps(EPOCHS)
    tokens = [last.run.num_tokens(step) for step in range(total + 1)]
    assert tokens[0] == 0
    assert all(a <= b for a, b in itertools.pairwise(tokens))
    assert tokens[-1] == EPOCHS * int(rows.lengths.sum())
    assert {type(count) for count in tokens} == {int}


def test_tokens_of_what_is_done_are_counted_and_not_guessed():
    first = Process(SOME, (2, 1), Position(epoch=0), 0)
    position = first.train(4)
    done = sum(int(ROWS[row]) for row in rows_of(first.delivered[0]))
    assert done != round(ROWS.sum() * 4 / first.run.plan.num_steps)
    other = Process(SOME, (3, 1), position, 4)
    assert other.run.num_tokens(4) == done
    assert other.run.num_tokens(2) == round(done / 2)


# -- steps -----------------------------------------------------------------------------------------


def test_a_run_ends_where_it_is_said_to_and_plans_no_epoch_beyond(monkeypatch):
    planned = []

    def spy(*args, epoch, **more):
        planned.append(epoch)
        return real(*args, epoch=epoch, **more)

    real = run_plan.plan_epoch
    monkeypatch.setattr(run_plan, "plan_epoch", spy)
    run = SOME.run((2, 1))
    first = run.plan.num_steps
    assert run.num_steps(1000, at_most=first + 2) == first + 2
    assert planned == [0, 1]
    assert run.num_steps(2, at_most=10**6) == run.num_steps(2) > first + 2
    assert run.num_steps(3, at_most=first) == first
    assert run.num_steps(1, at_most=3) == 3
    assert planned == [0, 1]  # each once
    run.set_epoch(1, first)
    assert run.num_steps(2) == first + run.plan.num_steps


def test_epochs_before_the_one_at_hand_take_the_steps_that_they_took():
    run = SOME.run((2, 1))
    run.resume(Position(epoch=1, segments=((2, 1, 2),)), step=100)
    assert run.num_steps(1) == run.num_steps(0) == 98
    assert run.num_steps(2) == 98 + run.plan.num_steps
    assert run.num_tokens(98) == ROWS.sum()


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_the_same_layout_goes_on_inside_its_plan(stop: int):
    process = Process(SOME, (2, 2), Position(epoch=0), 0)
    position = process.train(stop)
    again = Process(SOME, (2, 2), position, stop)
    assert again.same
    assert again.run.first_step == again.run.step_in_plan(stop) == stop
    assert again.run.plan.fingerprint == process.run.plan.fingerprint
    assert again.run.position(stop) == position


def test_another_layout_begins_a_plan_of_what_is_left():
    process = Process(SOME, (2, 1), Position(epoch=0), 0)
    other = Process(SOME, (3, 1), process.train(4), 4)
    assert not other.same
    assert other.run.first_step == other.run.step_in_plan(4) == 0
    assert other.run.step_in_plan(6) == 2
    assert other.run.plan.done == ((2, 1, 4),)


def test_a_process_that_did_nothing_leaves_the_position_as_it_was():
    process = Process(SOME, (2, 1), Position(epoch=0), 0)
    position = process.train(4)
    idle = Process(SOME, (3, 1), position, 4)
    assert idle.train(0) == position
    back = Process(SOME, (2, 1), idle.train(0), 4)
    assert back.same
    assert back.run.first_step == 4
    assert back.run.plan.fingerprint == process.run.plan.fingerprint


def test_back_at_an_earlier_layout_is_another_plan_of_the_rest():
    first = Process(SOME, (2, 1), Position(epoch=0), 0)
    second = Process(SOME, (3, 1), first.train(3), 3)
    third = Process(SOME, (2, 1), second.train(2), 5)
    assert third.train(1) == Position(epoch=0, segments=((2, 1, 3), (3, 1, 2), (2, 1, 1)))
    assert not third.same


def test_a_finished_epoch_is_followed_by_the_next():
    process = Process(SOME, (2, 1), Position(epoch=0), 0)
    steps = process.run.plan.num_steps
    position = process.train(steps)
    assert position == Position(epoch=0, segments=((2, 1, steps),), finished=True)
    assert not position.is_mid_epoch
    following = Process(SOME, (3, 1), position, steps)
    assert (following.run.epoch, following.run.first_step, following.same) == (1, 0, False)
    assert following.run.position(steps) == Position(epoch=1)
    assert not following.run.position(steps).is_mid_epoch
    assert following.run.position(steps + 1).is_mid_epoch


def test_a_new_epoch_is_planned_once():
    run = SOME.run((2, 1))
    assert not run.set_epoch(0, 0)
    assert run.set_epoch(1, 9)
    plan = run.plan
    assert not run.set_epoch(1, 11)
    assert run.plan is plan
    assert run.step_in_plan(11) == 2


def test_an_epoch_with_fewer_steps_than_were_done_is_refused():
    steps = SOME.run((2, 1)).plan.num_steps
    run = SOME.run((2, 1))
    with pytest.raises(ValueError, match=rf"after_step must be an integer in 0\.\.{steps}, got"):
        run.resume(Position(epoch=0, segments=((2, 1, steps + 1),)), steps + 1)
    with pytest.raises(ValueError, match=rf"after_step must be an integer in 0\.\.{steps}, got"):
        SOME.run((3, 1)).resume(Position(epoch=0, segments=((2, 1, steps + 1),)), steps + 1)


# -- boundaries ------------------------------------------------------------------------------------


def kept(edges: tuple[int, ...], buckets: int) -> dict[str, object]:
    """Settings of a checkpoint, as plain types."""
    return {"data.batching.boundaries": list(edges), "data.batching.num_buckets": buckets}


def test_edges_that_a_stopped_run_found_are_taken_for_the_whole_run():
    found = replace(SMALL, num_buckets=3)
    edges = (0, 9, 20, 42)
    run = Rows(ROWS, found, 5).run((2, 1))
    given_edges = Rows(ROWS, replace(found, boundaries=edges), 5).run((2, 1))
    assert run.plan.boundaries != edges
    assert steps_of(run.plan) != steps_of(given_edges.plan)
    run.num_steps(EPOCHS)  # counts that hold no longer
    run.keep_boundaries(kept(edges, 3))
    assert run.plan.boundaries == edges
    assert run.num_steps(EPOCHS) == given_edges.num_steps(EPOCHS)
    for epoch in range(EPOCHS):
        run.set_epoch(epoch, 0)
        given_edges.set_epoch(epoch, 0)
        assert steps_of(run.plan) == steps_of(given_edges.plan)


@pytest.mark.parametrize("given_edges", [None, (0, 15, 42)])
def test_edges_are_not_taken_where_the_configuration_asks_for_others(given_edges):
    run = Rows(ROWS, replace(SMALL, num_buckets=2, boundaries=given_edges), 5).run((2, 1))
    plan = run.plan
    saved = kept((0, 9, 42), 2) if given_edges else kept((0, 9, 20, 42), 3)
    run.keep_boundaries(saved)
    assert run.plan is plan


def test_a_plan_with_the_same_edges_is_not_made_again():
    run = SOME.run((2, 1))
    plan = run.plan
    run.keep_boundaries(kept(plan.boundaries, SMALL.num_buckets))
    assert run.plan is plan


# -- positions -------------------------------------------------------------------------------------

POSITIONS = st.builds(
    Position,
    epoch=st.integers(0, 99),
    segments=st.lists(st.tuples(*[st.integers(1, 10**6)] * 3)).map(tuple),
    finished=st.booleans(),
)


@FEW
@given(POSITIONS)
def test_a_position_survives_json(position: Position):
    assert written(position) == position


@FEW
@given(data(), LINKS)
def test_positions_are_plain_integers(rows, links):
    assume(all(can_be_planned(rows, layout) for layout, _ in links))
    for process in chain(rows, links):
        position = process.run.position(process.step)
        values = [position.epoch, *itertools.chain(*position.segments)]
        assert {type(value) for value in values} == {int}
        assert type(position.finished) is bool
