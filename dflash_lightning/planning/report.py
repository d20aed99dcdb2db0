"""What a run costs: memory, steps, time, and the ways out where it does not fit."""

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dflash_lightning.budget import Sheet, drafter_parameters, flops_per_step, memory, peak_flops
from dflash_lightning.planning.job import RESUME_POINTS, Job
from dflash_lightning.planning.steps import Rows, Steps


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """Memory, steps and time of a run.

    Args:
        job: The run.
        rows: Its training rows; None where they are not known.
        steps: Its steps; None without rows.
        gpu_memory: Memory of a GPU in bytes.
        tokens_per_second: Real tokens a second of all GPUs together, if known.
        gpu: Name of the GPUs, if known.
    """

    job: Job
    rows: Rows | None
    steps: Steps | None
    gpu_memory: int
    tokens_per_second: float | None = None
    gpu: str | None = None

    @cached_property
    def sheet(self) -> Sheet:
        """Memory of one GPU."""
        return self._sheet(self.job)

    def _sheet(self, job: Job) -> Sheet:
        load = job.load(self.steps.longest if self.steps else None)
        return memory(job.target, job.spec, load, job.setup)

    @property
    def fits(self) -> bool:
        """Whether the peak stays within a GPU's memory."""
        return self.sheet.peak <= self.gpu_memory

    @property
    def hours(self) -> float | None:
        """Hours of the run at the given speed; validation is not counted."""
        if self.steps is None or self.tokens_per_second is None:
            return None
        return self.steps.total * self.steps.tokens_per_step / self.tokens_per_second / 3600

    @cached_property
    def flops(self) -> dict[str, float] | None:
        """Operations of a mean step of all GPUs, as if every token were supervised."""
        return self._flops(checkpointing=self.job.setup.activation_checkpointing)

    def _flops(self, *, checkpointing: bool) -> dict[str, float] | None:
        if self.steps is None:
            return None
        job, steps = self.job, self.steps
        rows_a_step = steps.rows * len(steps.epoch_steps) / sum(steps.epoch_steps)
        slots = min(
            job.data.anchor_rate * steps.tokens_per_step, job.data.anchors_per_row * rows_a_step
        )
        return flops_per_step(
            job.target,
            job.spec,
            tokens=steps.padded_per_step,
            width=steps.width,
            slots=slots,
            labels=slots * (job.spec.block_size - 1),
            checkpointing=checkpointing,
            goal=job.setup.goal,
        )

    @property
    def mfu(self) -> float | None:
        """Share of the GPUs' peak that the given speed means; None where one is not known.

        What is computed a second time does not count (PaLM, arXiv 2204.02311, appendix B).
        """
        peak = peak_flops(self.gpu) if self.gpu else None
        useful = self._flops(checkpointing=False)
        if useful is None or self.steps is None or not self.tokens_per_second or peak is None:
            return None
        steps_per_second = self.tokens_per_second / self.steps.tokens_per_step
        return sum(useful.values()) * steps_per_second / (peak * self.job.setup.ranks)

    @property
    def kept_files(self) -> int | None:
        """Checkpoint files at most at once; None where neither limit nor epochs tell."""
        kept, epochs = self.job.kept_checkpoints, self.job.epochs
        if kept is not None:
            return kept
        return None if epochs is None else epochs + RESUME_POINTS

    def ways_out(self) -> list[tuple[str, int]]:
        """Settings that lower the peak, cheapest first, and the peak that each alone would give."""
        job = self.job
        setup, data, batching = job.setup, job.data, job.data.batching
        tried: list[tuple[str, Job]] = []
        if setup.gradients > 1 and job.accumulate == 1:
            lean = replace(job, setup=replace(setup, gradients=1))
            tried.append(("DDPStrategy with gradient_as_bucket_view: true", lean))
        if setup.ranks > 1 and not setup.shard_optimizer:
            lean = replace(job, setup=replace(setup, shard_optimizer=True))
            tried.append(("model.shard_optimizer: true", lean))
        if not setup.activation_checkpointing:
            lean = replace(job, setup=replace(setup, activation_checkpointing=True))
            tried.append(("model.activation_checkpointing: true", lean))
        half, accumulate = batching.token_budget // 2, 2 * job.accumulate
        if half >= job.load(self.steps.longest if self.steps else None).width:
            lean = self._with_data(batching=replace(batching, token_budget=half))
            copies = 2 if setup.ranks > 1 else 1  # accumulated gradients lie outside DDP's buckets
            lean = replace(lean, setup=replace(setup, gradients=copies))
            setting = f"data.batching.token_budget: {half} with "
            tried.append((f"{setting}trainer.accumulate_grad_batches: {accumulate}", lean))
        rate = data.anchor_rate / 2
        tried.append((f"data.anchor_rate: {rate:g}", self._with_data(anchor_rate=rate)))
        return [(name, self._sheet(lean).peak) for name, lean in tried]

    def _with_data(self, **changed: Any) -> Job:
        """The run with other settings of the data."""
        data = copy.copy(self.job.data)
        for name, value in changed.items():
            setattr(data, name, value)
        return replace(self.job, data=data)

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain types; bytes, tokens, operations and hours."""
        job, steps = self.job, self.steps
        return {
            "target": job.target_path,
            "target_parameters": job.target.parameters,
            "drafter_parameters": drafter_parameters(job.spec),
            "gpus": job.setup.ranks,
            "gpus_assumed": not job.devices_known,
            "accumulate": job.accumulate,
            "gpu_memory_bytes": self.gpu_memory,
            "fits": self.fits,
            "memory": self.sheet.to_dict(),
            "ways_out": dict(self.ways_out()),
            "checkpoint_bytes": job.checkpoint_bytes,
            "checkpoints_kept": self.kept_files,
            "rows": steps and steps.rows,
            "tokens_per_epoch": steps and steps.tokens,
            "padded_tokens_per_epoch": steps and list(steps.epoch_padded),
            "steps_per_epoch": steps and list(steps.epoch_steps),
            "steps": steps and steps.total,
            "flops_per_step": self.flops,
            "hours": self.hours,
            "mfu": self.mfu,
        }
