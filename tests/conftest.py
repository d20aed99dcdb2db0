"""Shared by the tests: one thread, tiny tokenizer, target and store, and runs to go on from."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest
import torch
from tiny import make_tokenizer, write_chats
from training.chain import KillAt
from training.restarts import Run, last, run
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash_lightning.callbacks import Stopped
from dflash_lightning.data.prepare import prepare_store
from dflash_lightning.data.store import RowStore

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave benchmarks out unless they are asked for, whatever else is chosen."""
    if "benchmark" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("benchmark")]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real Hugging Face folder: random Qwen3 of 4 layers and width 64, and its tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    config = Qwen3Config(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> RowStore:
    """Forty rows of the tiny tokenizer."""
    folder = tmp_path_factory.mktemp("rows")
    chats = write_chats(folder / "chats.jsonl", 40)
    return prepare_store(chats, tokenizer, folder / "store", max_length=256)


@pytest.fixture(scope="session")
def whole(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three epochs without a stop; the state after step 8 is kept."""
    return run(store, tmp_path_factory.mktemp("whole"), snapshot=8)


@pytest.fixture(scope="session")
def at_seven(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that a signal stopped after seven steps: in mid-epoch, past the warm-up."""
    folder = tmp_path_factory.mktemp("seven")
    stopped = run(store, folder, KillAt(6)).error
    assert isinstance(stopped, Stopped)
    assert stopped.code == 75
    return last(folder)


@pytest.fixture(scope="session")
def at_epoch_end(
    store: RowStore, whole: Run, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Run]:
    """A run that was stopped in the last step of its first epoch, before the validation."""
    folder = tmp_path_factory.mktemp("end")
    first = run(store, folder, KillAt(whole.steps_of_epochs[0] - 1))
    assert isinstance(first.error, Stopped)
    return last(folder), first
