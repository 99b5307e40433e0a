"""Generated texts taken apart as serving engines take them apart."""

from __future__ import annotations

import pytest

from speculators.data.answer_text import call_names, message_of_answer

KNOWS_ALL = "{{ message.reasoning_content }}{{ message.tool_calls }}"
BAR, LOW = "\uff5c", "\u2581"


def call(name: str = "look", arguments: object = None, **more: object) -> dict[str, object]:
    return {
        "type": "function",
        "function": {"name": name, "arguments": {"city": "Bern"} if arguments is None else arguments},
        **more,
    }


CALLS = {
    "hermes": ('Well.\n<tool_call>\n{"name": "look", "arguments": {"city": "Bern"}}\n</tool_call>', "Well.", [call()]),
    "two": (
        '<tool_call>\n{"name": "look", "arguments": {"city": "Bern"}}\n</tool_call>\n<tool_call>\n{"name": "b"}\n</tool_call>',
        "",
        [call(), call("b", {})],
    ),
    "qwen3-coder": (
        "<tool_call>\n<function=look>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [call("look", {"city": "Bern", "days": 3})],
    ),
    "glm": (
        "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>",
        "",
        [call()],
    ),
    "kimi": (
        'Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"city": "Bern"}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "Yes.",
        [call(id="functions.look:0")],
    ),
    "deepseek-v3": (
        f"<{BAR}tool{LOW}calls{LOW}begin{BAR}><{BAR}tool{LOW}call{LOW}begin{BAR}>function<{BAR}tool{LOW}sep{BAR}>look\n"
        f'```json\n{{"city": "Bern"}}\n```<{BAR}tool{LOW}call{LOW}end{BAR}><{BAR}tool{LOW}calls{LOW}end{BAR}>',
        "",
        [call()],
    ),
    "deepseek-v3.1": (
        f"<{BAR}tool{LOW}calls{LOW}begin{BAR}><{BAR}tool{LOW}call{LOW}begin{BAR}>look<{BAR}tool{LOW}sep{BAR}>"
        f'{{"city": "Bern"}}<{BAR}tool{LOW}call{LOW}end{BAR}><{BAR}tool{LOW}calls{LOW}end{BAR}>',
        "",
        [call()],
    ),
    "mistral": ('[TOOL_CALLS][{"name": "look", "arguments": {"city": "Bern"}}]', "", [call()]),
    "mistral-2025": ('[TOOL_CALLS]look[ARGS]{"city": "Bern"}[TOOL_CALLS]b[ARGS]{}', "", [call(), call("b", {})]),
    "llama": ('<|python_tag|>{"name": "look", "parameters": {"city": "Bern"}}', "", [call()]),
}


@pytest.mark.parametrize("form", CALLS)
def test_tool_calls(form: str) -> None:
    text, content, calls = CALLS[form]
    message = message_of_answer(text, KNOWS_ALL)
    assert message == {"role": "assistant", "content": content, "tool_calls": calls}
    assert call_names(message) == [entry["function"]["name"] for entry in calls]


@pytest.mark.parametrize("form", CALLS)
def test_a_template_without_tool_calls_gets_the_text_as_it_is(form: str) -> None:
    text, _, calls = CALLS[form]
    message = message_of_answer(text, "{{ message.content }}")
    assert message == {"role": "assistant", "content": text}
    assert call_names(message) == [entry["function"]["name"] for entry in calls]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{broken\n</tool_call>",
        '<tool_call>\n{"name": "look", "arguments": [1]}\n</tool_call>',
        '<tool_call>{"name": "look"}</tool_call><tool_call>{</tool_call>',
        "[TOOL_CALLS]no list",
        "<|python_tag|>print(1)",
        "I could call a tool.",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert message_of_answer(text, KNOWS_ALL) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("hm\n</think>\n\nyes", "hm", "yes"),  # the prompt ended with the first mark
        ("<think>\n\n</think>\n\nyes", "", "yes"),
        ("<think>\nhm, and", "hm, and", ""),
        ("[THINK]hm[/THINK]yes", "hm", "yes"),
        ("◁think▷hm◁/think▷yes", "hm", "yes"),
        ("yes", "", "yes"),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes", "hm", "yes"),
    ],
)
def test_reasoning(text: str, reasoning: str, content: str) -> None:
    message = message_of_answer(text, KNOWS_ALL)
    assert message["content"] == content
    assert message.get("reasoning_content", "") == message.get("thinking", "") == reasoning


def test_reasoning_that_the_template_does_not_take_stays_in_the_text() -> None:
    """Templates such as DeepSeek-R1's cut it out of the content themselves."""
    text = "hm\n</think>\n\nyes"
    template = "{{ content.split('</think>')[-1] }}{{ tool_calls }}"
    assert message_of_answer(text, template) == {"role": "assistant", "content": text}


def test_reasoning_and_calls_together() -> None:
    message = message_of_answer('<think>hm</think>\n\nSo:\n<tool_call>{"name": "look"}</tool_call>', KNOWS_ALL)
    assert message["reasoning_content"] == "hm"
    assert message["content"] == "So:"
    assert call_names(message) == ["look"]


def test_harmony_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look "
        '<|constrain|>json<|message|>{"city": "Bern"}<|call|>'
    )
    message = message_of_answer(text, KNOWS_ALL)
    assert message == {"role": "assistant", "content": "", "tool_calls": [call()], "reasoning_content": "hm", "thinking": "hm"}
