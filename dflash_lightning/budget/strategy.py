"""What a Lightning strategy means for memory, and which ones cannot train a drafter."""

from argparse import Namespace
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
            "trainer.strategy must be ddp or one device: target and drafter are whole on every "
            f"rank, got {name!r}. Use ddp with model.shard_optimizer=true, which shards the "
            "moments; `dflash-lightning plan` says what fits."
        )


def strategy_name(strategy: Any) -> str:
    """Name of a strategy: as given, or that of its class.

    >>> (
    ...     strategy_name("ddp"),
    ...     strategy_name({"class_path": "lightning.pytorch.strategies.DDPStrategy"}),
    ... )
    ('ddp', 'DDPStrategy')
    """
    if isinstance(strategy, str):
        return strategy.rpartition(".")[2]
    given = _mapping(strategy)
    if given is None:
        return type(strategy).__name__
    return str(given["class_path"]).rpartition(".")[2]


def gradient_copies(strategy: Any, ranks: int, accumulate: int = 1) -> int:
    """Copies of all gradients on a rank: DDP keeps its own unless they are views of its buckets.

    With accumulation they are no views: until the last batch nothing is in the buckets.

    Args:
        strategy: ``trainer.strategy`` as in a configuration.
        ranks: GPUs.
        accumulate: Batches that each rank adds up for one step.
    """
    if ranks == 1:
        return 1
    given = _mapping(strategy) or {}
    arguments = _mapping(given.get("init_args")) or {}
    # further arguments of a strategy that its signature does not name are kept apart by the parser
    more = _mapping(given.get("dict_kwargs")) or {}
    views = {**more, **arguments}.get("gradient_as_bucket_view") is True
    return 1 if views and accumulate == 1 else 2


def _mapping(value: Any) -> Mapping[str, Any] | None:
    """A parsed ``class_path`` or its arguments as a mapping; None for anything else."""
    if isinstance(value, Namespace):
        return vars(value)
    return value if isinstance(value, Mapping) else None
