"""The target's own answers: a real tiny target against one plain ``generate`` call at a time."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from dflash_lightning.data import regenerate as regenerate_module
from dflash_lightning.data.regenerate import regenerate

ENDS = {2, 210}  # the tokenizer's end token, and one that only the generation config names


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """A target whose greedy answers vary and often end by themselves."""
    folder = tmp_path_factory.mktemp("talker")
    shutil.copytree(target_folder, folder, dirs_exist_ok=True)
    values = json.loads((folder / "config.json").read_text())
    config = Qwen3Config(**{**values, "tie_word_embeddings": False, "initializer_range": 0.1})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = sorted(ENDS)
    model.save_pretrained(folder)
    return folder


def ask(*questions: str, **fields: object) -> dict:
    """A prompt of user turns; a colon-separated role may be given."""
    messages = []
    for question in questions:
        role, _, content = question.rpartition(": ")
        messages.append({"role": role or "user", "content": content})
    return {"id": questions[0], "source": "test", "messages": messages, **fields}


PROMPTS = [
    ask("hello there, how are you?"),
    ask("a"),
    ask("system: be brief", "why is the sky blue?", "and the sea?"),
    ask("b", max_new_tokens=3),
    ask("a long question " * 4),
    ask("first", "assistant: this is replaced", "second"),
    ask("x", "tool: is left out, since nobody asks after it"),
    ask("c"),
]


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(folder: Path, target: Path, prompts: list[dict] = PROMPTS, **options) -> list[dict]:
    file = write(folder / "prompts.jsonl", prompts)
    defaults = {"max_new_tokens": 12, "dtype": "float32"}
    regenerate(file, str(target), folder / "chats.jsonl", **{**defaults, **options})
    return read(folder / "chats.jsonl")


def one_at_a_time(target: Path, prompts: list[dict]) -> list[dict]:
    """Slow twin: a plain greedy call for each answer, without batches or padding."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    chats = []
    for prompt in prompts:
        chat = []
        for message in prompt["messages"]:
            if message["role"] in ("assistant", "tool"):
                continue
            chat.append(message)
            if message["role"] != "user":
                continue
            ids = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False, return_tensors="pt"
            )
            limit = prompt.get("max_new_tokens", 12)
            answer = model.generate(
                ids, max_new_tokens=limit, do_sample=False, attention_mask=torch.ones_like(ids)
            )
            tokens = answer[0, ids.shape[1] :].tolist()
            stopped = tokens[-1] in ENDS
            text = tokenizer.decode(tokens[:-1] if stopped else tokens)
            reason = "stop" if stopped else "length"
            chat.append({"role": "assistant", "content": text, "finish_reason": reason})
        chats.append({"id": prompt["id"], "source": "test", "messages": chat})
    return chats


@pytest.fixture(scope="module")
def expected(talker: Path) -> list[dict]:
    return one_at_a_time(talker, PROMPTS)


def test_the_cases_cover_both_ways_to_finish(expected) -> None:
    answers = [m for chat in expected for m in chat["messages"] if m["role"] == "assistant"]
    assert {a["finish_reason"] for a in answers} == {"stop", "length"}
    assert len({a["content"] for a in answers}) > len(answers) // 2


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_answers_are_the_targets_own_greedy_ones_in_the_order_of_the_prompts(
    tmp_path, talker, expected, capsys, batch_size: int
) -> None:
    assert run(tmp_path, talker, batch_size=batch_size) == expected
    answers = [m for chat in expected for m in chat["messages"] if m["role"] == "assistant"]
    stopped = sum(a["finish_reason"] == "stop" for a in answers)
    assert capsys.readouterr().out == (
        f"8 chats in {tmp_path / 'chats.jsonl'}: {len(answers)} answers, of which {stopped} ended "
        f"by themselves and {len(answers) - stopped} at their limit.\n"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chats.jsonl", "prompts.jsonl"]


def test_prompts_may_be_in_sharegpt_form(tmp_path, talker, expected) -> None:
    prompt = {"id": "a", "source": "test", "conversations": [{"from": "human", "value": "a"}]}
    assert run(tmp_path, talker, [prompt]) == [expected[1]]


@pytest.mark.parametrize("tail", ['{"id": "c", "sour', ""])
def test_a_run_continues_behind_a_half_written_line(
    tmp_path, talker, expected, monkeypatch, tail: str
) -> None:
    generate, calls = regenerate_module._generate, iter(range(100))

    def stops_at_fourth(*args):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return generate(*args)

    monkeypatch.setattr(regenerate_module, "_generate", stops_at_fourth)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, talker, batch_size=2)
    part = tmp_path / "chats.jsonl.part"
    settings, *done = read(part)
    assert 0 < len(done) < len(PROMPTS)
    assert not (tmp_path / "chats.jsonl").exists()
    done[0]["messages"][-1]["content"] = "an answer that only the part file knows"
    lines = "".join(json.dumps(record) + "\n" for record in (settings, *done))
    part.write_text(lines + tail)
    monkeypatch.setattr(regenerate_module, "_generate", generate)
    known = {record["id"]: record for record in done}
    assert run(tmp_path, talker, batch_size=2) == [known.get(c["id"], c) for c in expected]
    assert not part.exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_new_tokens": 13}, "max_new_tokens"),
        ({"temperature": 0.5, "seed": 1}, "temperature, seed"),
        ({"prompts": PROMPTS[:-1]}, "prompts"),
    ],
    ids=["limit", "sampling", "prompts"],
)
def test_answers_to_other_settings_are_never_mixed_in(
    tmp_path, talker, monkeypatch, change: dict, named: str
) -> None:
    def stops(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(regenerate_module, "_generate", stops)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, talker)
    part = (tmp_path / "chats.jsonl.part").read_bytes()
    with pytest.raises(ValueError, match=rf"part was begun with another {named}\. Give the same"):
        run(tmp_path, talker, **change)
    assert (tmp_path / "chats.jsonl.part").read_bytes() == part


def test_a_lines_own_temperature_wins_and_is_reproducible(tmp_path, talker, expected) -> None:
    prompts = [ask("a"), {**ask("a"), "id": "hot", "temperature": 5.0}]
    greedy, hot = run(tmp_path, talker, prompts, seed=3)
    assert greedy == expected[1]
    assert hot["messages"][-1]["content"] != greedy["messages"][-1]["content"]
    assert run(tmp_path, talker, prompts, seed=3) == [greedy, hot]
    assert run(tmp_path, talker, prompts, seed=4)[1] != hot


def test_the_default_temperature_holds_for_lines_without_one(tmp_path, talker, expected) -> None:
    cold = {**ask("a"), "id": "cold", "temperature": 0}
    hot, greedy = run(tmp_path, talker, [ask("a"), cold], temperature=5.0)
    assert greedy["messages"] == expected[1]["messages"]
    assert hot["messages"] != greedy["messages"]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "holds no prompts"),
        ([{"id": 1}], r"line 1: no messages\. Mend or remove the line"),
        ([ask("a"), ask("a")], r"line 2: id 'a' occurs twice; ids must differ"),
        ([ask("a"), ask("system: b")], r"line 2: there is no user turn to answer"),
        ([ask("a", max_new_tokens=0)], r"line 1: max_new_tokens must be at least 1 .* got 0 and 0"),
        ([ask("a", temperature=-1)], r"line 1: .*temperature not negative, got 12 and -1"),
    ],
    ids=["empty", "no messages", "same id", "no user", "limit", "temperature"],
)
def test_prompts_that_cannot_be_answered_are_refused_before_anything_is_written(
    tmp_path, talker, prompts: list[dict], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, talker, prompts)
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]
