"""From messages to token ids and loss mask, with nothing but the tokenizer's own chat template.

What is supervised is what the verifier would have had to generate: the assistant's text and the token that ends its turn,
but no template text after that token (ChatML's newline). The boundary is found by rendering the conversation with and
without the turn and comparing ids, so it needs neither template tags nor character offsets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError

from speculators.data.rows import Row
from speculators.data.tokenizer_checks import special_ids
from speculators.errors import DataError

__all__ = [
    "NothingSupervisedError",
    "Rendered",
    "on_policy_row",
    "render_conversation",
    "render_prompt",
    "render_rows",
]

Messages = Sequence[Mapping[str, Any]]


class NothingSupervisedError(DataError):
    """A rendering whose mask would be all zero: it can teach nothing."""


@dataclass(slots=True, eq=False)
class Rendered:
    """Ids and mask of a conversation, T tokens."""

    input_ids: np.ndarray  #: int64 ``[T]``
    loss_mask: np.ndarray  #: bool ``[T]``
    supervised_turns: int

    def row(self, row_id: int, max_length: int | None = None) -> Row:
        """The row of it, cut to ``max_length`` tokens."""
        return Row(row_id, self.input_ids[:max_length], self.loss_mask[:max_length])


def _ids(tokenizer: Any, messages: Messages, generate: bool, tools: Any, options: Mapping[str, Any]) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the tokenizer has no chat template; add chat_template to its tokenizer_config.json")
    try:
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=tools,
            add_generation_prompt=generate,
            tokenize=True,
            return_dict=False,
            **options,
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise DataError(f"the chat template refuses the conversation ({error}); leave it out or change its messages") from error
    return list(ids)


def render_prompt(
    tokenizer: Any, messages: Messages, tools: list[Any] | None = None, options: Mapping[str, Any] | None = None
) -> list[int]:
    """Ids after which the assistant is to speak: the messages and the template's generation prompt.

    :param options: further arguments of the chat template, such as ``enable_thinking``.
    :raises DataError: without a chat template, or when the template refuses the messages.
    """
    return _ids(tokenizer, messages, True, tools, options or {})


def render_conversation(
    tokenizer: Any,
    messages: Messages,
    tools: list[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    eos_ids: Collection[int] = (),
) -> Rendered:
    """The whole conversation as one row with every assistant turn supervised that stands in it as it was generated.

    Some templates render a turn differently once another follows (they drop its reasoning). Such history turns are not
    what the verifier generates, and are not supervised here; :func:`render_rows` gives them rows of their own.

    :param eos_ids: end-of-turn ids besides the tokenizer's ``eos_token_id`` (those of the generation config).
    :raises DataError: as :func:`render_prompt`, and when nothing would be supervised.
    """
    full, spans = _spans(tokenizer, messages, tools, options or {}, eos_ids)
    return _rendered(full, [span for ids, span in spans if full[: len(ids)] == ids])


def render_rows(
    tokenizer: Any,
    messages: Messages,
    tools: list[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    eos_ids: Collection[int] = (),
) -> list[Rendered]:
    """The conversation as one row where the template keeps its history as generated, else as one row per assistant turn.

    :raises DataError: as :func:`render_conversation`.
    """
    full, spans = _spans(tokenizer, messages, tools, options or {}, eos_ids)
    if all(full[: len(ids)] == ids for ids, _ in spans):
        return [_rendered(full, [span for _, span in spans])]
    return [_rendered(ids, [span]) for ids, span in spans]


def on_policy_row(row_id: int, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Row:
    """Row of a prompt and the answer that the verifier generated after it, ids as they are and never rendered again.

    :raises DataError: for an empty answer.
    """
    if not len(answer_ids):
        raise DataError(f"the answer to row {row_id} is empty; leave the row out")
    ids = np.concatenate([np.asarray(prompt_ids, dtype=np.int64), np.asarray(answer_ids, dtype=np.int64)])
    return Row(row_id, ids, np.arange(len(ids)) >= len(prompt_ids))


Span = tuple[int, int]


def _spans(
    tokenizer: Any, messages: Messages, tools: Any, options: Mapping[str, Any], eos_ids: Collection[int]
) -> tuple[list[int], list[tuple[list[int], Span]]]:
    """The full rendering, and for every assistant turn the rendering up to it with its supervised span."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError("the conversation has no assistant turn; answer it first (prepare-data --generate)")
    ends = {*eos_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    full = _ids(tokenizer, messages, False, tools, options)
    spans = []
    for turn in turns:
        prompt = _ids(tokenizer, messages[:turn], True, tools, options) if turn else []
        upto = _ids(tokenizer, messages[: turn + 1], False, tools, options)
        start = _common_prefix(prompt, upto)
        stop = _turn_end(tokenizer, messages[: turn + 1], upto, start, tools, options, ends)
        spans.append((upto, (start, stop)))
    return full, spans


def _rendered(ids: list[int], spans: list[Span]) -> Rendered:
    mask = np.zeros(len(ids), dtype=bool)
    for start, stop in spans:
        mask[start:stop] = True
    if not mask.any():
        raise NothingSupervisedError(
            "nothing in the conversation is supervised; its answers are empty, or the template drops them"
        )
    return Rendered(np.asarray(ids, dtype=np.int64), mask, len(spans))


def _turn_end(
    tokenizer: Any,
    messages: Messages,
    ids: list[int],
    start: int,
    tools: Any,
    options: Mapping[str, Any],
    eos_ids: Collection[int],
) -> int:
    """Index after the end-of-turn token of the turn that begins at ``start`` and ends the rendering."""
    for index in range(len(ids) - 1, start - 1, -1):
        if ids[index] in eos_ids:
            return index + 1
    # The end-of-turn token is none of the eos ids: what follows the text is what does not change with the text, and
    # of that, the first special token ends the turn.
    other = "1" if str(messages[-1].get("content") or "").rstrip().endswith("0") else "0"
    probe = _ids(tokenizer, [*messages[:-1], {"role": "assistant", "content": other}], False, tools, options)
    suffix = _common_prefix(ids[: start - 1 if start else None : -1], probe[::-1])
    special = special_ids(tokenizer)
    for index in range(len(ids) - suffix, len(ids)):
        if ids[index] in special:
            return index + 1
    return len(ids) - suffix


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
