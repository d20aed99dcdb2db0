"""DFlashCLI: ``fit`` and ``validate`` from YAML, with what two parts share said once."""

import sys
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger

from dflash_lightning.callbacks import RunReport, TokenProgressBar, ValidateAtStart, run_folder
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.module import DFlashModule


class OneLineParser(LightningArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # noqa: ARG002
        """Print the message without usage and exit with status 2."""
        line = " ".join(message.split())
        sys.stderr.write(f"dflash-lightning: {line}\n")
        sys.exit(2)


class SaveRunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run folder, whichever loggers are on."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Write on fit only, on one rank."""
        if stage != "fit" or not trainer.is_global_zero:
            return
        folder = run_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        self.parser.save(
            self.config, folder / "config.yaml", skip_none=False, overwrite=True, multifile=False
        )
        for logger in trainer.loggers:
            if not isinstance(logger, CSVLogger):
                logger.log_hyperparams({"config": self.parser.dump(self.config, skip_none=False)})


class DFlashCLI(LightningCLI):
    """LightningCLI with this project's links and defaults."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The subcommands that are there."""
        known = LightningCLI.subcommands()
        return {name: known[name] for name in ("fit", "validate")}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """One parser class for everything; abbreviated options are mistakes."""
        kwargs["allow_abbrev"] = False
        parser = OneLineParser(**kwargs)
        parser.add_argument(
            "-c", "--config", action="config", help="Path to a YAML file; later ones win."
        )
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Say once what model and data share."""
        parser.link_arguments("seed_everything", "data.seed")
        parser.link_arguments("seed_everything", "model.seed")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val/est_tau",
                "checkpoint.mode": "max",
                "checkpoint.filename": "step={step}-est_tau={val/est_tau:.3f}",
                "checkpoint.auto_insert_metric_name": False,
                "checkpoint.save_last": True,
            }
        )


TRAINER_DEFAULTS = {
    "callbacks": [ValidateAtStart(), TokenProgressBar(), RunReport()],
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "gradient_clip_val": 1.0,
    "logger": {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": "runs", "name": ""},
    },
}


def build_cli(args: list[str] | None = None, *, run: bool = True) -> DFlashCLI:
    """Parse and, unless ``run`` is False, carry out a command.

    Args:
        args: Command line without the program's name; None takes ``sys.argv``.
        run: False only builds model, data and trainer: for tests and notebooks.
    """
    return DFlashCLI(
        DFlashModule,
        DFlashDataModule,
        args=args,
        run=run,
        trainer_defaults=TRAINER_DEFAULTS,
        seed_everything_default=0,
        save_config_callback=SaveRunConfig,
        auto_configure_optimizers=False,
        parser_kwargs={"prog": "dflash-lightning"},
    )
