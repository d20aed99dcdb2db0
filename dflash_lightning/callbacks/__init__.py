"""Callbacks: what a run does beside its steps, one file per concern."""

from dflash_lightning.callbacks.checkpoint_io import AtomicCheckpointIO
from dflash_lightning.callbacks.diagnosis import RunDiagnosis
from dflash_lightning.callbacks.ledger import Ledger
from dflash_lightning.callbacks.preflight import Preflight
from dflash_lightning.callbacks.profile import Profile
from dflash_lightning.callbacks.progress import TokenProgressBar
from dflash_lightning.callbacks.report import RunReport, log_plan
from dflash_lightning.callbacks.restart import WandbRun, join_run, open_wandb
from dflash_lightning.callbacks.resume_points import ResumePoints, Stopped
from dflash_lightning.callbacks.run import parts, run_folder, say
from dflash_lightning.callbacks.run_lock import check_writable
from dflash_lightning.callbacks.validation import ValidateAtBothEnds

__all__ = [
    "AtomicCheckpointIO",
    "Ledger",
    "Preflight",
    "Profile",
    "ResumePoints",
    "RunDiagnosis",
    "RunReport",
    "Stopped",
    "TokenProgressBar",
    "ValidateAtBothEnds",
    "WandbRun",
    "check_writable",
    "join_run",
    "log_plan",
    "open_wandb",
    "parts",
    "run_folder",
    "say",
]
