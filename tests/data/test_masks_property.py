"""Over random conversations and every kind of tokenizer and template: what is supervised is what the verifier would write.

The renderer compares token ids. Here the same is found another way: from the rendered text, what the kind says its
verifier writes (``Kind.answer``), and where in the text each token lies. A token that lies partly in the answer and partly
in what the template writes around it is none that the verifier would write.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from speculators.data.rendering import NothingSupervisedError, TemplateRenderer
from tests.data.kinds import KINDS, Kind, token_places

#: Texts are strings of these: words that are tokens, white space in every place, letters of several bytes, marks that
#: combine, JSON, and special tokens of the kind.
PIECES = (
    "yes",
    " yes",
    "Paris",
    "a",
    "0",
    "1",
    " ",
    "\n",
    "\n\n",
    "  ",
    "\t",
    ".",
    "\u6f22",
    "\U0001f44d",
    "e\u0301",
    '{"a": 1}',
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": "text"}}}


def texts(kind: Kind) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from([*PIECES, *kind.markers]), max_size=5).map("".join)


@st.composite
def conversations(draw: st.DrawFn, kind: Kind) -> list[dict[str, Any]]:
    text = texts(kind)
    messages: list[dict[str, Any]] = []
    if kind.system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(text)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(text)})
        if not kind.alternates and draw(st.integers(0, 4)) == 4:
            messages.append({"role": "user", "content": draw(text)})
        if kind.tools and draw(st.booleans()):
            given_json = {"city": draw(text)}
            arguments = draw(st.sampled_from([given_json, json.dumps(given_json, ensure_ascii=False)]))
            call = {"id": "weather:0", "type": "function", "function": {"name": "weather", "arguments": arguments}}
            messages.append(_assistant(draw, kind, draw(st.one_of(st.none(), text))) | {"tool_calls": [call]})
            messages.append({"role": "tool", "name": "weather", "tool_call_id": "weather:0", "content": draw(text)})
        messages.append(_assistant(draw, kind, draw(text)))
    if draw(st.integers(0, 4)) == 4:
        messages.append({"role": "user", "content": draw(text)})
    return messages


def _assistant(draw: st.DrawFn, kind: Kind, content: str | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if kind.reasoning and draw(st.booleans()):
        message[kind.reasoning] = draw(texts(kind))
    return message


@cache
def renderer(name: str) -> TemplateRenderer:
    kind = KINDS[name]
    return TemplateRenderer(kind.tokenizer, eos_ids=kind.eos_ids, options=kind.options)


def expected_mask(kind: Kind, messages: list[dict[str, Any]], turns: list[int], tools: Any) -> tuple[list[int], list[bool]]:
    """Ids of the conversation and the mask of its turns, from the texts."""

    def apply(part: list[dict[str, Any]], generate: bool) -> str:
        return kind.tokenizer.apply_chat_template(
            part, tools=tools, add_generation_prompt=generate, tokenize=False, **kind.options
        )

    whole = apply(messages, False)
    ids, places = token_places(kind.tokenizer, whole)
    mask = [False] * len(ids)
    for turn in turns:
        prompt, answer = apply(messages[:turn], True), kind.answer(messages[turn])
        start, stop = len(prompt), len(prompt) + len(answer)
        assert whole[:stop] == prompt + answer  # else the kind does not know its template
        inside = [start <= first < stop and last <= stop for first, last in places]
        straddling = any(first < edge < last for first, last in places for edge in (start, stop))
        event("a token holds text of the answer and of the template" if straddling else "the answer is whole tokens")
        if not straddling:
            behind = len(inside) - inside[::-1].index(True)
            before, upto = (kind.tokenizer.decode(ids[:place]) for place in (inside.index(True), behind))
            assert upto == before + kind.decoded(answer)
        mask = [counted or new for counted, new in zip(mask, inside, strict=True)]
    return ids, mask


@pytest.mark.parametrize("name", KINDS)
def test_the_supervised_tokens_are_what_the_verifier_would_write(name: str) -> None:
    kind = KINDS[name]

    @settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
    @given(messages=conversations(kind), tools=st.sampled_from([None, [TOOL]] if kind.tools else [None]))
    def check(messages: list[dict[str, Any]], tools: Any) -> None:
        answered = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            rows = renderer(name).rows(messages, tools)
        except NothingSupervisedError:
            for turn in answered:
                assert not any(expected_mask(kind, messages[: turn + 1], [turn], tools)[1])
            return
        alone = len(rows) > 1 or rows[0].turn >= 0
        for row in rows:
            turns = [row.turn] if alone else answered
            ids, mask = expected_mask(kind, messages[: turns[-1] + 1], turns, tools)
            assert row.input_ids.tolist() == ids
            assert row.loss_mask.tolist() == mask

    check()
