"""Every form of a conversation gives the same messages, and what could only be guessed at is refused."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculators.data.conversations import ROLES, parse_conversation
from speculators.data.pretokenised import is_row, parse_row
from speculators.data.role_order import merge_roles, role_order_fault
from speculators.errors import DataError

QUESTION = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}
SHAREGPT = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
OPENAI = [QUESTION, ANSWER]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": OPENAI},
        {"messages": json.dumps(OPENAI)},
        {"messages": OPENAI, "prompt": "hello", "prompt_id": "x"},
        {"conversations": SHAREGPT},
        {"conversations": OPENAI, "messages": None, "system": None, "tools": None},
        {"conversation": SHAREGPT, "turn": 1},
        {"turns": OPENAI},
        {"prompt": "hello", "completion": "hi"},
        {"prompt": "hello", "response": "hi"},
        {"prompt": "hello", "answer": "hi"},
        {"prompt": [QUESTION], "completion": [ANSWER]},
        {"prompt": [QUESTION], "completion": "hi"},
        {"prompt": "hello", "completion": [ANSWER]},
        {"instruction": "hello", "input": "", "output": "hi"},
        {"question": "hello", "answer": "hi"},
        {"messages": [{"from": "human", "role": None, "content": None, "value": "hello"}, {"role": "GPT", "content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hel"}, "lo"]}, ANSWER | {"tool_calls": None}]},
        {"messages": [QUESTION | {"name": None, "tool_call_id": None, "thinking": None}, ANSWER | {"reasoning": ""}]},
    ],
)
def test_forms_of_one_conversation(record: dict[str, Any]) -> None:
    conversation = parse_conversation(record)
    assert conversation.messages == OPENAI
    assert (conversation.tools, conversation.options, conversation.later_turns) == (None, None, ())


def test_questions_without_answers() -> None:
    assert parse_conversation({"turns": ["hello", "and?"]}).later_turns == ("and?",)
    assert parse_conversation({"prompt": "hello", "answer": 42}).messages == [QUESTION]
    assert parse_conversation({"instruction": "sum up", "input": "a text"}).messages[0]["content"] == "sum up\n\na text"


@pytest.mark.parametrize("name", ROLES)
def test_role_names(name: str) -> None:
    value = '{"name": "f", "arguments": {}}'
    role = parse_conversation({"conversations": [{"from": name, "value": value}]}).messages[0]["role"]
    assert role == ROLES[name]
    assert role in ("system", "developer", "user", "assistant", "tool")


def test_system_prompts_beside_the_messages() -> None:
    system = {"role": "system", "content": "be brief"}
    assert parse_conversation({"system": "be brief", "conversations": SHAREGPT}).messages == [system, *OPENAI]
    assert parse_conversation({"system": "be brief", "messages": [system, *OPENAI]}).messages == [system, *OPENAI]
    with pytest.raises(DataError, match="two different system prompts"):
        parse_conversation({"system_prompt": "be long", "messages": [system, *OPENAI]})


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "SF"}}}
ENCODINGS = {
    "object": {"city": "SF"},
    "text": '{"city": "SF"}',
    "text twice": json.dumps('{"city": "SF"}'),
}


@pytest.mark.parametrize(("arguments", "content"), product(ENCODINGS, ("null", "empty", "absent")))
def test_tool_calls_however_they_are_written(arguments: str, content: str) -> None:
    given = ENCODINGS[arguments]
    message: dict[str, Any] = {"role": "assistant"} | {"null": {"content": None}, "empty": {"content": ""}, "absent": {}}[
        content
    ]
    function = {"name": "weather", "arguments": given}
    calls: list[Any] = [
        {"tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"tool_calls": [{"id": "c1", **function}]},
        {"tool_calls": json.dumps([{"id": "c1", "function": function}])},
        {"tool_calls": [json.dumps({"id": "c1", "function": function})], "function_call": None},
    ]
    for call in calls:
        parsed = parse_conversation({"messages": [QUESTION, message | call]}).messages[1]
        assert parsed == {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "c1"}]}
    legacy = parse_conversation({"messages": [message | {"function_call": function}]})
    assert legacy.messages == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]


@pytest.mark.parametrize("arguments", [{}, "", "{}", '"{}"', None, "null"])
def test_calls_without_arguments(arguments: Any) -> None:
    call = {"function": {"name": "now", "arguments": arguments}}
    (message,) = parse_conversation({"messages": [{"role": "assistant", "tool_calls": [call]}]}).messages
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]


def test_sharegpt_calls_and_results() -> None:
    call = json.dumps(CALL["function"])
    turns = [
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": f"[{call}, {call}]"},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "sunny"},
    ]
    record = {"conversations": turns, "tools": json.dumps([{"name": "weather"}])}
    conversation = parse_conversation(record)
    assert conversation.tools == [{"name": "weather"}]
    assert conversation.messages[1:3] == [
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "sunny"},
    ]
    assert parse_conversation({"prompt": "x", "functions": [{"name": "f"}]}).tools == [
        {"type": "function", "function": {"name": "f"}}
    ]
    assert parse_conversation({"prompt": "x", "tools": "[]"}).tools is None


@pytest.mark.parametrize(
    "message",
    [
        {"content": "hi", "reasoning_content": "hm"},
        {"content": "hi", "thinking": "hm", "reasoning_content": "hm", "reasoning": None},
        {"content": "hi", "reasoning": "hm"},
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "hi"}]},
        {"content": [{"type": "reasoning", "text": "hm"}, {"type": "output_text", "text": "hi"}]},
    ],
)
def test_reasoning_wherever_it_stands(message: dict[str, Any]) -> None:
    parsed = parse_conversation({"messages": [{"role": "assistant", **message}]}).messages
    assert parsed == [{"role": "assistant", "content": "hi", "reasoning_content": "hm", "thinking": "hm"}]


def test_options_and_names() -> None:
    record = {"prompt": "x", "chat_template_kwargs": {"enable_thinking": False, "effort": None}, "id": 3}
    assert parse_conversation(record).options == {"enable_thinking": False}
    assert parse_conversation(record | {"chat_template_kwargs": '{"a": 1}'}).options == {"a": 1}
    assert parse_conversation(record).conversation_id == "3"
    names = {"primary_id": "p", "conversation_id": "c", "id": "i", "uuid": "u"}
    for name in list(names):
        assert parse_conversation({"prompt": "x"} | names).conversation_id == names.pop(name)
    assert parse_conversation({"prompt": "x", "id": True}).conversation_id is None


def assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [QUESTION, {"role": "assistant", **fields}]}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([1], "no JSON object"),
        ({"messages": None, "prompt": ""}, "none of messages"),
        ({"messages": "[not json"}, "none of messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'"),
        ({"messages": [{"role": 3, "content": "x"}]}, "unknown role 3"),
        ({"messages": [{"content": "x"}]}, "unknown role None"),
        (assistant(), "without content"),
        (assistant(content={"text": "x"}), "not text but dict"),
        (assistant(content=[{"type": "image_url", "image_url": {}}]), "part of type 'image_url'"),
        (assistant(content=[{"type": "text", "text": None}]), "without text"),
        (assistant(content=[7]), "part of type None"),
        (assistant(content="x", thinking=["a"]), "reasoning that is not text"),
        (assistant(content="x", thinking="a", reasoning="b"), "two different reasonings"),
        (assistant(tool_calls="f()"), "tool calls that are no list"),
        (assistant(tool_calls=[{"function": {"name": "f", "arguments": "x=1"}}]), "arguments that are no JSON object"),
        (assistant(tool_calls=[{"function": {"name": "f", "arguments": [1]}}]), "arguments that are no JSON object"),
        (assistant(tool_calls=[{"function": {"name": "", "arguments": {}}}]), "without the name"),
        ({"messages": [QUESTION | {"tool_calls": [CALL]}]}, "only an assistant calls"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "no JSON of a call"),
        ({"prompt": "x", "tools": {"name": "f"}}, "tools that are neither"),
        ({"prompt": "x", "tools": ["f"]}, "tools that are neither"),
        ({"prompt": "x", "chat_template_kwargs": "fast"}, "chat_template_kwargs that are no JSON object"),
        ({"prompt": "x", "chat_template_kwargs": [1]}, "chat_template_kwargs that are no JSON object"),
        ({"turns": ["a", " "]}, "no list of texts"),
    ],
)
def test_what_is_refused(record: Any, says: str) -> None:
    with pytest.raises(DataError, match=says) as refusal:
        parse_conversation(record, "data.jsonl", 4)
    assert str(refusal.value).startswith("record 4 of data.jsonl has") or "no JSON object" in says
    assert ";" in str(refusal.value), "says what to do"


def roles(letters: str) -> list[dict[str, Any]]:
    """Messages of s(ystem), d(eveloper), u(ser), a(ssistant), c(aller: an assistant that calls a tool) and t(ool)."""
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    messages: list[dict[str, Any]] = [{"role": names[each], "content": f"{each}{i}"} for i, each in enumerate(letters)]
    for letter, message in zip(letters, messages, strict=True):
        if letter == "c":
            message["tool_calls"] = [CALL]
    return messages


@pytest.mark.parametrize(
    ("letters", "fault", "merged"),
    [
        ("uaua", None, "uaua"),
        ("suaua", None, "suaua"),
        ("sdua", None, "sdua"),
        ("ucttaua", None, "ucttaua"),
        ("ucu", None, "ucu"),
        ("auaua", "the assistant's", "uaua"),
        ("saua", "the assistant's", "sua"),
        ("ctaua", "the assistant's", "ua"),
        ("uaa", "both of the role assistant", "ua"),
        ("uua", "both of the role user", "ua"),
        ("ssua", "both of the role system", "sua"),
        ("tua", "nobody called", "ua"),
        ("uta", "nobody called", "uta"),
        ("uatu", "nobody called", "uatu"),
        ("uasu", "belongs at the beginning", "uasu"),
        ("uca", "both of the role assistant", "uca"),
    ],
)
def test_the_order_of_roles(letters: str, fault: str | None, merged: str) -> None:
    found = role_order_fault(roles(letters))
    assert found is None if fault is None else fault in str(found)
    assert [message["role"] for message in merge_roles(roles(letters))] == [message["role"] for message in roles(merged)]


def test_joined_turns() -> None:
    first = {"role": "assistant", "content": "one", "thinking": "hm", "reasoning_content": "hm"}
    second = {"role": "assistant", "content": "two", "tool_calls": [CALL]}
    (_, joined) = merge_roles([QUESTION, first, second])
    assert joined == first | second | {"content": "one\n\ntwo"}
    # Reasoning behind an answer cannot be moved before it.
    assert len(merge_roles([QUESTION, ANSWER, first])) == 3
    # Data for older templates writes its calls into the text.
    assert (
        role_order_fault([QUESTION, ANSWER | {"content": "<tool_call>f</tool_call>"}, {"role": "tool", "content": "x"}]) is None
    )


@given(st.text(alphabet="sduact", max_size=8))
def test_merging_settles(letters: str) -> None:
    messages = roles(letters)
    merged = merge_roles(messages)
    assert messages == roles(letters), "the argument is left as it was"
    assert merge_roles(merged) == merged
    if role_order_fault(messages) is None:
        assert merged == messages
    # Nothing but leading turns is lost.
    kept = "".join(message["content"] for message in merged)
    begun = next((i for i, each in enumerate(letters) if each == "u"), len(letters))
    assert all(f"{each}{i}" in kept for i, each in enumerate(letters) if i >= begun)


def test_rows_of_token_ids() -> None:
    record = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, True], "seq_len": 3}
    assert is_row(record)
    assert not is_row({"input_ids": None, "messages": []})
    ids, mask = parse_row(record)
    assert (ids.tolist(), mask.tolist()) == ([5, 6, 7], [False, True, True])
    assert (ids.dtype, mask.dtype) == ("int64", "bool")


@pytest.mark.parametrize(
    ("ids", "mask", "says"),
    [
        ([], [], "no list of whole numbers"),
        ([1, 2.0], [0, 1], "no list of whole numbers"),
        ([1, True], [0, 1], "no list of whole numbers"),
        ("12", [0, 1], "no list of whole numbers"),
        ([[1], [2]], [0, 1], "no list of whole numbers"),
        ([1, -1], [0, 1], "the token id -1"),
        ([1, 1 << 70], [0, 1], "which is none of the verifier's"),
        ([1, 2], [0, 2], "list of 0 and 1"),
        ([1, 2], [0, 1.0], "list of 0 and 1"),
        ([1, 2], None, "list of 0 and 1"),
        ([1, 2], [1], "2 input_ids and 1 values"),
    ],
)
def test_rows_that_are_refused(ids: Any, mask: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        parse_row({"input_ids": ids, "loss_mask": mask}, "record 4 of rows.jsonl")
