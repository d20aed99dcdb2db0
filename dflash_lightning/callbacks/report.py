"""What a run will do, and what a finished fit leaves."""

from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger

from dflash_lightning.batching.report import PlanReport
from dflash_lightning.callbacks.resume_points import ResumePoints
from dflash_lightning.callbacks.run import callbacks_of, parts, run_folder, say
from dflash_lightning.checkpoints import changes_table
from dflash_lightning.drafter.checkpoint import export, export_drafter


class RunReport(Callback):
    """Says what a run will do, each validation, and what it leaves; exports the best drafter.

    The report of the plan goes to the terminal, to ``plan.txt`` and to W&B as tables.

    Args:
        export_dtype: Dtype of the exported weights.
    """

    def __init__(self, export_dtype: Literal["float32", "bfloat16"] = "bfloat16") -> None:
        self.export_dtype: Literal["float32", "bfloat16"] = export_dtype
        self.report: PlanReport | None = None  # of the plan the fit began with, on rank 0
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
        report = self.report = data.report()
        text = "\n".join([f"{report}\n", *self._outlook(trainer)])
        say(f"\n{text}\n")
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "plan.txt").open("a" if module.resumed is not None else "w") as file:
            file.write(text + "\n")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                log_plan(logger, report)

    @staticmethod
    def _outlook(trainer: L.Trainer) -> list[str]:
        """Steps, rates and saves to come; after a restart also where it is and what changed."""
        module, _ = parts(trainer)
        lines = []
        if module.resumed is not None:
            epoch, done = module.resumed.epoch, sum(s for _, _, s in module.resumed.segments)
            state = "finished" if module.resumed.finished else f"after {done:,} of its steps"
            lines.append(f"restart {module.progress['restarts']}: epoch {epoch} {state}")
            if module.total_steps() <= module.resumed_step:
                lines.append("all its steps are done; raise trainer.max_epochs for more")
            lines += ["", changes_table(module.changes), ""] if module.changes else []
        total, warmup = module.total_steps(), module.effective_warmup()
        first, last = (module.lr * module.rate_factor(step) for step in (0, total - 1))
        lines.append(f"{total:,} optimizer steps in all")
        lines.append(
            f"learning rate {first:.3g} at the first step, {module.lr:g} at step {warmup:,}, where "
            f"the warm-up ends, then {module.schedule}, {last:.3g} at the last step"
        )
        saver = next(iter(callbacks_of(trainer, ResumePoints)), None)
        return [*lines, f"saves to go on from: {saver}"] if saver else lines

    def state_dict(self) -> dict[str, Any]:
        """The first and the best estimate of the run, over all its processes."""
        return {"before": self.before, "best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.before, self.best = state_dict["before"], state_dict["best"]

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
        savers = callbacks_of(trainer, ModelCheckpoint)
        best = savers[0].best_model_path if savers else ""
        if best and Path(best).is_file():
            export(Path(best), folder, dtype=self.export_dtype)
        else:
            module = parts(trainer)[0]
            path = module.target.path
            export_drafter(module.drafter, folder, target=path, dtype=self.export_dtype)
        if self.before is not None and self.best:
            say(f"val/est_tau {self.before:.3f} before training, {self.best:.3f} after (best)")
        say(f"run folder {folder.parent}, drafter in {folder}")


def log_plan(logger: WandbLogger, report: PlanReport) -> None:
    """Give W&B the report of a plan: a table of its buckets, one of the deals, and the whole."""
    values = report.to_dict()
    buckets, deals = values.pop("buckets"), values.pop("deals")
    logger.log_table("plan/buckets", list(buckets[0]), [list(row.values()) for row in buckets])
    columns = ["deal", *deals[report.deal]]
    rows = [[name, *deal.values()] for name, deal in deals.items()]
    logger.log_table("plan/deals", columns, rows)
    logger.log_hyperparams({"plan": values})
