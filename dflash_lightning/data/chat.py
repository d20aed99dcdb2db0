"""Messages to token ids and a loss mask: what the target wrote is supervised."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
SHAREGPT_ROLES |= {"system": "system", "tool": "tool"}
ROLES = ("system", "user", "assistant", "tool")
PLAIN = {"role", "content", "finish_reason"}  # fields of a message that the template only copies


class RejectedRowError(ValueError):
    """A conversation that cannot be trained on; the text is the reason that the report counts."""


@dataclass(frozen=True)
class Conversation:
    """One line of a chat file.

    Args:
        line: 1-based line number in the file.
        id: The line's own ``id``, or its number.
        source: The line's ``source`` tag, or an empty string.
        messages: Dictionaries with ``role`` and ``content``.
        extra: The line's other fields.
    """

    line: int
    id: str
    source: str
    messages: list[Message]
    extra: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A conversation as the target sees it.

    Args:
        ids: Token ids, int32 ``[T]``.
        loss_mask: True where the target wrote the token, bool ``[T]``.
        truncated: Whether tokens were cut off.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    truncated: bool


def open_text(path: Path) -> IO[str]:
    """Open a text file for reading, compressed or not."""
    if not path.is_file():
        raise FileNotFoundError(
            f"prompts must be a JSONL file (.jsonl or .jsonl.gz), got {path}, which is not there. "
            "Check the path."
        )
    return (
        gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".gz"
        else path.open(encoding="utf-8")
    )


def read_conversations(path: Path) -> Iterator[Conversation | tuple[int, str]]:
    """Yield conversations, or ``(line, reason)`` for lines that hold none.

    Reads OpenAI ``messages`` (``role``, ``content``) and ShareGPT ``conversations`` (``from``,
    ``value``).
    """
    with open_text(path) as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                yield _parse(line, text)
            except RejectedRowError as error:
                yield line, str(error)


def _parse(line: int, text: str) -> Conversation:
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        raise RejectedRowError("not JSON") from None
    if not isinstance(record, dict):
        raise RejectedRowError("not a JSON object")
    messages = record.get("messages")
    if messages is None and isinstance(record.get("conversations"), list):
        messages = [_from_sharegpt(turn) for turn in record["conversations"]]
    if not isinstance(messages, list) or not messages:
        raise RejectedRowError("no messages")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise RejectedRowError(f"unknown role {role!r}")
        if not isinstance(message.get("content"), str):
            raise RejectedRowError("content is not text")
    extra = {
        k: v for k, v in record.items() if k not in ("messages", "conversations", "id", "source")
    }
    identity, source = str(record.get("id", line)), str(record.get("source", ""))
    return Conversation(line, identity, source, messages, extra)


def _from_sharegpt(turn: Any) -> Message:
    if not isinstance(turn, dict) or "from" not in turn:
        raise RejectedRowError("a ShareGPT turn needs 'from' and 'value'")
    role = SHAREGPT_ROLES.get(turn["from"], turn["from"])
    rest = {k: v for k, v in turn.items() if k not in ("from", "value")}
    return {"role": role, "content": turn.get("value"), **rest}


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, answer_next: bool = False
) -> list[int]:
    """Token ids of messages under the chat template, which alone prints special tokens.

    Args:
        tokenizer: With a chat template.
        messages: The conversation so far.
        answer_next: Whether to end with the template's opening of an answer.

    Raises:
        RejectedRowError: If the template itself refuses the messages.
    """
    return _encode(tokenizer, _text(tokenizer, messages, answer_next=answer_next))


def _text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, answer_next: bool = False
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=answer_next
        )
    except TemplateError as error:
        raise RejectedRowError(f"refused by the template: {error}") from error
    return str(text)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def make_row(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    end_ids: frozenset[int],
    max_length: int,
    long_rows: Literal["truncate", "drop"] = "truncate",
) -> Row:
    """Ids and loss mask of a conversation, checked turn by turn.

    An answer is what stands between the prompt rendered for it and the conversation rendered with
    it, up to and including its end token. An answer that was cut short by a token limit
    (``"finish_reason": "length"``) has no end of its own: the template's end token is not
    supervised, and a row that ends in it is cut there.

    Args:
        tokenizer: The target's.
        messages: The conversation.
        end_ids: Ids that end an answer.
        max_length: Longest row in tokens.
        long_rows: What happens to longer ones.

    Raises:
        RejectedRowError: With the reason.
    """
    _check_turns(messages)
    ids = render(tokenizer, messages)
    mask = np.zeros(len(ids), dtype=bool)
    end = len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, stop = _answer_span(tokenizer, messages[:turn], message, ids)
        ends = [i for i in range(start, stop) if ids[i] in end_ids]
        stop = ends[-1] + 1 if ends else stop
        if message.get("finish_reason") == "length":
            stop -= bool(ends)
            end = stop if turn == len(messages) - 1 else end
        mask[start:stop] = True
    return _cut(np.array(ids[:end], dtype=np.int32), mask[:end], max_length, long_rows)


def _check_turns(messages: Sequence[Message]) -> None:
    spoken = [m["role"] for m in messages if m["role"] != "system"]
    if "assistant" not in spoken:
        raise RejectedRowError("no assistant turn")
    if spoken[0] == "assistant":
        raise RejectedRowError("begins with the assistant")


def _answer_span(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[Message], answer: Message, ids: list[int]
) -> tuple[int, int]:
    """First and one-past-last position of an answer in ``ids``, by rendering both prefixes."""
    opened = _text(tokenizer, before, answer_next=True)
    given = _text(tokenizer, [*before, answer])
    prompt, answered = _encode(tokenizer, opened), _encode(tokenizer, given)
    if answered[: len(prompt)] != prompt:
        raise RejectedRowError("the template opens this answer differently when it is given")
    written = given[len(opened) :].lstrip().startswith(answer["content"].strip())
    if answer.keys() <= PLAIN and not written:
        raise RejectedRowError("the template adds text in front of this answer or changes it")
    if ids[: len(answered)] != answered:
        raise RejectedRowError("the template rewrites an earlier turn")
    return len(prompt), len(answered)


def _cut(ids: np.ndarray, mask: np.ndarray, max_length: int, long_rows: str) -> Row:
    truncated = len(ids) > max_length
    if truncated and long_rows == "drop":
        raise RejectedRowError("longer than max_length")
    ids, mask = ids[:max_length], mask[:max_length]
    if not (mask[:-1] & mask[1:]).any():
        why = "no two supervised tokens in a row"
        raise RejectedRowError(f"{why} within max_length" if truncated else why)
    return Row(ids, mask, truncated)
