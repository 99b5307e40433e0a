"""Tools and tool calls in OpenAI's form, whichever way a record spells them."""

from __future__ import annotations

import json
from typing import Any

from speculators.errors import DataError

__all__ = ["CALLER", "legacy_tools", "read_tool_calls", "read_tools", "spelled_calls"]

#: The role of ShareGPT whose text is a call.
CALLER = "function_call"

#: How often text is decoded for an object in it: some exporters encode arguments twice.
ENCODINGS = 2


def read_tools(given: Any, where: str) -> list[Any] | None:
    """A record's ``tools``: a list of objects, or JSON text of one.

    :raises DataError: for anything else.
    """
    tools = _decoded(given) if isinstance(given, str) and given.strip() else given
    if tools is None or tools == "":
        return None
    if isinstance(tools, list):
        tools = [_decoded(tool) if isinstance(tool, str) else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where} has tools that are neither a list of objects nor JSON of one; correct them")
    return tools or None


def legacy_tools(given: Any, where: str) -> list[Any] | None:
    """A record's ``functions``, as the older interface named its tools."""
    functions = read_tools(given, where)
    return functions and [{"type": "function", "function": function} for function in functions]


def read_tool_calls(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The calls of a message: ``tool_calls``, or the older ``function_call``; none is an empty list.

    :raises DataError: for calls that are no objects, without a name, or with arguments that are no JSON object.
    """
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        calls = _decoded(calls)
    if not calls and message.get("function_call"):
        calls = [message["function_call"]]
    if calls and not isinstance(calls, list):
        raise DataError(f"{where} has tool calls that are no list; correct them")
    return [_call(call, where) for call in calls or ()]


def spelled_calls(text: str, where: str) -> list[dict[str, Any]]:
    """The calls that are the text of a ``function_call`` turn: an object or a list of them.

    :raises DataError: for text that is neither.
    """
    calls = _decoded(text)
    if not isinstance(calls, (dict, list)) or not calls:
        raise DataError(f"{where} has a {CALLER} turn that is no JSON of a call; give name and arguments")
    return [_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]


def _call(call: Any, where: str) -> dict[str, Any]:
    """With its arguments as an object: templates either iterate over them or serialise them."""
    if isinstance(call, str):
        call = _decoded(call)
    if not isinstance(call, dict):
        raise DataError(f"{where} has a tool call that is no JSON object; correct it")
    function = dict(call["function"]) if isinstance(call.get("function"), dict) else dict(call)
    arguments = function.get("arguments", function.get("parameters"))
    for _ in range(ENCODINGS):
        if isinstance(arguments, str):
            arguments = _decoded(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict) and arguments is not None:
        raise DataError(f"{where} has tool-call arguments that are no JSON object; correct them")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise DataError(f"{where} has a tool call without the name of its function; give it")
    result: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    if call.get("id") is not None:
        result["id"] = call["id"]
    return result


def _decoded(text: str) -> Any:
    """What JSON text holds; the text itself when it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
