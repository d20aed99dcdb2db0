"""What a GPU has to show of the drafter's attention: parity, speed, memory, one kernel, no waiting.

usage: python tests/gpu/check_attention.py [--device cpu] [--json FILE]

Compares flex, sdpa, and attention with one dense mask over context and all blocks, as public
trainers have it. On a CPU sizes are tiny and flex is left out, to see that the script works.
"""

import argparse
import copy
import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import Qwen3Config

sys.path.insert(0, str(Path(__file__).parents[1]))
from oracles import make_spec, naive_forward, random_drafter

from dflash_lightning import DFlashModule, DrafterConfig, RandomTarget
from dflash_lightning.budget.flops import flops_per_step, peak_flops
from dflash_lightning.budget.sizes import TargetSizes, target_sizes
from dflash_lightning.data.collate import Batch
from dflash_lightning.drafter.attention import Attention, KeyValue
from dflash_lightning.drafter.backends import AttentionChoice, Backends
from dflash_lightning.drafter.chunked import masked_attention
from dflash_lightning.drafter.config import DrafterSpec, LayerType
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.drafter.visibility import visible_ranges, within

FULL, SLIDING = "full_attention", "sliding_attention"
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}  # of the norm of hidden states and gradients
# as Qwen3-4B, whose drafter has five layers and five target layers
LARGE = Qwen3Config(
    vocab_size=151_936,
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)


class DenseBackends(Backends):
    """One mask over the context and all blocks, and one call for all of them."""

    def prepare(
        self, anchors: Tensor, anchor_valid: Tensor, *, width: int, dtype: torch.dtype
    ) -> Attention:
        masks = {}
        for kind in dict.fromkeys(self.spec.layer_types):
            ranges = visible_ranges(anchors, anchor_valid, self.spec, kind)
            start, end, own_start, own_end = (edge[..., None] for edge in ranges)
            token = torch.arange(width, device=anchors.device)
            slot = torch.arange(ranges.end.shape[1], device=anchors.device)
            seen = torch.cat([within(token, start, end), within(slot, own_start, own_end)], -1)
            mask = torch.zeros(seen.shape, dtype=dtype, device=anchors.device)
            masks[kind] = mask.masked_fill_(~seen, -torch.inf)[:, None]
        return DenseAttention(masks)


class DenseAttention:
    """Attends as :class:`DenseBackends` says."""

    def __init__(self, masks: dict[LayerType, Tensor]) -> None:
        self.masks = masks

    def attend(self, kind: LayerType, queries: Tensor, own: KeyValue, context: KeyValue) -> Tensor:
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
        return masked_attention(queries, keys, values, self.masks[kind])


def with_backend(drafter: Drafter, name: str) -> Drafter:
    """The same drafter with another attention."""
    other = copy.copy(drafter)
    if name == "dense":
        other.backends = DenseBackends(drafter.spec, "sdpa", 16)
    else:
        choice: AttentionChoice = "flex" if name == "flex" else "sdpa"
        other.backends = Backends(drafter.spec, choice, 16)
    return other


def draw(spec: DrafterSpec, rows: int, width: int, count: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Features, embeddings, sorted anchors and their validity; the last slot of a row is empty."""
    generator = torch.Generator().manual_seed(seed)
    features = len(spec.target_layer_ids) * spec.hidden_size
    anchors = torch.rand(rows, width, generator=generator).argsort(1)[:, :count].sort(1).values
    valid = torch.arange(count).expand(rows, -1) < count - 1
    size = spec.block_size
    return (
        torch.randn(rows, width, features, generator=generator),
        torch.randn(rows, count, size, spec.hidden_size, generator=generator),
        anchors,
        valid,
    )


def moved(batch: tuple[Tensor, ...], device: str) -> tuple[Tensor, ...]:
    return tuple(x.to(device) for x in batch)


# -- parity ----------------------------------------------------------------------------------------


def gradients_of(forward: Callable[..., Tensor], drafter: Drafter, batch: tuple) -> list[Tensor]:
    """Hidden states of real blocks, and all gradients of a mixture of them as one vector."""
    features, embeddings, anchors, valid = batch
    embeddings = embeddings.clone().requires_grad_()
    hidden = forward(features, embeddings, anchors, valid)
    probe = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    loss = (hidden.float() * probe.to(hidden.device))[valid].sum()
    found = torch.autograd.grad(loss, [embeddings, *drafter.parameters()])
    return [
        hidden[valid].detach().float().cpu(),
        torch.cat([g.float().cpu().flatten() for g in found]),
    ]


def parity(name: str, device: str, *, mixed: bool) -> dict[str, float]:
    """Errors relative to the naive forward in float32 on the CPU, and the gradient's scale."""
    spec = make_spec(
        hidden_size=64, head_dim=32, layer_types=(FULL, SLIDING), sliding_window=24, block_size=8
    )
    drafter = random_drafter(spec)
    batch = draw(spec, 2, 90, 20)
    exact = gradients_of(functools.partial(naive_forward, drafter), drafter, batch)
    on_device = with_backend(drafter.to(device), name)
    with torch.autocast(device, torch.bfloat16, enabled=mixed):
        found = gradients_of(on_device, on_device, moved(batch, device))
    hidden, gradients = ((a - b).norm() / b.norm() for a, b in zip(found, exact, strict=True))
    scale = found[1] @ exact[1] / (exact[1] @ exact[1])
    return {"hidden": hidden.item(), "gradients": gradients.item(), "scale": scale.item()}


# -- speed and memory ------------------------------------------------------------------------------


def speed(
    name: str,
    spec: DrafterSpec,
    target: TargetSizes,
    *,
    width: int,
    count: int,
    device: str,
    repeats: int,
) -> dict[str, Any]:
    """Forward and backward of one row in bfloat16: seconds, bytes above the weights, and work."""
    with torch.device(device):
        drafter = Drafter(spec)
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    drafter = with_backend(drafter, name)
    drafter.reserve(torch.device(device), width, count)
    batch = moved(draw(spec, 1, width, count), device)
    cuda = device == "cuda"

    def step() -> None:
        drafter.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            hidden = drafter(*batch)
        hidden.backward(hidden.detach())

    start = time.perf_counter()
    step()
    first = wait(device) - start
    step()
    if cuda:
        drafter.zero_grad()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    seconds = []
    for _ in range(repeats):
        start = wait(device)
        step()
        seconds.append(wait(device) - start)
    middle = statistics.median(seconds)
    work = flops_per_step(target, spec, tokens=width, width=width, slots=count, labels=0)["drafter"]
    peak = peak_flops(torch.cuda.get_device_name()) if cuda else None
    return {
        "seconds": middle,
        "first_seconds": first,
        "peak_bytes": torch.cuda.max_memory_allocated() - before if cuda else None,
        "share_of_peak": work / middle / peak if peak else None,
    }


def wait(device: str) -> float:
    """The time when the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# -- one kernel, no waiting ------------------------------------------------------------------------


def recompilations(batches: int) -> dict[str, Any]:
    """Kernels over batches of many shapes, training and validating: two, made at the first."""
    spec = make_spec(hidden_size=64, head_dim=16, layer_types=(FULL, SLIDING), sliding_window=40)
    drafter = with_backend(random_drafter(spec).cuda(), "flex")
    drafter.reserve(torch.device("cuda"), 2048, 256)
    graphs = [counters["stats"]["unique_graphs"]]
    for i in range(batches):
        rows = 1 + i % 7
        batch = moved(draw(spec, rows, 2048 // rows - i, 256 // rows - i % 5, seed=i), "cuda")
        with torch.autocast("cuda", torch.bfloat16):
            drafter(*batch).sum().backward()
            with torch.no_grad():
                drafter(*batch)
        graphs.append(counters["stats"]["unique_graphs"])
    return {
        "batches": batches,
        "at_the_first": graphs[1] - graphs[0],
        "after_the_first": graphs[-1] - graphs[1],
        "shapes": sorted(drafter.attention_shapes),
    }


def waits(attention: AttentionChoice, device: str) -> dict[str, Any]:
    """How often a training step of the module, optimizer aside, waits for the device."""
    target = RandomTarget()
    dials = DrafterConfig(num_layers=2, target_layer_ids=(0, 2), mask_token_id=500)
    module = DFlashModule(target, dials, init="random", attention=attention).to(device)
    target.load(device)
    _, _, anchors, valid = draw(module.drafter.spec, 4, 100, 24)
    labels = torch.arange(0, anchors.numel() * 16, 3)
    labels = labels[labels % 16 > 0]
    batch = Batch(
        rows=torch.arange(4),
        input_ids=torch.arange(400).view(4, 100).to(device),
        lengths=torch.full((4,), 100, device=device),
        anchors=anchors.to(device),
        anchor_valid=valid.to(device),
        label_slots=labels.to(device),
        labels=(labels % 500).to(device),
        features=None,
    )

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            module.sums(batch).numerator.backward()

    for _ in range(2):
        step()
    if device == "cpu":
        return {"waits": None}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    where = [
        f"{Path(w.filename).name}:{w.lineno}"
        for w in said
        if "called a synchronizing" in str(w.message)
    ]
    return {"waits": len(where), "where": where}


def check(device: str) -> dict[str, Any]:
    """All results."""
    cuda = device == "cuda"
    names = ["flex", "sdpa", "dense"] if cuda else ["sdpa", "dense"]
    config = LARGE if cuda else RandomTarget().config
    dials = DrafterConfig(
        num_layers=5 if cuda else 2,
        target_layer_ids=(1, 9, 17, 25, 33) if cuda else (0, 2),
        mask_token_id=config.vocab_size - 1,
    )
    spec, target = dials.for_target(config), target_sizes(config)
    widths, count = ((2048, 4096), 512) if cuda else ((64, 128), 16)
    sizes = {"count": count, "device": device, "repeats": 20 if cuda else 1}
    return {
        "device": torch.cuda.get_device_name() if cuda else device,
        "torch": torch.__version__,
        "parity": {
            f"{name}, {dtype}": parity(name, device, mixed=dtype == "bfloat16")
            for name in names
            for dtype in LIMITS
        },
        "speed": {
            f"{name}, {width} context tokens": speed(name, spec, target, width=width, **sizes)
            for width in widths
            for name in names
        },
        "recompilations": recompilations(50) if cuda else None,
        "waits": {name: waits(name, device) for name in (("flex", "sdpa") if cuda else ("sdpa",))},
    }


def wrong(results: dict[str, Any]) -> list[str]:
    """What does not hold."""
    found = [
        f"{name}: {what} {errors[what]:.2g} off"
        for name, errors in results["parity"].items()
        for what in ("hidden", "gradients")
        if not errors[what] <= LIMITS[name.rpartition(" ")[2]]
    ]
    again = results["recompilations"]
    if again and (again["at_the_first"], again["after_the_first"], len(again["shapes"])) != (
        2,
        0,
        1,
    ):
        found.append(f"flex must compile twice, at the first batch: {again}")
    waiting = results["waits"].get("flex")
    if waiting and waiting["waits"]:
        found.append(f"the step waits for the device at {', '.join(waiting['where'])}")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Check everything, print and write it, fail where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("highest")
    results = check(given.device)
    text = json.dumps(results, indent=1)
    sys.stdout.write(text + "\n")
    if given.json:
        given.json.write_text(text + "\n")
    if wrong(results):
        sys.exit("; ".join(wrong(results)))


if __name__ == "__main__":
    main()
