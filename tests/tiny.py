"""A tiny tokenizer and chats for it."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<|pad|>", "<|start|>", "<|end|>", "<|mask|>"]


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
