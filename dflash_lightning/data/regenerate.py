"""The target's own answers to a file of prompts: the best data a drafter can be trained on."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from dflash_lightning.data.chat import Conversation, Message, read_conversations, render
from dflash_lightning.target import Dtype, HFTarget


def regenerate(
    prompts: Path,
    target: str,
    output: Path,
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    batch_size: int = 32,
    seed: int = 0,
    dtype: Dtype = "auto",
    device: str = "cpu",
) -> None:
    """Answer every user turn with the target; given assistant turns are replaced.

    Finished answers are kept in OUTPUT.part, so the same command continues after a stop. A line's
    own ``max_new_tokens`` and ``temperature`` win over the options.

    Args:
        prompts: JSONL with ``messages`` (or ShareGPT ``conversations``), compressed or not.
        target: Folder or hub name of the target, or ``smollm2``.
        output: JSONL of chats, in the order of the prompts.
        max_new_tokens: Longest answer in tokens.
        temperature: 0 takes the target's most likely token, as greedy decoding does.
        batch_size: Conversations answered together; they are sorted by length first.
        seed: Of the sampling.
        dtype: Dtype of the target.
        device: Where the target runs, such as cuda or cpu.
    """
    wanted = _read_prompts(prompts, max_new_tokens, temperature)
    part = output.with_name(output.name + ".part")
    settings = {
        "prompts": hashlib.sha256(prompts.read_bytes()).hexdigest()[:16],
        "target": target,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "dtype": dtype,
    }
    loaded = HFTarget(target, dtype).load(device)
    done = _finished(part, settings)
    tokenizer = loaded.tokenizer
    model = loaded.model
    ends = end_ids(loaded)
    progress = tqdm(total=len(wanted), initial=len(done), unit="chat", disable=None)
    with part.open("a", encoding="utf-8") as file:
        for batch in _batches(wanted, tokenizer, batch_size):
            batch = [c for c in batch if c.id not in done]
            if not batch:
                continue
            torch.manual_seed(seed + batch[0].line)
            for answered in _answer(model, tokenizer, ends, batch):
                file.write(json.dumps(answered, ensure_ascii=False) + "\n")
            file.flush()
            progress.update(len(batch))
    progress.close()
    _finish(part, output, wanted)


def end_ids(target: HFTarget) -> frozenset[int]:
    """Ids that end an answer: the tokenizer's end token and those of the generation config."""
    ids = {target.tokenizer.eos_token_id}
    configured = target.model.generation_config.eos_token_id
    ids.update(configured if isinstance(configured, list) else [configured])
    return frozenset(i for i in ids if i is not None)


def _read_prompts(path: Path, max_new_tokens: int, temperature: float) -> list[Conversation]:
    prompts, seen = [], set()
    for entry in read_conversations(path):
        if isinstance(entry, tuple):
            raise ValueError(f"{path} line {entry[0]}: {entry[1]}. Mend or remove the line.")
        entry.extra.setdefault("max_new_tokens", max_new_tokens)
        entry.extra.setdefault("temperature", temperature)
        if int(entry.extra["max_new_tokens"]) < 1 or float(entry.extra["temperature"]) < 0:
            raise ValueError(
                f"{path} line {entry.line}: max_new_tokens must be at least 1 and temperature not "
                f"negative, got {entry.extra['max_new_tokens']} and {entry.extra['temperature']}."
            )
        if not any(m["role"] == "user" for m in entry.messages):
            raise ValueError(
                f"{path} line {entry.line}: there is no user turn to answer. Mend or remove the "
                "line."
            )
        if entry.id in seen:
            raise ValueError(
                f"{path} line {entry.line}: id {entry.id!r} occurs twice; ids must differ. Rename "
                "one."
            )
        seen.add(entry.id)
        prompts.append(entry)
    if not prompts:
        raise ValueError(f"{path} holds no prompts.")
    return prompts


def _finished(part: Path, settings: dict[str, Any]) -> set[str]:
    """Ids answered by an earlier run with these settings, which stand in the first line.

    A half-written last line is cut off.
    """
    text = part.read_bytes() if part.exists() else b""
    complete = text[: text.rfind(b"\n") + 1]
    if not complete:
        part.parent.mkdir(parents=True, exist_ok=True)
        complete = json.dumps(settings).encode() + b"\n"
    found, *answers = map(json.loads, complete.splitlines())
    differing = [name for name in settings if found.get(name) != settings[name]]
    if differing:
        raise ValueError(
            f"{part} was begun with another {', '.join(differing)}. Give the same to continue it, "
            "or delete it."
        )
    if complete != text:
        part.write_bytes(complete)
    return {answer["id"] for answer in answers}


def _batches(
    prompts: list[Conversation], tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> Iterator[list[Conversation]]:
    """Conversations of like settings and length together; the same batches after a restart."""

    def key(c: Conversation) -> tuple:
        asked = _asked(c.messages)
        first = next(i for i, m in enumerate(asked, start=1) if m["role"] == "user")
        length = len(render(tokenizer, asked[:first], answer_next=True))
        turns = sum(m["role"] == "user" for m in asked)
        return turns, float(c.extra["temperature"]), int(c.extra["max_new_tokens"]), length

    keyed = sorted(((key(c), c) for c in prompts), key=lambda pair: pair[0])
    batch: list[Conversation] = []
    previous: tuple | None = None
    for k, conversation in keyed:
        if batch and (len(batch) == batch_size or k[:3] != previous):
            yield batch
            batch = []
        batch.append(conversation)
        previous = k[:3]
    yield batch


def _asked(messages: list[Message]) -> list[Message]:
    """Everything but answers, up to the last user turn."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    return [m for m in messages[: last + 1] if m["role"] != "assistant"]


def _answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    ends: frozenset[int],
    batch: list[Conversation],
) -> Iterator[dict]:
    """Chats of one batch, turn after turn."""
    chats: list[list[Message]] = [[] for _ in batch]
    queues = [_asked(c.messages) for c in batch]
    while any(queues):
        for chat, queue in zip(chats, queues, strict=True):
            while queue and (not chat or chat[-1]["role"] != "user"):
                chat.append(queue.pop(0))
        prompts = [render(tokenizer, chat, answer_next=True) for chat in chats]
        extra = batch[0].extra
        answers = _generate(
            model,
            prompts,
            tokenizer.pad_token_id or 0,
            int(extra["max_new_tokens"]),
            float(extra["temperature"]),
        )
        for chat, answer in zip(chats, answers, strict=True):
            stop = next((i for i, token in enumerate(answer) if token in ends), None)
            text = tokenizer.decode(answer[:stop], skip_special_tokens=False)
            reason = "length" if stop is None else "stop"
            chat.append({"role": "assistant", "content": text, "finish_reason": reason})
    for conversation, chat in zip(batch, chats, strict=True):
        yield {"id": conversation.id, "source": conversation.source, "messages": chat}


def _generate(
    model: Any, prompts: list[list[int]], pad: int, limit: int, temperature: float
) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device
    )
    # Every knob that a generation config may have turned is set: the answers are the target's own.
    sampling = {"do_sample": temperature > 0, "repetition_penalty": 1.0, "num_beams": 1}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=limit,
        pad_token_id=pad,
        **sampling,
    )
    return out[:, width:].tolist()


def _finish(part: Path, output: Path, wanted: list[Conversation]) -> None:
    """Write the chats in the order of the prompts, all or nothing, and say what came out."""
    _, *answers = map(json.loads, part.read_bytes().splitlines())
    by_id = {answer["id"]: answer for answer in answers}
    scratch = part.with_name(part.name + ".sorted")
    with scratch.open("w", encoding="utf-8") as file:
        for prompt in wanted:
            file.write(json.dumps(by_id[prompt.id], ensure_ascii=False) + "\n")
    scratch.replace(output)
    part.unlink()
    reasons = Counter(
        m["finish_reason"]
        for r in by_id.values()
        for m in r["messages"]
        if m["role"] == "assistant"
    )
    sys.stdout.write(
        f"{len(by_id)} chats in {output}: {sum(reasons.values())} answers, of which "
        f"{reasons['stop']} ended by themselves and {reasons['length']} at their limit.\n"
    )
