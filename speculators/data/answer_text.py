"""A generated text as the message that stands in the history of the next turn: reasoning, content, tool calls.

Serving engines take an answer apart before a client sees it, and the client sends the parts back. What they do with a
parser per model is done here by the marks that models write, for as many parts as the chat template can take.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

__all__ = ["call_names", "message_of_answer"]

Call = dict[str, Any]

#: Marks around reasoning. The first may be missing: many templates write it as part of the generation prompt.
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))

_DEEPSEEK = "<\uff5ctool\u2581{}\uff5c>"  # its bars and underscores are not ASCII's
_DEEPSEEK_CALL = "(.*?)".join(_DEEPSEEK.format(part) for part in ("call\u2581begin", "sep", "call\u2581end"))

_HARMONY = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?(?P<head>[^<]*)<\|channel\|>(?P<channel>[^<]*)(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<text>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)


def message_of_answer(text: str, template: str) -> dict[str, Any]:
    """The assistant's message that a generated text amounts to.

    Reasoning becomes ``reasoning_content`` (and ``thinking``) and tool calls ``tool_calls`` if the chat template reads such
    keys; else they stay in ``content``, where the model wrote them.

    :param text: the answer with its special tokens, without the one that ends the turn.
    :param template: source of the chat template.
    """
    takes_reasoning = "reasoning_content" in template or ".thinking" in template or "'thinking'" in template
    takes_calls = "tool_calls" in template
    if "<|channel|>" in text:
        reasoning, content, calls = _harmony_parts(text)
    else:
        reasoning, content = _split_reasoning(text) if takes_reasoning else ("", text)
        calls = []
        if takes_calls:
            content, calls = _split_calls(content)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning_content"] = message["thinking"] = reasoning
    return message


def call_names(message: dict[str, Any]) -> list[str]:
    """Names of the functions that an assistant's message calls, in order, whether as ``tool_calls`` or in its text."""
    calls = message.get("tool_calls") or _split_calls(message.get("content") or "")[1]
    return [str(call["function"].get("name")) for call in calls]


def _split_reasoning(text: str) -> tuple[str, str]:
    for begin, end in _REASONING:
        reasoning, mark, content = text.partition(end)
        if mark:
            return reasoning.strip().removeprefix(begin).strip(), content.lstrip("\n")
        if text.lstrip().startswith(begin):  # cut in the middle of its reasoning
            return text.strip().removeprefix(begin).strip(), ""
    return "", text


def _harmony_parts(text: str) -> tuple[str, str, list[Call]]:
    reasoning, content, calls = [], [], []
    for part in _HARMONY.finditer(text):
        addressed = re.search(r"to=functions\.([\w.-]+)", part["head"] + part["channel"])
        if addressed:
            call = _call(addressed[1], part["text"])
            calls += [] if call is None else [call]
        elif part["channel"].strip().startswith("final"):
            content.append(part["text"])
        else:
            reasoning.append(part["text"])
    return "\n".join(reasoning), "\n".join(content), calls


def _split_calls(text: str) -> tuple[str, list[Call]]:
    """The text before the calls, and the calls; none if any of them cannot be read, as an engine would have it."""
    for mark, read in _FORMS.items():
        start = text.find(mark)
        if start < 0:
            continue
        calls = read(text[start:])
        if calls and None not in calls:
            return text[:start].strip(), [call for call in calls if call is not None]
    return text, []


def _call(name: str, arguments: Any, call_id: str | None = None) -> Call | None:
    """A call in the form of chat templates, with its arguments as an object; None if they are none."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments.strip() or "{}")
        except (ValueError, RecursionError):
            return None
    if not name or not isinstance(arguments, dict):
        return None
    call: Call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {**call, "id": call_id}


def _object_call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return _call(value["name"], value.get("arguments", value.get("parameters", {})))


def _json_call(text: str) -> Call | None:
    try:
        return _object_call(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _tagged_calls(text: str) -> list[Call | None]:
    """``<tool_call>``: JSON (Hermes, Qwen), functions and parameters as tags (Qwen3-Coder), or keys and values (GLM)."""
    calls: list[Call | None] = []
    for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        function = re.match(r"\s*<function=([^>]+)>(.*)", body, re.DOTALL)
        if function:
            found = re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL)
            calls.append(_call(function[1].strip(), {key: _value(value) for key, value in found}))
        elif body.lstrip().startswith("{"):
            calls.append(_json_call(body))
        else:
            found = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
            calls.append(_call(body.partition("<arg_key>")[0].strip(), {key.strip(): _value(value) for key, value in found}))
    return calls


def _value(text: str) -> Any:
    """A parameter written without quotes: the JSON it is, else its text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _kimi_calls(text: str) -> list[Call | None]:
    """Kimi-K2: the id is ``functions.NAME:NUMBER``."""
    pattern = r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>"
    calls: list[Call | None] = []
    for call_id, arguments in re.findall(pattern, text, re.DOTALL):
        name = call_id.strip().rpartition(":")[0] or call_id.strip()
        calls.append(_call(name.removeprefix("functions."), arguments, call_id.strip()))
    return calls


def _deepseek_calls(text: str) -> list[Call | None]:
    """DeepSeek: ``function<sep>NAME`` and a fenced object (V3, R1), or ``NAME<sep>`` and the object (V3.1)."""
    calls: list[Call | None] = []
    for first, second in re.findall(_DEEPSEEK_CALL, text, re.DOTALL):
        fenced = re.fullmatch(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", second, re.DOTALL)
        calls.append(_call(fenced[1], fenced[2]) if fenced else _call(first.strip(), second))
    return calls


def _mistral_calls(text: str) -> list[Call | None]:
    """Mistral: ``[TOOL_CALLS]`` and a list of objects, or once a call ``[TOOL_CALLS]NAME[ARGS]{...}``."""
    calls: list[Call | None] = []
    for body in text.split("[TOOL_CALLS]")[1:]:
        name, separator, arguments = body.partition("[ARGS]")
        if separator:
            calls.append(_call(re.split(r"\[CALL_ID\]", name)[0].strip(), arguments))
            continue
        try:
            listed = json.loads(body)
        except (ValueError, RecursionError):
            return []
        calls += [_object_call(value) for value in (listed if isinstance(listed, list) else [listed])]
    return calls


def _llama_calls(text: str) -> list[Call | None]:
    """Llama 3: one object behind ``<|python_tag|>``."""
    return [_json_call(part) for part in text.removeprefix("<|python_tag|>").split(";\n")]


#: First mark of each form, and what reads the text from there on.
_FORMS: dict[str, Callable[[str], list[Call | None]]] = {
    "<|tool_calls_section_begin|>": _kimi_calls,
    "<tool_call>": _tagged_calls,
    _DEEPSEEK.format("calls\u2581begin"): _deepseek_calls,
    "[TOOL_CALLS]": _mistral_calls,
    "<|python_tag|>": _llama_calls,
}
