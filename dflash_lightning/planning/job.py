"""What a fit configuration says about cost; builds neither drafter nor trainer."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from dflash_lightning.assets.known import known_config
from dflash_lightning.batching import Batching
from dflash_lightning.budget import (
    BatchLoad,
    Setup,
    TargetSizes,
    drafter_parameters,
    gradient_copies,
    refuse_sharded_strategy,
    target_sizes,
)
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.drafter.config import DrafterConfig, DrafterSpec
from dflash_lightning.functional.objective import check_objective
from dflash_lightning.target import HFTarget

RESUME_POINTS = 3  # last.ckpt, previous.ckpt, and the one that is being written
UNKNOWN_WIDTH = 8192  # longest row in tokens, where neither lengths nor boundaries tell


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, as far as its cost goes.

    Args:
        target_path: Name of the target.
        target: Its sizes.
        spec: The drafter.
        data: The data module, not set up.
        setup: Ranks, precision and what saves memory.
        accumulate: Batches that each rank adds up for one step.
        epochs: Epochs; None where only ``max_steps`` ends the run.
        max_steps: Most steps; None without such a limit.
        kept_checkpoints: Checkpoint files at most at once; None where each epoch leaves one.
        devices_known: Whether the configuration counts the GPUs.
    """

    target_path: str
    target: TargetSizes
    spec: DrafterSpec
    data: DFlashDataModule
    setup: Setup
    accumulate: int
    epochs: int | None
    max_steps: int | None
    kept_checkpoints: int | None
    devices_known: bool

    @property
    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint: weights and both moments in float32."""
        return 12 * drafter_parameters(self.spec)

    def load(self, longest: int | None) -> BatchLoad:
        """The heaviest batch: a full budget, every token supervised, rows as long as can be.

        Args:
            longest: Longest row in tokens; None takes the last boundary or a common limit.
        """
        batching = self.data.batching
        if longest is None:
            longest = batching.boundaries[-1] if batching.boundaries else UNKNOWN_WIDTH
        width = min(longest, batching.token_budget)
        rows = max(1, min(batching.token_budget // width, batching.max_rows))
        return BatchLoad(batching.token_budget, rows, self.data.most_anchors, width)


def read_job(config: Mapping[str, Any]) -> Job:
    """Read the parsed configuration of a fit.

    Args:
        config: Sections ``model``, ``data``, ``trainer`` and ``checkpoint`` as plain mappings.

    Raises:
        ValueError: A setting is refused, as fit would refuse it.
    """
    model, trainer, checkpoint = config["model"], config["trainer"], config["checkpoint"]
    refuse_sharded_strategy(trainer["strategy"])
    check_objective(
        model["goal"], model["weighting"], model["loss_decay_gamma"], model["dpace_alpha"]
    )
    target = build_target(model["target"])
    target_config = planned_config(target)
    given: dict[str, Any] = {**config["data"], "batching": Batching(**config["data"]["batching"])}
    devices, known = count_devices(trainer["devices"])
    ranks = devices * int(trainer["num_nodes"])
    on_cpu = str(trainer["accelerator"]) == "cpu"
    setup = Setup(
        ranks=ranks,
        target_bytes=4 if target.dtype == "float32" or (target.dtype == "auto" and on_cpu) else 2,
        compute_bytes=compute_bytes(trainer["precision"], on_cpu=on_cpu),
        gradients=gradient_copies(
            trainer["strategy"], ranks, int(trainer["accumulate_grad_batches"])
        ),
        shard_optimizer=bool(model["shard_optimizer"]),
        activation_checkpointing=bool(model["activation_checkpointing"]),
        attention="sdpa" if on_cpu or model["attention"] == "sdpa" else "flex",
        on_gpu=not on_cpu,
        goal=model["goal"],
    )
    epochs, max_steps = trainer["max_epochs"], trainer["max_steps"]
    return Job(
        target_path=target.path,
        target=target_sizes(target_config),
        spec=DrafterConfig(**model["drafter"]).for_target(target_config),
        data=DFlashDataModule(**given),
        setup=setup,
        accumulate=int(trainer["accumulate_grad_batches"]),
        epochs=None if epochs in (None, -1) else int(epochs),
        max_steps=None if max_steps in (None, -1) else int(max_steps),
        kept_checkpoints=kept_checkpoints(checkpoint["save_top_k"], checkpoint["save_last"]),
        devices_known=known,
    )


def build_target(section: Mapping[str, Any]) -> HFTarget:
    """The target of a ``class_path`` with ``init_args``; nothing is loaded."""
    module, _, name = str(section["class_path"]).rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    return kind(**(section.get("init_args") or {}))


def planned_config(target: HFTarget) -> PretrainedConfig:
    """The target's configuration: from its folder, else as bundled, else from the hub."""
    known = None if Path(target.path).is_dir() else known_config(target.path)
    return target.config if known is None else known


def count_devices(devices: Any) -> tuple[int, bool]:
    """GPUs of one node, and whether the setting counts them.

    >>> count_devices(8), count_devices("0,1"), count_devices("auto")
    ((8, True), (2, True), (1, False))
    """
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()]), True
    if isinstance(devices, list | tuple):
        return len(devices), True
    if str(devices).isdigit():
        return int(devices), True
    return 1, False


def compute_bytes(precision: Any, *, on_cpu: bool) -> int:
    """Bytes of a number in the drafter's products.

    Raises:
        ValueError: Another precision than those that fit supports.
    """
    name = str(precision) if precision is not None else "32" if on_cpu else "bf16-mixed"
    if name in ("bf16-mixed", "bf16"):
        return 2
    if name in ("32-true", "32"):
        return 4
    raise ValueError(
        f"trainer.precision must be bf16-mixed or 32-true to be planned, got {name!r}. Use one of "
        "them: weights and moments stay float32."
    )


def kept_checkpoints(top: int, last: Any) -> int | None:
    """Checkpoint files at most at once, those to go on from among them; None where all stay.

    >>> kept_checkpoints(1, None), kept_checkpoints(-1, None)
    (4, None)
    """
    return None if top == -1 else top + bool(last) + RESUME_POINTS
