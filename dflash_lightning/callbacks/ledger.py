"""The ledger writer: one row per optimizer step, and the same quantities for the loggers."""

import time
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.hooks import RemovableHandle

from dflash_lightning.batching import EpochPlan
from dflash_lightning.batching.cost import rank_work
from dflash_lightning.batching.report import PlanReport
from dflash_lightning.budget import TargetSizes, target_sizes
from dflash_lightning.callbacks.ledger_file import LedgerFile
from dflash_lightning.callbacks.rate import Rate, Stopwatch
from dflash_lightning.callbacks.report import RunReport
from dflash_lightning.callbacks.restart import wandb_logger
from dflash_lightning.callbacks.run import callbacks_of, parts, run_folder, say
from dflash_lightning.callbacks.step_values import step_values
from dflash_lightning.callbacks.utilisation import flops_of, peak_of
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.functional.anchors import draw_anchors, labelled_slots
from dflash_lightning.module import DFlashModule
from dflash_lightning.phases import CudaInstant, HostInstant, PhaseClock

FORMAT = 1
SAMPLED_ROWS = 500  # of each bucket, for the shares of weight: a few percent of error
FEW_STEPS = 30  # of what a restart left of an epoch: too few to tell how deals differ


class Ledger(Callback):
    """Writes ``ledger.csv`` on rank 0; logs buckets, rates and the time left on all ranks.

    The seconds of a step are those of waiting for data and of computing, over its batches; what
    validation and saving take is in neither. They are rank 0's, who waits for the slowest rank in
    every step; waiting for data is the mean of all ranks. So are those of its phases, which do not
    cover moving the batch, the host's own work and logging; see :class:`PhaseClock` for CUDA.

    Args:
        peak_flops: Operations a second that all ranks could do together; null looks the card up.
            ``train/mfu`` is logged where it is known.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        self.peak_flops = peak_flops
        self.file: LedgerFile | None = None
        self.rate = Rate()
        self.total_tokens = 0
        self.clock = Stopwatch()  # other callbacks may pause it for what is no part of a step
        self.trained_seconds = 0.0  # of the steps of this process
        self.row: dict[str, Any] = {}  # of the last step
        self._seconds = 0.0
        self._sizes: TargetSizes | None = None
        self._phases = PhaseClock()
        self._update: RemovableHandle | None = None
        self._work: tuple[str, np.ndarray, np.ndarray] = ("", np.zeros(0), np.zeros(0))

    # -- the run --------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the file, cut back to the step from which the run goes on."""
        module, data = parts(trainer)
        self.rate, self._seconds, self.trained_seconds = Rate(), 0.0, 0.0
        self.peak_flops = self.peak_flops or peak_of(trainer)
        self.total_tokens = data.num_tokens(module.total_steps())
        phases = PhaseClock(CudaInstant if module.device.type == "cuda" else HostInstant)
        module.phases, self._phases = phases, phases
        update = trainer.optimizers[0].register_step_post_hook(lambda *_: phases.mark(None))
        self._update = update
        folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        header = run_header(module, data, _plan_report(trainer, data))
        logger = wandb_logger(trainer)
        if logger is not None:  # others keep it in a file that has the ledger beside it, or as text
            logger.log_hyperparams({"ledger": header})
        self.file = LedgerFile(folder, header, say=say)
        cut = self.file.resume(trainer.global_step)
        if cut:
            say(
                f"ledger: {cut:,} rows from step {trainer.global_step} on are trained anew; the "
                f"old ones are in {self.file.replaced}"
            )

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Close the file."""
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the file."""
        self._close()

    def _close(self) -> None:
        if self._update is not None:
            self._update.remove()
        if self.file is not None:
            self.file.close()
            self.file = None

    # -- the clock ------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The wait for the epoch's first batch begins."""
        self.clock.take()
        self.clock.start()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The batch is there: count the wait, which is summed over ranks with the statistics."""
        module, data = parts(trainer)
        self._seconds += self.clock.take()
        module.extra["wait_seconds"] += data.take_wait()
        self.clock.start()
        self._phases.start()

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor
    ) -> None:
        """The module marks what comes before."""
        self._phases.mark("backward")

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The gradients of a batch are there."""
        self._phases.mark(None)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Reduction, clipping and update; the optimizer itself says when it is done."""
        self._phases.mark("optimizer")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validation is no part of a step."""
        self.clock.pause()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The wait goes on."""
        self.clock.start()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Saving is no part of a step; no hook says when it ends, so the clock stands till then."""
        self.clock.pause()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Write and log a finished optimizer step."""
        self._phases.stop()
        self._seconds += self.clock.take()
        if not trainer.fit_loop._should_accumulate():
            module, data = parts(trainer)
            phases = {f"{phase}_seconds": x for phase, x in self._phases.take().items()}
            row = {**module.step_stats, "time": time.time(), "seconds": self._seconds, **phases}
            self.row = row
            self._seconds = 0.0
            self.trained_seconds += row["seconds"]
            self.rate.add(tokens=row["tokens"], seconds=row["seconds"])
            if self.file is not None:
                self.file.write(row)
            step = data.run_plan.step_in_plan(int(row["step"]))
            waiting, width = self._work_of(data.plan, step)
            left = self.rate.seconds_left(self.total_tokens - row["tokens_seen"])
            values = {**step_values(row), "eta_hours": left / 3600, "rank_waiting": waiting}
            if pl_module.device.type == "cuda":
                values["attention_shapes"] = float(len(module.drafter.attention_shapes))
                # the gap between the two is fragmentation
                values["rank0_memory_peak_gb"] = (
                    torch.cuda.max_memory_allocated(pl_module.device) / 1e9
                )
                values["rank0_memory_reserved_gb"] = (
                    torch.cuda.memory_reserved(pl_module.device) / 1e9
                )
            if self.peak_flops is not None:
                self._sizes = self._sizes or target_sizes(module.target.config)
                spent = flops_of(trainer, row, width, self._sizes)
                values["mfu"] = spent / max(row["seconds"], 1e-9) / self.peak_flops
            # Tensors on the CPU: Lightning would copy a number to the device and wait for it. In
            # float64, which it keeps: a row number above 16.8 million is none in float32.
            tensors = {
                f"train/{name}": torch.tensor(x, dtype=torch.float64) for name, x in values.items()
            }
            pl_module.log_dict(tensors, batch_size=1)
        self.clock.start()

    # -- what is logged -------------------------------------------------------------------------

    def _work_of(self, plan: EpochPlan, step: int) -> tuple[float, float]:
        """The slowest rank's padded tokens over the mean rank's, and the mean width by tokens."""
        if self._work[0] != plan.fingerprint:
            linear, quadratic = rank_work(plan)
            waiting = linear.max(1) / linear.mean(1)
            self._work = plan.fingerprint, waiting, quadratic.sum(1) / linear.sum(1)
        _, waiting, width = self._work
        return float(waiting[step]), float(width[step])


def _plan_report(trainer: L.Trainer, data: DFlashDataModule) -> PlanReport:
    """The report that another callback has made already, since it takes a second for long plans."""
    made = [callback.report for callback in callbacks_of(trainer, RunReport)]
    return next((report for report in made if report is not None), None) or data.report()


def run_header(module: DFlashModule, data: DFlashDataModule, report: PlanReport) -> dict[str, Any]:
    """What a reader of the ledger needs to know of the run; plain types.

    Position and settings let a later plan name the rows of every step that follows; store and
    tokenizer say where the rows themselves were. ``deals`` is the deviation from step to step that
    each deal would have, if neighbouring buckets lay 0.1 nats apart; it is left out where a restart
    left too few steps of the epoch.
    """
    plan, batching = data.plan, data.batching
    buckets = plan.row_buckets(np.arange(len(data.train_rows)))
    rows = np.bincount(buckets, minlength=plan.num_buckets)
    deals = {name: deal.step_std for name, deal in report.deals.items()}
    few = bool(plan.done) and plan.num_steps < FEW_STEPS
    return {
        "format": FORMAT,
        "boundaries": list(plan.boundaries),
        "weight_share": weight_shares(data, module.objective.slot_weights.cpu().numpy()),
        "row_share": (rows / rows.sum()).tolist(),
        "warmup_steps": module.effective_warmup(),
        "total_steps": module.total_steps(),
        "peak_lr": module.lr,
        "world_size": data.world_size,
        "accumulate": data.accumulate,
        "position": data.position().to_dict(),
        "step": module.global_step,
        "settings": data.settings(),
        "store": str(data.train_store.path.absolute()),
        "tokenizer": module.target.prepare(),
        "order": batching.order,
        "deal": batching.deal,
        **({} if few else {"deals": deals}),
        "plan": plan.fingerprint,
        "attention": module.drafter.attention_on(module.device),
    }


def weight_shares(data: DFlashDataModule, slot_weights: np.ndarray) -> list[float]:
    """Share of each bucket in the weight of an epoch.

    The store does not say how many tokens of a row are supervised, and reading the loss mask of
    all rows would take as long as reading the store. So the weight of up to 500 rows of each
    bucket, evenly chosen, is worked out from their anchors in epoch 0: exact for small data, and
    within a few percent otherwise, also where ``anchors_per_row`` makes long rows count less than
    their tokens.

    Args:
        data: After setup.
        slot_weights: Weight of each token of a block, the anchor's first, ``[K]``; where weights
            depend on losses, those of a drafter that knows nothing.

    Returns:
        Shares that sum to 1, or zeros where no row has a label.
    """
    buckets = data.plan.row_buckets(np.arange(len(data.train_rows)))
    weights = []
    for k in range(data.plan.num_buckets):
        rows = data.train_rows[buckets == k]
        chosen = np.unique(np.linspace(0, len(rows) - 1, SAMPLED_ROWS).round().astype(np.int64))
        chosen = rows[chosen] if len(rows) else rows
        some = [_row_weight(data, int(row), slot_weights) for row in chosen] or [0.0]
        weights.append(len(rows) * float(np.mean(some)))
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def _row_weight(data: DFlashDataModule, row: int, slot_weights: np.ndarray) -> float:
    """Weight of a row's labels in epoch 0."""
    mask = data.train_store.row(row)[1]
    anchors = draw_anchors(
        mask,
        rate=data.anchor_rate,
        limit=data.anchors_per_row,
        key=(data.seed, 0, row),
        whole_block=data.whole_block,
    )
    labelled = labelled_slots(mask, anchors, data.block_size, holes=data.label_holes)
    return float((labelled * slot_weights.astype(np.float64)).sum())
