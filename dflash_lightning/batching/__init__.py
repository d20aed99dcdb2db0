"""Plans of an epoch: row lengths in, every batch of every rank out. NumPy only."""

from dflash_lightning.batching.buckets import optimal_boundaries
from dflash_lightning.batching.plan import EpochPlan, plan_epoch
from dflash_lightning.batching.settings import Batching

__all__ = ["Batching", "EpochPlan", "optimal_boundaries", "plan_epoch"]
