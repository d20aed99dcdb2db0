"""Tables as text and as HTML."""

import html
import textwrap
from collections.abc import Sequence
from typing import NamedTuple


def wrapped(line: str) -> str:
    """A long line in lines of at most 100 columns, the later ones indented."""
    return textwrap.fill(line, 100, subsequent_indent="  ")


class Table(NamedTuple):
    """Cells to print.

    Args:
        title: A line above the table; may be empty.
        headers: One per column.
        rows: Cells, as many as headers.
        align: One letter per column, ``l`` or ``r``; by default the first is ``l``.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str = ""

    def text(self) -> str:
        """Columns of equal width."""
        lines = [self.headers, *self.rows] if any(self.headers) else list(self.rows)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        align = self.align or "l" + "r" * (len(widths) - 1)
        shown = [
            "  ".join(
                cell.ljust(width) if side == "l" else cell.rjust(width)
                for cell, width, side in zip(line, widths, align, strict=True)
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *shown] if self.title else shown)

    def html(self) -> str:
        """A table with its title as caption."""
        body = [_row("td", row) for row in self.rows]
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        head = _row("th", self.headers) if any(self.headers) else ""
        return f"<table>{caption}{head}{''.join(body)}</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
