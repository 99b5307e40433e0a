"""``{% generation %}`` tags: where a template itself says what the assistant generates, it must say what its renderings say.

Tags are written by hand and get out of step with the text around them (they leave out tool calls, or a think block), so they
are a check here and not the source of the mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from speculators.data.encoding import Encoded
from speculators.data.turns import Messages, Turn

__all__ = ["has_generation_tags", "tagged_characters", "tags_fault"]

_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def _template(tokenizer: Any, tools: list[Any] | None, options: Mapping[str, Any]) -> str:
    """The text of the template that the tokenizer would use; empty when it has none of its own."""
    try:
        return str(tokenizer.get_chat_template(options.get("chat_template"), tools))
    except (AttributeError, ValueError):
        return ""


def has_generation_tags(tokenizer: Any, tools: list[Any] | None, options: Mapping[str, Any]) -> bool:
    """Whether the template that the tokenizer would use marks what the assistant generates."""
    return _TAG.search(_template(tokenizer, tools, options)) is not None


def tagged_characters(
    tokenizer: Any, messages: Messages, tools: list[Any] | None, options: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """The rendering of ``messages`` and the (start, stop) of its tagged characters."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = _template(tokenizer, tools, options)
    others = {name: value for name, value in options.items() if name != "chat_template"}
    # None is left out of messages, as apply_chat_template does.
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    rendered: Any = render_jinja_template(
        conversations=[chat],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        add_generation_prompt=False,
        **{**tokenizer.special_tokens_map, **others},
    )
    texts, spans = rendered
    return texts[0], spans[0]


def tags_fault(
    tokenizer: Any, rendering: Encoded, turn: Turn, tagged: list[tuple[int, int]], encode: Callable[[str], Encoded]
) -> str | None:
    """What is wrong with the tags of a turn, None when they say what its boundaries say.

    The end-of-turn token and what the template writes after it may be tagged or not, and so may a token that holds the
    prompt's end and the answer's beginning.

    :param rendering: of a conversation that begins with the turn's own, as text and ids.
    :param tagged: (start, stop) of its tagged characters.
    """

    def places_by_prefixes(start: int, stop: int) -> range:
        return range(*(encode(rendering.text[:place]).common(rendering) for place in (start, stop)))

    covered = _covered(turn, tagged, places_by_prefixes)
    if _agree(turn, covered):
        return None
    # A text cut within a word may end in other tokens than the whole has there, so this needs the tokens' own places.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        offsets = backend.encode(rendering.text, add_special_tokens=False).offsets

        def places_by_offsets(start: int, stop: int) -> range:
            holding = [place for place, (first, end) in enumerate(offsets) if first < stop and end > start]
            return range(holding[0], holding[-1] + 1) if holding else range(0)

        covered = _covered(turn, tagged, places_by_offsets)
        if _agree(turn, covered):
            return None
    ids = rendering.ids()
    ours = tokenizer.decode(ids[turn.start : turn.stop])
    theirs = tokenizer.decode([ids[place] for place in sorted(covered)])
    return f"they mark {_short(theirs)}, and the rendering with and without the turn gives {_short(ours)}"


def _covered(turn: Turn, tagged: list[tuple[int, int]], places: Callable[[int, int], range]) -> set[int]:
    """Ids in the tagged stretches that reach into the turn."""
    stretches = [places(start, stop) for start, stop in tagged]
    return {place for stretch in stretches if stretch.stop > turn.start and stretch.start < len(turn.upto) for place in stretch}


def _agree(turn: Turn, covered: set[int]) -> bool:
    if not covered.issuperset(range(turn.start, turn.content)):
        return False
    return all(turn.start - 1 <= place < len(turn.upto) for place in covered)


def _short(text: str, length: int = 80) -> str:
    return repr(text if len(text) <= length else f"{text[: length // 2]}...{text[-length // 2 :]}")
