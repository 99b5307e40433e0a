"""``{% generation %}`` tags are held against the mask: harmless differences pass, the others are refused with both texts."""

from __future__ import annotations

from typing import Any

import pytest

from speculators.data.rendering import RenderError, TemplateRenderer
from tests.data.kind_templates import KIMI
from tests.data.kinds import KINDS, byte_level, chatml
from tests.tiny import tiny_tokenizer

MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes", "reasoning_content": "it is"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "no", "reasoning_content": "why"},
]


def template(assistant: str) -> str:
    """ChatML whose assistant turns read ``assistant``; ``text`` and ``why`` are the message's."""
    return (
        "{% for m in messages %}{% set text = m['content'] %}{% set why = m['reasoning_content'] %}"
        "{% if m['role'] == 'assistant' %}"
        + assistant
        + "{% else %}<|im_start|>{{ m['role'] }}\n{{ text }}<|im_end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


AGREEING = {
    "the text": "<|im_start|>assistant\n{% generation %}{{ text }}{% endgeneration %}<|im_end|>{{ '\n' }}",
    "and the end of turn": "<|im_start|>assistant\n{% generation %}{{ text }}<|im_end|>{% endgeneration %}{{ '\n' }}",
    "and the line break": "<|im_start|>assistant\n{% generation %}{{ text }}<|im_end|>{{ '\n' }}{% endgeneration %}",
    "in two": "<|im_start|>assistant\n{% generation %}{{ why }}.{% endgeneration %}"
    "{%- generation %}{{ text }}{% endgeneration %}<|im_end|>{{ '\n' }}",
    "history without reasoning": "<|im_start|>assistant\n{% generation %}{% if loop.last %}{{ why }}.{% endif %}{{ text }}"
    "{% endgeneration %}<|im_end|>{{ '\n' }}",
}
DISAGREEING = {
    "without the reasoning": (
        "<|im_start|>assistant\n{{ why }}.{% generation %}{{ text }}<|im_end|>{% endgeneration %}{{ '\n' }}",
        r"message 1: they mark 'yes<\|im_end\|>', and the rendering with and without the turn gives 'it is\.yes<\|im_end\|>'",
    ),
    "with the header": (
        "{% generation %}<|im_start|>assistant\n{{ text }}<|im_end|>{% endgeneration %}{{ '\n' }}",
        r"they mark '<\|im_start\|>assistant\\nyes<\|im_end\|>', and",
    ),
    "without the last letters": (
        "<|im_start|>assistant\n{% generation %}{{ text[:1] }}{% endgeneration %}{{ text[1:] }}<|im_end|>{{ '\n' }}",
        r"they mark 'y', and",
    ),
    "not in the second turn": (
        "<|im_start|>assistant\n{% if loop.last %}{{ text }}{% else %}{% generation %}{{ text }}{% endgeneration %}{% endif %}"
        "<|im_end|>{{ '\n' }}",
        r"message 3: they mark '', and the rendering with and without the turn gives 'no<\|im_end\|>'",
    ),
}


@pytest.mark.parametrize("name", AGREEING)
@pytest.mark.parametrize("pieces", [True, False])
def test_tags_that_agree(name: str, pieces: bool) -> None:
    tokenizer = tiny_tokenizer(template(AGREEING[name]))
    renderer = TemplateRenderer(tokenizer, pieces=pieces)
    rows = renderer.rows(MESSAGES)
    assert len(rows) == (2 if "history" in name else 1)
    ignored = TemplateRenderer(tokenizer, tags="ignore").rows(MESSAGES)
    assert [row.loss_mask.tolist() for row in rows] == [row.loss_mask.tolist() for row in ignored]


@pytest.mark.parametrize("name", DISAGREEING)
def test_tags_that_disagree(name: str) -> None:
    text, words = DISAGREEING[name]
    tokenizer = tiny_tokenizer(template(text))
    with pytest.raises(RenderError, match=words) as caught:
        TemplateRenderer(tokenizer).rows(MESSAGES)
    assert caught.value.outcome == "tags_disagree"
    assert len(TemplateRenderer(tokenizer, tags="ignore").rows(MESSAGES)) == 1


def test_turns_that_are_not_supervised_may_be_tagged_as_they_like() -> None:
    text = (
        "<|im_start|>assistant\n{% if loop.last %}{% generation %}{{ text }}{% endgeneration %}{% else %}{{ text }}{% endif %}"
    )
    tokenizer = tiny_tokenizer(template(text + "<|im_end|>{{ '\n' }}"))
    with pytest.raises(RenderError, match="message 1: they mark ''"):
        TemplateRenderer(tokenizer).rows(MESSAGES)
    assert len(TemplateRenderer(tokenizer, last_turn_only=True).rows(MESSAGES)) == 1


def test_tokenizers_without_offsets() -> None:
    tokenizer = KINDS["kimi"].tokenizer
    message = "{{ m['content'] or '' }}"
    right = KIMI.replace(
        message,
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}"
        + message
        + "{% endif %}",
    )
    wrong = right.replace("{% generation %}{{ m['content'] }}", "{{ m['content'][:1] }}{% generation %}{{ m['content'][1:] }}")
    renderer = TemplateRenderer(tokenizer, eos_ids=KINDS["kimi"].eos_ids)
    assert right != KIMI
    assert renderer.rows(MESSAGES, options={"chat_template": right})[0].supervised_turns == 2
    with pytest.raises(RenderError, match="they mark") as caught:
        renderer.rows(MESSAGES, options={"chat_template": wrong})
    assert caught.value.outcome == "tags_disagree"


def test_tokens_that_hold_text_of_the_answer_and_of_the_template() -> None:
    """Line breaks behind the header and behind the answer merge with the answer's own, in the whole and not in its parts."""
    plain = byte_level(
        "{% for m in messages %}{{ m['role'] }}:\n{% generation %}{{ m['content'] }}{% endgeneration %}{{ '\n' }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    for content in ("yes", "\nyes\n", "\n\nyes", " yes is\n\n", "yes\n"):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
        (row,) = TemplateRenderer(plain).rows(messages)
        assert "yes" in plain.decode(row.input_ids[row.loss_mask])


def test_a_tokenizer_that_renders_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chatml(template(AGREEING["the text"]))
    apply = type(tokenizer).apply_chat_template

    def own(messages: Any, **arguments: Any) -> Any:
        return apply(tokenizer, [{**message, "content": message["content"] + "!"} for message in messages], **arguments)

    monkeypatch.setattr(tokenizer, "apply_chat_template", own)
    with pytest.raises(RenderError, match="their places are not known"):
        TemplateRenderer(tokenizer).rows(MESSAGES)
    assert TemplateRenderer(tokenizer, tags="ignore").rows(MESSAGES)[0].supervised_turns == 2


def test_a_prompt_whose_tokens_are_others_at_its_end() -> None:
    """Two line breaks are one token where the text ends there and two before a word: only the tokens' places tell."""
    tokenizer = byte_level(
        "{% for m in messages %}{{ m['role'] }}:\n\n{% generation %}{{ m['content'] }}{% endgeneration %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n\n{% endif %}",
        ["<|end|>"],
        split=None,
        eos_token="<|end|>",
    )
    (row,) = TemplateRenderer(tokenizer).rows(MESSAGES[:2])
    assert tokenizer.decode(row.input_ids[row.loss_mask]) == "yes<|end|>"
