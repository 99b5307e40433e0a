"""Conversations of every common form, brought to the one that chat templates take.

A record is refused, in one sentence, rather than guessed at: an unknown role, content that is not text, arguments that are not
JSON. Columns that a record does not use come as None out of parquet files, so None means absent everywhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from speculators.data.tool_calls import CALLER, legacy_tools, read_tool_calls, read_tools, spelled_calls
from speculators.errors import DataError

__all__ = ["ROLES", "Conversation", "Message", "parse_conversation", "record_id"]

#: Names of roles in data, and what chat templates call them.
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    CALLER: "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}

#: Fields that hold a list of messages, the first that is there being meant; ``turns`` and ``prompt`` may hold text as well.
MESSAGE_LISTS = ("messages", "conversations", "conversation", "turns", "prompt")

#: Fields of a question in text, and of its answer.
QUESTIONS = ("prompt", "instruction", "question")
ANSWERS = ("completion", "response", "answer", "output")

IDS = ("primary_id", "conversation_id", "id", "uuid")
SYSTEM_PROMPTS = ("system", "system_prompt")
REASONING = ("reasoning_content", "thinking", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as chat templates want them; further user turns of a ``turns`` record wait for their predecessors' answers."""

    messages: list[Message]
    source: str  #: name of the file
    index: int  #: of the record in it, from 0
    tools: list[Any] | None = None
    later_turns: tuple[str, ...] = field(default=())
    conversation_id: str | None = None  #: as the record names itself; rows of one conversation stay together in a split
    options: dict[str, Any] | None = None  #: the record's ``chat_template_kwargs``


def parse_conversation(record: Any, source: str = "", index: int = 0) -> Conversation:
    """Bring one record to the common form.

    Roles are mapped, text parts joined, tool calls brought to OpenAI's form with their arguments as objects, and reasoning
    given as both ``reasoning_content`` and ``thinking``, because templates read one or the other.

    :raises DataError: for a record in none of the accepted forms, an unknown role, or content that is not text.
    """
    where = f"record {index} of {source}" if source else f"record {index}"
    if not isinstance(record, dict):
        raise DataError(f"{where} is no JSON object; give messages, conversations, turns or prompt")
    messages, later = _messages(record, where)
    system = _first(record, SYSTEM_PROMPTS)
    if isinstance(system, str) and system.strip():
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        elif messages[0]["content"] != system:
            raise DataError(f"{where} has two different system prompts; keep one")
    return Conversation(
        messages,
        source,
        index,
        read_tools(record.get("tools"), where) or legacy_tools(record.get("functions"), where),
        later,
        record_id(record),
        _options(record.get("chat_template_kwargs"), where),
    )


def record_id(record: dict[str, Any]) -> str | None:
    """What a record calls the conversation that it is, or is a part of; None when it does not say."""
    identity = _first(record, IDS)
    return str(identity) if isinstance(identity, (str, int)) and not isinstance(identity, bool) else None


def _first(record: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The first of the fields that is there."""
    return next((record[key] for key in keys if record.get(key) is not None), None)


def _messages(record: dict[str, Any], where: str) -> tuple[list[Message], tuple[str, ...]]:
    """The messages of a record, and the user turns that wait for an answer."""
    for key in MESSAGE_LISTS:
        given = record.get(key)
        if isinstance(given, str) and key != "prompt":
            given = _decoded(given)
        if isinstance(given, list) and given:
            break
    else:
        return _pair(record, where), ()
    if key == "turns" and not all(isinstance(turn, dict) for turn in given):
        if not all(isinstance(turn, str) and turn.strip() for turn in given):
            raise DataError(f"{where} has turns that are no list of texts; correct them")
        return [{"role": "user", "content": given[0]}], tuple(given[1:])
    if key == "prompt":  # the answer stands beside the messages before it
        answer = _first(record, ANSWERS)
        given = [*given, *(answer if isinstance(answer, list) else [_answer(answer)] if isinstance(answer, str) else [])]
    return [_message(message, where) for message in given], ()


def _pair(record: dict[str, Any], where: str) -> list[Message]:
    """Of a question in text with or without its answer."""
    question, answer = _first(record, QUESTIONS), _first(record, ANSWERS)
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where} has none of messages, conversations, turns and prompt with something in it; give one of them")
    context = record.get("input")
    if record.get("prompt") is None and isinstance(context, str) and context.strip():
        question = f"{question}\n\n{context}"
    messages: list[Message] = [{"role": "user", "content": question}]
    if isinstance(answer, str) and answer.strip():
        messages.append(_answer(answer))
    elif isinstance(answer, list):
        messages += [_message(message, where) for message in answer]
    return messages


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _options(given: Any, where: str) -> dict[str, Any] | None:
    options = _decoded(given) if isinstance(given, str) and given.strip() else given or None
    if options is None and not given:
        return None
    if not isinstance(options, dict):
        raise DataError(f"{where} has chat_template_kwargs that are no JSON object; correct them")
    return {key: value for key, value in options.items() if value is not None} or None


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{where} has a message that is no JSON object; give role and content")
    name = _first(message, ("role", "from"))
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise DataError(f"{where} has the unknown role {name!r}; use one of {', '.join(ROLES)}")
    text, thoughts = _content(_first(message, ("content", "value")), where)
    calls = read_tool_calls(message, where)
    if name.lower() == CALLER:
        calls += spelled_calls(text or "", where)
        text = ""
    result: Message = {"role": role, "content": text or ""}
    if calls:
        if role != "assistant":
            raise DataError(f"{where} has a tool call of the role {name!r}; only an assistant calls tools")
        result["tool_calls"] = calls
    elif text is None:
        raise DataError(f"{where} has a message without content; remove it or give it text")
    result.update({key: message[key] for key in ("tool_call_id", "name") if message.get(key) is not None})
    thinking = _reasoning(message, thoughts, where)
    if thinking:
        result["reasoning_content"] = result["thinking"] = thinking
    return result


def _content(content: Any, where: str) -> tuple[str | None, str]:
    """(text, reasoning) of content; the text is None where there is no content."""
    if content is None or isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        raise DataError(f"{where} has content that is not text but {type(content).__name__}; give text")
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        if kind in TEXT_PARTS:
            piece, into = part if isinstance(part, str) else part.get("text"), texts
        elif kind in REASONING:
            piece, into = _first(part, (*REASONING, "text")), thoughts
        else:
            said = f"{where} has content that is not text, a part of type {kind!r}"
            raise DataError(f"{said}; images and other media are not supported")
        if not isinstance(piece, str):
            raise DataError(f"{where} has a part of its content without text; correct it")
        into.append(piece)
    return "".join(texts), "".join(thoughts)


def _reasoning(message: Message, thoughts: str, where: str) -> str:
    given = {message[key] for key in REASONING if isinstance(message.get(key), str)} | {thoughts}
    given.discard("")
    if len(given) > 1:
        raise DataError(f"{where} has a message with two different reasonings; keep one")
    if any(message.get(key) is not None and not isinstance(message[key], str) for key in REASONING):
        raise DataError(f"{where} has reasoning that is not text; correct it")
    return given.pop() if given else ""
