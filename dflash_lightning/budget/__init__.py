"""What a run costs: bytes on each GPU, operations of a step, from sizes alone."""

from dflash_lightning.budget.flops import PEAK_FLOPS, flops_per_step, peak_flops
from dflash_lightning.budget.memory import Line, Sheet, memory
from dflash_lightning.budget.setup import BatchLoad, Setup
from dflash_lightning.budget.sizes import (
    TargetSizes,
    drafter_parameters,
    target_sizes,
)
from dflash_lightning.budget.strategy import gradient_copies, refuse_sharded_strategy

__all__ = [
    "PEAK_FLOPS",
    "BatchLoad",
    "Line",
    "Setup",
    "Sheet",
    "TargetSizes",
    "drafter_parameters",
    "flops_per_step",
    "gradient_copies",
    "memory",
    "peak_flops",
    "refuse_sharded_strategy",
    "target_sizes",
]
