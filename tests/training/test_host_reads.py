"""No step waits for the device: what would read a tensor on the host, counted without a GPU."""

import traceback

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_lightning.data.collate import Batch, BatchIndex, RowBatches
from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.metrics import BlockMetrics
from dflash_lightning.module import DFlashModule
from dflash_lightning.target import RandomTarget

aten = torch.ops.aten
# Their results, or the sizes of them, must be known on the host.
READS = {
    aten._local_scalar_dense,  # item, tolist, bool, float, int
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.equal,
    aten.allclose,
}
INDEXED = {aten.index, aten.index_put, aten.index_put_}
METHODS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}  # no operation on a CPU


class Operations(TorchDispatchMode):
    """Notes operations that read a tensor on the host, or copy a number to the device."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func._overloadpacket
        if packet in READS or (packet in INDEXED and _reads(args)):
            self.found.append(f"{func} {_here()}")
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """Notes methods that read a tensor without an operation."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in METHODS:
            self.found.append(f"{func.__name__} {_here()}")
        return func(*args, **(kwargs or {}))


def _here() -> str:
    """The lines of the package and of the tests that lead here."""
    frames = [f for f in traceback.extract_stack() if "dflash" in f.filename or "test_" in f.name]
    return " > ".join(f"{f.filename}:{f.lineno}" for f in frames[-2:])


def _reads(args: tuple) -> bool:
    """Whether indices are a mask, or the value is a number of the host's."""
    masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
    return bool(masks) or (len(args) > 2 and args[2].dim() == 0)


def host_reads(run) -> list[str]:
    found: list[str] = []
    with Methods(found), Operations(found):
        run()
    return found


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.__setitem__(x > 0, 0.0),
        lambda x: x.__setitem__(torch.tensor([0]), 1.0),
        lambda x: torch.equal(x, x),
    ],
)
def test_the_count_sees_what_waits(read):
    x = torch.arange(4.0)
    assert host_reads(lambda: read(x)) != []


class FixedDrafter(nn.Module):
    """Stands for the drafter, whose own reads are no business of the objective."""

    def __init__(self, module: DFlashModule) -> None:
        super().__init__()
        self.spec = module.drafter.spec
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, features: Tensor, blocks: Tensor, anchors: Tensor, valid: Tensor) -> Tensor:
        return blocks * self.weight


class Rows:
    """Two rows in memory, one without a label."""

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.arange(4, 24, dtype=np.int32)
        return ids, (ids > 9) & (ids != 15) if index == 0 else ids < 0


@pytest.fixture
def batch() -> Batch:
    rows = RowBatches(
        Rows(), block_size=4, seed=0, anchor_rate=1.0, anchors_per_row=9, label_holes=True
    )
    return rows[BatchIndex(0, np.array([0, 1]), 20)]


@pytest.mark.parametrize(
    ("goal", "weighting"),
    [("ce", "decay"), ("ce", "dpace"), ("argmax", "dpace"), ("kl", "decay")],
)
def test_objective_and_metrics_read_nothing(batch: Batch, goal: str, weighting: str):
    config = DrafterConfig(num_layers=1, block_size=4, target_layer_ids=(0,), mask_token_id=3)
    target = RandomTarget().load()
    module = DFlashModule(target, config, goal=goal, weighting=weighting)
    module.drafter = FixedDrafter(module)
    features, states = target.context_features(batch.input_ids, (0,)), torch.randn(40, 64)
    target.context_features = lambda ids, layer_ids: features
    target.features_and_final = lambda ids, layer_ids, at: (features, states.index_select(0, at))
    metrics = BlockMetrics(4)

    def step() -> None:
        s = module.sums(batch)
        s.numerator.backward()
        metrics.update(s.losses, s.weights, s.correct, batch.label_slots, batch.anchors.numel())

    assert host_reads(step) == []
    assert module.drafter.weight.grad.abs().max() > 0
