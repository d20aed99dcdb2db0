"""The rows of a step as text."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

from dflash_lightning.data.row_facts import RowFacts
from dflash_lightning.table import Table, wrapped

if TYPE_CHECKING:
    from dflash_lightning.data.steps import StepRows

WIDTH = 100  # columns of the terminal
SOURCE_WIDTH = 16


def step_text(step: "StepRows", at_most: int) -> str:
    """What is known of a step, and its rows.

    Args:
        step: The step.
        at_most: Rows that are listed.
    """
    parts = ["\n".join(wrapped(line) for line in _head(step))]
    if any(bucket.get("rows") for bucket in step.buckets):
        parts.append(_bucket_table(step).text())
    if step.rows:
        extra = {}
        for name, values in zip(("rank", "micro"), zip(*step.places, strict=True), strict=True):
            if any(values):
                extra[name] = [str(value) for value in values[:at_most]]
        top = step.values.get("top_row")
        parts.append(row_table(step.rows[:at_most], extra, marked=top))
    if len(step.rows) > at_most:
        parts[-1] += f"\n... and {len(step.rows) - at_most:,} more; --json has all"
    if step.missing:
        parts.append(wrapped(step.missing))
    return "\n\n".join(parts)


def row_table(
    rows: Sequence[RowFacts],
    extra: Mapping[str, Sequence[str]] | None = None,
    *,
    marked: float | None = None,
) -> str:
    """Rows as a table of at most 100 columns.

    Args:
        rows: At least one.
        extra: More columns by name, a cell for each row, between the bucket and the words.
        marked: The row that gets an asterisk.

    Returns:
        The table; columns in which nothing is known are left out.
    """
    columns = {
        "row": ["*" * (r.row == marked) + str(r.row) for r in rows],
        "source": [clip(r.source, SOURCE_WIDTH) for r in rows],
        "line": [str(r.line) for r in rows],
        "tokens": [f"{r.length:,}" for r in rows],
        "bucket": ["" if r.bucket is None else str(r.bucket) for r in rows],
        **(extra or {}),
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    align = "".join("l" if name == "source" else "r" for name in columns) + "l"
    left = WIDTH - sum(2 + _needed([name, *cells]) for name, cells in columns.items())
    columns |= _words(rows, left)
    return Table("", list(columns), list(zip(*columns.values(), strict=True)), align).text()


def _words(rows: Sequence[RowFacts], width: int) -> dict[str, list[str]]:
    """Prompts and answers as the last column, which a table need not align."""
    each = (width - 2) // 2
    prompts, answers = [clip(r.prompt, each) for r in rows], [clip(r.answer, each) for r in rows]
    longest = max(map(wide, ["prompt", *prompts]))
    lines = [
        f"{prompt}{' ' * (longest - wide(prompt))}  {answer}"
        for prompt, answer in zip(["prompt", *prompts], ["answer", *answers], strict=True)
    ]
    return {lines[0]: lines[1:]}


def _needed(cells: Sequence[str]) -> int:
    """Columns of a terminal for cells that a table pads by their letters."""
    return max(map(len, cells)) + max(wide(cell) - len(cell) for cell in cells)


def wide(text: str) -> int:
    """Columns of a terminal that a text takes; some letters take two."""
    return len(text) + sum(east_asian_width(letter) in "WF" for letter in text)


def clip(text: str, width: int) -> str:
    """The beginning of a text in at most ``width`` columns of a terminal, 3 or more."""
    if wide(text) <= width:
        return text
    while wide(text) > width - 3:
        text = text[:-1]
    return text.rstrip(" .") + "..."


def _head(step: "StepRows") -> list[str]:
    """A line on the step, and one on the row that deviates most."""
    values = step.values
    where = f"Step {step.step} of {step.run}" + f", epoch {step.epoch}" * (step.epoch is not None)
    sizes = [f"{values[name]:,} {name}" for name in ("rows", "tokens", "labels") if name in values]
    loss = [f"loss {values['loss']:.4f}"] if "loss" in values else []
    skipped = ["update skipped"] if values.get("skipped") else []
    told = ", ".join([*loss, *sizes, *skipped])
    lines = [f"{where}: {told}" if told else where]
    if "top_row" in values:
        lines.append(_top_line(step))
    return lines


def _top_line(step: "StepRows") -> str:
    values = step.values
    known = next((r for r in step.rows if r.row == values["top_row"]), None)
    about = ""
    if known is not None:
        source = f"source {known.source}, " if known.source else ""
        about = f" ({source}line {known.line}, {known.length:,} tokens, bucket {known.bucket})"
    line = f"* row {values['top_row']}{about} deviates most"
    if "top_share" in values:
        line += f": {values['top_share']:.0%} of its bucket's deviations"
    if {"top_pull", "loss"} <= values.keys():
        line += f"; without it the loss would be {values['loss'] - values['top_pull']:.4f}"
    return line


def _bucket_table(step: "StepRows") -> Table:
    """Losses and shares of the buckets drawn; the deviation is that of sampling noise."""
    edges = step.boundaries
    lines = []
    for k, bucket in enumerate(step.buckets):
        if not bucket.get("rows"):
            continue
        span = f"({edges[k]:,}, {edges[k + 1]:,}]" if k + 1 < len(edges) else ""
        share = bucket.get("weight", 0) / max(step.values.get("weight", 0), 1e-12)
        loss = f"{bucket['loss']:.4f}" if "loss" in bucket else "-"
        noise = f"{bucket['noise'] ** 0.5:.4f}" if "noise" in bucket else "-"
        lines.append([str(k), span, f"{bucket['rows']:,}", f"{share:.0%}", loss, noise])
    headers = ["bucket", "tokens", "rows", "weight", "loss", "noise +-"]
    return Table("", headers, lines, "rrrrrr")
