"""The packed attention on a CPU, where torch's dense twin stands in for its compiled kernel."""

from collections.abc import Iterator

import pytest
import torch
from drafter.batches import FULL, SLIDING, inputs
from oracles import make_spec
from torch import Tensor
from torch.nn.attention import flex_attention

from dflash_lightning.drafter import backends
from dflash_lightning.drafter.model import Drafter

BOTH = make_spec(layer_types=(FULL, SLIDING), sliding_window=6)
refuse_cpu = backends._refuse_cpu


@pytest.fixture(scope="module", autouse=True)
def dense_twin() -> Iterator[None]:
    """Let the dense twin run as it is, backward too: it can, and only its door is shut on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        patch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
        patch.setattr(backends, "_refuse_cpu", lambda device: None)
        yield


def with_flex(drafter: Drafter) -> Drafter:
    other = Drafter(drafter.spec, attention="flex", checkpoint_layers=drafter.checkpoint_layers)
    other.load_state_dict(drafter.state_dict())
    return other


def batch_of(rows: int, width: int, count: int) -> tuple[Tensor, ...]:
    anchors = torch.arange(count).expand(rows, -1).contiguous()
    return (*inputs(BOTH, anchors, width), anchors, torch.ones_like(anchors, dtype=torch.bool))
