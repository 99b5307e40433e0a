"""What of a recorded conversation follows a new answer, and where it cannot go on."""

from __future__ import annotations

from typing import Any

import pytest

from speculators.pipelines.dialogue import Dialogue


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, *names: str, ids: bool = False) -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": name, "arguments": {}}, **({"id": f"{text}{place}"} if ids else {})}
        for place, name in enumerate(names)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def result(text: str, **more: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, **more}


SYSTEM = {"role": "system", "content": "s"}


def contents(dialogue: Dialogue) -> list[str]:
    return [message["content"] for message in dialogue.history]


def test_every_assistant_turn_is_answered_again() -> None:
    dialogue = Dialogue([SYSTEM, user("a"), said("old"), user("b"), said("old"), user("c")])
    assert dialogue.turns == 3
    assert contents(dialogue) == ["s", "a"]
    assert dialogue.take(said("1")) is None
    assert contents(dialogue) == ["s", "a", "1", "b"]
    assert dialogue.take(said("2")) is None
    assert dialogue.take(said("3")) == "answered"
    assert contents(dialogue) == ["s", "a", "1", "b", "2", "c", "3"]


def test_a_conversation_that_ends_with_the_assistant_ends_with_its_answer() -> None:
    dialogue = Dialogue([user("a"), said("old")])
    assert dialogue.turns == 1
    assert dialogue.take(said("1")) == "answered"


def test_later_turns_follow_one_another() -> None:
    dialogue = Dialogue([user("a")], ["b", "c"])
    assert [dialogue.take(said(text)) for text in "123"] == [None, None, "answered"]
    assert contents(dialogue) == ["a", "1", "b", "2", "c", "3"]


@pytest.mark.parametrize("messages", [[], [SYSTEM], [said("x")], [SYSTEM, said("x"), SYSTEM]])
def test_nothing_to_answer(messages: list[dict[str, Any]]) -> None:
    assert Dialogue(messages).turns == 0


def test_a_greeting_is_history_and_turns_in_a_row_are_one() -> None:
    dialogue = Dialogue([SYSTEM, said("hello!"), user("a"), said("x"), said("y"), user("b")])
    assert dialogue.turns == 2
    assert contents(dialogue) == ["s", "hello!", "a"]
    dialogue.take(said("1"))
    assert contents(dialogue) == ["s", "hello!", "a", "1", "b"]


def test_a_system_message_at_the_end_asks_for_nothing() -> None:
    assert Dialogue([user("a"), said("x"), SYSTEM]).turns == 1


RECORDED = [
    user("a"),
    said("old", "f", "g", ids=True),
    result("F", tool_call_id="old0", name="f"),
    result("G", tool_call_id="old1", name="g"),
    said("old2"),
]


def test_recorded_results_answer_the_new_calls() -> None:
    dialogue = Dialogue(RECORDED)
    assert dialogue.turns == 2
    assert dialogue.take(said("new", "f", "g", ids=True)) is None
    assert [(message["content"], message["tool_call_id"]) for message in dialogue.history[2:]] == [("F", "new0"), ("G", "new1")]
    assert RECORDED[2]["tool_call_id"] == "old0"  # the record is as it was
    assert dialogue.take(said("3")) == "answered"


def test_new_calls_without_ids_take_those_of_the_recorded_ones() -> None:
    dialogue = Dialogue(RECORDED)
    assert dialogue.take(said("new", "f", "g")) is None
    assert [call["id"] for call in dialogue.history[1]["tool_calls"]] == ["old0", "old1"]
    assert [message["tool_call_id"] for message in dialogue.history[2:]] == ["old0", "old1"]


@pytest.mark.parametrize("names", [(), ("f",), ("g", "f"), ("f", "g", "g"), ("f", "h")])
def test_other_calls_end_the_conversation(names: tuple[str, ...]) -> None:
    dialogue = Dialogue(RECORDED)
    assert dialogue.take(said("new", *names)) == "tools_differ"
    assert contents(dialogue) == ["a", "new"]


def test_a_call_where_none_was_recorded_ends_the_conversation_unless_it_is_over() -> None:
    assert Dialogue([user("a"), said("x"), user("b")]).take(said("new", "f")) == "tools_differ"
    assert Dialogue([user("a"), said("x")]).take(said("new", "f")) == "answered"


def test_calls_in_the_text_count_and_results_alone_name_them() -> None:
    spelled = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    dialogue = Dialogue([user("a"), said(spelled), result("F"), said("x")])
    assert dialogue.take(said(spelled)) is None
    assert contents(dialogue) == ["a", spelled, "F"]
    named = Dialogue([user("a"), said("calling"), result("F", name="f"), said("x")])
    assert named.take(said("new", "f")) is None
    unknown = Dialogue([user("a"), said("calling"), result("F"), said("x")])
    assert unknown.take(said("new", "f")) == "tools_differ"


def test_more_results_than_calls_end_the_conversation() -> None:
    dialogue = Dialogue([user("a"), said("x", "f"), result("1"), result("2"), said("y")])
    assert dialogue.take(said("new", "f")) == "tools_differ"
