"""What is said to OpenAI-compatible servers, and what their answers mean."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from speculators.data.render_endpoint import refuse_credentials
from speculators.errors import VerifierError
from speculators.verifiers.answering import Answer, Question

__all__ = [
    "PASSING",
    "Garbled",
    "NoTokenIds",
    "answer_of_chat",
    "answer_of_completion",
    "base_address",
    "chat_body",
    "completion_body",
    "refusal_of",
]

#: What upstream's users write behind the address.
_PATHS = ("/chat/completions", "/completions", "/models", "/v1")


#: Statuses that may pass: timeout, conflict, too early, too many requests; and all from 500 on.
PASSING = frozenset({408, 409, 425, 429})

#: Larger than the ids of any tokenizer.
_ID_LIMIT = 1 << 31


class Garbled(Exception):
    """An answer in a form that no server means to give."""


class NoTokenIds(Exception):
    """An answer in good form, but as text alone."""


def base_address(endpoint: str, flag: str = "--endpoint") -> str:
    """``http://host:port/v1`` of an address with or without it, or with a path behind it.

    :param flag: that gave the address.
    :raises ConfigError: for one with a password in it.
    """
    refuse_credentials(endpoint, flag)
    address = endpoint.strip().rstrip("/")
    for path in _PATHS:
        address = address.removesuffix(path).rstrip("/")
    return f"{address if '://' in address else f'http://{address}'}/v1"


def completion_body(model: str, question: Question, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Of ``/completions``. Every sampling parameter is said, or a server would take those of the model's folder."""
    return {
        **question.further,
        "model": model,
        "prompt": list(question.prompt),
        "max_tokens": question.limit,
        **question.sampling.model_dump(),
        "seed": question.seed,
        "stop_token_ids": list(eos_ids),
        "return_token_ids": True,
    }


def chat_body(model: str, question: Question) -> dict[str, Any]:
    """Of ``/chat/completions``, with nothing that is not OpenAI's unless it is asked for."""
    if question.chat is None:
        raise ValueError("a server without token ids needs the conversation")
    options = dict(question.chat.options)
    effort = options.pop("reasoning_effort", None)
    sampling = question.sampling.model_dump(exclude={"top_k"} if not question.sampling.top_k else None)
    return {
        **question.further,
        "model": model,
        "messages": _as_sent(question.chat.messages),
        "max_tokens": question.limit,
        **sampling,
        "seed": question.seed,
        **({"tools": list(question.chat.tools)} if question.chat.tools else {}),
        **({"reasoning_effort": effort} if effort is not None else {}),
        **({"chat_template_kwargs": options} if options else {}),
    }


def _as_sent(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with what OpenAI's form wants of tool calls: arguments as text, ids, and results that name them."""
    sent = []
    unanswered: list[str] = []
    for number, message in enumerate(messages):
        entry = {key: value for key, value in message.items() if key != "thinking"}
        if message.get("tool_calls"):
            calls = []
            for place, call in enumerate(message["tool_calls"]):
                function = {**call["function"], "arguments": json.dumps(call["function"].get("arguments") or {})}
                calls.append({"id": f"call_{number}_{place}", **call, "type": "function", "function": function})
            entry["tool_calls"] = calls
            unanswered = [str(call["id"]) for call in calls]
        elif message["role"] == "tool" and unanswered:
            first = unanswered.pop(0)
            entry.setdefault("tool_call_id", first)
        sent.append(entry)
    return sent


def _choice(content: bytes) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(whole answer, its first choice, its usage)."""
    try:
        whole = json.loads(content)
        choice, usage = whole["choices"][0], whole.get("usage") or {}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Garbled(f"{content[:80]!r}") from error
    if not isinstance(choice, dict) or not isinstance(usage, dict):
        raise Garbled(f"{content[:80]!r}")
    return whole, choice, usage


def _finish_reason(choice: Mapping[str, Any]) -> str:
    reason = choice.get("finish_reason")
    if reason in ("stop", "tool_calls", "function_call", "eos_token"):
        return "stop"
    if reason == "length":
        return "length"
    raise Garbled(f"finish reason {reason!r}")


def answer_of_completion(content: bytes, question: Question) -> Answer:
    """The answer in a body of ``/completions``.

    :raises Garbled: for anything else.
    :raises NoTokenIds: when it holds text only.
    :raises VerifierError: when the server read another prompt than was sent.
    """
    whole, choice, usage = _choice(content)
    ids = choice.get("token_ids")
    if ids is None:
        if isinstance(choice.get("text"), str):
            raise NoTokenIds
        raise Garbled("neither token ids nor text")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < _ID_LIMIT for token in ids):
        raise Garbled(f"token ids {str(ids)[:80]}")
    if not ids or len(ids) > question.limit:
        raise Garbled(f"{len(ids)} tokens where 1 to {question.limit} were asked for")
    read = choice.get("prompt_token_ids", whole.get("prompt_token_ids"))
    if read is not None and not isinstance(read, list):
        raise Garbled(f"prompt token ids {str(read)[:80]}")
    if read is not None and read != list(question.prompt):
        raise VerifierError(
            f"the server read a prompt of {len(read)} tokens that is not the one of {len(question.prompt)} sent to it; "
            "switch off what it adds or cuts"
        )
    return Answer(ids, _finish_reason(choice), _count(usage, "prompt_tokens", len(question.prompt)), len(ids))


def answer_of_chat(content: bytes) -> Answer:
    """The answer in a body of ``/chat/completions``: a message, and no ids.

    :raises Garbled: for anything else.
    """
    _, choice, usage = _choice(content)
    given = choice.get("message")
    if not isinstance(given, dict):
        raise Garbled("no message")
    message: dict[str, Any] = {"role": "assistant", "content": given.get("content") or ""}
    thinking = given.get("reasoning_content") or given.get("reasoning")
    if thinking:
        message["reasoning_content"] = message["thinking"] = thinking
    try:
        calls = [_call_received(call) for call in given.get("tool_calls") or ()]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Garbled(f"tool calls {str(given.get('tool_calls'))[:80]}") from error
    if calls:
        message["tool_calls"] = calls
    if not isinstance(message["content"], str) or not (message["content"] or thinking or calls):
        raise Garbled("an empty message")
    tokens = _count(usage, "completion_tokens", 0)
    return Answer([], _finish_reason(choice), _count(usage, "prompt_tokens", 0), tokens, message)


def _call_received(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    result = {"type": "function", "function": {"name": str(function["name"]), "arguments": arguments}}
    return {**result, "id": call["id"]} if call.get("id") else result


def _count(usage: Mapping[str, Any], key: str, default: int) -> int:
    value = usage.get(key)
    return value if isinstance(value, int) else default


def refusal_of(text: str) -> str:
    """What a server says about a refusal, in one line."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        pass
    return " ".join(text.split())[:300] or "no reason given"
