"""The packed attention in a run: one shape, one kernel, and what happens where it does not run."""

import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from drafter import packed
from drafter.packed import BOTH, batch_of, refuse_cpu, with_flex
from oracles import random_drafter
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._inductor.exc import InductorError
from training.restarts import make_module

from dflash_lightning import Batching, DFlashDataModule, DFlashModule
from dflash_lightning.callbacks import Preflight
from dflash_lightning.data.store import RowStore
from dflash_lightning.drafter import backends
from dflash_lightning.drafter.backends import AttentionChoice, Backends
from dflash_lightning.drafter.flex import Room, _attend, grown
from dflash_lightning.drafter.model import Drafter

CPU = torch.device("cpu")
dense_twin = packed.dense_twin


# -- one shape in a run ----------------------------------------------------------------------------


def compiled(monkeypatch: pytest.MonkeyPatch, counter: CompileCounter) -> CompileCounter:
    """Compile the kernel as on CUDA, with a compiler that only counts."""
    torch._dynamo.reset()
    kernel = torch.compile(_attend, fullgraph=True, dynamic=False, backend=counter)
    monkeypatch.setattr(backends, "kernel_for", lambda device: kernel)
    monkeypatch.setattr(backends, "has_flex", lambda device: True)
    return counter


SHAPES = [(1, 30, 20), (2, 15, 10), (3, 8, 7), (5, 6, 4), (1, 1, 1), (30, 1, 1)]


def test_batches_of_any_shape_meet_one_kernel_once_there_is_room(monkeypatch: pytest.MonkeyPatch):
    counter = compiled(monkeypatch, CompileCounterWithBackend("aot_eager"))
    drafter = Drafter(BOTH)
    drafter.reserve(CPU, 200, 40)
    for shape in SHAPES:
        drafter(*batch_of(*shape)).sum().backward()
    assert counter.frame_count == 1
    drafter.checkpoint_layers = True
    for shape in SHAPES:
        drafter(*batch_of(*shape)).sum().backward()
    assert counter.frame_count == 1
    with torch.no_grad():  # validation
        for shape in SHAPES:
            drafter(*batch_of(*shape))
    assert counter.frame_count == 2
    assert drafter.attention_shapes == {Room(256, 256)}
    assert drafter.attention_fallback is None


def test_the_room_grows_by_rungs_and_says_so():
    drafter = with_flex(random_drafter(BOTH))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        drafter(*batch_of(2, 60, 5))
        drafter(*batch_of(1, 128, 32))
        with pytest.raises(UserWarning, match=r"1,200 context tokens and 16 block tokens exceeds"):
            drafter(*batch_of(4, 300, 1))
    assert drafter.attention_shapes == {Room(128, 128)}
    with pytest.warns(UserWarning, match="compiled again for 1,536 and 128. Call Drafter.reserve"):
        drafter(*batch_of(4, 300, 1))
    assert drafter.attention_shapes == {Room(128, 128), Room(1536, 128)}


@pytest.mark.parametrize(
    ("count", "rung"),
    [(0, 128), (128, 128), (129, 256), (257, 384), (385, 512), (513, 768), (769, 1024)],
)
def test_rungs_are_powers_of_two_and_half_more(count: int, rung: int):
    assert grown(None, count, count) == Room(rung, rung)
    assert grown(Room(640, 640), count, 640) == Room(rung if count > 640 else 640, 640)


# -- when it does not run --------------------------------------------------------------------------


def failing(*args: object) -> Tensor:
    raise InductorError(RuntimeError("out of resource: shared memory"), None)


def test_a_kernel_that_does_not_compile_gives_way_to_sdpa_aloud(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "has_flex", lambda device: True)
    monkeypatch.setattr(backends, "kernel_for", lambda device: failing)
    drafter = random_drafter(BOTH)
    batch = batch_of(2, 15, 10)
    reason = "InductorError: RuntimeError: out of resource: shared memory"
    with pytest.warns(UserWarning, match="out of resource: shared memory.; sdpa attends for"):
        got = drafter(*batch)
    assert drafter.attention_fallback == reason
    drafter.backends.choice = "sdpa"
    assert torch.equal(got, drafter(*batch))
    drafter.backends.choice = "auto"
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        assert torch.equal(got, drafter(*batch))


class BackwardFails(torch.autograd.Function):
    """A kernel of which only the forward fits into shared memory."""

    @staticmethod
    def forward(ctx, queries: Tensor) -> Tensor:
        return queries.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return failing()


def test_a_backward_pass_that_does_not_compile_shows_in_the_forward(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(backends, "has_flex", lambda device: True)
    kernel = BackwardFails.apply
    monkeypatch.setattr(backends, "kernel_for", lambda device: lambda q, k, v, mask: kernel(q))
    drafter = random_drafter(BOTH)
    with pytest.warns(UserWarning, match="flex does not compile"):
        drafter(*batch_of(2, 15, 10)).sum().backward()
    assert drafter.attention_fallback.startswith("InductorError")


def test_too_many_shapes_are_an_event_and_no_slow_kernel(monkeypatch: pytest.MonkeyPatch):
    # PF-01
    compiled(monkeypatch, CompileCounter())
    drafter = random_drafter(BOTH)
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        drafter(*batch_of(1, 100, 5))
        assert drafter.attention_fallback is None
        with (
            pytest.warns(UserWarning, match="compiled again for 256 and 128"),
            pytest.warns(UserWarning, match="flex does not compile .FailOnRecompileLimitHit"),
        ):
            drafter(*batch_of(1, 200, 5))
    assert drafter.attention_fallback.startswith("FailOnRecompileLimitHit: ")


def test_flex_asked_for_by_name_is_refused_when_it_does_not_compile(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(backends, "kernel_for", lambda device: failing)
    drafter = with_flex(random_drafter(BOTH))
    with pytest.raises(ValueError, match=r"attention=flex must compile on this device, got Induc"):
        drafter(*batch_of(2, 15, 10))
    assert drafter.attention_fallback is None


def test_other_errors_of_the_kernel_are_not_hidden(monkeypatch: pytest.MonkeyPatch):
    def full(*args: object) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(backends, "has_flex", lambda device: True)
    monkeypatch.setattr(backends, "kernel_for", lambda device: full)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        random_drafter(BOTH)(*batch_of(2, 15, 10))


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="attention must be auto, flex or sdpa, got eager"):
        Backends(BOTH, "eager", 16)


def test_training_with_flex_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "_refuse_cpu", refuse_cpu)
    rule = "attention=flex must train on a GPU, got a CPU: .* Set attention to auto or sdpa."
    drafter = with_flex(random_drafter(BOTH))
    with pytest.raises(ValueError, match=rule):
        drafter(*batch_of(2, 15, 10))
    with pytest.raises(ValueError, match=rule):
        drafter.reserve(CPU, 100, 20)
    with torch.no_grad():
        drafter(*batch_of(2, 15, 10))


def test_auto_is_sdpa_on_a_cpu():
    drafter = random_drafter(BOTH)
    drafter.reserve(CPU, 100, 20)
    drafter(*batch_of(2, 15, 10))
    assert not drafter.attention_shapes
    assert drafter.attention_fallback is None


# -- a fit -----------------------------------------------------------------------------------------


def fit(store: RowStore, folder: Path, attention: AttentionChoice = "auto") -> DFlashModule:
    """One epoch of batches of all widths, tried before and validated after."""
    module = make_module(attention=attention)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        default_root_dir=folder,
        callbacks=[Preflight()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batching = Batching(token_budget=400, max_rows=3, num_buckets=3)
    data = DFlashDataModule(str(store.path), batching, val_fraction=0.2, num_workers=0)
    trainer.fit(module, datamodule=data)
    return module


def test_a_fit_with_preflight_and_validation_meets_one_shape(
    store: RowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backends, "has_flex", lambda device: True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="attention: ")
        packed = fit(store, tmp_path / "flex").drafter
    chunked = fit(store, tmp_path / "sdpa", attention="sdpa").drafter
    assert len(packed.attention_shapes) == 1
    assert not chunked.attention_shapes
    for a, b in zip(packed.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_fit_with_flex_on_a_cpu_is_refused_before_its_first_step(
    store: RowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backends, "_refuse_cpu", refuse_cpu)
    with pytest.raises(ValueError, match="attention=flex must train on a GPU"):
        fit(store, tmp_path, attention="flex")
