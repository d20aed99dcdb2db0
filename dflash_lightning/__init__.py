"""Train DFlash drafters for speculative decoding, and explain their loss."""

import importlib
from typing import Any

_HOMES = {
    "DFlashDataModule": "data.datamodule",
    "DFlashModule": "module",
    "DrafterConfig": "drafter.config",
    "Drafter": "drafter.model",
    "HFTarget": "target",
    "RandomTarget": "random_target",
    "Batching": "batching",
    "EpochPlan": "batching",
    "plan_epoch": "batching",
    "optimal_boundaries": "batching",
    "diagnose": "diagnosis",
    "speculative_generate": "decoding",
    "export_drafter": "drafter.checkpoint",
    "load_drafter": "drafter.checkpoint",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that light tools start fast."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
