"""What a report says: warnings with remedies, text, HTML and plain types."""

import dataclasses
import html.parser
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter

import numpy as np
import pytest
from batching.plans import (
    DEALS,
    FEW,
    family,
    plan_of,
    plannable_cases,
)
from hypothesis import given
from story import story_lengths

from dflash_lightning.batching import Batching, plan_epoch
from dflash_lightning.batching.report import PlanReport

PLAIN = (str, int, float, type(None))


def test_rows_too_few_for_the_places_are_named_as_longest_first() -> None:
    lengths = [10, 10, 10, 1, 1, 1, 1, 1]  # of which random order makes up to seven batches
    batching = Batching(order="random", token_budget=10)
    plans = [plan_of(lengths, batching, seed=seed, world_size=6) for seed in range(20)]
    given_up = [plan.report() for plan in plans if plan.batches.longest_first]
    assert 0 < len(given_up) < len(plans)
    for report in given_up:
        assert report.title.endswith("(longest first)")
        assert any(w.startswith("rows are too few for 6 batches a step") for w in report.warnings)


# -- warnings --------------------------------------------------------------------------------------

FILL = [
    (
        [600] * 100,
        {"token_budget": 1000},
        {},
        (
            "fill 0.60: 99% of the batches were closed by token_budget; rows are long for the "
            "budget: raise token_budget."
        ),
        {"token_budget": 6000},
    ),
    (
        [10] * 100,
        {"token_budget": 100, "max_rows": 4},
        {},
        (
            "fill 0.40: 96% of the batches were closed by max_rows; raise max_rows, or lower "
            "token_budget to what is used."
        ),
        {"max_rows": 10},
    ),
    (
        [10] * 100,
        {"token_budget": 100, "max_rows": 4},
        {},
        (
            "fill 0.40: 96% of the batches were closed by max_rows; raise max_rows, or lower "
            "token_budget to what is used."
        ),
        {"token_budget": 40},
    ),
    (
        [10] * 100,
        {"token_budget": 100, "cost_budget": 80, "cost_knee": 10},
        {},
        (
            "fill 0.40: 96% of the batches were closed by cost_budget; raise cost_budget, or lower "
            "token_budget to what is used."
        ),
        {"cost_budget": 200},
    ),
    (
        [10] * 100,
        {"token_budget": 100, "cost_budget": 80, "cost_knee": 10},
        {},
        (
            "fill 0.40: 96% of the batches were closed by cost_budget; raise cost_budget, or lower "
            "token_budget to what is used."
        ),
        {"token_budget": 40},
    ),
    (
        [10] * 7 + [12] * 5 + [14] * 6,
        {"token_budget": 126, "num_buckets": 3},
        {},
        "fill 0.57: 100% of the batches were closed by bucket end; lower num_buckets.",
        {"num_buckets": 1},
    ),
    (
        [10] * 10,
        {"token_budget": 100},
        {"world_size": 5},
        (
            "fill 0.20: 100% of the batches were closed by split; lower world_size or accumulate, "
            "or add rows."
        ),
        {"world_size": 1},
    ),
]


@pytest.mark.parametrize(("lengths", "settings", "layout", "text", "remedy"), FILL)
def test_low_fill_is_explained_by_what_closed_most_batches_and_the_remedy_helps(
    lengths: list[int], settings: dict, layout: dict, text: str, remedy: dict
) -> None:
    report = plan_of(lengths, Batching(**settings), **layout).report()
    assert [warning for warning in report.warnings if "fill" in warning] == [text]
    assert f"! {text}" in " ".join(repr(report).split())
    change = {name: value for name, value in remedy.items() if name != "world_size"}
    layout = layout | {name: value for name, value in remedy.items() if name == "world_size"}
    remedied = plan_of(lengths, Batching(**settings | change), **layout).report()
    assert remedied.fill >= 0.8
    assert not any("fill" in warning for warning in remedied.warnings)


def test_a_bucket_of_less_than_one_batch_is_named_with_two_ways_out() -> None:
    batching = Batching(boundaries=(0, 10, 20), token_budget=100)
    lengths = [10] * 50 + [20] * 4
    text = (
        "bucket (10, 20] holds 4 rows, less than one batch: lower num_buckets, or leave out one "
        "of its boundaries."
    )
    assert plan_of(lengths, batching).report().warnings == (text,)
    assert plan_of([*lengths, 20], batching).report().warnings == ()
    joined = dataclasses.replace(batching, boundaries=(0, 20))
    assert not any("less" in warning for warning in plan_of(lengths, joined).report().warnings)
    for order in ("sorted", "random"):  # whose batches do not end with a bucket
        mixed = plan_of(lengths, dataclasses.replace(batching, order=order)).report()
        assert not any("less than one batch" in warning for warning in mixed.warnings)


@pytest.mark.parametrize("longest", [65, 128, 129, 1000, 4096, 4097, 8192])
def test_more_than_64_widths_are_named_with_a_grid_that_leaves_64(longest: int) -> None:
    lengths = np.unique(np.linspace(1, longest, 400).astype(int))
    batching = Batching(token_budget=16384, max_rows=1)
    report = plan_of(lengths, batching).report()
    (text,) = [warning for warning in report.warnings if " widths, " in warning]
    pattern = (
        rf"{report.widths:,} widths, {report.shapes:,} shapes of rows x width: attention that is "
        r"compiled per shape would be compiled for each; for it, pad_to=(\d+) leaves at most 64 "
        r"widths\."
    )
    grid = int(re.fullmatch(pattern, text)[1])
    remedied = plan_of(lengths, dataclasses.replace(batching, pad_to=grid)).report()
    assert remedied.widths <= 64
    assert not any(" widths, " in warning for warning in remedied.warnings)


@pytest.mark.parametrize(("widths", "warned"), [(64, False), (65, True)])
def test_sixty_four_widths_are_not_too_many(widths: int, warned: bool) -> None:
    report = plan_of(range(1, widths + 1), Batching(max_rows=1)).report()
    assert report.widths == widths
    assert any(" widths, " in warning for warning in report.warnings) == warned


def test_batch_mates_that_always_meet_again_are_named() -> None:
    lengths = [10] * 400 + [20] * 400
    text = "again 1.00: most rows meet the same batch-mates every epoch; use order=bucketed."
    batching = Batching(order="sorted", token_budget=200)
    assert plan_of(lengths, batching).report().warnings == (text,)
    remedied = dataclasses.replace(batching, order="bucketed")
    assert plan_of(lengths, remedied).report().warnings == ()


def test_no_warning_advises_what_is_set_already() -> None:
    # Ten rows in buckets of one batch each: they meet again, though order is bucketed.
    report = plan_of(range(1, 11), Batching(max_rows=4)).report()
    assert report.again > 0.5
    assert not any("use order=bucketed" in warning for warning in report.warnings)


@pytest.mark.parametrize("order", ["bucketed", "random"])
def test_a_plan_without_fault_warns_of_nothing(order: str) -> None:
    lengths = family("uniform")
    batching = Batching(order=order, pad_to=64, max_rows=512, token_budget=16384)
    report = plan_of(lengths, batching, world_size=4).report()
    assert report.warnings == ()
    assert "!" not in repr(report)


# -- text, HTML, plain types -----------------------------------------------------------------------


def story_report(**settings: object) -> PlanReport:
    plan = plan_of(story_lengths(40_000), Batching(**settings), world_size=8)
    return plan.report()


@pytest.mark.parametrize("settings", [{}, {"order": "sorted"}, {"pad_to": 64, "num_buckets": 16}])
def test_a_report_fits_a_hundred_columns(settings: dict) -> None:
    lines = repr(story_report(**settings)).splitlines()
    long = [line for line in lines if len(line) > 100 and not line.startswith("! ")]
    assert long == []


@pytest.mark.parametrize("world_size", [1, 8])
def test_the_text_says_what_was_planned_and_every_number(world_size: int) -> None:
    plan = plan_of(story_lengths(40_000), Batching(), epoch=2, world_size=world_size, accumulate=2)
    report = plan.report()
    lines = repr(report).splitlines()
    ranks = {1: "1 rank", 8: "8 ranks"}[world_size]
    assert lines[0] == (
        f"Epoch 2: 40,000 rows in {report.batches:,} batches, {plan.num_steps:,} steps on {ranks} "
        "x 2 accumulated (6 buckets, sort_window=32)"
    )
    cells = {line.split()[0]: line.split()[1] for line in lines if line}
    assert cells["efficiency"] == f"{report.efficiency:.3f}"
    assert cells["predicted"] == f"{report.predicted:.3f}"
    assert cells["fill"] == f"{report.fill:.3f}"
    assert cells["peak"] == f"{report.peak:.3f}"
    assert cells["widths"] == f"{report.widths:,}"
    assert cells["lag-1"] == f"{report.lag1:.3f}"
    assert cells["again"] == f"{report.again:.4f}"
    named = {line.rsplit(maxsplit=3)[0]: line.split()[-3:] for line in lines if line.count(" ") > 5}
    for name, deal in report.deals.items():
        shown = name + " (this plan)" * (name == "stratified")
        numbers = (deal.waiting_linear, deal.waiting_quadratic)
        assert named[shown] == [*(f"{n:.3f}" for n in numbers), f"{deal.step_std:.4f}"]
    (at_random,) = [line for line in lines if line.startswith("a random global batch")]
    assert at_random.split()[-1] == f"{report.random_step_std:.4f}"
    rows = [line for line in lines if line.startswith("(")]
    assert len(rows) == len(report.buckets) == 6
    for line, bucket in zip(rows, report.buckets, strict=True):
        assert line.split() == [
            f"({bucket.low},",
            f"{bucket.high}]",
            f"{bucket.rows:,}",
            f"{100 * bucket.token_share:.1f}%",
            f"{bucket.mean_length:,.0f}",
            f"{bucket.batch_rows:.1f}",
            f"{bucket.batch_width:,.0f}",
            f"{bucket.efficiency:.3f}",
            f"{bucket.predicted:.3f}",
        ]


@pytest.mark.parametrize(("world_size", "shown"), [(1, 1), (2, 3)])
def test_deals_are_compared_only_where_a_step_has_several_batches(
    world_size: int, shown: int
) -> None:
    batching = Batching(deal="aligned", token_budget=2000)
    report = plan_of(range(1, 200), batching, world_size=world_size).report()
    assert set(report.deals) == set(DEALS)
    lines = [line for line in repr(report).splitlines() if line.startswith(DEALS)]
    assert len(lines) == shown
    assert sum(line.startswith("aligned (this plan)") for line in lines) == 1


@pytest.mark.parametrize("order", ["sorted", "random"])
def test_the_title_of_a_plan_without_buckets_names_its_order(order: str) -> None:
    report = plan_of([5, 6, 7], Batching(order=order)).report()
    assert repr(report).startswith("Epoch 0: 3 rows in 1 batch, 1 step on 1 rank (")
    assert report.title.endswith(f"({order})")


class Balance(html.parser.HTMLParser):
    """Counts tags, and refuses one that is closed out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter = Counter()

    def handle_starttag(self, tag, attrs) -> None:
        self.open.append(tag)
        self.seen[tag] += 1

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def test_the_html_is_well_formed_and_says_the_same_as_the_text() -> None:
    report = story_report()
    text = report._repr_html_()
    balance = Balance()
    balance.feed(text)
    assert balance.open == []
    assert balance.seen["table"] == 3
    root = ET.fromstring(f"<div>{text}</div>")
    cells = [[cell.text or "" for cell in row] for row in root.iter("tr")]
    expected = []
    for table in report.tables():
        expected += [list(table.headers)] if any(table.headers) else []
        expected += [list(row) for row in table.rows]
    assert cells == expected
    titles = [table.title for table in report.tables() if table.title]
    assert [caption.text for caption in root.iter("caption")] == titles
    assert titles[0] == report.title
    assert [note.text for note in root.iter("p")] == list(report.warnings)


def test_the_html_escapes_every_text() -> None:
    nasty = "<b>a & b</b>"
    report = dataclasses.replace(
        plan_of([5]).report(), title=nasty, warnings=(nasty,), closed_by={nasty: 1.0}
    )
    root = ET.fromstring(f"<div>{report._repr_html_()}</div>")
    assert root.find(".//b") is None
    assert [note.text for note in root.iter("p")] == [nasty]
    assert next(root.iter("caption")).text == nasty
    assert any(nasty in (cell.text or "") for cell in root.iter("td"))


def leaves(value: object) -> list[object]:
    """Everything in nested dicts, tuples and lists that is none of these, and every key."""
    if type(value) is dict:
        return [*value, *(leaf for part in value.values() for leaf in leaves(part))]
    if type(value) in (tuple, list):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


@FEW
@given(plannable_cases())
def test_a_report_is_plain_types_that_json_keeps(case) -> None:
    lengths, batching, arguments = case
    report = plan_epoch(lengths, batching, **arguments).report()
    numbers = report.to_dict()
    assert numbers.keys() == {field.name for field in dataclasses.fields(report)}
    assert {type(leaf) for leaf in leaves(numbers)} <= set(PLAIN)
    back = json.loads(json.dumps(numbers, allow_nan=False))
    assert back["efficiency"] == report.efficiency
    assert back["buckets"] == [dataclasses.asdict(bucket) for bucket in report.buckets]
    assert back["deals"].keys() == set(DEALS)
    assert back["deals"][report.deal]["step_std"] == report.step_std
    assert repr(report)
