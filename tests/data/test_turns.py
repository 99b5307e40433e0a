"""Turns in templates that write headers, ends and tool calls where others do not."""

from __future__ import annotations

from typing import Any

import pytest

from speculators.data.rendering import RenderError, TemplateRenderer
from tests.data.kinds import byte_level
from tests.data.test_rendering import ANSWER, QUESTION, TWO_TURNS, call, supervised
from tests.tiny import tiny_tokenizer

#: The user's message brings the assistant's header with it, as in Phi-3's template: there is no generation prompt.
HEADED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}user:\n{{ m['content'] }}<|end|>assistant:\n"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
)
#: A turn is ended by the role of the next, as in GLM's template.
ENDED_BY_THE_NEXT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['closed'] %}<|user|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: Words behind the end of a call, as in the template of DeepSeek-R1's distilled models.
CALL_THEN_WORDS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['arguments'] | tojson }}<|im_end|>\n"
    "<|im_start|>assistant\n{% endfor %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def answers(*texts: str, **beside: Any) -> list[dict[str, Any]]:
    """The same question before each answer."""
    return [message for text in texts for message in (QUESTION, {"role": "assistant", "content": text, **beside})]


@pytest.mark.parametrize("pieces", [True, False])
def test_a_token_over_the_boundary_where_there_is_no_generation_prompt(pieces: bool) -> None:
    tokenizer = byte_level(HEADED, ["<|end|>"], eos_token="<|end|>")
    renderer = TemplateRenderer(tokenizer, pieces=pieces)
    (row,) = renderer.rows(answers("\nyes", "yes"))
    # The prompt's line break and the answer's are one token: the history is what it was, and the verifier writes no such token.
    assert supervised(tokenizer, row) == ["yes<|end|>", "yes<|end|>"]
    assert len(TemplateRenderer(tokenizer, history="turn", pieces=pieces).rows(answers("\nyes", "yes"))) == 2


def test_an_end_that_only_the_next_message_writes() -> None:
    tokenizer = byte_level(ENDED_BY_THE_NEXT, ["<|user|>", "<|assistant|>", "<|tool|>"])
    ends = tokenizer.convert_tokens_to_ids(["<|user|>", "<|tool|>"])
    renderer = TemplateRenderer(tokenizer, eos_ids=ends)
    messages = [*answers("yes", "is it<|user|>"), {"role": "tool", "content": "x"}, ANSWER]
    (row,) = renderer.rows(messages)
    assert supervised(tokenizer, row) == ["yes<|user|>", "is it<|user|><|tool|>", "yes."]
    # Nothing stands behind a turn in a row of its own, and an answer that has its end has no second one.
    renderer.history = "turn"
    assert [supervised(tokenizer, row) for row in renderer.rows(messages)] == [["yes"], ["is it<|user|>"], ["yes."]]
    renderer.history = "conversation"
    (row,) = renderer.rows(answers("yes", "no", closed=True))
    assert supervised(tokenizer, row) == ["yes<|user|>", "no<|user|>"]


def test_tool_calls_that_the_template_leaves_out() -> None:
    for said in ("", "let me see"):
        with pytest.raises(RenderError, match="leaves out the tool calls of message 1; use a template") as caught:
            TemplateRenderer(tiny_tokenizer()).rows([QUESTION, call({"a": 1}) | {"content": said}, *TWO_TURNS])
        assert caught.value.outcome == "template_refused"
    # A template that refuses the turn without its calls renders them.
    strict = CALL_THEN_WORDS.replace("{{ m['content'] }}", "{% if not m['tool_calls'] %}{{ m['content'] + '' }}{% endif %}")
    wordless = {key: value for key, value in call({"a": 1}).items() if key != "content"}
    assert len(TemplateRenderer(tiny_tokenizer(strict)).rows([QUESTION, wordless])) == 1


def test_an_end_that_the_template_writes_within_a_turn() -> None:
    tokenizer = byte_level(CALL_THEN_WORDS, ["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    renderer = TemplateRenderer(tokenizer)
    for _ in range(2):  # the second time with what was learnt the first time
        (row,) = renderer.rows([QUESTION, call({}) | {"content": "yes."}, QUESTION, ANSWER])
        assert supervised(tokenizer, row) == ["{}<|im_end|>", "yes.<|im_end|>"]
    # What the answer says itself ends nothing.
    (row,) = renderer.rows(answers("a<|im_end|>b<|im_end|>"))
    assert supervised(tokenizer, row) == ["a<|im_end|>b<|im_end|><|im_end|>"]
