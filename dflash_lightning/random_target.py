"""A target that needs no files."""

from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from dflash_lightning.target import HFTarget


class RandomTarget(HFTarget):
    """A tiny target with random weights, for tests and notebooks: real architecture, no files.

    Args:
        model_type: Architecture.
        vocab_size: Rows of embedding and head.
        hidden_size: Width.
        num_layers: Decoder layers.
        seed: Of the weights.
    """

    def __init__(
        self,
        model_type: Literal["llama", "qwen3"] = "qwen3",
        vocab_size: int = 512,
        hidden_size: int = 64,
        num_layers: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(path=f"random-{model_type}", dtype="float32")
        self.seed = seed
        kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[model_type]
        self._config = kind(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden_size // 4,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """There is no tokenizer: any store whose ids fit the vocabulary will do."""
        return None

    def _read_model(self, dtype: torch.dtype, device: torch.device) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return AutoModelForCausalLM.from_config(self.config, dtype=dtype).to(device)
