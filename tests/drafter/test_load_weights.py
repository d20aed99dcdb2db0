"""A run that starts from the weights of another drafter: its folder, or a checkpoint of it."""

import re
from pathlib import Path

import pytest
import torch
from oracles import make_spec, random_drafter

from dflash_lightning.drafter.checkpoint import export_drafter, load_weights
from dflash_lightning.drafter.model import Drafter


def as_folder(drafter: Drafter, path: Path) -> Path:
    export_drafter(drafter, path, target="org/target")
    return path


def as_checkpoint(drafter: Drafter, path: Path) -> Path:
    """A checkpoint as ``fit`` writes it, reduced to what is read."""
    state = {f"drafter.{name}": weight for name, weight in drafter.state_dict().items()}
    record = {"spec": drafter.spec.to_dict(), "target": "org/target"}
    torch.save({"state_dict": state, "dflash": record, "global_step": 3}, path)
    return path


BOTH = pytest.mark.parametrize("save", [as_folder, as_checkpoint])


def refused(text: str) -> pytest.RaisesExc:
    return pytest.raises(ValueError, match=re.escape(text))


@BOTH
@pytest.mark.parametrize("theirs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ours", [torch.float32, torch.bfloat16])
def test_weights_come_over_in_the_dtype_of_the_drafter(
    tmp_path: Path, save, theirs: torch.dtype, ours: torch.dtype
):
    source = random_drafter(make_spec(), seed=1).to(theirs)
    drafter = random_drafter(make_spec(), seed=2).to(ours)
    places = {name: weight.data_ptr() for name, weight in drafter.named_parameters()}
    load_weights(drafter, save(source, tmp_path / "source"))
    for name, weight in drafter.named_parameters():
        assert torch.equal(weight, source.state_dict()[name].to(ours))
        assert weight.dtype == ours
        assert weight.requires_grad
        assert weight.data_ptr() == places[name]  # an optimizer or DDP may hold it


@BOTH
def test_a_drafter_of_another_description_is_refused_and_nothing_changes(tmp_path: Path, save):
    path = save(random_drafter(make_spec()), tmp_path / "source")
    drafter = random_drafter(make_spec(block_size=8, rope_theta=5000.0), seed=2)
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    with refused(
        f"model.init must be a drafter like model.drafter; {path} differs in block_size (4 there, "
        "8 here), rope_theta (10000.0 there, 5000.0 here). Give its settings."
    ):
        load_weights(drafter, path)
    assert all(torch.equal(weight, before[name]) for name, weight in drafter.state_dict().items())


def test_a_path_that_is_neither_is_refused(tmp_path: Path):
    drafter = random_drafter(make_spec())
    text = tmp_path / "text"
    text.write_text("no checkpoint")
    for path in (tmp_path / "missing", tmp_path, text):
        with refused(f"model.init must be a checkpoint file of fit; {path} is none."):
            load_weights(drafter, path)
    foreign = tmp_path / "foreign.ckpt"
    torch.save({"state_dict": {}}, foreign)
    with refused(f"model.init must be a checkpoint of dflash-lightning fit; {foreign} is none."):
        load_weights(drafter, foreign)
