"""What a norm multiplies by, however its family stores it."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def norm_factors(norm: nn.Module) -> Tensor:
    """Factors of a root-mean-square norm, ``[D]``; some families store them less one.

    Args:
        norm: With a ``weight`` of shape ``[D]``.
    """
    weight = norm.get_parameter("weight")
    # a constant row has its own value as root mean square, eps aside
    return norm(torch.full_like(weight, 256.0))
