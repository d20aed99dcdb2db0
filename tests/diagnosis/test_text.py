"""A diagnosis in words: what it says, how wide, and HTML that nothing can break."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from diagnosis import example

from dflash_lightning.diagnosis.result import Cause, Diagnosis, Share
from dflash_lightning.diagnosis.text import html, text

EXAMPLES = (example.orange, example.against_purple, example.troubled, example.bare)


def only_mix() -> Diagnosis:
    """A source that knows buckets, but not the noise of their rows."""
    return replace(
        example.orange(),
        shares={"mix": Share(0.6, 0.5, 0.7, 0.05), "noise": None, "rest": None},
        facts={},
    )


def flat(words: str) -> str:
    """Without line breaks and indents."""
    return " ".join(words.split())


@pytest.mark.parametrize("make", [*EXAMPLES, only_mix])
def test_no_line_is_wider_than_100_columns(make) -> None:
    wide = replace(
        make(),
        name="a/" * 70 + "run",
        remedy="https://" + "x" * 150 + " " + "words " * 60,
        missing=("one " * 80, "y" * 205),
        facts={"mix": "which " * 50, "noise": "z" * 120, "rest": "so " * 40},
    )
    for diagnosis in (make(), wide):
        lines = text(diagnosis).splitlines()
        assert max(map(len, lines)) <= 100
        assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("make", EXAMPLES)
def test_the_answer_without_reasons_fits_a_screen_and_ends_with_the_verdict(make) -> None:
    lines = text(replace(make(), reasons=())).splitlines()
    assert len(lines) <= 33
    last = max(i for i, line in enumerate(lines) if not line.startswith(" "))
    assert lines[last].startswith(f"Verdict: {make().verdict}.")


def test_the_first_lines_tell_steps_deviation_and_shares() -> None:
    title, *lines = text(example.orange()).splitlines()[:6]
    assert title.split("  ")[0] == "Why does the loss of orange jump?"
    assert title.endswith("  steps 60..310, standard deviation from step to step 0.203")
    assert len(title) == 100
    assert lines == [
        "  71 %  length mix      which buckets a step drew: 1.9 in (0, 770], 2.6 in (3296, 8192]",
        "  26 %  sampling noise  about 5,100 labels a step; expected from the rows' own spread",
        "   3 %  unexplained     95 % interval -2 .. 7 %: nothing to explain",
        "Warm-up: step 310 of 4,200, rate 1.2e-5 of 6.0e-4; judged again once it ends.",
        "Mix-adjusted loss of the last 50 steps: 4.312 [4.291, 4.333].",
    ]


def test_the_five_answers_are_sentences() -> None:
    run = example.orange()
    assert run.random is not None
    run = replace(run, random=replace(run.random, average_raw=6600, apart_same_plan=24))
    block = text(run).split("Just randomness?\n")[1].split("\n\n")[0]
    assert flat(block) == (
        "No step depends on the steps before: neighbours correlate by 0.03 (chance: within 0.13), "
        "ten lags p = 0.46. Beyond two deviations: 4.8 % of the steps (chance: 4.6 %). "
        "An unexplained part above 7 % would have shown. "
        "To read the curve to +-0.05 nats, average 20 steps mix adjusted, 6,600 raw. "
        "To tell two runs 0.05 nats apart, compare 75 steps of each, or 24 where both draw the "
        "same rows. "
        "Deviation from step to step: 0.203 now, 0.189 with twice the rows a step, 0.113 with "
        "batching.deal=stratified."
    )


@pytest.mark.parametrize(
    ("lag1", "p_value", "said"),
    [
        (-0.001, 0.4, "No step depends on the steps before: neighbours correlate by 0.00 "),
        (0.2, 0.04, "Steps may depend on the steps before"),
        (0.5, 1e-9, "Steps depend on the steps before: neighbours correlate by 0.50 "),
        (0.5, 1e-9, "p < 0.001."),
        (-0.3, 0.04, "Steps may depend on the steps before"),
        (0.01, 0.002, "Steps depend on the steps before"),
    ],
)
def test_memory_is_told_from_correlation_and_ten_lags(lag1, p_value, said) -> None:
    run = example.orange()
    assert run.random is not None
    run = replace(run, random=replace(run.random, lag1=lag1, p_value=p_value))
    assert said in flat(text(run))


def test_causes_tell_steps_rows_and_share_once() -> None:
    found = text(example.troubled()).split("Found:\n")[1].split("\n\n")[0]
    assert flat(found).startswith(
        "rows: rows far beyond the others, likely bad data: row 4711 in 3 steps (steps 120, 410, "
        "700; 8 % of the variance) spread: the loss scatters 4.1 times as much (variance) from "
        "step 300 to 399, and its rows do not explain it divergence: "
    )
    assert "non finite: " in found
    unnamed = Cause(cause="rows", steps=(7,), rows=(12345, 6), says="bad rows")
    listed = replace(example.orange(), causes=(unnamed,))
    assert "  rows: bad rows (step 7; rows 12345, 6)\n" in text(listed)
    many = replace(unnamed, steps=tuple(range(1000, 1020)), rows=())
    assert "(steps 1,000, 1,001, 1,002, 1,003, 1,004, 1,005, 1,006, 1,007 and 12 more)" in flat(
        text(replace(listed, causes=(many,)))
    )


def test_the_comparison_is_told_once_with_the_name_of_the_baseline() -> None:
    run = example.against_purple()
    assert run.comparison is not None
    run = replace(run, reasons=(*run.reasons, f"Beside the baseline {run.comparison.says}."))
    said = flat(text(run))
    assert (
        "Against purple: at 7.9 M tokens, mix adjusted, difference +0.011 [-0.032, 0.054]" in said
    )
    assert said.count("no difference beyond chance") == 1
    assert html(run).count("no difference beyond chance") == 1
    same = replace(run, comparison=replace(run.comparison, same_rows=True))
    assert "Against purple (same rows, so noise cancels): at 7.9 M" in flat(text(same))


def test_what_a_source_cannot_tell_apart_is_one_number() -> None:
    lines = text(only_mix()).splitlines()[1:3]
    assert lines == [
        "  60 %  length mix",
        "  40 %  noise and rest  sampling noise and the unexplained are one number here",
    ]
    said = text(example.bare())
    assert "  Length mix, sampling noise and the unexplained are one number here.\n" in said
    assert "Cannot be told:\n  mix, noise and rest: the ledger.csv of a run folder" in said
    assert "would have shown" not in said
    assert "Deviation from step" not in said


def test_too_few_steps_leave_the_state_and_the_verdict() -> None:
    run = replace(example.bare(), random=None, missing=(), state="Too early to say more.")
    assert text(run).splitlines()[1:] == ["Too early to say more.", "", "Verdict: ON TRACK."]
    assert "one number" not in html(run)


class Checker(HTMLParser):
    """Fails on tags that are not closed in order; keeps the words."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.words = ""

    def handle_starttag(self, tag, attrs) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.words += data


def parsed(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


@pytest.mark.parametrize("make", [*EXAMPLES, only_mix])
def test_html_is_well_formed_and_says_what_the_text_says(make) -> None:
    run = make()
    page = parsed(run._repr_html_())
    for words in (run.name, run.verdict, *run.missing, *run.reasons, f"{run.std:.3f}"):
        assert words in page.words
    for cause in run.causes:
        assert cause.says in page.words
    assert ("details" in page.seen) == bool(run.reasons)


def test_bars_are_as_long_as_the_shares() -> None:
    page = html(example.orange())
    for width in ("71.2%", "26.2%", "2.6%"):
        assert f'<div style="width:{width};' in page
    assert ">71 %<" in page
    assert ">-2 to 7 %<" in page
    negative = Share(-0.02, -0.1, 0.06, 0.04)
    run = replace(example.orange(), shares={**example.orange().shares, "rest": negative})
    assert '<div style="width:0.0%;' in html(run)
    assert "  -2 %  unexplained " in text(run)


def test_html_escapes_every_text() -> None:
    bad = '<script>alert("x")</script>&'
    run = example.against_purple()
    assert run.comparison is not None
    run = replace(
        run,
        name=bad,
        kind=bad,
        causes=(Cause(cause="rows", steps=(1,), rows=(2,), says=bad),),
        comparison=replace(run.comparison, says=bad),
        missing=(bad,),
        reasons=("The reason " + bad.replace("x", "y"),),
        facts=dict.fromkeys(run.shares, bad),
        state=bad,
        remedy=bad,
        baseline=(bad, run.curves),
    )
    page = parsed(html(run))
    assert "script" not in page.seen
    assert page.words.count(bad) == 11


def test_printing_a_diagnosis_is_its_text() -> None:
    run = example.orange()
    assert str(run) == repr(run) == text(run)
