"""Callbacks: the first validation, progress with time left, and what a finished fit leaves."""

import sys
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

from dflash_lightning.batching.report import PlanReport
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.drafter.checkpoint import export, export_drafter
from dflash_lightning.module import DFlashModule


class ValidateAtBothEnds(Callback):
    """Validates before the first step, and after the last where ``max_steps`` ends an epoch early.

    Lightning's sanity check logs nothing, and a run cut by ``max_steps`` would end without a
    number for the drafter that it leaves.
    """

    def __init__(self) -> None:
        self.validated_step = -1

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember when the last validation was."""
        self.validated_step = trainer.global_step

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validate at the last step unless that was done; before the checkpoint is ranked."""
        last = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if last and trainer.enable_validation and self.validated_step != trainer.global_step:
            self._validate(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Run the whole validation at step 0."""
        if trainer.global_step == 0 and trainer.enable_validation:
            self._validate(trainer)

    @staticmethod
    def _validate(trainer: L.Trainer) -> None:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True


class TokenProgressBar(ProgressBar):
    """One bar over the real tokens of the whole run: tokens per second, and the time left from it.

    Tokens rather than steps, since a step over long rows takes longer than one over short rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bar: tqdm | None = None
        self.total_steps = 0
        self._enabled = True

    def disable(self) -> None:
        """Show nothing: Lightning's word to ranks other than 0."""
        self._enabled = False

    def enable(self) -> None:
        """Show the bar."""
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar over all tokens that the run will see."""
        module, data = parts(trainer)
        self.total_steps = module.total_steps()
        self.bar = tqdm(
            total=data.num_tokens(self.total_steps),
            unit="tok",
            unit_scale=True,
            smoothing=0.05,
            dynamic_ncols=True,
            file=sys.stderr,
            disable=not self._enabled,
        )

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Advance by the real tokens of a finished optimizer step, over all ranks."""
        if self.bar is None or trainer.fit_loop._should_accumulate():
            return
        stats = parts(trainer)[0].step_stats
        step = f"step {trainer.global_step}/{self.total_steps}"
        self.bar.set_description(step, refresh=False)
        self.bar.set_postfix(loss=f"{stats['loss']:.3f}", refresh=False)
        self.bar.update(int(stats["tokens"]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()

    def print(self, *args: Any, **_: Any) -> None:
        """Write a line above the bar."""
        if self._enabled:
            say(" ".join(map(str, args)))


class RunReport(Callback):
    """Says what a run will do, each validation, and what it leaves; exports the best drafter.

    The report of the plan goes to the terminal, to ``plan.txt`` and to W&B as tables.

    Args:
        export_dtype: Dtype of the exported weights.
    """

    def __init__(self, export_dtype: Literal["float32", "bfloat16"] = "bfloat16") -> None:
        self.export_dtype: Literal["float32", "bfloat16"] = export_dtype
        self.before: float | None = None
        self.best = 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print model, plan and steps."""
        module, data = parts(trainer)
        spec, weight = module.drafter.spec, module.drafter.fc.weight
        size = sum(p.numel() for p in module.drafter.parameters()) / 1e6
        say(
            f"drafter: {size:.1f} M parameters in {weight.dtype}, {spec.num_layers} layers, "
            f"block {spec.block_size}, target layers {list(spec.target_layer_ids)}, "
            f"mask id {spec.mask_token_id}"
        )
        folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        report = data.report()
        text = f"{report}\n\n{module.total_steps():,} optimizer steps in all"
        say(f"\n{text}\n")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.txt").write_text(text + "\n")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                log_plan(logger, report)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the numbers that matter."""
        values = trainer.callback_metrics
        if "val/est_tau" not in values:
            return
        tau, loss = float(values["val/est_tau"]), float(values["val/loss"])
        if trainer.state.fn == "fit":
            if self.before is None:
                self.before = tau
            else:
                self.best = max(self.best, tau)
        say(f"step {trainer.global_step}: val/loss {loss:.3f}, val/est_tau {tau:.3f}")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Export the best drafter into the run folder."""
        folder = run_folder(trainer) / "drafter"
        if not trainer.is_global_zero:
            return
        saver = trainer.checkpoint_callback
        best = saver.best_model_path if isinstance(saver, ModelCheckpoint) else ""
        if best:
            export(Path(best), folder, dtype=self.export_dtype)
        else:
            module = parts(trainer)[0]
            path = module.target.path
            export_drafter(module.drafter, folder, target=path, dtype=self.export_dtype)
        if self.before is not None and self.best:
            say(f"val/est_tau {self.before:.3f} before training, {self.best:.3f} after (best)")
        say(f"run folder {folder.parent}, drafter in {folder}")


def parts(trainer: L.Trainer) -> tuple[DFlashModule, DFlashDataModule]:
    """The module and the data module of a run.

    Raises:
        ValueError: If the trainer was given others.
    """
    module, data = trainer.lightning_module, vars(trainer).get("datamodule")
    if not isinstance(module, DFlashModule) or not isinstance(data, DFlashDataModule):
        raise ValueError(
            "trainer.fit must be given a DFlashModule and a DFlashDataModule, got "
            f"{type(module).__name__} and {type(data).__name__}."
        )
    return module, data


def log_plan(logger: WandbLogger, report: PlanReport) -> None:
    """Give W&B the report of a plan: a table of its buckets, one of the deals, and the whole."""
    values = report.to_dict()
    buckets, deals = values.pop("buckets"), values.pop("deals")
    logger.log_table("plan/buckets", list(buckets[0]), [list(row.values()) for row in buckets])
    columns = ["deal", *deals[report.deal]]
    rows = [[name, *deal.values()] for name, deal in deals.items()]
    logger.log_table("plan/deals", columns, rows)
    logger.log_hyperparams({"plan": values})


def run_folder(trainer: L.Trainer) -> Path:
    """Where a run leaves its files; call it on all ranks, since Lightning broadcasts the answer."""
    return Path(trainer.log_dir or trainer.default_root_dir)


@rank_zero_only
def say(line: str) -> None:
    """Print a line on rank 0, above any bar."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
