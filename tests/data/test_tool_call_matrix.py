"""Tool calls as data has them, by every kind of template that knows tools: all spellings of one call give one row.

Content absent, null or empty; arguments as an object or as text, spaced or not, or encoded twice. Templates differ in what
they take: some refuse arguments as text, some encode them once more, some write null as ``None``.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from speculators.data.conversations import parse_conversation
from speculators.data.rendering import TemplateRenderer
from tests.data.kinds import KINDS

ARGUMENTS = ({"city": "SF"}, '{"city": "SF"}', '{"city":"SF"}', '"{\\"city\\": \\"SF\\"}"')
CONTENTS: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": ""})


def record(arguments: Any, content: dict[str, Any]) -> dict[str, Any]:
    call = {"id": "weather:0", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", **content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "weather:0", "name": "weather", "content": "sunny"},
            {"role": "assistant", "content": "yes"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    }


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.tools])
def test_every_spelling_of_a_call_gives_the_same_rows(name: str) -> None:
    kind = KINDS[name]
    renderer = TemplateRenderer(kind.tokenizer, eos_ids=kind.eos_ids, history="turn", options=kind.options)
    seen = set()
    for arguments, content in product(ARGUMENTS, CONTENTS):
        conversation = parse_conversation(record(arguments, content))
        calling, answering = renderer.rows(conversation.messages, conversation.tools)
        decoded = [kind.tokenizer.decode(row.input_ids[row.loss_mask]) for row in (calling, answering)]
        seen.add((*decoded, tuple(calling.input_ids.tolist()), tuple(answering.input_ids.tolist())))
    assert len(seen) == 1
    called, answered, *_ = seen.pop()
    assert '{"city": "SF"}' in called  # neither encoded twice nor written as Python writes it
    assert "weather" in called
    assert "None" not in called
    assert "yes" in answered
    assert "sunny" not in answered
