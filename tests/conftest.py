"""Shared by the tests: one thread, a tiny tokenizer, a tiny target on disk, a tiny store."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest
import torch
from tiny import make_tokenizer, write_chats
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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
