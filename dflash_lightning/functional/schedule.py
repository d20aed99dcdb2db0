"""The learning-rate schedule: a factor on the peak rate at each optimizer step."""

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant", "wsd"]


def schedule_factor(
    step: int, *, warmup_steps: int, total_steps: int, schedule: Schedule = "cosine"
) -> float:
    """Factor for the update that follows ``step`` finished updates.

    The rate rises linearly and reaches its peak at update number ``warmup_steps``; then it falls to
    zero at the end. ``wsd`` stays at the peak and falls linearly over the last fifth.

    >>> [round(schedule_factor(s, warmup_steps=2, total_steps=6), 3) for s in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    left = 1 - (step - warmup_steps) / max(1, total_steps - warmup_steps)
    left = min(max(left, 0.0), 1.0)
    return {
        "cosine": 0.5 * (1 - math.cos(math.pi * left)),
        "linear": left,
        "constant": 1.0,
        "wsd": min(1.0, left / 0.2),
    }[schedule]
