"""The command table. Nothing heavy is imported before a command is known."""

import difflib
import importlib
import os
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

TOOLS = {
    "regenerate": ("dflash_lightning.data.regenerate", "the target's own answers to train on"),
    "prepare": (
        "dflash_lightning.data.prepare",
        "chats to rows, loss mask, report of kept and rejected rows",
    ),
    "buckets": (
        "dflash_lightning.data.buckets",
        "padding, waiting and mixing of an epoch under every batching strategy",
    ),
    "diagnose": (
        "dflash_lightning.data.diagnose",
        "why the loss of a run jumps, in words, numbers and a picture",
    ),
    "export": (
        "dflash_lightning.drafter.checkpoint",
        "a checkpoint's drafter in the public format",
    ),
    "decode": (
        "dflash_lightning.decoding",
        "lossless speculative decoding: tau with interval, speed-up",
    ),
}
POSITIONAL = ("buckets", "export")  # tools whose required values are given by place
TRAINER = {
    "fit": "train a drafter",
    "validate": "validate a checkpoint",
    "plan": "memory, steps and hours per GPU from a fit configuration alone",
}


def main() -> None:
    """Entry point of ``dflash-lightning``."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(overview() + "\n")
        return
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # batches differ in size: no fragmentation
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    try:
        run(name, rest)
    except (ValueError, FileNotFoundError, ArgumentError) as error:
        if not is_ours(error):
            raise
        line = " ".join(str(error).split())
        more = f". See dflash-lightning {name} --help." if isinstance(error, ArgumentError) else ""
        sys.exit(f"dflash-lightning {name}: {line}{more}")


def run(name: str, rest: list[str]) -> None:
    """Carry out one command."""
    if name == "diagnose":  # numpy is all it needs
        from dflash_lightning.data.diagnose import main as read

        read(rest)
    elif name in TOOLS:
        from jsonargparse import auto_cli, set_parsing_settings

        set_parsing_settings(docstring_parse_attribute_docstrings=False)
        auto_cli(
            tool(name),
            args=rest,
            as_positional=name in POSITIONAL,
            prog=f"dflash-lightning {name}",
            allow_abbrev=False,
            exit_on_error=False,
        )
    elif name == "fit" and "--rehearse" in rest:
        from dflash_lightning.rehearsal import rehearse

        rehearse([word for word in rest if word != "--rehearse"])
    elif name in TRAINER:
        from lightning.fabric.utilities.exceptions import MisconfigurationException

        from dflash_lightning.callbacks import Stopped
        from dflash_lightning.cli import build_cli
        from dflash_lightning.planning import build_plan_cli

        try:
            build_plan_cli() if name == "plan" else build_cli()
        except Stopped as stop:
            leave(str(stop), stop.code)
        except MisconfigurationException as error:
            raise ValueError(str(error)) from error
    else:
        known = [*TRAINER, *TOOLS]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}."
        raise ValueError(f"unknown command {name!r}; {hint}")


def leave(line: str, code: int) -> NoReturn:
    """End a stopped run; ranks other than 0 end with 0, lest the launcher kill the rest."""
    from lightning.pytorch.utilities import rank_zero_only

    if vars(rank_zero_only).get("rank", 0) == 0:
        sys.stderr.write(f"dflash-lightning fit: {line}\n")
        sys.exit(code)
    sys.exit(0)


def tool(name: str) -> Callable[..., None]:
    """The function behind a tool, whose signature is its command line."""
    return getattr(importlib.import_module(TOOLS[name][0]), name)


def overview() -> str:
    """What ``--help`` prints."""
    rows = [*TRAINER.items(), *((name, text) for name, (_, text) in TOOLS.items())]
    lines = [f"  {name:12} {text}" for name, text in rows]
    return "\n".join(["usage: dflash-lightning COMMAND [options]; each has --help", "", *lines])


def is_ours(error: BaseException) -> bool:
    """Whether a check of the command line or of this package raised it: told in one line."""
    if isinstance(error, ArgumentError):
        return True
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(frame.filename).is_relative_to(Path(__file__).parent)


if __name__ == "__main__":
    main()
