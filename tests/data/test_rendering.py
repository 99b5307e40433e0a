"""Loss masks from chat templates: what is supervised, token by token, for templates that behave and templates that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from speculators.data import Rendered, on_policy_row, render_conversation, render_prompt, render_rows
from speculators.data.rendering import NothingSupervisedError
from speculators.errors import DataError
from tests.tiny import tiny_tokenizer

QUESTION = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yes."}
TWO_TURNS = [QUESTION, ANSWER, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "no"}]

#: Drops the reasoning of every assistant turn but the last, as reasoning models' templates do.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}think {{ m.get('reasoning_content', '') }}\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: No end-of-turn token at all, only template text.
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
#: The turn ends in a special token that is not the tokenizer's eos.
OTHER_END = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|mask|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def supervised(tokenizer: Any, rendered: Rendered) -> list[str]:
    """Text of every supervised span."""
    spans: list[str] = []
    previous = False
    for token, counted in zip(rendered.input_ids.tolist(), rendered.loss_mask.tolist(), strict=True):
        if counted:
            spans = spans if previous else [*spans, ""]
            spans[-1] += tokenizer.decode([token])
        previous = counted
    return spans


def test_the_answer_and_its_end_of_turn_are_supervised_and_nothing_else() -> None:
    tokenizer = tiny_tokenizer()
    rendered = render_conversation(tokenizer, [QUESTION, ANSWER])
    assert supervised(tokenizer, rendered) == ["yes.<|im_end|>"]
    text = tokenizer.decode(rendered.input_ids)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes.<|im_end|>\n"
    # Exactly what the verifier would continue the prompt with.
    prompt = render_prompt(tokenizer, [QUESTION])
    assert rendered.input_ids[: len(prompt)].tolist() == prompt
    assert int(rendered.loss_mask.argmax()) == len(prompt)


def test_every_assistant_turn_is_supervised() -> None:
    tokenizer = tiny_tokenizer()
    rendered = render_conversation(tokenizer, TWO_TURNS)
    assert supervised(tokenizer, rendered) == ["yes.<|im_end|>", "no<|im_end|>"]
    assert rendered.supervised_turns == 2
    assert len(render_rows(tokenizer, TWO_TURNS)) == 1
    # A later user turn without an answer is context for nobody, but does no harm.
    assert supervised(tokenizer, render_conversation(tokenizer, TWO_TURNS[:3])) == ["yes.<|im_end|>"]


def test_an_end_of_turn_token_in_the_answers_text_is_part_of_the_answer() -> None:
    tokenizer = tiny_tokenizer()
    rendered = render_conversation(tokenizer, [QUESTION, {"role": "assistant", "content": "a<|im_end|>b"}])
    assert supervised(tokenizer, rendered) == ["a<|im_end|>b<|im_end|>"]


def test_a_template_that_rewrites_history() -> None:
    tokenizer = tiny_tokenizer(FORGETFUL)
    messages = [dict(message) for message in TWO_TURNS]
    messages[1]["reasoning_content"] = "one"
    messages[3]["reasoning_content"] = "two"
    # In one row only the last turn stands as it was generated.
    one = render_conversation(tokenizer, messages)
    assert supervised(tokenizer, one) == ["think two\nno<|im_end|>"]
    # As rows, every turn is seen once as it was generated.
    rows = render_rows(tokenizer, messages)
    assert [supervised(tokenizer, row) for row in rows] == [["think one\nyes.<|im_end|>"], ["think two\nno<|im_end|>"]]


@pytest.mark.parametrize("content", ["yes.", "yes 0", "0", "1"])
def test_templates_without_an_eos_token(content: str) -> None:
    messages = [QUESTION, {"role": "assistant", "content": content}]
    tokenizer = tiny_tokenizer(PLAIN)
    assert supervised(tokenizer, render_conversation(tokenizer, messages)) == [content]
    tokenizer = tiny_tokenizer(OTHER_END)
    assert supervised(tokenizer, render_conversation(tokenizer, messages)) == [f"{content}<|mask|>"]
    # The generation config may name the end-of-turn token.
    named = render_conversation(tokenizer, messages, eos_ids=[tokenizer.mask_token_id])
    assert supervised(tokenizer, named) == [f"{content}<|mask|>"]


def test_template_options_and_tools_reach_the_template() -> None:
    template = "{{ tools }}{{ mood }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    tokenizer = tiny_tokenizer(template)
    ids = render_prompt(tokenizer, [QUESTION], tools=[{"a": 1}], options={"mood": "glad"})
    assert "glad" in tokenizer.decode(ids)
    assert "a" in tokenizer.decode(ids[:8])


def test_conversations_that_cannot_be_supervised() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(DataError, match="no assistant turn"):
        render_conversation(tokenizer, [QUESTION])
    silent = tiny_tokenizer("{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}")
    with pytest.raises(NothingSupervisedError, match="nothing in the conversation is supervised"):
        render_conversation(silent, [QUESTION, ANSWER])
    with pytest.raises(DataError, match="no chat template"):
        render_prompt(tiny_tokenizer(None), [QUESTION])
    strict = tiny_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="roles must alternate"):
        render_prompt(strict, [QUESTION])


def test_on_policy_rows_are_ids_as_they_are() -> None:
    row = on_policy_row(5, [1, 2, 3], [9, 8])
    assert row.row_id == 5
    assert row.input_ids.tolist() == [1, 2, 3, 9, 8]
    assert row.loss_mask.tolist() == [False, False, False, True, True]
    assert row.input_ids.dtype == np.int64
    with pytest.raises(DataError, match="answer to row 5 is empty"):
        on_policy_row(5, [1], [])


def test_rows_can_be_cut() -> None:
    rendered = render_conversation(tiny_tokenizer(), [QUESTION, ANSWER])
    row = rendered.row(3, 12)
    assert (row.row_id, len(row), int(row.loss_mask.sum())) == (3, 12, 12 - int(rendered.loss_mask.argmax()))
