"""Lossless speculative decoding: draft a block, verify it in one target call, keep what agrees."""

import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from dflash_lightning.data.chat import Conversation, read_conversations, render
from dflash_lightning.data.regenerate import end_ids
from dflash_lightning.data.store import write_json
from dflash_lightning.drafter.checkpoint import load_drafter
from dflash_lightning.drafter.model import DraftCache, Drafter
from dflash_lightning.drafter.start import init_random
from dflash_lightning.functional.acceptance import (
    accepted_length,
    ratio_interval,
    sample_acceptance,
)
from dflash_lightning.target import Dtype, HFTarget


@dataclass
class Generated:
    """What decoding gave.

    Args:
        ids: New token ids, the end token included.
        accepted: Draft tokens accepted in each verification, bonus token excluded.
        target_calls: Calls of the target, the prompt's included.
        seconds: Wall time.
    """

    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    target_calls: int = 0
    seconds: float = 0.0

    @property
    def tau(self) -> float:
        """Mean tokens per verification, bonus token included; 1 where nothing was verified."""
        return 1 + sum(self.accepted) / len(self.accepted) if self.accepted else 1.0


@torch.inference_mode()
def speculative_generate(
    target: HFTarget,
    drafter: Drafter,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    end_ids: frozenset[int] = frozenset(),
    seed: int = 0,
) -> Generated:
    """Decode a row with drafts; the output is distributed as the target's own.

    Args:
        target: Loaded.
        drafter: Trained for this target, on the same device.
        input_ids: The prompt, int64 ``[1, T]``.
        max_new_tokens: Longest output.
        temperature: 0 gives the target's greedy output, token for token up to ties in its logits;
            above 0, rejection sampling keeps its distribution at that temperature.
        end_ids: Ids that end the output.
        seed: Of the sampling.
    """
    start = time.perf_counter()
    spec, generator = drafter.spec, torch.Generator(input_ids.device).manual_seed(seed)
    cache, draft_cache, out = DynamicCache(), DraftCache(), Generated()
    logits, features = target.verify(input_ids, cache, spec.target_layer_ids)
    out.target_calls = 1
    out.ids.append(_pick(logits[0, -1], temperature, generator))
    while len(out.ids) < max_new_tokens and out.ids[-1] not in end_ids:
        drafter.extend(draft_cache, features)
        draft_ids, draft_probs = _draft(
            target, drafter, draft_cache, out.ids[-1], temperature, generator
        )
        block = torch.cat([input_ids.new_tensor(out.ids[-1:]), draft_ids])
        logits, features = target.verify(block[None], cache, spec.target_layer_ids)
        out.target_calls += 1
        accepted, bonus = _accept(logits[0], draft_ids, draft_probs, temperature, generator)
        new = _until_end([*draft_ids[:accepted].tolist(), bonus], end_ids)
        out.ids += new
        out.accepted.append(min(accepted, len(new)))
        _crop(cache, len(block) - 1 - accepted)
        features = features[:, : accepted + 1]
    out.ids = out.ids[:max_new_tokens]
    out.seconds = time.perf_counter() - start
    return out


@torch.inference_mode()
def plain_generate(
    target: HFTarget,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    end_ids: frozenset[int] = frozenset(),
) -> Generated:
    """The target's own greedy decoding; arguments as in :func:`speculative_generate`."""
    start = time.perf_counter()
    cache, out, block = DynamicCache(), Generated(), input_ids
    while len(out.ids) < max_new_tokens and not (out.ids and out.ids[-1] in end_ids):
        logits, _ = target.verify(block, cache, ())
        out.ids.append(int(logits[0, -1].argmax()))
        out.target_calls += 1
        block = input_ids.new_tensor([out.ids[-1:]])
    out.seconds = time.perf_counter() - start
    return out


def _until_end(ids: list[int], end_ids: frozenset[int]) -> list[int]:
    """Ids up to and including the first end token."""
    for i, token in enumerate(ids):
        if token in end_ids:
            return ids[: i + 1]
    return ids


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(_probs(logits, temperature), 1, generator=generator))


def _probs(logits: Tensor, temperature: float) -> Tensor:
    return torch.softmax(logits.float() / temperature, dim=-1)


def _draft(
    target: HFTarget,
    drafter: Drafter,
    cache: DraftCache,
    anchor: int,
    temperature: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor | None]:
    """Draft token ids ``[K-1]`` and, when sampling, their distributions ``[K-1, V]``."""
    spec, head = drafter.spec, target.head_weight
    ids = torch.full((1, spec.block_size), spec.mask_token_id, device=head.device)
    ids[0, 0] = anchor
    hidden = drafter.draft(cache, target.embed(ids))[0, 1:]
    logits = hidden.to(head.dtype) @ head.T
    if temperature == 0:
        return logits.argmax(-1), None
    probs = _probs(logits, temperature)
    return torch.multinomial(probs, 1, generator=generator)[:, 0], probs


def _accept(
    logits: Tensor,
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    temperature: float,
    generator: torch.Generator,
) -> tuple[int, int]:
    """How many draft tokens stand, and the token that follows them."""
    if draft_probs is None:
        best = logits.argmax(-1)
        right = best[:-1] == draft_ids
        accepted = int(accepted_length(right, torch.ones_like(right)))
        return accepted, int(best[accepted])
    uniform = torch.rand(len(draft_ids), generator=generator, device=logits.device)
    accepted, rest = sample_acceptance(draft_probs, _probs(logits, temperature), draft_ids, uniform)
    return accepted, int(torch.multinomial(rest, 1, generator=generator))


def _crop(cache: DynamicCache, count: int) -> None:
    """Drop the last ``count`` tokens; a crop of 0 would empty the cache in some versions."""
    if count:
        cache.crop(-count)


def decode(
    drafter: str,
    target: str,
    prompts: Path,
    *,
    max_new_tokens: int = 128,
    untrained: bool = False,
    dtype: Dtype = "float32",
    device: str = "cpu",
    json: Path | None = None,
) -> None:
    """Decode prompts greedily with and without drafts, compare token for token, and measure tau.

    Args:
        drafter: Folder of the drafter.
        target: Folder or hub name of the target, or ``smollm2``.
        prompts: JSONL with ``messages``; turns after the first answer are not used.
        max_new_tokens: Longest answer; a line's own ``max_new_tokens`` wins.
        untrained: Also measure a drafter of the same shape with random weights.
        dtype: Dtype of target and drafter.
        device: Where they run, such as cuda or cpu.
        json: Also write the numbers here.
    """
    loaded = HFTarget(target, dtype).load(device)
    trained = load_drafter(drafter, loaded.head_weight.dtype).to(device).eval()
    drafters = {"trained": trained}
    if untrained:
        drafters["untrained"] = Drafter(trained.spec).to(device, loaded.head_weight.dtype).eval()
        init_random(drafters["untrained"], seed=0)
    results = [
        _compare(loaded, drafters, conversation, max_new_tokens)
        for conversation in tqdm(_prompts(prompts), unit="prompt", disable=None)
    ]
    numbers = _summary(results, list(drafters))
    if json:
        write_json(json, numbers)
    sys.stdout.write(_table(numbers) + "\n")


def _prompts(path: Path) -> list[Conversation]:
    entries = list(read_conversations(path))
    for entry in entries:
        if isinstance(entry, tuple):
            raise ValueError(f"{path} line {entry[0]}: {entry[1]}. Mend or remove the line.")
    return [entry for entry in entries if isinstance(entry, Conversation)]


def _compare(
    target: HFTarget, drafters: dict[str, Drafter], conversation: Conversation, max_new_tokens: int
) -> dict:
    """One prompt, plainly and with each drafter."""
    asked = conversation.messages
    first = next((i for i, m in enumerate(asked) if m["role"] == "assistant"), len(asked))
    device = target.head_weight.device
    input_ids = torch.tensor(
        [render(target.tokenizer, asked[:first], answer_next=True)], device=device
    )
    limit = int(conversation.extra.get("max_new_tokens", max_new_tokens))
    ends = end_ids(target)
    plain = plain_generate(target, input_ids, max_new_tokens=limit, end_ids=ends)
    result = {"id": conversation.id, "source": conversation.source, "plain": plain}
    for name, drafter in drafters.items():
        result[name] = speculative_generate(
            target, drafter, input_ids, max_new_tokens=limit, end_ids=ends
        )
    return result


def _summary(results: list[dict], names: list[str]) -> dict:
    """Numbers of all prompts: tau with interval, in all and per source, equality, speed."""
    numbers: dict = {"prompts": len(results)}
    for name in names:
        equal = [r[name].ids == r["plain"].ids for r in results]
        by_source = defaultdict(list)
        for r in results:
            by_source[r["source"]].append(r[name])
        numbers[name] = {
            "equal": sum(equal),
            "differing": [r["id"] for r, same in zip(results, equal, strict=True) if not same],
            "tau": _tau([r[name] for r in results]),
            "tau_by_source": {source: _tau(group) for source, group in sorted(by_source.items())},
            "tokens": sum(len(r[name].ids) for r in results),
            "target_calls": sum(r[name].target_calls for r in results),
            "seconds": sum(r[name].seconds for r in results),
            "plain_seconds": sum(r["plain"].seconds for r in results),
        }
    return numbers


def _tau(group: list[Generated]) -> list[float]:
    """Tau, low, high over the prompts in which anything was verified."""
    verified = [g for g in group if g.accepted]
    if not verified:
        return [1.0, 1.0, 1.0]
    tokens = [sum(g.accepted) + len(g.accepted) for g in verified]
    return [round(x, 3) for x in ratio_interval(tokens, [len(g.accepted) for g in verified])]


def _table(numbers: dict) -> str:
    lines = []
    for name, n in numbers.items():
        if not isinstance(n, dict):
            continue
        tau, low, high = n["tau"]
        lines.append(
            f"{name}: tau {tau:.2f} [{low:.2f}, {high:.2f}]; output equal to the target's own for "
            f"{n['equal']} of {numbers['prompts']} prompts; {n['tokens']} tokens in "
            f"{n['target_calls']} target "
            f"calls, {n['plain_seconds'] / n['seconds']:.2f} x the speed of plain decoding"
        )
        lines += [
            f"  {s or '-':12} tau {t:.2f} [{lo:.2f}, {hi:.2f}]"
            for s, (t, lo, hi) in n["tau_by_source"].items()
        ]
        lines += [f"  differs: {n['differing']}"] if n["differing"] else []
    return "\n".join(lines)
