"""How much of what the GPUs could compute a run does compute."""

import functools
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch

from dflash_lightning.budget import TargetSizes, flops_per_step, peak_flops, target_sizes
from dflash_lightning.callbacks.run import parts


def peak_of(trainer: L.Trainer) -> float | None:
    """Operations a second that all ranks could do together; None where the card is not known."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(device))
    return None if peak is None else peak * trainer.world_size


def flops_of(trainer: L.Trainer, row: Mapping[str, Any], width: float) -> float:
    """Operations of a step over all ranks; recomputation counts, padding too.

    Args:
        trainer: Of the run.
        row: The step's statistics.
        width: Mean padded length of its rows, weighted by tokens.
    """
    module, data = parts(trainer)
    spent = flops_per_step(
        _sizes(module.target),
        module.drafter.spec,
        tokens=row["padded_tokens"],
        width=width,
        slots=row["anchors"],
        labels=row["labels"],
        checkpointing=module.drafter.checkpoint_layers,
    )
    return sum(n for part, n in spent.items() if part != "target" or not data.cache_features)


@functools.lru_cache(maxsize=1)
def _sizes(target: Any) -> TargetSizes:
    return target_sizes(target.config)
