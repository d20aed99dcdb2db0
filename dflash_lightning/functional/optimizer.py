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


def check_rates(
    lr: float,
    warmup_ratio: float,
    warmup_steps: int | None,
    weight_decay: float,
    betas: tuple[float, float],
) -> None:
    """Refuse rates that mean nothing.

    Raises:
        ValueError: One of them is outside its range.
    """
    if lr <= 0 or not 0 <= warmup_ratio < 1 or (warmup_steps or 0) < 0:
        raise ValueError(
            "lr must be positive, warmup_ratio in [0, 1) and warmup_steps not negative, "
            f"got {lr}, {warmup_ratio} and {warmup_steps}."
        )
    if weight_decay < 0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay}.")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be at least 0 and below 1, got {betas}.")


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
