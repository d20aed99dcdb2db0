"""AdamW with decay on matrices only, whole or sharded over ranks."""

from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import LambdaLR


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Holds a restored shard once: the base class keeps it in its own state as well."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's moments; AdamW's step counts go to the CPU, where they are read."""
        super().load_state_dict(state_dict)
        self.state.clear()
        for state in self.optim.state.values():
            state["step"] = state["step"].cpu()


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    shard: bool = False,
) -> torch.optim.Optimizer:
    """Make the optimizer of all parameters.

    Args:
        model: Its parameters are trained.
        lr: Peak rate.
        betas: Decay of the first and second moments.
        weight_decay: On parameters with two or more dimensions.
        shard: Keep each moment on one rank only (ZeRO stage 1, arXiv 1910.02054); the updates
            are the same.
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if shard:
        return ShardedOptimizer(groups, torch.optim.AdamW, lr=lr, betas=betas)
    return torch.optim.AdamW(groups, lr=lr, betas=betas)


def set_rates(
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """Give a restored optimizer and schedule the settings of now; moments stay.

    Args:
        optimizer: Of :func:`make_optimizer`.
        schedule: Its factors are those of now: the state does not keep them.
        lr: Peak rate.
        betas: Decay of the moments.
        weight_decay: On matrices.
    """
    schedule.base_lrs = [lr] * len(optimizer.param_groups)
    rates = [lr * factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
    decays = (weight_decay, 0.0)
    for group, rate, decay in zip(optimizer.param_groups, rates, decays, strict=True):
        group.update(lr=rate, initial_lr=lr, betas=betas, weight_decay=decay)
    schedule._last_lr = [*rates]
