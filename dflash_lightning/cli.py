"""DFlashCLI: ``fit`` and ``validate`` from YAML, with what two parts share said once."""

import difflib
import logging
import re
import warnings
import zipfile
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment

from dflash_lightning.budget import refuse_sharded_strategy
from dflash_lightning.callbacks import (
    AtomicCheckpointIO,
    Ledger,
    Preflight,
    Profile,
    ResumePoints,
    RunDiagnosis,
    RunReport,
    TokenProgressBar,
    ValidateAtBothEnds,
    WandbRun,
    check_writable,
    join_run,
    open_wandb,
    run_folder,
    say,
)
from dflash_lightning.checkpoints import (
    first_logger,
    newest_complete,
    read_checkpoint,
    run_root,
    run_version,
)
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.module import DFlashModule
from dflash_lightning.target import compute_dtype


class HelpfulParser(LightningArgumentParser):
    """Names the closest key where one does not exist."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an ``ArgumentError``."""
        unknown = re.search(r"(?:accept option '|arguments: --)([\w.]+)[^()]*$", message)
        close = closest(unknown[1], set(keys(self))) if unknown else None
        super().error(f"{message} (did you mean {close}?)" if close else message, ex)


def keys(parser: ArgumentParser) -> Iterator[str]:
    """Every key that a parser and its subcommands know."""
    for action in parser._actions:
        yield action.dest
        for sub in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from keys(sub)


def closest(key: str, known: set[str]) -> str | None:
    """The same key in another section, else one that begins so, else the one spelt most like it."""
    moved = [k for k in sorted(known) if k.rpartition(".")[2] == key.rpartition(".")[2]]
    longer = [k for k in sorted(known) if k.startswith(key)]
    alike = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    return next(iter(moved or longer or alike), None)


class SaveRunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run folder, whichever loggers are on."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Write on fit only, on one rank."""
        if stage != "fit":
            return
        folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        keep_older(folder / "config.yaml")
        self.parser.save(
            self.config, folder / "config.yaml", skip_unset=False, overwrite=True, multifile=False
        )
        for logger in trainer.loggers:
            if not isinstance(logger, CSVLogger):
                logger.log_hyperparams({"config": self.parser.dump(self.config, skip_unset=False)})


def keep_older(path: Path) -> None:
    """Rename a file of an earlier process of the run to ``NAME-1``, ``NAME-2``, ..."""
    if path.exists():
        count = len(list(path.parent.glob(f"{path.stem}-*{path.suffix}")))
        path.replace(path.with_name(f"{path.stem}-{count + 1}{path.suffix}"))


class DFlashCLI(LightningCLI):
    """LightningCLI with this project's links and defaults."""

    checkpoint: Path | None = None

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The subcommands that are there."""
        known = LightningCLI.subcommands()
        return {name: known[name] for name in ("fit", "validate")}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """One parser class for everything; abbreviated options are mistakes."""
        parser = HelpfulParser(**kwargs, allow_abbrev=False, exit_on_error=False)
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
            }
        )
        parser.add_lightning_class_args(ResumePoints, "resume")
        parser.add_class_arguments(RunDiagnosis, "diagnosis")
        parser.add_argument(
            "--preflight",
            type=bool,
            default=True,
            help="Train the heaviest batches before step 0, without a trace: memory runs out then.",
        )
        parser.add_argument(
            "--profile",
            action="store_true",
            help="Record the operators of a few steps, and say where the time of a step goes.",
        )
        parser.add_argument(
            "--rehearse",
            action="store_true",
            help="Two steps, a save, a restart, an export in a folder that goes; then say what the "
            "whole run takes.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and refuse what is no checkpoint before anything tries to read it."""
        super().parse_arguments(parser, args)
        command = self.config.get("subcommand")
        path = self.config.get(f"{command}.ckpt_path")
        if command == "fit" and path == "auto":
            self.checkpoint = newest_checkpoint(self.config["fit"]["trainer"])
            return
        if command == "validate" and path is None:
            raise ValueError(
                "ckpt_path must be given to validate: without it a drafter has random weights. "
                "Give one of the files in a run folder's checkpoints."
            )
        if path is not None and not zipfile.is_zipfile(path):
            raise ValueError(
                f"ckpt_path must be a checkpoint file that fit wrote; {path} is none. Give one of "
                "the files in a run folder's checkpoints."
            )
        self.checkpoint = None if path is None else Path(path)

    def _parse_ckpt_path(self) -> None:
        """Leave the settings alone: Lightning would put the checkpoint's over the user's."""

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Give the checkpoint that was found, whatever word it was asked for with."""
        given = super()._prepare_subcommand_kwargs(subcommand)
        return {**given, "ckpt_path": None if self.checkpoint is None else str(self.checkpoint)}

    def before_fit(self) -> None:
        """Refuse a folder that cannot be written; let the loggers of a restarted run go on."""
        if self.checkpoint is not None:
            found = read_checkpoint(self.checkpoint)
            if found is None:
                raise ValueError(
                    f"ckpt_path must be a whole checkpoint of fit; {self.checkpoint} is damaged or "
                    "of something else. Give another, or auto for the newest whole one."
                )
            join_run(self.trainer, found, self.checkpoint)
            self.model.starts_fresh = False
        folder = run_folder(self.trainer)
        if self.checkpoint is None and (folder / "checkpoints" / "last.ckpt").exists():
            raise ValueError(
                f"run folder {folder} must be new, or the run in it be continued; it holds another "
                "run's checkpoints. Give --ckpt_path auto to go on with that, or make a CSVLogger "
                "the first logger, which numbers its folders."
            )
        if self.trainer.is_global_zero:
            check_writable(folder)
        open_wandb(self.trainer)

    def before_instantiate_classes(self) -> None:
        """Settle what depends on the hardware, so that the saved configuration says it."""
        config: Any = self.config
        trainer = self._get(config, "trainer")
        if self._get(config, "rehearse"):
            raise ValueError("rehearse must be given as --rehearse on the command line.")
        refuse_sharded_strategy(trainer["strategy"])
        if trainer["precision"] is None:
            trainer["precision"] = default_precision(str(trainer["accelerator"]))

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Give every trainer callbacks of its own, without the bar where it is switched off."""
        config: Any = self.config_init
        preflight = Preflight(enabled=self._get(config, "preflight"))
        callbacks: list[Callback] = [WandbRun(), ValidateAtBothEnds(), RunReport(), preflight]
        if self._get(config, "trainer")["enable_progress_bar"] is not False:
            callbacks.append(TokenProgressBar())
        # What callbacks before the ledger do is part of a step; the diagnosis reads what it wrote.
        profile = Profile(enabled=self._get(config, "profile"))
        callbacks += [Ledger(), profile, self._get(config, "diagnosis")]
        self.trainer_defaults = {**self.trainer_defaults, "callbacks": callbacks}
        plugins = self._get(config, "trainer").get("plugins") or []
        plugins = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()]
        if SLURMEnvironment.detect():  # Lightning's own way saves inside a signal handler
            plugins.append(SLURMEnvironment(auto_requeue=False))
        try:
            return super().instantiate_trainer(plugins=plugins, **kwargs)
        except ValueError as error:
            raise ValueError(f"trainer: {error}") from error


TRAINER_DEFAULTS = {
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "gradient_clip_val": 1.0,
    "logger": {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": "runs", "name": ""},
    },
}


def newest_checkpoint(trainer: Any) -> Path | None:
    """The checkpoint to go on from, by a trainer's configuration; None where a new run starts."""
    kind = str((first_logger(trainer) or {}).get("class_path", ""))
    tells = trainer["logger"] is False or kind.endswith(("CSVLogger", "WandbLogger"))
    if not tells:
        raise ValueError(
            f"ckpt_path auto must know where runs are; {kind or 'logger: true'} does not tell. "
            "Make a CSVLogger the first logger, or give the file."
        )
    root, version = run_root(trainer), run_version(trainer)
    folders = [root, *root.glob("[!.]*")] if version is None else [root / version]
    newest, broken = newest_complete(folders)
    for path in broken:
        say(f"passed over {path}: it is not complete, or holds weights only")
    say(f"no checkpoint in {root}: a new run" if newest is None else f"going on from {newest}")
    return newest


def default_precision(accelerator: str) -> str:
    """``bf16-mixed`` where the accelerator computes in bfloat16, else ``32-true``."""
    cuda = accelerator != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    return "bf16-mixed" if compute_dtype("auto", device) == torch.bfloat16 else "32-true"


def build_cli(args: list[str] | None = None, *, run: bool = True) -> DFlashCLI:
    """Parse and, unless ``run`` is False, carry out a command.

    Args:
        args: Command line without the program's name; None takes ``sys.argv``.
        run: False only builds model, data and trainer: for tests and notebooks.
    """
    # Lightning's advertisements and a deprecation inside its own code are not the user's business.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings(
        "ignore", message="It is recommended to use `self.log"
    )  # already global
    warnings.filterwarnings("ignore", message="`isinstance\\(treespec, LeafSpec\\)` is deprecated")
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
