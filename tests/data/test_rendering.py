"""Loss masks from chat templates: what is supervised, token by token, for templates that behave and templates that do not."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from speculators.data import Rendered, on_policy_row, render_conversation, render_prompt, render_rows
from speculators.data.rendering import NothingSupervisedError, RenderError, TemplateRenderer, plain_spans
from speculators.errors import DataError
from tests.data.kinds import KINDS, byte_level
from tests.data.test_masks_property import conversations
from tests.tiny import CHATML, tiny_tokenizer

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


#: What the verifier is given ends in an opened think block, and the turns have none.
OPENED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
#: A template that writes the end of text behind the end of the last turn.
ENDED = CHATML.replace("{% endfor %}", "{% endfor %}{% if not add_generation_prompt %}<|endoftext|>{% endif %}")
#: A template that tells the last message by a mark.
MARKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}{% if loop.last %}*{% endif %}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}<|mask|>{{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }}<|unk|>"
    "{% endfor %}END{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize("name", KINDS)
def test_the_fast_way_is_the_plain_way(name: str) -> None:
    kind = KINDS[name]
    fast = TemplateRenderer(kind.tokenizer, eos_ids=kind.eos_ids, options=kind.options)  # remembers from one to the next
    plain = TemplateRenderer(kind.tokenizer, eos_ids=kind.eos_ids, options=kind.options, pieces=False)

    @settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow])
    @given(messages=conversations(kind))
    def check(messages: list[dict[str, Any]]) -> None:
        expected = plain_spans(kind.tokenizer, messages, options=kind.options, eos_ids=kind.eos_ids)
        spans = [(turn.index, turn.upto.ids(), turn.start, turn.stop) for turn in expected if turn.stop > turn.start]
        for renderer in (fast, plain):
            renderer.history = "turn"
            try:
                rows = renderer.rows(messages)
            except NothingSupervisedError:
                rows = []
            assert [(row.turn, row.input_ids.tolist(), *bounds(row)) for row in rows] == spans
            renderer.history = "auto"
        if spans:
            one, other = fast.rows(messages), plain.rows(messages)
            assert [row.input_ids.tolist() for row in one] == [row.input_ids.tolist() for row in other]
            assert [row.loss_mask.tolist() for row in one] == [row.loss_mask.tolist() for row in other]

    check()


def bounds(rendered: Rendered) -> tuple[int, int]:
    """Start and stop of the only span."""
    places = np.flatnonzero(rendered.loss_mask)
    assert len(places) == places[-1] - places[0] + 1
    return int(places[0]), int(places[-1]) + 1


def test_one_row_per_conversation_or_per_turn() -> None:
    tokenizer = tiny_tokenizer()
    (one,) = TemplateRenderer(tokenizer, history="conversation").rows(TWO_TURNS)
    assert (one.turn, one.supervised_turns) == (-1, 2)
    first, second = TemplateRenderer(tokenizer, history="turn").rows(TWO_TURNS)
    assert (first.turn, second.turn) == (1, 3)
    assert supervised(tokenizer, first) == ["yes.<|im_end|>"]
    assert supervised(tokenizer, second) == ["no<|im_end|>"]
    assert second.input_ids.tolist() == one.input_ids.tolist()


@pytest.mark.parametrize("pieces", [True, False])
def test_history_that_changes_is_refused_where_one_row_is_asked_for(pieces: bool) -> None:
    tokenizer = tiny_tokenizer(FORGETFUL)
    messages = [dict(message, reasoning_content=message["content"]) for message in TWO_TURNS]
    words = (
        r"assistant turn 1 otherwise once others follow \('.*assistant\\nthink yes\.\\nyes\.<.*' becomes '.*assistant\\nyes\."
    )
    renderer = TemplateRenderer(tokenizer, history="conversation", pieces=pieces)
    with pytest.raises(RenderError, match=words) as caught:
        renderer.rows(messages)
    assert caught.value.outcome == "unstable_template"
    assert len(TemplateRenderer(tokenizer, pieces=pieces).rows(messages)) == 2
    # Stable as far as it goes: one turn, or the last alone.
    assert len(renderer.rows(messages[:2])) == 1


@pytest.mark.parametrize("history", ["auto", "conversation", "turn"])
@pytest.mark.parametrize("template", [CHATML, FORGETFUL])
def test_the_last_turn_only(history: Any, template: str) -> None:
    tokenizer = tiny_tokenizer(template)
    renderer = TemplateRenderer(tokenizer, history=history, last_turn_only=True)
    (row,) = renderer.rows([*TWO_TURNS, QUESTION])
    assert (row.turn, row.supervised_turns) == (3, 1)
    thought = "think \n" if template is FORGETFUL else ""
    assert supervised(tokenizer, row) == [f"{thought}no<|im_end|>"]
    assert tokenizer.decode(row.input_ids).endswith("no<|im_end|>\n")  # what nobody answers is left out


def test_what_answers_nothing_is_context() -> None:
    tokenizer = tiny_tokenizer()
    (row,) = TemplateRenderer(tokenizer).rows([ANSWER, *TWO_TURNS])
    assert supervised(tokenizer, row) == ["yes.<|im_end|>", "no<|im_end|>"]
    assert tokenizer.decode(row.input_ids).startswith("<|im_start|>assistant\nyes.<|im_end|>\n")
    with pytest.raises(NothingSupervisedError, match="nothing stands before the only assistant turn"):
        TemplateRenderer(tokenizer).rows([ANSWER, QUESTION])


def test_what_the_verifier_was_not_asked_is_not_supervised() -> None:
    # Given "<think>", the verifier did not choose to begin with the answer's first token, but it chose the others.
    tokenizer = tiny_tokenizer(OPENED)
    (row,) = TemplateRenderer(tokenizer).rows(TWO_TURNS)
    assert supervised(tokenizer, row) == ["es.<|im_end|>", "o<|im_end|>"]
    # A prompt that the turn changes was never given.
    words = r"before assistant turn 1 otherwise when it follows \('.*user\*.*hi<.*' becomes '.*user(\\n)?hi<"
    with pytest.raises(RenderError, match=words) as caught:
        TemplateRenderer(tiny_tokenizer(MARKING)).rows(TWO_TURNS)
    assert caught.value.outcome == "unstable_template"


def test_tokens_over_the_boundary() -> None:
    """GPT-2's splitting takes the last of several line breaks for itself, but not at the end of a text."""
    tokenizer = byte_level(
        "{% for m in messages %}{{ m['role'] }}:\n\n{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n\n{% endif %}",
        ["<|end|>"],
        split=None,
        eos_token="<|end|>",
    )
    prompt = render_prompt(tokenizer, [QUESTION])
    for answer in ("yes", "\nyes", " yes", ""):
        (row,) = TemplateRenderer(tokenizer).rows([QUESTION, {"role": "assistant", "content": answer}])
        assert supervised(tokenizer, row) == [f"{answer}<|end|>"]
        # Before "yes" the prompt's two line breaks are two tokens, and at its own end one.
        assert (answer == "yes") == (row.input_ids[: len(prompt)].tolist() != prompt)


def test_the_end_of_a_turn() -> None:
    tokenizer = tiny_tokenizer(ENDED)
    eos = [tokenizer.pad_token_id]  # <|endoftext|>, which the template writes behind everything
    renderer = TemplateRenderer(tokenizer, eos_ids=eos)
    for answer in ("yes", "yes<|endoftext|>", "a<|im_end|>\n<|endoftext|>", "<|im_end|>", "0", "1", "", "\n"):
        (row,) = renderer.rows([QUESTION, {"role": "assistant", "content": answer}])
        assert supervised(tokenizer, row) == [f"{answer}<|im_end|>"]
    assert [supervised(tokenizer, row) for row in renderer.rows(TWO_TURNS)] == [["yes.<|im_end|>", "no<|im_end|>"]]
    # An end-of-turn token in the text is no end where the template writes none, also after it was seen to end others.
    plain = TemplateRenderer(tiny_tokenizer(PLAIN))
    for answer in ("a<|im_end|>b", "a<|im_end|>", "a"):
        (row,) = plain.rows([QUESTION, {"role": "assistant", "content": answer}])
        assert supervised(tokenizer, row) == [answer]


def test_tool_calls_without_content() -> None:
    tokenizer = tiny_tokenizer(CALLS.replace("END", "<|im_end|>\n"))
    renderer = TemplateRenderer(tokenizer)
    for _ in range(2):  # the second time with what was learnt the first time
        for arguments, written in (({"a": "0"}, "{?a?: ?0?}"), ('{"a": 1}', None), ({}, "{}")):
            (row,) = renderer.rows([QUESTION, call(arguments), {"role": "tool", "content": "x"}, ANSWER])
            spans = supervised(tokenizer, row)
            assert spans[1] == "yes.<|im_end|>"
            assert spans[0].startswith("<|mask|>f ")
            assert spans[0].endswith("<|unk|><|im_end|>")
            assert written is None or len(spans[0]) >= len(f"<|mask|>f {written}<|unk|><|im_end|>")
    # Without an end of turn, the call is supervised as far as the template goes on as behind any answer.
    tokenizer = tiny_tokenizer(CALLS.replace("END", "\n\n").replace("<|unk|>", "=").replace("<|mask|>", "="))
    (row,) = TemplateRenderer(tokenizer).rows([QUESTION, call([]), {"role": "tool", "content": "x"}, ANSWER])
    first, second = supervised(tokenizer, row)
    assert first.startswith("=f <|unk|>")
    assert first.endswith("<|unk|>=")
    assert second == "yes."


def test_why_a_conversation_gives_no_row() -> None:
    def refusal(template: str, messages: list[dict[str, Any]]) -> tuple[str, str]:
        with pytest.raises(RenderError) as caught:
            TemplateRenderer(tiny_tokenizer(template)).rows(messages)
        again = pickle.loads(pickle.dumps(caught.value))  # they come from worker processes
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))
        return again.outcome, str(again)

    alternating = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('users first') }}{% endif %}" + CHATML
    silent = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    query = CHATML + "{% if messages | length > 2 %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    outcome, words = refusal(alternating, [{"role": "system", "content": "x"}, ANSWER])
    assert outcome == "role_order"
    assert "is the assistant's" in words
    assert "users first" in words
    outcome, words = refusal(query, TWO_TURNS)
    assert outcome == "template_refused"
    assert "(No user query found in messages.)" in words
    assert refusal(silent, TWO_TURNS)[0] == "nothing_supervised"
    assert "the template drops its answers" in refusal(silent, TWO_TURNS)[1]
    assert "its answers are empty" in refusal(PLAIN, [QUESTION, {"role": "assistant", "content": ""}])[1]
    assert refusal(CHATML, [QUESTION])[0] == "no_assistant_turn"
    broken = [QUESTION, {"role": "assistant", "content": "a\ud83d"}]
    outcome, words = refusal(CHATML, broken)
    assert outcome == "unreadable"
    assert "it holds U+D83D, half of a character" in words
    with pytest.raises(RenderError, match=r"U\+D83D"):
        TemplateRenderer(tiny_tokenizer(), pieces=False).rows(broken)
    with pytest.raises(DataError, match="no chat template") as caught:
        TemplateRenderer(tiny_tokenizer(None)).rows(TWO_TURNS)
    assert not isinstance(caught.value, RenderError)  # nothing to do with the conversation


def test_renderers_go_to_other_processes() -> None:
    tokenizer = tiny_tokenizer(FORGETFUL)
    renderer = TemplateRenderer(tokenizer, eos_ids=[3], history="turn", options={"a": 1})
    renderer.rows(TWO_TURNS)
    again = pickle.loads(pickle.dumps(renderer))
    expected = [row.input_ids.tolist() for row in renderer.rows(TWO_TURNS)]
    assert [row.input_ids.tolist() for row in again.rows(TWO_TURNS)] == expected
    assert again.prompt(TWO_TURNS[:1]) == render_prompt(tokenizer, TWO_TURNS[:1])


def test_what_was_learnt_of_ends_is_not_taken_for_granted() -> None:
    # A turn that stays open, and says itself what ended others.
    end = "{% if not m['open'] %}<|im_end|>\n{% endif %}"
    tokenizer = tiny_tokenizer(CHATML.replace("message", "m").replace("ms", "messages").replace("<|im_end|>\n", end))
    renderer = TemplateRenderer(tokenizer)
    assert supervised(tokenizer, renderer.rows([QUESTION, ANSWER])[0]) == ["yes.<|im_end|>"]
    (row,) = renderer.rows([QUESTION, {"role": "assistant", "content": "a<|im_end|>\n", "open": True}])
    assert supervised(tokenizer, row) == ["a<|im_end|>\n"]
    # An end token that the template writes in front of answers ends none.
    tokenizer = tiny_tokenizer(
        "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}<|im_end|>{% endif %}{{ m['content'] }}\n\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert supervised(tokenizer, TemplateRenderer(tokenizer).rows([QUESTION, ANSWER])[0]) == ["<|im_end|>yes."]
    # Behind a call, a token that closes it stands before the one that ends the turn.
    tokenizer = tiny_tokenizer(CALLS.replace("END", "<|endoftext|>\n").replace("<|unk|>", "<|mask|>"))
    (row,) = TemplateRenderer(tokenizer).rows([QUESTION, call({"a": 1})])
    assert supervised(tokenizer, row)[0].endswith("<|mask|><|endoftext|>")
