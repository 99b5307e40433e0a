"""Whose turn it is: what most chat templates expect of the order of roles, and a policy for data that does not keep to it."""

from __future__ import annotations

from speculators.data.conversations import Message

__all__ = ["merge_roles", "role_order_fault"]

#: Roles that instruct; they stand at the beginning.
INSTRUCTING = ("system", "developer")

REASONING = ("reasoning_content", "thinking")


def role_order_fault(messages: list[Message]) -> str | None:
    """What is wrong with the order of roles, as the end of a sentence; None when nothing is.

    Right is: instructions first, then a user, no role twice in a row but tools, and results of tools only behind a call.
    """
    before: Message | None = None
    caller: Message | None = None
    for index, message in enumerate(messages):
        role, last = message["role"], before["role"] if before else None
        if role in INSTRUCTING and last not in (None, *INSTRUCTING):
            return f"message {index} is of the role {role}, which belongs at the beginning"
        if role == last and role != "tool":
            return f"messages {index - 1} and {index} are both of the role {role}"
        if role == "assistant" and last in (None, *INSTRUCTING):
            return f"message {index}, the first after any instructions, is the assistant's"
        if role == "tool" and (caller is None or not _calls(caller)):
            return f"message {index} is the result of a tool that nobody called"
        before = message
        caller = message if role == "assistant" else caller if role == "tool" else None
    return None


def _calls(message: Message) -> bool:
    # Data for older templates writes calls into the text, in one of many notations, all with braces or tags.
    return bool(message.get("tool_calls")) or any(mark in (message.get("content") or "") for mark in "{<")


def merge_roles(messages: list[Message]) -> list[Message]:
    """The messages with leading turns of the assistant dropped and neighbours of one role joined by a blank line.

    Only what can be joined without changing its order is: an assistant's turn that ends in a call, or begins with reasoning
    where the one before has said something, stays for itself, and so does an instruction in the middle. Ask
    :func:`role_order_fault` about what is left.
    """
    merged: list[Message] = []
    for message in messages:
        if message["role"] in ("assistant", "tool") and all(each["role"] in INSTRUCTING for each in merged):
            continue
        if merged and _joinable(merged[-1], message):
            merged[-1] = _joined(merged[-1], message)
        else:
            merged.append(message)
    return merged


def _joinable(first: Message, second: Message) -> bool:
    if first["role"] != second["role"] or first["role"] == "tool" or first.get("name") != second.get("name"):
        return False
    return not first.get("tool_calls") and not (second.get("thinking") and (first["content"] or first.get("thinking")))


def _joined(first: Message, second: Message) -> Message:
    texts = [message["content"] for message in (first, second) if message["content"]]
    thinking = {key: message[key] for key in REASONING for message in (second, first) if message.get(key)}
    return {**first, **second, **thinking, "content": "\n\n".join(texts)}
