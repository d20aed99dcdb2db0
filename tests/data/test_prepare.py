"""Chats to a store: what is kept, what is counted, and when a finished store may be used again."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from dflash_lightning.data import prepare as prepare_module
from dflash_lightning.data.prepare import describe, prepare, prepare_store
from dflash_lightning.data.store import RowStore, split_rows


def chat(answer: str = "fine", question: str = "hi", **fields: object) -> dict:
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, **fields}


def write(path: Path, records: list) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def prepared(folder: Path, tokenizer, records: list, **options) -> RowStore:
    chats = write(folder / "chats.jsonl", records)
    return prepare_store(chats, tokenizer, folder / "store", **{"max_length": 256, **options})


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# -- the report ------------------------------------------------------------------------------------


def test_every_line_is_kept_or_counted_under_its_reason(tmp_path, tokenizer) -> None:
    records = [
        chat(),  # line 1
        {"messages": []},
        {"messages": [{"role": "system", "content": "s"}]},
        {"messages": [{"role": "assistant", "content": "a"}]},
        "nonsense",  # 5
        chat(question="q" * 300),
        chat("yes", source="web"),
        {"messages": []},
        chat("w" * 400, "long", source="web"),
        {"messages": [{"role": "bot", "content": "a"}]},  # 10
        chat(),
        chat(question="r" * 300),
    ]
    store = prepared(tmp_path, tokenizer, records)
    assert store.meta["report"] == {
        "kept": 4,
        "rejected": {
            "no messages": 2,
            "no assistant turn": 1,
            "begins with the assistant": 1,
            "not JSON": 1,
            "no two supervised tokens in a row within max_length": 2,
            "unknown role 'bot'": 1,
        },
        "first_rejected_line": {
            "no messages": 2,
            "no assistant turn": 3,
            "begins with the assistant": 4,
            "not JSON": 5,
            "no two supervised tokens in a row within max_length": 6,
            "unknown role 'bot'": 10,
        },
        "truncated": 1,
        "sources": {"": 2, "web": 2},
        "duplicates": 1,
    }
    assert len(store) == 4
    assert store.column("line").tolist() == [1, 7, 9, 11]
    assert store.column("source").tolist() == [0, 1, 1, 0]
    assert store.meta["sources"] == ["", "web"]
    rejected = sum(store.meta["report"]["rejected"].values())
    assert store.meta["report"]["kept"] + rejected == len(records)


def test_dropped_rows_are_counted_and_not_cut(tmp_path, tokenizer) -> None:
    store = prepared(tmp_path, tokenizer, [chat(), chat("w" * 400)], long_rows="drop")
    assert store.meta["report"]["rejected"] == {"longer than max_length": 1}
    assert store.meta["report"]["truncated"] == 0
    assert len(store) == 1


def test_the_report_is_told_in_words_and_numbers(tmp_path, tokenizer) -> None:
    records = [chat(), chat(), "nonsense", chat("w" * 400, source="web")]
    store = prepared(tmp_path, tokenizer, records, max_length=64)
    short = len(store.row(0)[0])
    assert describe(store).splitlines() == [
        f"3 rows in {store.path}, 1 copies of another row",
        f"{2 * short + 64} tokens, {store.meta['supervised']} supervised; longest 64, 1 cut at 64",
        "rejected 1: not JSON (first in line 3)",
        "rows by source: none 2, web 1",
    ]


def test_the_command_prints_the_report_and_writes_it(tmp_path, target_folder, capsys) -> None:
    chats = write(tmp_path / "chats.jsonl", [chat(), "nonsense"])
    report = tmp_path / "report.json"
    prepare(chats, str(target_folder), tmp_path / "store", json=report)
    store = RowStore.open(tmp_path / "store")
    assert capsys.readouterr().out == describe(store) + "\n"
    assert json.loads(report.read_text()) == store.meta["report"]


def test_chats_of_which_no_row_is_kept_leave_nothing(tmp_path, tokenizer) -> None:
    with pytest.raises(ValueError, match=r"no row was kept: .*'no messages': 2.*Nothing was writ"):
        prepared(tmp_path, tokenizer, [{"messages": []}] * 2)
    assert [p.name for p in tmp_path.iterdir()] == ["chats.jsonl"]


def test_a_tokenizer_without_a_template_is_refused(tmp_path, tokenizer) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match="tokenizer must have a chat template; this one has none"):
        prepared(tmp_path, bare, [chat()])


# -- DP-08: lengths --------------------------------------------------------------------------------


def test_stored_lengths_are_those_of_the_final_ids(tmp_path, tokenizer) -> None:
    records = [chat("a" * n, f"q{n}") for n in (2, 9, 31, 300)]
    store = prepared(tmp_path, tokenizer, records, max_length=200)
    added = len("(user\n)\n" + "(assistant\n)\n")  # a special token counts as one
    whole = [added + len(f"q{n}") + n for n in (2, 9, 31, 300)]
    assert store.lengths.tolist() == [min(n, 200) for n in whole]
    for index, length in enumerate(store.lengths):
        ids, mask = store.row(index)
        assert len(ids) == len(mask) == length
    assert store.meta["tokens"] == store.lengths.sum()
    assert store.meta["supervised"] == sum(store.row(i)[1].sum() for i in range(4))


# -- DP-09: stale stores ---------------------------------------------------------------------------


def test_the_same_inputs_open_the_store_that_is_there(tmp_path, tokenizer, monkeypatch) -> None:
    first = prepared(tmp_path, tokenizer, [chat()])
    before = files(first.path)
    monkeypatch.setattr(prepare_module, "make_row", None)  # nothing may be rendered again
    second = prepared(tmp_path, tokenizer, [chat()])
    assert second.fingerprint == first.fingerprint
    assert files(second.path) == before


def another_template(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = tokenizer.chat_template.replace("<|end|>\n", "<|end|>")
    return other


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"records": [chat("fine!")]}, "chats"),
        ({"max_length": 128}, "max_length"),
        ({"long_rows": "drop"}, "long_rows"),
        ({"tokenizer": another_template}, "tokenizer"),
        ({"rules": 2}, "rules"),
        ({"max_length": 128, "records": [chat(source="x")]}, "chats, max_length"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_a_store_made_otherwise_is_refused_by_the_name_of_what_differs(
    tmp_path, tokenizer, monkeypatch, changes: dict, named: str
) -> None:
    store = prepared(tmp_path, tokenizer, [chat()])
    before = files(store.path)
    changes = dict(changes)
    monkeypatch.setattr(prepare_module, "RULES", changes.pop("rules", prepare_module.RULES))
    other = changes.pop("tokenizer", lambda same: same)(tokenizer)
    records = changes.pop("records", [chat()])
    with pytest.raises(
        ValueError,
        match=rf"was made with another {named}\. Give another output, or overwrite=true\.$",
    ):
        prepared(tmp_path, other, records, **changes)
    assert files(store.path) == before
    again = prepared(tmp_path, other, records, **changes, overwrite=True)
    assert again.meta["key"] != store.meta["key"]
    assert again.fingerprint != store.fingerprint
    assert len(again) == 1


def test_the_fingerprint_follows_content_and_settings_only(tmp_path, tokenizer) -> None:
    cases = {
        "base": ([chat()], {}),
        "same": ([chat()], {}),
        "other answer": ([chat("fine?")], {}),
        "other length": ([chat()], {"max_length": 255}),
        "one more": ([chat(), chat("b")], {}),
    }
    found = {}
    for name, (records, options) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        found[name] = prepared(folder, tokenizer, records, **options).fingerprint
    assert found["same"] == found["base"]
    assert len(set(found.values())) == len(cases) - 1


# -- never half a store, never somebody else's folder ----------------------------------------------


def test_a_failure_halfway_leaves_no_folder(tmp_path, tokenizer, monkeypatch) -> None:
    calls = iter(range(10))
    whole = prepare_module.make_row

    def fails_at_third(*args, **kwargs):
        if next(calls) == 2:
            raise OSError("disk full")
        return whole(*args, **kwargs)

    monkeypatch.setattr(prepare_module, "make_row", fails_at_third)
    with pytest.raises(OSError, match="disk full"):
        prepared(tmp_path, tokenizer, [chat(str(i)) for i in range(5)])
    assert [p.name for p in tmp_path.iterdir()] == ["chats.jsonl"]


def test_a_failed_overwrite_keeps_the_old_store(tmp_path, tokenizer) -> None:
    old = prepared(tmp_path, tokenizer, [chat()])
    before = files(old.path)
    with pytest.raises(ValueError, match="no row was kept"):
        prepared(tmp_path, tokenizer, [{"messages": []}], overwrite=True)
    assert files(old.path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chats.jsonl", "store"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_no_store_is_left_alone(tmp_path, tokenizer, overwrite: bool) -> None:
    thesis = tmp_path / "store" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("five years")
    with pytest.raises(
        ValueError, match=r"output must be a new folder or a row store, got .*store"
    ):
        prepared(tmp_path, tokenizer, [chat()], overwrite=overwrite)
    assert thesis.read_text() == "five years"


def test_an_empty_folder_may_be_filled(tmp_path, tokenizer) -> None:
    (tmp_path / "store").mkdir()
    assert len(prepared(tmp_path, tokenizer, [chat()])) == 1


# -- DP-10: validation leaks -----------------------------------------------------------------------


def contents(store: RowStore, rows: np.ndarray) -> set[bytes]:
    return {store.row(int(row))[0].tobytes() for row in rows}


@pytest.mark.parametrize("val_fraction", [0.0, 0.1, 0.2, 0.5, 0.9])
def test_no_conversation_and_no_copy_is_on_both_sides_of_the_split(
    tmp_path, tokenizer, val_fraction: float
) -> None:
    records = [chat(f"answer {i} {k}", id=f"talk-{i}") for i in range(10) for k in range(3)]
    records += [chat(f"answer 4 {k}", id="talk-4-again") for k in range(3)]
    store = prepared(tmp_path, tokenizer, records)
    assert store.meta["report"]["duplicates"] == 3
    conversation = store.column("conversation")
    assert len(set(conversation.tolist())) == 10
    assert len({conversation[r] for r in (*range(12, 15), *range(30, 33))}) == 1
    train, val = split_rows(conversation, val_fraction)
    assert sorted([*train, *val]) == list(range(33))
    ids = [r["id"].removesuffix("-again") for r in records]
    assert not {ids[r] for r in train} & {ids[r] for r in val}
    assert not contents(store, train) & contents(store, val)
    assert len({ids[r] for r in val}) == round(val_fraction * 10)


def test_links_by_id_and_by_content_chain_into_one_conversation(tmp_path, tokenizer) -> None:
    links = [("a", "1"), ("b", "2"), ("c", "3"), ("b", "1"), ("c", "2"), ("d", "4")]
    store = prepared(tmp_path, tokenizer, [chat(f"text {text}", id=i) for i, text in links])
    one, *_ = numbers = store.column("conversation").tolist()
    assert numbers[:5] == [one] * 5
    assert numbers[5] != one
    assert store.meta["report"]["duplicates"] == 2


def test_rows_without_id_are_conversations_of_their_own(tmp_path, tokenizer) -> None:
    store = prepared(tmp_path, tokenizer, [chat(f"text {i}") for i in range(6)])
    assert len(set(store.column("conversation").tolist())) == 6
