"""Plans of an epoch: row lengths in, every batch of every rank out. NumPy only."""

from dflash_lightning.batching.buckets import Batching, quantile_boundaries
from dflash_lightning.batching.plan import EpochPlan, plan_epoch

__all__ = ["Batching", "EpochPlan", "plan_epoch", "quantile_boundaries"]
