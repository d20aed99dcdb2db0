"""AdamW with decay on matrices only, whole or sharded over ranks; scaling and clipping."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import LambdaLR

FUSED = ("cpu", "cuda")  # devices with one kernel for a whole update: a quarter of the time


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Holds a restored shard once: the base class keeps it in its own state as well."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's moments.

        AdamW's step counts go where they are read: by the fused kernel on the device, else by the
        host.
        """
        super().load_state_dict(keep_kernel(self, state_dict))
        self.state.clear()
        fused = self.param_groups[0]["fused"]
        for parameter, state in self.optim.state.items():
            state["step"] = state["step"].to(parameter.device if fused else "cpu")


def keep_kernel(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A state to restore, with the kernel of this process: a checkpoint may be of another device.

    Args:
        optimizer: Restores the state.
        state: Its groups say which kernel made the updates that are done.
    """
    own = optimizer.param_groups[0]
    kernel = {name: own[name] for name in ("fused", "foreach")}
    return {**state, "param_groups": [{**group, **kernel} for group in state["param_groups"]]}


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
    fused = True if all(p.device.type in FUSED for p in model.parameters()) else None
    if shard:
        return ShardedOptimizer(groups, torch.optim.AdamW, lr=lr, betas=betas, fused=fused)
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)
    optimizer.register_load_state_dict_pre_hook(keep_kernel)
    return optimizer


@torch.no_grad()
def scale_and_clip(
    parameters: Iterable[Tensor], factor: Tensor, max_norm: float | None = None
) -> Tensor:
    """Multiply all gradients by a factor, then clip them by global norm; the host reads nothing.

    Both are one multiplication in float32, so the gradients are gone through twice in all. Without
    the clip it is the same as with a norm that is never reached.

    Args:
        parameters: Those without a gradient count nothing.
        factor: Scalar on the device of the gradients.
        max_norm: What the norm may be after the factor; None does not clip.

    Returns:
        Norm after the factor and before the clip, float32 scalar; not finite where a gradient is
        not, and then the gradients are not either.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    factor = factor.float()
    norm = torch.nn.utils.get_total_norm(gradients) * factor
    if max_norm:
        factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor)
    return norm


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
