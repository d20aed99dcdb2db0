"""Callbacks: what a run does beside its steps, one file per concern."""

from dflash_lightning.callbacks.progress import TokenProgressBar
from dflash_lightning.callbacks.report import RunReport, log_plan
from dflash_lightning.callbacks.run import parts, run_folder, say
from dflash_lightning.callbacks.validation import ValidateAtBothEnds

__all__ = [
    "RunReport",
    "TokenProgressBar",
    "ValidateAtBothEnds",
    "log_plan",
    "parts",
    "run_folder",
    "say",
]
