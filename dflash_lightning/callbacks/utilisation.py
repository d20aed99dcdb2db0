"""How much of what the GPUs could compute a run does compute."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch

from dflash_lightning.budget import TargetSizes, flops_per_step, peak_flops
from dflash_lightning.callbacks.run import parts


def peak_of(trainer: L.Trainer) -> float | None:
    """Operations a second that all ranks could do together; None where the card is not known."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(device))
    return None if peak is None else peak * trainer.world_size


def flops_of(trainer: L.Trainer, row: Mapping[str, Any], width: float, sizes: TargetSizes) -> float:
    """Operations of a step over all ranks: padding counts, what is computed twice counts once.

    Args:
        trainer: Of the run.
        row: The step's statistics.
        width: Mean padded length of its rows in tokens, weighted by tokens.
        sizes: Of the target.
    """
    module, data = parts(trainer)
    spent = flops_per_step(
        sizes,
        module.drafter.spec,
        tokens=row["padded_tokens"],
        width=width,
        slots=row["anchors"],
        labels=row["labels"],
        goal=module.goal,
    )
    return sum(n for part, n in spent.items() if part != "target" or not data.cache_features)
