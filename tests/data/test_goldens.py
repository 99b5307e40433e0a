"""Hand-checked renderings by every kind of tokenizer and template: each token with its id, its text and its mask.

The files in ``goldens/`` have one line a token: 1 if it is supervised, the id, the token as the vocabulary has it, and the
text it stands for. They were checked by hand, token by token, against what a server of such a verifier generates after
its own prompt. ``python -m tests.data.test_goldens`` writes them anew; check the differences by hand again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speculators.data.rendering import render_rows
from tests.data.kinds import KINDS, Kind

FOLDER = Path(__file__).parent / "goldens"

WHO = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "I am Paris."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "yes"},
]
TOOL = {"type": "function", "function": {"name": "weather"}}


def reasoned(key: str) -> list[dict[str, Any]]:
    """Two turns with reasoning; templates that drop it from history drop the first."""
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", key: "it is"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": " no\n", key: "sunny"},
    ]


def called(arguments: Any, content: Any = "", key: str = "") -> list[dict[str, Any]]:
    """A tool call, its result and an answer; with reasoning in the template's ``key``, if it has one."""
    call = {"id": "weather:0", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "weather:0", "content": "sunny"},
        {"role": "assistant", "content": "yes"},
    ]
    if key:
        messages[1][key] = "it is"
    return messages


def cases(kind: Kind) -> Iterator[tuple[str, list[dict[str, Any]], list[Any] | None]]:
    """Names, messages and tools of the conversations a kind is checked with."""
    yield "who are you", WHO, None
    if kind.system:
        yield "system", [{"role": "system", "content": "Be"}, {"role": "user", "content": "hi"}, WHO[-1]], None
    yield "spaces", [{"role": "user", "content": " hi "}, {"role": "assistant", "content": " yes \n"}], None
    yield "thought in the text", [WHO[0], {"role": "assistant", "content": "<think>\nit is\n</think>\n\nyes"}], None
    if kind.reasoning:
        yield "reasoning", reasoned(kind.reasoning), None
    if kind.tools:
        yield "tool call, arguments as an object", called({"city": "SF"}, key=kind.reasoning), [TOOL]
        yield "tool call, arguments as text", called('{"city": "SF"}', "yes"), None


def lines(kind: Kind) -> Iterator[str]:
    tokenizer = kind.tokenizer
    for name, messages, tools in cases(kind):
        rows = render_rows(tokenizer, messages, tools, kind.options, kind.eos_ids)
        for place, row in enumerate(rows):
            yield f"# {name}: row {place + 1} of {len(rows)}"
            for index, counted in zip(row.input_ids.tolist(), row.loss_mask.tolist(), strict=True):
                token, text = tokenizer.convert_ids_to_tokens(index), tokenizer.decode([index])
                shown = " ".join(json.dumps(piece, ensure_ascii=False) for piece in (token, text))
                yield f"{int(counted)} {index:>6} {shown}"


@pytest.mark.parametrize("name", KINDS)
def test_golden(name: str) -> None:
    expected = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert list(lines(KINDS[name])) == expected


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, kind in KINDS.items():
        (FOLDER / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines(kind)), encoding="utf-8")
