"""Callbacks: first validation, progress and time left, and the drafter that a finished fit leaves behind."""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.drafter.checkpoint import export_drafter
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.module import DFlashModule


class ValidateAtStart(Callback):
    """Validates once before the first step, and logs it: the sanity check of Lightning logs nothing."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Run the whole validation at step 0."""
        if trainer.global_step == 0 and trainer.enable_validation:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True


class TokenProgressBar(ProgressBar):
    """One bar for the whole run, in real tokens: its rate is tokens per second, its time left follows from it.

    Tokens rather than steps, since steps over long rows take longer and a bar of steps would guess
    wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bar: tqdm | None = None
        self._enabled = True

    def disable(self) -> None:
        """Show nothing: Lightning's word to ranks other than 0."""
        self._enabled = False

    def enable(self) -> None:
        """Show the bar."""
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar over all tokens that the run will see."""
        data: DFlashDataModule = trainer.datamodule
        self.total_steps = pl_module.total_steps()
        planned = data.num_steps(trainer.max_epochs)
        total = data.tokens_per_epoch * trainer.max_epochs * self.total_steps // planned
        initial = total * trainer.global_step // self.total_steps
        self.bar = tqdm(
            total=total,
            initial=initial,
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
        outputs: Any,  # noqa: ANN401, ARG002
        batch: Any,  # noqa: ANN401, ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Advance by the real tokens of a finished optimizer step, over all ranks."""
        if self.bar is None or trainer.fit_loop._should_accumulate():
            return
        stats = pl_module.step_stats
        self.bar.set_description(f"step {trainer.global_step}/{self.total_steps}", refresh=False)
        self.bar.set_postfix(loss=f"{stats['loss']:.3f}", refresh=False)
        self.bar.update(stats["tokens"])

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()

    def print(self, *args: Any, **_: Any) -> None:  # noqa: ANN401
        """Write a line above the bar."""
        if self._enabled:
            tqdm.write(" ".join(map(str, args)), file=sys.stdout)


class RunReport(Callback):
    """Says what a run is about to do, each validation, and what it leaves; exports the best drafter.

    Args:
        export_dtype: Dtype of the exported weights.
    """

    def __init__(self, export_dtype: str = "bfloat16") -> None:
        self.export_dtype = export_dtype
        self.first: float | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print model, plan and steps."""
        data, spec = trainer.datamodule, pl_module.drafter.spec
        plan = data.report()
        size = sum(p.numel() for p in pl_module.drafter.parameters())
        _say(
            f"drafter: {size / 1e6:.1f} M parameters in {pl_module.drafter.fc.weight.dtype}, "
            f"{spec.num_layers} layers, "
            f"block {spec.block_size}, target layers {list(spec.target_layer_ids)}, mask id "
            f"{spec.mask_token_id}"
        )
        _say(
            f"plan: {plan['rows']} rows in {plan['batches']} batches, {plan['steps']} steps an "
            "epoch, "
            f"{pl_module.total_steps()} in all; padding efficiency {plan['efficiency']:.3f}, fill "
            f"{plan['fill']:.2f}"
        )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Print the numbers that matter."""
        values = trainer.callback_metrics
        if "val/est_tau" not in values:
            return
        tau, loss = float(values["val/est_tau"]), float(values["val/loss"])
        if trainer.state.fn == "fit":
            self.first = tau if self.first is None else self.first
        _say(f"step {trainer.global_step}: val/loss {loss:.3f}, val/est_tau {tau:.3f}")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Export the best drafter into the run folder."""
        if not trainer.is_global_zero:
            return
        folder = run_folder(trainer) / "drafter"
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        notes = f"Trained with dflash_lightning for {trainer.global_step} steps."
        if best:
            export_checkpoint(
                best, folder, pl_module.drafter, pl_module.target.path, self.export_dtype, notes
            )
        else:
            export_drafter(
                pl_module.drafter,
                folder,
                target=pl_module.target.path,
                dtype=self.export_dtype,
                notes=notes,
            )
        if self.first is not None:
            score = trainer.checkpoint_callback.best_model_score if best else None
            after = (
                float(score)
                if score is not None
                else float(trainer.callback_metrics["val/est_tau"])
            )
            _say(f"val/est_tau {self.first:.3f} before, {after:.3f} after (best)")
        _say(f"run folder: {run_folder(trainer)}; drafter in {folder}")


def run_folder(trainer: L.Trainer) -> Path:
    """Where a run leaves its files."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def export_checkpoint(
    checkpoint: str | Path, folder: Path, like: Drafter, target: str, dtype: str | None, notes: str
) -> None:
    """Export the drafter inside a Lightning checkpoint; ``like`` has its shape."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    drafter = Drafter(like.spec)
    drafter.load_state_dict(
        {k.removeprefix("drafter."): v for k, v in state.items() if k.startswith("drafter.")}
    )
    export_drafter(drafter, folder, target=target, dtype=dtype, notes=notes)


@rank_zero_only
def _say(line: str) -> None:
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
