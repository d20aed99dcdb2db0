"""What a Lightning strategy means for memory, and which ones cannot train a drafter."""

from collections.abc import Mapping
from typing import Any

SHARDED = ("fsdp", "deepspeed", "modelparallel", "model_parallel")


def refuse_sharded_strategy(strategy: Any) -> None:
    """Refuse strategies that cut the module's weights into shards.

    Args:
        strategy: ``trainer.strategy``: a name, ``class_path`` with ``init_args``, or an object.

    Raises:
        ValueError: It is FSDP, DeepSpeed or model parallelism.
    """
    name = strategy_name(strategy)
    if any(word in name.lower() for word in SHARDED):
        raise ValueError(
            "trainer.strategy must be ddp or a single device: gradients are scaled and clipped, and "
            f"the target is held, whole on every rank, got {name!r}. Use ddp with "
            "model.shard_optimizer=true, which shards the moments."
        )


def strategy_name(strategy: Any) -> str:
    """Name of a strategy: as given, or that of its class.

    >>> strategy_name("ddp"), strategy_name({"class_path": "lightning.pytorch.strategies.DDPStrategy"})
    ('ddp', 'DDPStrategy')
    """
    if isinstance(strategy, str):
        return strategy.rpartition(".")[2]
    if isinstance(strategy, Mapping):
        return str(strategy["class_path"]).rpartition(".")[2]
    return type(strategy).__name__


def gradient_copies(strategy: Any, ranks: int) -> int:
    """Copies of all gradients on a rank: DDP keeps its own unless they are views of its buckets.

    Args:
        strategy: ``trainer.strategy`` as in a configuration.
        ranks: GPUs.
    """
    if ranks == 1:
        return 1
    given: Any = strategy.get("init_args") if isinstance(strategy, Mapping) else None
    viewed = given is not None and given.get("gradient_as_bucket_view") is True
    return 1 if viewed else 2
