"""Messages to ids and loss mask: expectations are spelt out, supervised text in brackets."""

import copy
import gzip
import json
from itertools import groupby
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from dflash_lightning.data.chat import (
    Conversation,
    RejectedRowError,
    Row,
    make_row,
    read_conversations,
    render,
)

BOS, END = 1, 2
THINK = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n<think>{% endif %}"
)
WRAPS_AGAIN = THINK.replace("<think>{% endif %}{{", "<think></think>{% endif %}{{")
OPENS_OTHERWISE = THINK.replace("<think>{% endif %}{{", "{% endif %}{{")
REASONING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
FORGETS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{{ m.content if m.role == 'user' or loop.last else '...' }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def under(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    """The same tokenizer under another chat template."""
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def talk(*turns: str, **last: str) -> list[dict]:
    """Messages from ``role: content`` strings; keywords are fields of the last one."""
    messages = [dict(zip(("role", "content"), t.split(": ", 1), strict=True)) for t in turns]
    messages[-1] |= last
    return messages


def row_of(tokenizer, messages: list[dict], max_length: int = 4096, **options: str) -> Row:
    return make_row(tokenizer, messages, end_ids=frozenset([END]), max_length=max_length, **options)


def marked(tokenizer: PreTrainedTokenizerFast, row: Row) -> str:
    """The row's text with supervised stretches in brackets."""
    text = ""
    for supervised, part in groupby(zip(row.loss_mask, row.ids, strict=True), key=lambda p: p[0]):
        piece = tokenizer.decode([int(token) for _, token in part])
        text += f"[{piece}]" if supervised else piece
    return text


# -- what is supervised ---------------------------------------------------------------------------


def test_every_answer_and_its_end_are_supervised_and_nothing_else_is(tokenizer) -> None:
    messages = talk("system: be brief", "user: hi", "assistant: yo", "user: bye", "assistant: ok")
    row = row_of(tokenizer, messages)
    assert marked(tokenizer, row) == (
        "<|start|>system\nbe brief<|end|>\n"
        "<|start|>user\nhi<|end|>\n"
        "<|start|>assistant\n[yo<|end|>]\n"
        "<|start|>user\nbye<|end|>\n"
        "<|start|>assistant\n[ok<|end|>]\n"
    )
    assert row.ids.dtype == "int32"
    assert row.ids.tolist() == render(tokenizer, messages)
    assert not row.truncated


@pytest.mark.parametrize("turns", [1, 2, 3, 5])
def test_the_supervised_text_is_what_the_answers_say(tokenizer, turns: int) -> None:
    answers = [f"answer {i} " + "word " * (i % 3) + "." for i in range(turns)]
    pairs = [(f"user: question {i}?", f"assistant: {answers[i]}") for i in range(turns)]
    row = row_of(tokenizer, talk(*[turn for pair in pairs for turn in pair]))
    spoken = tokenizer.decode(row.ids[row.loss_mask].tolist())
    assert spoken == "".join(f"{answer}<|end|>" for answer in answers)


def test_tool_turns_are_context_and_not_answers(tokenizer) -> None:
    messages = talk("user: 2+2?", "assistant: add(2,2)", "tool: 4", "assistant: four")
    assert marked(tokenizer, row_of(tokenizer, messages)) == (
        "<|start|>user\n2+2?<|end|>\n<|start|>assistant\n[add(2,2)<|end|>]\n"
        "<|start|>tool\n4<|end|>\n<|start|>assistant\n[four<|end|>]\n"
    )


# -- DP-01, DP-07: rows that are too long ----------------------------------------------------------


def test_a_row_whose_answer_lies_behind_the_cut_is_rejected_for_that(tokenizer) -> None:
    kept = talk("user: short", "assistant: 10 letters")
    lost = talk("user: " + "u" * 200, "assistant: 10 letters")
    assert row_of(tokenizer, kept, max_length=64).loss_mask.sum() == 11
    with pytest.raises(RejectedRowError, match=r"^no two supervised tokens in a row within max_le"):
        row_of(tokenizer, lost, max_length=64)


def test_one_supervised_token_before_the_cut_makes_no_anchor(tokenizer) -> None:
    messages = talk("user: hi", "assistant: yo")
    whole = row_of(tokenizer, messages)
    first = int(whole.loss_mask.argmax())
    assert row_of(tokenizer, messages, max_length=first + 2).loss_mask.sum() == 2
    with pytest.raises(RejectedRowError, match="within max_length"):
        row_of(tokenizer, messages, max_length=first + 1)


def test_a_cut_invents_no_end_and_supervises_nothing_after_the_last_answer(tokenizer) -> None:
    messages = talk("user: q", "assistant: first", "user: again", "assistant: second")
    whole = row_of(tokenizer, messages)
    text = tokenizer.decode(whole.ids.tolist())
    in_answer = len(render(tokenizer, messages[:3], answer_next=True)) + len("sec")
    in_question = len(render(tokenizer, messages[:2])) + len("<user\nag")
    for length, shown in (
        (in_answer, "<|start|>assistant\n[first<|end|>]\n<|start|>user\nagain<|end|>\n"),
        (in_question, "<|start|>assistant\n[first<|end|>]\n<|start|>user\nag"),
    ):
        row = row_of(tokenizer, messages, max_length=length)
        assert row.truncated
        assert len(row.ids) == length
        assert row.ids.tolist() == whole.ids[:length].tolist()
        assert text.startswith(tokenizer.decode(row.ids.tolist()))
        assert shown in marked(tokenizer, row)
    cut_in_answer = marked(tokenizer, row_of(tokenizer, messages, max_length=in_answer))
    assert cut_in_answer.endswith("<|start|>assistant\n[sec]")
    cut_in_question = marked(tokenizer, row_of(tokenizer, messages, max_length=in_question))
    assert cut_in_question.endswith("<|start|>user\nag")


def test_a_long_row_is_dropped_where_that_is_asked_for(tokenizer) -> None:
    messages = talk("user: q", "assistant: a long answer")
    length = len(render(tokenizer, messages))
    assert not row_of(tokenizer, messages, max_length=length, long_rows="drop").truncated
    with pytest.raises(RejectedRowError, match=r"^longer than max_length$"):
        row_of(tokenizer, messages, max_length=length - 1, long_rows="drop")


# -- DP-02, DP-03: odd conversations ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ("hello", "no messages"),
        (talk("moderator: hi"), "unknown role 'moderator'"),
        (talk("user: hi", "my-model-9b: yo", "user: bye"), "unknown role 'my-model-9b'"),
        (["hi"], "unknown role 'hi'"),
        ([{"role": "user", "content": None}], "content is not text"),
        ([{"role": "user"}], "content is not text"),
    ],
)
def test_a_line_without_a_conversation_gives_its_number_and_reason(
    tmp_path: Path, messages: object, reason: str
) -> None:
    file = tmp_path / "chats.jsonl"
    good = {"messages": talk("user: hi", "assistant: yo")}
    file.write_text("\n".join(map(json.dumps, (good, {"messages": messages}, good))))
    first, rejected, last = read_conversations(file)
    assert rejected == (2, reason)
    assert isinstance(first, Conversation)
    assert isinstance(last, Conversation)
    assert (first.line, last.line) == (1, 3)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ("{}", "no messages"),
        ('{"conversations": [{"value": "x"}]}', "a ShareGPT turn needs 'from' and 'value'"),
    ],
)
def test_a_line_that_is_no_chat_at_all_gives_its_reason(tmp_path, line: str, reason: str) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(f"\n{line}\n\n")
    assert list(read_conversations(file)) == [(2, reason)]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (talk("system: be kind"), "no assistant turn"),
        (talk("user: hi"), "no assistant turn"),
        (talk("assistant: yo"), "begins with the assistant"),
        (talk("system: be kind", "assistant: yo", "user: hi"), "begins with the assistant"),
        (talk("user: hi", "assistant: ", finish_reason="length"), "no two supervised tokens in a"),
    ],
)
def test_a_conversation_that_cannot_be_trained_on_gives_its_reason(
    tokenizer, messages: list[dict], reason: str
) -> None:
    with pytest.raises(RejectedRowError, match=f"^{reason}"):
        row_of(tokenizer, messages)


# -- DP-04, DP-05: reasoning -----------------------------------------------------------------------


def test_a_row_is_the_opened_prompt_followed_by_the_captured_answer(tokenizer) -> None:
    thinker = under(tokenizer, THINK)
    captured = "2+2</think>4"
    messages = talk("user: sum?", f"assistant: {captured}")
    row = row_of(thinker, messages)
    prompt = render(thinker, messages[:1], answer_next=True)
    answer = tokenizer(captured, add_special_tokens=False)["input_ids"]
    assert row.ids[: len(prompt) + len(answer)].tolist() == prompt + answer
    assert marked(thinker, row) == (
        "<|start|>user\nsum?<|end|>\n<|start|>assistant\n<think>[2+2</think>4<|end|>]\n"
    )


def test_a_template_that_wraps_a_captured_answer_again_is_rejected(tokenizer) -> None:
    messages = talk("user: sum?", "assistant: 2+2</think>4")
    with pytest.raises(RejectedRowError, match=r"^the template adds text in front of this answer"):
        row_of(under(tokenizer, WRAPS_AGAIN), messages)


def test_a_template_that_opens_given_answers_otherwise_is_rejected(tokenizer) -> None:
    messages = talk("user: sum?", "assistant: 2+2</think>4")
    with pytest.raises(RejectedRowError, match=r"^the template opens this answer differently"):
        row_of(under(tokenizer, OPENS_OTHERWISE), messages)


def test_separate_reasoning_is_rendered_and_supervised(tokenizer) -> None:
    messages = talk("user: sum?", "assistant: 4", reasoning_content="2+2")
    assert marked(tokenizer, row_of(under(tokenizer, REASONING), messages)).endswith(
        "<|start|>assistant\n[(2+2)4<|end|>]\n"
    )


# -- DP-06 and other things that templates do ------------------------------------------------------


def test_the_template_alone_prints_the_start_token(tokenizer) -> None:
    eager = copy.deepcopy(tokenizer)
    eager.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|end|>", special_tokens=[("<|start|>", BOS), ("<|end|>", END)]
    )
    assert eager("x")["input_ids"][0] == BOS
    eager.chat_template = "<|start|>" + tokenizer.chat_template.replace("<|start|>", "#")
    messages = talk("user: hi", "assistant: yo")
    ids = row_of(eager, messages).ids.tolist()
    assert ids.count(BOS) == 1
    assert ids[0] == BOS
    assert ids.count(END) == 2
    assert ids == eager.apply_chat_template(messages, tokenize=True, return_dict=False)


def test_a_template_that_rewrites_earlier_turns_is_rejected_for_that(tokenizer) -> None:
    forgetful = under(tokenizer, FORGETS)
    assert row_of(forgetful, talk("user: a", "assistant: one")).loss_mask.sum() == 4
    messages = talk("user: a", "assistant: one", "user: b", "assistant: two")
    with pytest.raises(RejectedRowError, match=r"^the template rewrites an earlier turn$"):
        row_of(forgetful, messages)


def test_a_conversation_that_the_template_refuses_is_rejected_in_its_words(tokenizer) -> None:
    strict = under(tokenizer, NO_SYSTEM)
    assert row_of(strict, talk("user: a", "assistant: one")).loss_mask.any()
    with pytest.raises(RejectedRowError, match=r"^refused by the template: no system role$"):
        row_of(strict, talk("system: s", "user: a", "assistant: one"))


def test_an_answer_that_was_cut_short_teaches_no_end(tokenizer) -> None:
    cut = talk("user: hi", "assistant: endles", finish_reason="length")
    row = row_of(tokenizer, cut)
    assert marked(tokenizer, row).endswith("<|start|>assistant\n[endles]")
    earlier = talk("user: hi", "assistant: endles", finish_reason="length")
    earlier += talk("user: go on", "assistant: ok")
    assert marked(tokenizer, row_of(tokenizer, earlier)).endswith(
        "<|start|>assistant\n[endles]<|end|>\n"
        "<|start|>user\ngo on<|end|>\n<|start|>assistant\n[ok<|end|>]\n"
    )
    stopped = talk("user: hi", "assistant: done", finish_reason="stop")
    assert marked(tokenizer, row_of(tokenizer, stopped)).endswith("[done<|end|>]\n")


# -- files -----------------------------------------------------------------------------------------


def test_sharegpt_turns_become_messages(tmp_path, tokenizer) -> None:
    turns = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "yo", "finish_reason": "length"},
    ]
    record = {"id": 7, "source": "share", "conversations": turns, "temperature": 0.5}
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(record))
    (found,) = read_conversations(file)
    messages = talk("system: be brief", "user: hi", "assistant: yo", finish_reason="length")
    assert found == Conversation(1, "7", "share", messages, {"temperature": 0.5})
    assert marked(tokenizer, row_of(tokenizer, found.messages)).endswith("\n[yo]")


def test_lines_without_id_are_named_by_their_number(tmp_path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": talk(f"user: {i}")}) for i in range(3)))
    found = [c for c in read_conversations(file) if isinstance(c, Conversation)]
    assert [(c.line, c.id, c.source) for c in found] == [(1, "1", ""), (2, "2", ""), (3, "3", "")]


def test_compressed_and_plain_files_read_alike(tmp_path) -> None:
    text = json.dumps({"messages": talk("user: grüß", "assistant: dich")}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    plain, packed = (list(read_conversations(tmp_path / n)) for n in ("a.jsonl", "a.jsonl.gz"))
    assert plain == packed
    assert plain[0].messages[0]["content"] == "grüß"
