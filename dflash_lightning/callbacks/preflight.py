"""Preflight: before step 0 every GPU trains the heaviest batches of the plan, without a trace."""

from dataclasses import asdict, dataclass

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng

from dflash_lightning.batching.heaviest import Heavy, heaviest
from dflash_lightning.callbacks.dry_step import attempt, untouched
from dflash_lightning.callbacks.memory import EXPAND, Memory, Meter, gigabytes, summary
from dflash_lightning.callbacks.run import parts, run_folder, say
from dflash_lightning.data.collate import Batch, BatchIndex
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.data.store import write_json
from dflash_lightning.functional.anchors import most_anchors, num_anchors


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One heavy batch and what training it took.

    Args:
        reason: In what it is the heaviest.
        step: Where it stands in the plan.
        rank: Likewise.
        micro: Likewise.
        rows: Its rows.
        width: Its padded length.
        tokens: Its real tokens.
        anchors: Its anchor slots, padded ones included.
        labels: Its labels.
        loss: Mean weighted cross-entropy in nats.
        seconds: Forward, backward and optimizer step, without building the batch.
        peak_bytes: Most memory at once, see :class:`Memory`; the most of all ranks.
        reserved_bytes: Likewise.
    """

    reason: str
    step: int
    rank: int
    micro: int
    rows: int
    width: int
    tokens: int
    anchors: int
    labels: int
    loss: float
    seconds: float
    peak_bytes: int
    reserved_bytes: int


class Preflight(Callback):
    """Trains the heaviest batches of the plan before step 0 and puts everything back.

    Memory then runs out at once and not days later, with the settings that help. Every rank trains
    the same batches, whoever's they are. Drafter, optimizer, schedule, counters, statistics and
    random states are afterwards as before.

    Afterwards ``results`` holds what each batch took, ``peak_bytes`` the most memory of all ranks,
    and ``tokens_per_second`` the real tokens of all ranks over the seconds of the tried batches.

    Args:
        enabled: False skips it.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.results: list[Trial] = []
        self.peak_bytes = 0
        self.tokens_per_second = 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Try the batches; before a checkpoint's optimizer state is restored."""
        self.results = []
        data = parts(trainer)[1]
        chosen = heaviest_of(data) if self.enabled else []
        if not chosen:
            return
        meter = Meter(trainer)
        with isolate_rng():
            failed = self._try_all(trainer, data, chosen, meter)
        meter.close()
        if failed is not None:
            raise ValueError(failed)
        self._report(trainer, meter)

    def _try_all(
        self, trainer: L.Trainer, data: DFlashDataModule, chosen: list[Heavy], meter: Meter
    ) -> str | None:
        """Try every batch; what to tell the user if one does not fit, on all ranks alike."""
        (optimizer,) = trainer.optimizers
        with untouched(optimizer) as put_back:
            # Once more before the first: moments and gradients are then there as in any later
            # step, and kernels are loaded.
            for i, heavy in enumerate([chosen[0], *chosen]):
                batch = batch_of(data, heavy)
                meter.start()
                loss = attempt(trainer, batch)
                memory = meter.stop(failed=loss is None)
                if memory is None:
                    return refusal(trainer, heavy, batch, meter)
                put_back()
                if i > 0 and loss is not None:
                    self.results.append(trial(heavy, batch, loss, meter.seconds, memory))
        return None

    def _report(self, trainer: L.Trainer, meter: Meter) -> None:
        """Say what was measured, and leave it in the run folder."""
        memory = meter.most
        self.peak_bytes = memory.peak
        seconds = sum(t.seconds for t in self.results)
        tokens = sum(t.tokens for t in self.results) * trainer.world_size
        self.tokens_per_second = tokens / max(seconds, 1e-9)
        for t in self.results:
            say(f"preflight, {t.reason}: {describe(t)}")
            if not np.isfinite(t.loss):
                say(f"preflight, {t.reason}: its loss is {t.loss}; a step with it will be skipped")
        say(
            f"preflight: {summary(memory, trainer.world_size)}; {self.tokens_per_second:,.0f} tok/s"
        )
        drafter, device = parts(trainer)[0].drafter, trainer.strategy.root_device
        if device.type != "cpu":
            shapes = f", {len(drafter.attention_shapes)} shapes" if drafter.attention_shapes else ""
            say(f"preflight: attention by {drafter.attention_on(device)}{shapes}")
        if memory.is_fragmented:
            say(
                f"preflight: {gigabytes(memory.gap)} are reserved and not usable (fragmentation). "
                f"Set {EXPAND} in the environment."
            )
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            numbers = {
                **memory._asdict(),
                "tokens_per_second": self.tokens_per_second,
                "batches": [asdict(t) for t in self.results],
            }
            write_json(folder / "preflight.json", numbers)


# -- which batches ---------------------------------------------------------------------------------


def heaviest_of(data: DFlashDataModule) -> list[Heavy]:
    """The heaviest batches of the current plan of a data module."""
    dials = {
        "rate": data.anchor_rate,
        "limit": data.anchors_per_row,
        "whole_block": data.whole_block,
    }

    def count(rows: np.ndarray) -> np.ndarray:
        masks = (data.train_store.row(int(row))[1] for row in data.train_rows[rows])
        return np.array([num_anchors(mask, **dials) for mask in masks])

    return heaviest(data.plan, most_anchors(data.plan.lengths, **dials), count)


def batch_of(data: DFlashDataModule, heavy: Heavy) -> Batch:
    """Build a batch, whichever rank it belongs to."""
    place = heavy.step, heavy.rank, heavy.micro
    rows = data.train_rows[data.plan.rows(*place)]
    dataset = data.train_dataloader().dataset
    return dataset[BatchIndex(data.epoch, rows, data.plan.width(*place))]


# -- words -----------------------------------------------------------------------------------------


def trial(heavy: Heavy, batch: Batch, loss: float, seconds: float, memory: Memory) -> Trial:
    """What is kept of a batch that was trained."""
    rows, width = batch.input_ids.shape
    return Trial(
        **heavy._asdict(),
        rows=rows,
        width=width,
        tokens=int(batch.lengths.sum()),
        anchors=batch.anchors.numel(),
        labels=len(batch.labels),
        loss=loss,
        seconds=seconds,
        peak_bytes=memory.peak,
        reserved_bytes=memory.reserved,
    )


def describe(t: Trial) -> str:
    """Size and cost of a batch, in words."""
    peak = f", peak {gigabytes(t.peak_bytes)}" if t.peak_bytes else ""
    return (
        f"{t.rows} x {t.width:,} tokens, {t.anchors:,} anchor slots, {t.labels:,} labels (step "
        f"{t.step:,}), {t.seconds:.2f} s{peak}"
    )


def refusal(trainer: L.Trainer, heavy: Heavy, batch: Batch, meter: Meter) -> str:
    """Why the run cannot be, and what helps, cheapest first."""
    rows, width = batch.input_ids.shape
    named = ", ".join(map(str, batch.rows[:3].tolist())) + (", ..." if rows > 3 else "")
    module, data = parts(trainer)
    ways = []
    if not module.drafter.checkpoint_layers:
        ways.append("set model.activation_checkpointing")
    if trainer.world_size > 1 and not module.shard_optimizer:
        ways.append("set model.shard_optimizer")
    if meter.most.is_fragmented:
        ways.insert(0, f"set {EXPAND} in the environment")
    ways += [
        "lower data.batching.token_budget and raise trainer.accumulate_grad_batches",
        "lower data.anchor_rate",
    ]
    return (
        "data.batching.token_budget must let the heaviest batches fit in memory, which ran out in "
        f"the preflight on the one with the {heavy.reason}: {rows} x {width:,} tokens, "
        f"{batch.anchors.numel():,} anchor slots (step {heavy.step:,} of the epoch, store rows "
        f"{named}), got token_budget={data.batching.token_budget}; "
        f"{summary(meter.most, trainer.world_size)}. Ways out, cheapest first: {'; '.join(ways)}."
    )
