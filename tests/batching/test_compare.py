"""Strategies side by side: the same boundaries, one of them asked about, one recommended."""

import dataclasses
import itertools
import json
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from batching.plans import DEALS, FEW, family, plannable_cases
from hypothesis import given, settings
from story import story_lengths

from dflash_lightning.batching import Batching, plan_epoch
from dflash_lightning.batching.buckets import best_boundaries
from dflash_lightning.batching.compare import GOOD_ENOUGH, Comparison, compare
from dflash_lightning.batching.measure import MOST_WAITING
from dflash_lightning.batching.predict import predicted_padding

SMALL = {"token_budget": 9000, "max_rows": 12}
KINDS = ("log-normal", "heavy tail", "two piles", "uniform")
STANDARD = ("sorted", "random", "bucketed, window 0", "bucketed, window 32", "bucketed, window 64")
SENTENCE = re.compile(
    r"Use sort_window=(\d+) with deal=(stratified|aligned): ([\d.]+)% of the padded tokens are "
    r"real \(random order ([\d.]+)%\), ([\d.]+)% of batch-mates meet again \(sorted (\d+)%\)"
    r"(?:, length moves the step loss (\d+) times less than in aligned steps)?"
    r"(?:, ranks wait ([\d.]+)% for the slowest)?\."
)


@pytest.fixture(scope="module")
def story() -> Comparison:
    return compare(story_lengths(10_000), Batching(sort_window=4), world_size=8)


def strategy(name: str, batching: Batching, boundaries: tuple[int, ...]) -> Batching:
    """The settings that a strategy's name stands for."""
    order, _, window = name.partition(", window ")
    own = {"order": order, "boundaries": boundaries}
    return dataclasses.replace(batching, **own | ({"sort_window": int(window)} if window else {}))


# -- strategies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "own", "others"),
    [
        ({}, "bucketed, window 32", ()),
        ({"sort_window": 0}, "bucketed, window 0", ()),
        ({"sort_window": 5}, "bucketed, window 5", ()),
        ({"sort_window": 500, "deal": "aligned"}, "bucketed, window 500", ()),
        ({"order": "sorted"}, "sorted", ()),
        ({"order": "random", "sort_window": 5}, "random", ("bucketed, window 5",)),
    ],
)
def test_every_strategy_is_there_and_the_one_asked_about_is_marked(
    changes: dict, own: str, others: tuple[str, ...]
) -> None:
    batching = Batching(**SMALL, **changes)
    found = compare(family("uniform", 2000), batching, world_size=2)
    assert set(found.reports) == {*STANDARD, own, *others}
    assert found.name == own
    assert found.own is found.reports[own]
    table = found.table()
    assert [row[0].removesuffix(" *") for row in table.rows] == list(found.reports)
    assert [row[0] for row in table.rows if row[0].endswith(" *")] == [own + " *"]
    assert sum(f"{own} *" in line for line in repr(found).splitlines()) == 1
    assert {report.deal for report in found.reports.values()} == {batching.deal}


@pytest.mark.parametrize("boundaries", [None, (0, 400, 900, 2048)])
def test_all_strategies_are_plans_with_the_same_boundaries(boundaries: tuple | None) -> None:
    lengths = family("uniform", 2000)
    batching = Batching(**SMALL, boundaries=boundaries, sort_window=4)
    layout = {"seed": 3, "world_size": 2, "accumulate": 2}
    found = compare(lengths, batching, **layout)
    edges = boundaries or best_boundaries(lengths, 6, batching)
    assert found.plan.boundaries == edges
    for name, report in found.reports.items():
        plan = plan_epoch(lengths, strategy(name, batching, edges), epoch=0, **layout)
        assert report.to_dict() == plan.report().to_dict(), name
        assert (0, *(bucket.high for bucket in report.buckets)) == edges
    assert found.own.to_dict() == found.plan.report().to_dict()
    assert found.plan.batching == batching


def test_the_table_has_the_numbers_of_every_strategy(story: Comparison) -> None:
    table = story.table()
    for (_, report), row in zip(story.reports.items(), table.rows, strict=True):
        deals = [report.deals[deal] for deal in DEALS]
        assert list(row[1:]) == [
            f"{report.steps:,}",
            f"{report.efficiency:.3f}",
            f"{report.fill:.2f}",
            f"{report.again:.3f}",
            f"{report.lag1:.2f}",
            " ".join(f"{deal.waiting_linear:.2f}" for deal in deals),
            " ".join(f"{deal.step_std:.3f}" for deal in deals),
        ]
    assert "stratified, aligned, independent" in table.title
    assert all(len(line) <= 100 for line in table.text().splitlines())


def test_strategies_order_as_they_must(story: Comparison) -> None:
    found = story.reports
    padding = [found[name].efficiency for name in ("random", "bucketed, window 0", story.name)]
    assert padding == sorted(padding)
    assert found["sorted"].efficiency > found[story.name].efficiency
    again = [found[name].again for name in ("random", "bucketed, window 0", story.name, "sorted")]
    assert again == sorted(again)
    assert again[-1] > 0.99


# -- the recommendation ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, {"order": "sorted"}, {"deal": "aligned"}, {"pad_to": 64}])
def test_the_recommendation_is_one_sentence_whose_settings_reach_what_it_says(
    kind: str, changes: dict
) -> None:
    lengths = family(kind, 2000)
    batching = Batching(**SMALL, sort_window=8, **changes)
    found = compare(lengths, batching, world_size=4)
    told = SENTENCE.fullmatch(found.recommendation)
    assert told, found.recommendation
    assert found.recommended == dataclasses.replace(
        batching, order="bucketed", sort_window=int(told[1]), deal=told[2]
    )
    waiting = found.reports[f"bucketed, window {told[1]}"].deals["stratified"].waiting_linear
    assert told[2] == ("aligned" if waiting > MOST_WAITING else "stratified")
    report = plan_epoch(lengths, found.recommended, seed=0, epoch=0, world_size=4).report()
    # The deal decides which batches are halved at the end, and nothing else of these numbers.
    assert float(told[3]) == pytest.approx(100 * report.efficiency, abs=0.1)
    assert float(told[5]) == pytest.approx(100 * report.again, abs=0.3)
    assert told[4] == f"{100 * found.reports['random'].efficiency:.1f}"
    assert told[6] == f"{100 * found.reports['sorted'].again:.0f}"
    assert found.recommendation in " ".join(repr(found).split())


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_window_that_is_good_enough_is_recommended(kind: str) -> None:
    found = compare(family(kind, 3000), Batching(**SMALL, sort_window=4), world_size=4)
    reached = {
        int(name.rpartition(" ")[2]): report.efficiency
        for name, report in found.reports.items()
        if name.startswith("bucketed")
    }
    enough = max(reached.values()) - GOOD_ENOUGH
    chosen = found.recommended.sort_window
    assert chosen == min(window for window, share in reached.items() if share >= enough)


def test_a_run_whose_buckets_all_lose_alike_is_not_told_that_length_moves_the_loss() -> None:
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(11, 16, 400)
        batching = Batching(boundaries=(0, 5, 10, 15), token_budget=150, sort_window=4)
        found = compare(lengths, batching, seed=seed, world_size=2)
        assert "moves the step loss" not in found.recommendation


# -- efficiency by number of buckets ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_more_buckets_pad_less_and_optimal_ones_no_more_than_equal_mass(kind: str) -> None:
    lengths = family(kind, 3000)
    found = compare(lengths, Batching(token_budget=16384, max_rows=32, sort_window=4)).efficiency
    assert set(found) == {"optimal", "windows", "equal_mass"}
    for curve in found.values():
        assert list(curve) == list(range(1, 17))
        assert all(value > 0 for value in curve.values())
    optimal = list(found["optimal"].values())
    assert optimal[-1] > optimal[0]
    for fewer, more in itertools.pairwise(optimal):
        assert more >= fewer - 2e-3
    for count, value in found["equal_mass"].items():
        assert found["optimal"][count] >= value - 0.012
        assert found["windows"][count] >= found["optimal"][count] - 2e-3
    assert found["optimal"][1] == found["equal_mass"][1]


def test_no_curve_rises_above_1() -> None:
    batching = Batching(token_budget=16384, max_rows=32, sort_window=4)
    found = compare(family("two piles", 3000), batching).efficiency
    assert all(value <= 1 + 1e-9 for curve in found.values() for value in curve.values())


def test_the_curves_are_what_is_foretold_of_these_boundaries() -> None:
    lengths = family("log-normal", 3000)
    batching = Batching(**SMALL, sort_window=7, order="sorted")
    found = compare(lengths, batching).efficiency
    tokens = int(lengths.sum())
    for count in (1, 5, 16):
        edges = best_boundaries(lengths, count, batching)
        for name, window in (("optimal", 0), ("windows", 7)):
            plain = Batching(**SMALL, sort_window=window)
            padded = predicted_padding(lengths, plain, edges).sum()
            assert found[name][count] == pytest.approx(tokens / padded)


def test_equal_mass_means_as_many_tokens_in_each_bucket() -> None:
    # 8 rows of 1 token, 4 of 2, 2 of 4, 1 of 8: each length holds 8 of the 32 tokens.
    lengths = [1] * 8 + [2] * 4 + [4] * 2 + [8]
    found = compare(lengths, Batching(token_budget=8)).efficiency["equal_mass"]
    for count, edges in ((1, (0, 8)), (2, (0, 2, 8)), (4, (0, 1, 2, 4, 8))):
        plain = Batching(token_budget=8, sort_window=0)
        padded = predicted_padding(np.array(lengths, np.int32), plain, edges).sum()
        assert found[count] == pytest.approx(32 / padded)
    assert found[4] == 1


def test_curves_do_not_depend_on_given_boundaries() -> None:
    lengths = family("uniform", 1000)
    given_edges = compare(lengths, Batching(**SMALL, boundaries=(0, 100, 3000)))
    assert given_edges.efficiency == compare(lengths, Batching(**SMALL)).efficiency


# -- little data -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths", [[5], [5, 5], [1, 9], list(range(1, 11)), [7] * 50, [7] * 10 + [4000]]
)
@pytest.mark.parametrize(
    "changes", [{}, {"boundaries": (0, 5, 10, 5000)}, {"max_rows": 1}, {"order": "random"}]
)
def test_little_and_equal_data_make_neither_nan_nor_warnings(
    lengths: list[int], changes: dict
) -> None:
    with warnings.catch_warnings(), np.errstate(divide="raise", invalid="raise"):
        warnings.simplefilter("error")
        found = compare(lengths, Batching(**{"max_rows": 16} | changes))
        assert json.dumps(found.to_dict(), allow_nan=False)
        assert "nan" not in repr(found)
        assert "inf" not in repr(found)
        assert SENTENCE.fullmatch(found.recommendation)
        assert found._repr_html_()


@settings(FEW, max_examples=6)
@given(plannable_cases())
def test_any_data_that_can_be_planned_can_be_compared(case) -> None:
    lengths, batching, arguments = case
    layout = {name: arguments[name] for name in ("seed", "world_size", "accumulate")}
    found = compare(lengths, batching, **layout)
    assert SENTENCE.fullmatch(found.recommendation)
    assert {report.rows for report in found.reports.values()} == {len(lengths)}
    assert found.reports[found.name].to_dict() == found.plan.report().to_dict()
    assert json.dumps(found.to_dict(), allow_nan=False)


# -- printing, progress, refusals ------------------------------------------------------------------


def test_the_text_is_the_own_report_the_strategies_and_the_sentence(story: Comparison) -> None:
    text = repr(story)
    assert text.startswith(repr(story.own))
    assert " ".join(text.split()).endswith(story.recommendation)
    assert max(map(len, text.splitlines())) <= 100
    assert story.table().text() in text
    assert "\n" not in story.recommendation


def test_the_html_is_well_formed_and_has_a_row_for_every_strategy(story: Comparison) -> None:
    root = ET.fromstring(f"<div>{story._repr_html_()}</div>")
    assert len(root.findall("table")) == 4
    last = [[cell.text or "" for cell in row] for row in root.findall("table")[-1].iter("tr")]
    assert last[1:] == [list(row) for row in story.table().rows]
    assert root.findall("p")[-1].text == story.recommendation


def test_the_html_shows_the_warnings_that_the_text_shows(story: Comparison) -> None:
    assert story.own.warnings
    root = ET.fromstring(f"<div>{story._repr_html_()}</div>")
    shown = [note.text for note in root.iter("p")]
    assert all(warning in shown for warning in story.own.warnings)


def test_numbers_are_plain_and_say_what_was_asked_and_what_is_advised(story: Comparison) -> None:
    back = json.loads(json.dumps(story.to_dict(), allow_nan=False))
    assert back["batching"]["sort_window"] == 4
    assert back["boundaries"] == list(story.plan.boundaries)
    assert back["strategies"].keys() == story.reports.keys()
    assert back["strategies"]["sorted"]["efficiency"] == story.reports["sorted"].efficiency
    assert back["efficiency"]["optimal"]["6"] == story.efficiency["optimal"][6]
    assert back["recommended"] == json.loads(json.dumps(dataclasses.asdict(story.recommended)))
    assert back["recommendation"] == story.recommendation


def test_progress_wraps_the_strategies_once() -> None:
    wrapped: list[list[Any]] = []
    taken = []

    def watch(items: list[Any]) -> Iterable[Any]:
        wrapped.append(items)
        for item in items:
            yield item
            taken.append(item)

    found = compare(list(range(1, 50)), Batching(max_rows=8), progress=watch)
    assert len(wrapped) == 1
    assert taken == wrapped[0] == list(found.reports)


@pytest.mark.parametrize(
    ("lengths", "changes", "layout", "message"),
    [
        ([5, 6], {}, {"world_size": 3}, r"world_size \* accumulate must not exceed the number of"),
        ([5, 60], {"token_budget": 50}, {}, r"token_budget must hold every row: 1 of 2 rows do"),
        ([5, 60], {"boundaries": (0, 50)}, {}, r"boundaries must end at the longest row \(60"),
        ([], {}, {}, r"lengths must be a flat, non-empty array of integers"),
        ([5], {}, {"world_size": 0}, r"world_size must be an integer in 1"),
        ([5], {}, {"seed": -1}, r"seed must be an integer in 0"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    lengths: list[int], changes: dict, layout: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        compare(lengths, Batching(**changes), **layout)
    assert "\n" not in str(caught.value)
