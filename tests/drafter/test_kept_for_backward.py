"""What a forward keeps for the backward pass: less when layers are recomputed, nothing twice."""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from oracles import make_spec, random_drafter
from torch import Tensor

from dflash_lightning.drafter.config import DrafterSpec
from dflash_lightning.drafter.model import Drafter, DraftLayer

FULL, SLIDING = "full_attention", "sliding_attention"
SPECS = [
    make_spec(),
    make_spec(num_layers=3, layer_types=(SLIDING, FULL, SLIDING), sliding_window=6),
]
WIDTH = 30


class Trained(NamedTuple):
    """One training step of a drafter."""

    hidden: Tensor
    gradients: list[Tensor]
    kept: list[Tensor]

    @property
    def kept_bytes(self) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.kept}
        return sum(storage.nbytes() for storage in storages.values())


def batch(spec: DrafterSpec, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Two rows of forty anchors that make three chunks, one slot of them empty."""
    generator = torch.Generator().manual_seed(3)
    features = len(spec.target_layer_ids) * spec.hidden_size
    anchors = torch.randint(1, WIDTH, (2, 40), generator=generator).sort().values
    valid = torch.ones_like(anchors, dtype=torch.bool)
    valid[1, -1] = False
    shape = (2, 40, spec.block_size, spec.hidden_size)
    return (
        torch.randn(2, WIDTH, features, generator=generator).to(dtype),
        torch.randn(shape, generator=generator).to(dtype),
        anchors,
        valid,
    )


def train(drafter: Drafter, inputs: tuple[Tensor, ...], *, mixed: bool = False) -> Trained:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    features, embeddings, anchors, valid = inputs
    embeddings = embeddings.clone().requires_grad_()
    drafter.zero_grad()
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=mixed),
    ):
        hidden = drafter(features, embeddings, anchors, valid)
    forward = list(kept)
    probe = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4))
    (hidden * probe)[valid].sum().backward()
    gradients = [embeddings.grad, *(weight.grad for weight in drafter.parameters())]
    return Trained(hidden.detach(), gradients, forward)


def equal(a: Trained, b: Trained) -> bool:
    pairs = zip([a.hidden, *a.gradients], [b.hidden, *b.gradients], strict=True)
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def recomputing(drafter: Drafter) -> Drafter:
    other = Drafter(drafter.spec, checkpoint_layers=True)
    other.load_state_dict(drafter.state_dict())
    return other


# -- layers that are computed again ----------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("mixed", [False, True])
def test_recomputed_layers_give_the_same_bits_and_keep_less(spec: DrafterSpec, mixed: bool):
    drafter = random_drafter(spec)
    inputs = batch(spec, torch.bfloat16 if mixed else torch.float32)
    plain = train(drafter, inputs, mixed=mixed)
    again = train(recomputing(drafter), inputs, mixed=mixed)
    assert equal(again, plain)
    assert all(gradient.abs().sum() > 0 for gradient in plain.gradients)
    assert again.kept_bytes < 0.7 * plain.kept_bytes


def test_layers_are_recomputed_only_for_a_backward_pass(monkeypatch: pytest.MonkeyPatch):
    calls = Counter()

    def counted(self: DraftLayer, *args: object) -> Tensor:
        calls[torch.is_grad_enabled()] += 1
        return forward(self, *args)

    forward = DraftLayer.forward
    monkeypatch.setattr(DraftLayer, "forward", counted)
    spec = SPECS[0]
    drafter, inputs = recomputing(random_drafter(spec)), batch(spec)
    with torch.no_grad():
        hidden = drafter(*inputs)
    assert calls == {False: spec.num_layers}
    trained = train(drafter, inputs)
    assert calls == {False: spec.num_layers, True: 2 * spec.num_layers}
    assert torch.equal(hidden, trained.hidden)


def test_serving_does_not_recompute():
    spec = SPECS[1]
    drafter = random_drafter(spec)
    features, embeddings, _, _ = batch(spec)
    with torch.no_grad():
        served = [
            model.draft_block(features[:1], embeddings[:1, 0])
            for model in (drafter, recomputing(drafter))
        ]
    assert torch.equal(*served)


# -- features under autocast -----------------------------------------------------------------------


def features_kept(trained: Trained, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Kept tensors of the size of the features, each storage once."""
    wide = [t for t in trained.kept if t.numel() == inputs[0].numel()]
    return list({t.untyped_storage().data_ptr(): t for t in wide}.values())


def test_bf16_features_are_kept_once_and_not_copied_under_autocast():
    spec = make_spec(target_layer_ids=(0, 1, 3), hidden_size=32, head_dim=4)
    inputs = batch(spec, torch.bfloat16)
    (kept,) = features_kept(train(random_drafter(spec), inputs, mixed=True), inputs)
    assert kept.dtype == torch.bfloat16
    assert kept.untyped_storage().data_ptr() == inputs[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("spec", SPECS)
def test_bf16_features_give_the_bits_of_the_same_numbers_in_float32(spec: DrafterSpec):
    drafter = random_drafter(spec)
    narrow = batch(spec, torch.bfloat16)
    wide = (narrow[0].float(), *narrow[1:])
    assert equal(train(drafter, narrow, mixed=True), train(drafter, wide, mixed=True))


def test_without_autocast_features_take_the_dtype_of_the_weights():
    spec = SPECS[0]
    drafter = random_drafter(spec)
    narrow = batch(spec, torch.bfloat16)
    wide = (narrow[0].float(), narrow[1].float(), *narrow[2:])
    with torch.no_grad():
        assert torch.equal(drafter(*narrow), drafter(*wide))
        assert drafter.to(torch.bfloat16)(*wide).dtype == torch.bfloat16


def test_the_residuals_stay_float32_under_autocast():
    spec = SPECS[0]
    drafter, seen = random_drafter(spec), []
    for layer in drafter.draft_layers:
        layer.register_forward_hook(lambda _layer, inputs, out: seen.extend([inputs[0], out]))
    train(drafter, batch(spec, torch.bfloat16), mixed=True)
    assert len(seen) == 2 * spec.num_layers
    assert {tensor.dtype for tensor in seen} == {torch.float32}
