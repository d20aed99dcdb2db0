"""The memory sheet of one GPU: what is always there, and the most that any phase adds."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from dflash_lightning.budget.activations import (
    Moment,
    labels_of,
    mask_bytes,
    moments,
    score_bytes,
    target_peak,
)
from dflash_lightning.budget.setup import BatchLoad, Setup
from dflash_lightning.budget.sizes import TargetSizes, drafter_parameters
from dflash_lightning.drafter.config import DrafterSpec
from dflash_lightning.functional.head import ChunkedHead

Phase = Literal["always", "target", "drafter", "optimizer"]

CONTEXT = 700_000_000  # CUDA context, cuBLAS and cuDNN workspaces: rule of thumb
NCCL = 800_000_000  # communicators and their buffers on eight GPUs: rule of thumb
FRAGMENTATION = 0.03  # of everything else: rule of thumb for the caching allocator
# what goes away within the worst moment of the drafter's phase, and what it is
PASSING = {
    "forward": ("states in flight", "of the last layer going forwards"),
    "head": ("head's states", "output norm, states of the labels, their gradient"),
    "backward": ("gradients in flight", "of one layer going backwards"),
    "context": ("gradients in flight", "of the fused context"),
}


class Line(NamedTuple):
    """One item of the sheet.

    Args:
        name: What it is.
        bytes: How much.
        phase: When it is there.
        why: One sentence: how it is computed.
    """

    name: str
    bytes: int
    phase: Phase
    why: str


@dataclass(frozen=True)
class Sheet:
    """All lines, and their peak.

    Args:
        lines: Items in order of the run.
        unfused: Bytes that attention without a fused kernel would add.
    """

    lines: tuple[Line, ...]
    unfused: int

    def total(self, phase: Phase) -> int:
        """Bytes of one phase alone."""
        return sum(line.bytes for line in self.lines if line.phase == phase)

    @property
    def worst_phase(self) -> Phase:
        """The phase that decides the peak."""
        phases: tuple[Phase, ...] = ("target", "drafter", "optimizer")
        return max(phases, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes at the worst moment: what is always there, and the largest phase."""
        return self.total("always") + self.total(self.worst_phase)

    def to_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "peak_bytes": self.peak,
            "worst_phase": self.worst_phase,
            "unfused_attention_bytes": self.unfused,
            "lines": [line._asdict() for line in self.lines],
        }


def memory(target: TargetSizes, spec: DrafterSpec, load: BatchLoad, setup: Setup) -> Sheet:
    """Bytes of everything on one GPU.

    Args:
        target: The target.
        spec: The drafter.
        load: The heaviest batch.
        setup: How the run trains.
    """
    lines = [
        *_weights(target, spec, setup),
        _head(target, spec, load, setup),
        *_target_phase(target, spec, load, setup),
        *_drafter_phase(spec, load, setup),
    ]
    shard = setup.ranks if setup.shard_optimizer else 1
    lines.append(
        Line("optimizer's scratch", 4 * drafter_parameters(spec) // shard, "optimizer",
             "root of the second moments, float32")
    )  # fmt: skip
    lines.extend(_reserve(Sheet(tuple(lines), 0).peak, setup))
    unfused = score_bytes(spec, load) * (1 if setup.activation_checkpointing else spec.num_layers)
    return Sheet(tuple(lines), unfused)


def _weights(target: TargetSizes, spec: DrafterSpec, setup: Setup) -> list[Line]:
    count = drafter_parameters(spec)
    shard = setup.ranks if setup.shard_optimizer else 1
    drafter = f"{count / 1e9:.3f} B x"
    shared = f" / {shard} GPUs" if shard > 1 else ", on every GPU"
    return [
        Line(
            "target weights",
            target.parameters * setup.target_bytes,
            "always",
            f"{target.parameters / 1e9:.3f} B x {setup.target_bytes} bytes, all layers and head",
        ),
        Line("drafter weights", 4 * count, "always", f"{drafter} 4 bytes, float32"),
        Line(
            "gradients",
            4 * count * setup.gradients,
            "always",
            f"{drafter} 4 bytes x {setup.gradients}"
            + (", and DDP's buckets" if setup.gradients > 1 else ", in DDP's buckets or alone"),
        ),
        Line("moments", 8 * count // shard, "always", f"{drafter} 2 x 4 bytes{shared}"),
    ]


def _target_phase(
    target: TargetSizes, spec: DrafterSpec, load: BatchLoad, setup: Setup
) -> list[Line]:
    kinds = set(target.layer_types[: max(spec.target_layer_ids) + 1])
    worst = "linear layer in float32" if "linear_attention" in kinds else "feed-forward"
    why = f"{load.tokens:,} tokens: {worst}, features"
    peak = target_peak(
        target,
        spec.target_layer_ids,
        load.tokens,
        setup.target_bytes,
        whole=setup.goal != "ce",
    )
    return [Line("target forward", peak, "target", why)]


def _drafter_phase(spec: DrafterSpec, load: BatchLoad, setup: Setup) -> list[Line]:
    """Lines of the worst moment of the drafter's training."""
    features = len(spec.target_layer_ids) * spec.hidden_size
    worst = max(moments(spec, load, setup), key=lambda moment: sum(moment[1:]))
    blocks = f"{load.slots:,} blocks x {spec.block_size}"
    sizes = {
        "context features": (
            load.tokens * features * setup.target_bytes,
            f"{load.tokens:,} x {features:,} x {setup.target_bytes} bytes, from the target",
        ),
        "autocast copies": (worst.casts, "matrices in bfloat16, 2 bytes a weight"),
        "drafter context": (worst.context, f"{load.tokens:,} tokens: fused features, keys, values"),
        "drafter blocks": (worst.blocks, f"{blocks}: {_kept(worst, spec, setup)}"),
        "attention masks": (
            mask_bytes(spec, load, setup),
            "tiles that anyone sees, per layer type"
            if setup.attention == "flex"
            else f"{blocks} x {load.visible:,.0f} context, per layer type",
        ),
        PASSING[worst.name][0]: (worst.passing, PASSING[worst.name][1]),
    }
    return [Line(name, count, "drafter", why) for name, (count, why) in sizes.items()]


def _kept(worst: Moment, spec: DrafterSpec, setup: Setup) -> str:
    if worst.name == "context":
        return "none left"
    if not setup.activation_checkpointing:
        return f"all {spec.num_layers} layers"
    return "inputs and one layer" if worst.name == "backward" else "inputs"


def _head(target: TargetSizes, spec: DrafterSpec, load: BatchLoad, setup: Setup) -> Line:
    """The head's buffers, which stay from step to step."""
    rows = min(ChunkedHead(goal=setup.goal).rows(target.vocab_size), labels_of(spec, load))
    wide = 12 if setup.goal == "kl" else 4
    narrow = setup.target_bytes if setup.target_bytes < 4 else 0
    return Line(
        "head's buffers",
        rows * target.vocab_size * (wide + narrow),
        "always",
        f"{rows:,} x {target.vocab_size:,} logits, float32 and computed",
    )


def _reserve(peak: int, setup: Setup) -> list[Line]:
    fixed = CONTEXT + (NCCL if setup.ranks > 1 else 0)
    name = "CUDA and NCCL" if setup.ranks > 1 else "CUDA"
    return [
        Line(name, fixed, "always", "context, workspaces, communicators: rule of thumb"),
        Line(
            "fragmentation",
            int(FRAGMENTATION * peak),
            "always",
            "3 % of the peak so far: rule of thumb",
        ),
    ]
