"""A diagnosis in words: for the terminal, at most 100 columns wide, and as HTML for notebooks."""

import html as escaping
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from dflash_lightning.diagnosis.result import Cause, Chance, Diagnosis, Share
from dflash_lightning.table import Table

WIDTH = 100
NAMES = {"mix": "length mix", "noise": "sampling noise", "rest": "unexplained"}
COLOURS = {"mix": "#4477aa", "noise": "#999999", "rest": "#cc3311"}
VERDICT_COLOURS = {"ON TRACK": "#228833", "WATCH": "#b8860b", "INVESTIGATE": "#cc3311"}
# Causes whose sentences tell their steps.
RANGES = ("spread", "period", "divergence", "learning_rate", "source")
ALL_ONE = "Length mix, sampling noise and the unexplained are one number here."
UNLIKELY = 0.01  # p-value from which steps are said to have a memory
SHOWN = 8  # steps or rows of a cause


def text(diagnosis: Diagnosis) -> str:
    """All of it, the verdict last."""
    parts = [
        [*_title(diagnosis), *_shares(diagnosis), *_level(diagnosis)],
        _block("Found:", (_cause_line(cause) for cause in diagnosis.causes)),
        _compared(diagnosis),
        _block("Just randomness?", _sentences(diagnosis.random)),
        _block("Cannot be told:", diagnosis.missing),
        _block("Reading it:", _reasons(diagnosis)),
        _hanging("", f"Verdict: {_verdict(diagnosis)}", 2),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _hanging(prefix: str, words: str, indent: int | None = None) -> list[str]:
    """Words behind a prefix, in lines that begin below the first word."""
    indent = len(prefix) if indent is None else indent
    return textwrap.wrap(
        words, WIDTH, initial_indent=prefix, subsequent_indent=" " * indent
    ) or [prefix.rstrip()]  # fmt: skip


def _block(title: str, items: Iterable[str]) -> list[str]:
    """A title and indented items; nothing without items."""
    lines = [line for item in items for line in _hanging("  ", item, 4)]
    return [title, *lines] if lines else []


def _title(diagnosis: Diagnosis) -> list[str]:
    question = f"Why does the loss of {diagnosis.name} jump?"
    where = _where(diagnosis)
    space = WIDTH - len(question) - len(where)
    if space < 2:
        return [*_hanging("", question, 2), *_hanging("  ", where)]
    return [question + " " * space + where]


def _where(diagnosis: Diagnosis) -> str:
    first, last = diagnosis.window
    return f"steps {first}..{last}, standard deviation from step to step {diagnosis.std:.3f}"


class _Line(NamedTuple):
    """One share as it is shown."""

    key: str
    name: str
    share: Share | None
    fact: str


def _share_lines(diagnosis: Diagnosis) -> list[_Line]:
    """The shares; one line of what the source cannot tell apart, none where that is all."""
    shares, facts = diagnosis.shares, diagnosis.facts
    if not any(shares.values()):
        return []
    mix = shares["mix"]
    if mix is not None and shares["noise"] is None and shares["rest"] is None:
        both = Share(1 - mix.share, 1 - mix.high, 1 - mix.low, mix.error)
        fact = facts.get("noise", "sampling noise and the unexplained are one number here")
        return [
            _Line("mix", NAMES["mix"], mix, facts.get("mix", "")),
            _Line("noise", "noise and rest", both, fact),
        ]
    return [_Line(key, NAMES[key], share, facts.get(key, "")) for key, share in shares.items()]


def _shares(diagnosis: Diagnosis) -> list[str]:
    lines = _share_lines(diagnosis)
    width = max(map(len, NAMES.values()))
    shown = [
        piece
        for line in lines
        for piece in _hanging(f"{_share_percents(line):>6}  {line.name:<{width}}  ", line.fact)
    ]
    return shown or ([] if diagnosis.random is None else _hanging("  ", ALL_ONE))


def _share_percents(line: _Line) -> str:
    return "?" if line.share is None else f"{percents(line.share.share)} %"


def percents(fraction: float) -> str:
    """A fraction as whole percents, without the sign."""
    return f"{round(100 * fraction):,}"


def _level(diagnosis: Diagnosis) -> list[str]:
    lines = [diagnosis.state] if diagnosis.state else []
    if diagnosis.mix_adjusted is not None:
        value, low, high = diagnosis.mix_adjusted
        named = "Mix-adjusted loss" if diagnosis.shares["mix"] is not None else "Loss"
        lines.append(f"{named} of the last 50 steps: {value:.3f} [{low:.3f}, {high:.3f}].")
    return [piece for line in lines for piece in _hanging("", line, 2)]


def _cause_line(cause: Cause) -> str:
    where = "; ".join(_cause_places(cause))
    return f"{cause.cause.replace('_', ' ')}: {cause.says}" + (f" ({where})" if where else "")


def _cause_places(cause: Cause) -> list[str]:
    """Steps, rows and share, as far as the sentence does not tell them."""
    places = []
    if cause.steps and cause.cause not in RANGES:
        places.append(
            f"step{'s' * (len(cause.steps) > 1)} {_some(map('{:,}'.format, cause.steps))}"
        )
    if not all(f"row {row} " in cause.says for row in cause.rows):
        # Row numbers are copied into other commands: no thousands separator.
        places.append(f"rows {_some(map(str, cause.rows))}")
    if cause.share is not None:
        places.append(f"{percents(cause.share)} % of the variance")
    return places


def _some(numbers: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    numbers = list(numbers)
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return ", ".join(numbers[:SHOWN]) + more


def _compared(diagnosis: Diagnosis) -> list[str]:
    line = _comparison(diagnosis)
    return _hanging("", line, 2) if line else []


def _comparison(diagnosis: Diagnosis) -> str:
    if diagnosis.comparison is None:
        return ""
    name = "the baseline" if diagnosis.baseline is None else diagnosis.baseline[0]
    same = " (same rows, so noise cancels)" if diagnosis.comparison.same_rows else ""
    return f"Against {name}{same}: {diagnosis.comparison.says.rstrip('.')}."


def _reasons(diagnosis: Diagnosis) -> list[str]:
    """The reasons, without what the comparison's line says."""
    comparison = diagnosis.comparison
    return [r for r in diagnosis.reasons if comparison is None or comparison.says not in r]


def _sentences(chance: Chance | None) -> list[str]:
    """The five answers."""
    if chance is None:
        return []
    lines = [_memory(chance)]
    if chance.noticed is not None:
        lines.append(f"An unexplained part above {percents(chance.noticed)} % would have shown.")
    lines += [_smoothing(chance), _apart(chance)]
    if len(chance.changes) > 1:
        changes = ", ".join(
            f"{value:.3f} {name if name == 'now' else 'with ' + name}"
            for name, value in chance.changes.items()
        )
        lines.append(f"Deviation from step to step: {changes}.")
    return lines


def _memory(chance: Chance) -> str:
    if chance.p_value < UNLIKELY:
        finding = "Steps depend on the steps before"
    elif abs(chance.lag1) > chance.lag1_band:
        finding = "Steps may depend on the steps before"
    else:
        finding = "No step depends on the steps before"
    p = "p < 0.001" if chance.p_value < 0.001 else f"p = {chance.p_value:.2g}"
    return (
        f"{finding}: neighbours correlate by {round(chance.lag1, 2) + 0.0:.2f} (chance: within "
        f"{chance.lag1_band:.2f}), ten lags {p}. Beyond two deviations: {100 * chance.outside:.1f} "
        "% of the steps (chance: 4.6 %)."
    )


def _smoothing(chance: Chance) -> str:
    adjusted, raw = chance.average_adjusted, chance.average_raw
    both = "" if adjusted == raw else f" mix adjusted, {raw:,} raw"
    return f"To read the curve to +-{chance.delta:.2g} nats, average {_steps(adjusted)}{both}."


def _apart(chance: Chance) -> str:
    same = chance.apart_same_plan
    also = "" if same is None else f", or {same:,} where both draw the same rows"
    return (
        f"To tell two runs {chance.apart_delta:.2g} nats apart, compare "
        f"{_steps(chance.apart_steps)} of each{also}."
    )


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def _verdict(diagnosis: Diagnosis) -> str:
    remedy = diagnosis.remedy
    return f"{diagnosis.verdict}. {remedy[:1].upper()}{remedy[1:]}".rstrip()


def html(diagnosis: Diagnosis) -> str:
    """The same for a notebook, on a light or a dark page."""
    colour = VERDICT_COLOURS[diagnosis.verdict]
    head = (
        f'<p style="font-size:1.15em"><b style="color:{colour}">{_safe(diagnosis.verdict)}</b> '
        f"{_safe(diagnosis.name)}</p>" + _paragraph(diagnosis.remedy)
    )
    about = f"Of the {diagnosis.kind}: {_where(diagnosis)} nats."
    parts = [
        head,
        _paragraph(about),
        _share_table(diagnosis),
        *map(_paragraph, _level(diagnosis)),
        _cause_table(diagnosis.causes),
        _paragraph(_comparison(diagnosis)),
        _list("Just randomness?", _sentences(diagnosis.random)),
        _list("Cannot be told", diagnosis.missing),
        _details("Reading it", _reasons(diagnosis)),
    ]
    return f'<div style="max-width:64em">{"".join(parts)}</div>'


def _safe(words: str) -> str:
    return escaping.escape(words)


def _paragraph(words: str) -> str:
    return f"<p>{_safe(words)}</p>" if words else ""


def _share_table(diagnosis: Diagnosis) -> str:
    rows = "".join(map(_share_row, _share_lines(diagnosis)))
    if not rows:
        return "" if diagnosis.random is None else _paragraph(ALL_ONE)
    head = "".join(f"<th>{title}</th>" for title in ("", "share", "", "95 %", ""))
    return f'<table style="margin:0 0 1em 0"><tr>{head}</tr>{rows}</table>'


def _share_row(line: _Line) -> str:
    share, bar, interval = line.share, "", ""
    if share is not None:
        filled = 100 * min(max(share.share, 0.0), 1.0)
        interval = f"{percents(share.low)} to {percents(share.high)} %"
        bar = (
            '<div style="width:11em;background:rgba(128,128,128,.22)">'
            f'<div style="width:{filled:.1f}%;height:.8em;background:{COLOURS[line.key]}"></div>'
            "</div>"
        )
    cells = (_safe(line.name), _share_percents(line), bar, interval, _safe(line.fact))
    return "<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in cells) + "</tr>"


def _cause_table(causes: tuple[Cause, ...]) -> str:
    if not causes:
        return ""
    rows = [(c.cause.replace("_", " "), c.says, "; ".join(_cause_places(c))) for c in causes]
    return Table("", ("found", "what", "where"), rows).html()


def _list(title: str, items: Iterable[str]) -> str:
    listed = "".join(f"<li>{_safe(item)}</li>" for item in items)
    return f"<p><b>{title}</b></p><ul>{listed}</ul>" if listed else ""


def _details(title: str, items: Iterable[str]) -> str:
    body = "".join(map(_paragraph, items))
    return f"<details><summary>{title}</summary>{body}</details>" if body else ""
