"""``plan``: parses what ``fit`` parses, and builds nothing."""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L

from dflash_lightning.cli import TRAINER_DEFAULTS, DFlashCLI
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.data.store import write_json
from dflash_lightning.module import DFlashModule
from dflash_lightning.planning.job import read_job
from dflash_lightning.planning.report import RunCost
from dflash_lightning.planning.steps import count_steps, find_rows
from dflash_lightning.planning.text import cost_text


class PlanTrainer(L.Trainer):
    """Never built; its ``plan`` holds the options of the command."""

    def plan(
        self,
        model: L.LightningModule,
        datamodule: L.LightningDataModule,
        lengths: Path | None = None,
        tokens_per_second: float | None = None,
        gpu_memory: float = 96.0,
        gpu: str | None = None,
        json: Path | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Memory, steps and hours per GPU of a fit configuration, without GPU, weights or network.

        Args:
            model: Not built.
            datamodule: Not set up.
            lengths: A ``.npy`` file of row lengths in tokens in place of the store's training rows.
            tokens_per_second: Real tokens a second of all GPUs together, for the hours.
            gpu_memory: Memory of one GPU in GB (1e9 bytes).
            gpu: Name of the GPU, such as H200, for the share of its peak.
            json: Also write all numbers here.
            ckpt_path: As in fit; changes nothing here.
            weights_only: As in fit; changes nothing here.
        """
        raise NotImplementedError  # LightningCLI reads the signature; PlanCLI does the work


class PlanCLI(DFlashCLI):
    """The command line of ``fit`` under another name."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """``plan`` alone."""
        return {"plan": {"model", "datamodule"}}

    def before_instantiate_classes(self) -> None:
        """The hardware here is not that of the run."""

    def instantiate_classes(self) -> None:
        """Build nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        config: dict[str, Any] = self.config[subcommand].as_dict()
        cost = cost_of(config)
        sys.stdout.write(cost_text(cost) + "\n")
        if config["json"]:
            write_json(Path(config["json"]), cost.to_dict())


def cost_of(config: dict[str, Any]) -> RunCost:
    """What a run costs.

    Args:
        config: The parsed configuration with the options of ``plan``.

    Raises:
        ValueError: A setting or option is refused.
    """
    for name in ("gpu_memory", "tokens_per_second"):
        if config[name] is not None and not config[name] > 0:
            raise ValueError(f"{name} must be above 0, got {config[name]}. Leave it out if unsure.")
    job = read_job(config)
    ends = job.epochs is not None or job.max_steps is not None
    lengths = config["lengths"]
    rows = find_rows(job, None if lengths is None else Path(lengths)) if ends else None
    return RunCost(
        job=job,
        rows=rows,
        steps=None if rows is None else count_steps(rows.lengths, job),
        gpu_memory=int(config["gpu_memory"] * 1e9),
        tokens_per_second=config["tokens_per_second"],
        gpu=config["gpu"],
    )


def build_plan_cli(args: list[str] | None = None) -> PlanCLI:
    """Parse a command line that begins with ``plan``, and carry it out.

    Args:
        args: Command line without the program's name; None takes ``sys.argv``.
    """
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="`isinstance\\(treespec, LeafSpec\\)` is deprecated")
    return PlanCLI(
        DFlashModule,
        DFlashDataModule,
        args=args,
        trainer_class=PlanTrainer,
        trainer_defaults=TRAINER_DEFAULTS,
        seed_everything_default=0,
        save_config_callback=None,
        auto_configure_optimizers=False,
        parser_kwargs={"prog": "dflash-lightning"},
    )
