"""The ``plan`` command: memory and time per GPU from a fit configuration alone."""

from dflash_lightning.planning.cli import build_plan_cli
from dflash_lightning.planning.job import Job, read_job
from dflash_lightning.planning.report import RunCost
from dflash_lightning.planning.steps import Steps, count_steps

__all__ = ["Job", "RunCost", "Steps", "build_plan_cli", "count_steps", "read_job"]
