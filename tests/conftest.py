"""Shared by the tests: one thread, a tiny tokenizer, a tiny target on disk, a tiny store."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash_lightning.data.prepare import prepare_store
from dflash_lightning.data.store import RowStore

torch.set_num_threads(1)

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<|pad|>", "<|start|>", "<|end|>", "<|mask|>"]
MASK_ID = 3


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave benchmarks out unless they are asked for, whatever else is chosen."""
    if "benchmark" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("benchmark")]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, four special ones before them, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|start|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|mask|>"],
    )
    fast.chat_template = TEMPLATE
    return fast


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


def write_chats(path: Path, count: int, longest: int = 17) -> Path:
    """Chats whose answers vary in length; ids and sources are given."""
    lines = []
    for i in range(count):
        answer = " ".join(f"word{(i * 7 + k) % 13}" for k in range(2 + (i * 5) % longest))
        messages = [
            {"role": "user", "content": f"question {i}"},
            {"role": "assistant", "content": answer},
        ]
        record = {"id": f"chat-{i}", "source": ["a", "b"][i % 2], "messages": messages}
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> RowStore:
    """Forty rows of the tiny tokenizer."""
    folder = tmp_path_factory.mktemp("rows")
    chats = write_chats(folder / "chats.jsonl", 40)
    return prepare_store(chats, tokenizer, folder / "store", max_length=256)
