"""The ``diagnose`` command: why the loss of a run jumps, and which rows are behind a step.

It works where NumPy is all that is installed, so it reads its own options.
"""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from dflash_lightning.data.row_facts import RowFacts, describe_rows, find_tokenizer
from dflash_lightning.data.sources import sources_of
from dflash_lightning.data.step_text import row_table
from dflash_lightning.data.steps import find_store, rows_of_step
from dflash_lightning.data.store import write_json
from dflash_lightning.diagnosis import (
    Deviator,
    Run,
    Sources,
    deviators,
    diagnose,
    read_run,
    tops_of,
)
from dflash_lightning.figure import check_plot
from dflash_lightning.table import Table, wrapped

LISTED = 20  # rows of --rows on the terminal
RUNS = """\
RUN is a run folder (or the folder above version_0, version_1, ...), its ledger.csv, Lightning's
metrics.csv, a CSV file with step and loss, an offline W&B folder, or ENTITY/PROJECT/RUN_ID of W&B.
"""


class _Parser(ArgumentParser):
    """Tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. See dflash-lightning diagnose --help.")


def main(words: Sequence[str]) -> None:
    """Carry out the command.

    Args:
        words: Of the command line, behind ``diagnose``.

    Raises:
        ValueError: An option is wrong, or the run cannot be read.
    """
    options = _parser().parse_args(words)
    _check_options(options)
    run = read_run(options.run)
    _check_tokenizer(run, options)
    if options.step is not None:
        _step(run, options)
    elif options.rows:
        _rows(run, options)
    else:
        _whole(run, options)


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog="dflash-lightning diagnose",
        description=f"Say why the loss of a run jumps, and whether it is on track.\n\n{RUNS}",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="the run to read, see above")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--baseline", metavar="RUN", help="another run to compare with")
    what.add_argument(
        "--step", type=int, metavar="N", help="name the rows of optimizer step N, counted from 0"
    )
    what.add_argument(
        "--rows", action="store_true", help="list the rows that deviate most, again and again"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw a picture here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers here")
    parser.add_argument(
        "--store",
        type=Path,
        metavar="FOLDER",
        help="the run's prepared rows, where they are not where the run had them",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="the tokenizer that shows words of the rows of --step or --rows, where the run's own "
        "is not here: a folder, or a name that was fetched before",
    )
    return parser


def _check_options(options: Namespace) -> None:
    """Refuse options that do not go together, and files that could not be written."""
    alone = options.step is None and not options.rows
    if options.plot is not None:
        if not alone:
            raise ValueError(
                f"plot shows the whole run, got {options.plot} together with step or rows. Leave "
                "one out."
            )
        check_plot(options.plot)
    if options.tokenizer is not None and alone:
        raise ValueError(
            f"tokenizer shows words of the rows that step or rows name, got {options.tokenizer} "
            "without them. Give --step N or --rows, or leave it out."
        )
    for name, path in (("plot", options.plot), ("json", options.json)):
        if path is not None:
            _check_place(name, path)


def _check_place(name: str, path: Path) -> None:
    """Refuse a file that could not be written."""
    if path.is_dir():
        raise ValueError(f"{name} must be a file to write, {path} is a folder. Give a file in it.")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ValueError(
            f"{name} must be a file that can be written, {above} does not take {path}. Give "
            "another place."
        )


def _check_tokenizer(run: Run, options: Namespace) -> None:
    """Refuse a tokenizer that shows no words, where the rows are at hand."""
    if options.tokenizer is None:
        return
    store, _ = find_store(run.header, options.store)
    if store is not None and find_tokenizer(options.tokenizer, store) is None:
        raise ValueError(
            f"tokenizer must be the one that prepared {store.path}, on this machine, and take "
            f"transformers to read; got {options.tokenizer}. Leave it out to see token ids."
        )


def _whole(run: Run, options: Namespace) -> None:
    """The diagnosis."""
    sources, missing = _sources(run, options.store)
    found = diagnose(run, options.baseline, sources=sources)
    if missing:
        found = replace(found, missing=(*found.missing, missing))
    sys.stdout.write(f"{found}\n")
    if options.json is not None:
        write_json(options.json, found.to_dict())
    if options.plot is not None:
        found.plot(options.plot)


def _sources(run: Run, given: Path | None) -> tuple[Sources | None, str]:
    """What steps drew of each source, or why it is not known where the run's store is there.

    A store that was given has to be right. One that the run left behind may be damaged, or of
    another version: the loss is explained without it.
    """
    if given is not None:
        return sources_of(run, given), ""
    try:
        return sources_of(run), ""
    except (OSError, ValueError) as error:
        return None, f"the sources that steps drew: {' '.join(str(error).split())}"


def _step(run: Run, options: Namespace) -> None:
    """The rows of a step."""
    found = rows_of_step(run, options.step, store=options.store, tokenizer=options.tokenizer)
    sys.stdout.write(f"{found}\n")
    if options.json is not None:
        write_json(options.json, found.to_dict())


def _rows(run: Run, options: Namespace) -> None:
    """The rows that deviate most, over the run."""
    tops = tops_of(run)
    if tops is None:
        raise ValueError(
            f"rows take the top rows of at least three steps, {run.kind} of {run.name} names "
            "fewer. Give the folder of a run whose steps have several rows of a bucket."
        )
    found = deviators(tops)
    store, missing = find_store(run.header, options.store)
    facts = []
    if store is not None:
        facts = describe_rows(
            store,
            [deviator.row for deviator in found],
            boundaries=run.header.get("boundaries", ()),
            tokenizer=options.tokenizer or run.header.get("tokenizer"),
        )
    sys.stdout.write(_rows_text(run, found, facts, missing) + "\n")
    if options.json is not None:
        known = [fact._asdict() for fact in facts] or [{} for _ in found]
        rows = [deviator.to_dict() | fact for deviator, fact in zip(found, known, strict=True)]
        told = {"run": run.name, "rows": rows, "bound": tops.bound, "missing": missing}
        write_json(options.json, told)


def _rows_text(run: Run, found: Sequence[Deviator], facts: Sequence[RowFacts], missing: str) -> str:
    """A line on what the list is, the list, and what would name the rows."""
    shown = found[:LISTED]
    if not shown:
        return wrapped(
            f"{run.name}: no row was the top row of more than one step. Rows come once an epoch: "
            "ask again after the next."
        )
    far = sum(deviator.far for deviator in found)
    head = (
        f"{run.name}: {len(found):,} rows were the top row of more than one step; {far:,} of them "
        f"{'lies' if far == 1 else 'lie'} far beyond what top rows usually are (*), which is how "
        "bad data looks. Distance in deviations of a row in its bucket."
    )
    parts = [wrapped(head)]
    columns = {
        "times": [str(d.times) for d in shown],
        "distance": ["*" * d.far + f"{d.size:.1f}" for d in shown],
        "pull": [f"{d.pull:+.3f}" for d in shown],
    }
    if facts:
        parts.append(row_table(facts[:LISTED], columns))
    else:
        columns = {"row": [str(d.row) for d in shown], **columns}
        columns["steps"] = [", ".join(map(str, d.steps[-5:])) for d in shown]
        cells = list(zip(*columns.values(), strict=True))
        parts.append(Table("", list(columns), cells, "rrrrl").text())
    if len(found) > LISTED:
        parts[-1] += f"\n... and {len(found) - LISTED:,} more; --json has all"
    if missing:
        parts.append(wrapped(missing))
    return "\n\n".join(parts)
