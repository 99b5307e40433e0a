"""From messages to token ids and loss mask, with nothing but the tokenizer's own chat template.

What is supervised is what the verifier would have had to generate: the assistant's text and the token that ends its turn,
but no template text after that token (ChatML's newline). The boundary is found by rendering the conversation with and
without the turn and comparing ids, so it needs neither template tags nor character offsets; ``docs/data/masks.md`` says it
at length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError

from speculators.data.encoding import Encoded, PieceEncoder, PieceMismatchError, runs_own_code
from speculators.data.generation_tags import has_generation_tags, tagged_characters, tags_fault
from speculators.data.rendered import (
    FoundRow,
    History,
    NothingSupervisedError,
    Rendered,
    Renderer,
    RenderError,
    find_rows,
    find_turns,
)
from speculators.data.rows import Row
from speculators.data.tokenizer_checks import special_ids
from speculators.data.turns import Messages, Turn, TurnFinder
from speculators.errors import DataError

__all__ = [
    "History",
    "NothingSupervisedError",
    "PieceMismatchError",
    "RenderError",
    "Rendered",
    "Renderer",
    "TemplateRenderer",
    "on_policy_row",
    "plain_spans",
    "render_conversation",
    "render_prompt",
    "render_rows",
]

#: A renderer checks this many of its first texts against the tokenizer's word on the whole, and then every n-th.
FIRST_CHECKED = 32
THEN_CHECKED = 256

#: What templates, and the code that comes with tokenizers, raise over messages they cannot use.
REFUSALS = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, AssertionError, RecursionError, NotImplementedError),
)


class TemplateRenderer:
    """Renders with a tokenizer's own chat template.

    :param eos_ids: end-of-turn ids besides the tokenizer's ``eos_token_id`` (those of the generation config).
    :param history: ``conversation`` gives one row and refuses a conversation whose earlier turns do not stand in it as they
        were generated, ``turn`` gives one row per assistant turn, ``auto`` one row where that is true and else one per turn.
    :param last_turn_only: supervise the last assistant turn alone; gives one row.
    :param tags: whether ``{% generation %}`` tags, where the template has them, must agree with the mask.
    :param options: further arguments of the chat template, such as ``enable_thinking``.
    :param pieces: whether texts are cut at special tokens and equal pieces encoded once; the same ids, but slower, without.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos_ids: Collection[int] = (),
        history: History = "auto",
        last_turn_only: bool = False,
        tags: Literal["check", "ignore"] = "check",
        options: Mapping[str, Any] | None = None,
        pieces: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.history = history
        self.last_turn_only = last_turn_only
        self.tags = tags
        self.options = dict(options or {})
        self._encoder = PieceEncoder(tokenizer) if pieces else None
        self._check_rows = runs_own_code(tokenizer)
        self._encoded = 0
        self._finder = _finder(tokenizer, eos_ids)

    def prompt(self, messages: Messages, tools: list[Any] | None = None, options: Mapping[str, Any] | None = None) -> list[int]:
        """Ids after which the assistant is to speak: the messages and the template's generation prompt.

        :raises DataError: without a chat template.
        :raises RenderError: when the template refuses the messages.
        :raises PieceMismatchError: when the tokenizer is not to be used with ``pieces``.
        """
        return _Template(self, tools, options).render(messages, True).ids()

    def rows(
        self, messages: Messages, tools: list[Any] | None = None, options: Mapping[str, Any] | None = None
    ) -> list[Rendered]:
        """The rows of a conversation, at least one. What follows the last assistant turn is left out of them.

        :raises DataError: without a chat template.
        :raises RenderError: for a conversation that gives none.
        :raises PieceMismatchError: when the tokenizer is not to be used with ``pieces``.
        """
        template = _Template(self, tools, options)
        rows = find_rows(template.render, messages, self._finder, self.history, self.last_turn_only, template.difference)
        for row in rows:
            template.check_row(row)
        return [row.rendered() for row in rows]


class _Template:
    """The template of a renderer with the tools and options of one conversation."""

    def __init__(self, renderer: TemplateRenderer, tools: list[Any] | None, options: Mapping[str, Any] | None) -> None:
        self.renderer = renderer
        self.tokenizer = renderer.tokenizer
        self.tools = tools
        self.options = {**renderer.options, **(options or {})}
        self._like: Encoded | None = None
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError("the tokenizer has no chat template; add chat_template to its tokenizer_config.json")

    def render(self, messages: Messages, generate: bool) -> Encoded:
        text = self._apply(messages, generate, False)
        encoder = self.renderer._encoder
        try:
            if encoder is None:
                return Encoded([list(self._apply(messages, generate, True))], text)
            encoded = encoder.encode(text, self._like)
        except (TypeError, ValueError) as error:
            raise RenderError("unreadable", f"the tokenizer cannot encode the text ({_text_fault(text, error)})") from error
        self._like = self._like or encoded
        count = self.renderer._encoded
        self.renderer._encoded += 1
        if count < FIRST_CHECKED or count % THEN_CHECKED == 0:
            self._check(encoded, messages, generate)
        return encoded

    def check_row(self, row: FoundRow) -> None:
        """Compare a row with the whole text's ids, where nothing but running the tokenizer's own code tells, and with tags."""
        renderer = self.renderer
        if renderer._encoder is not None and renderer._check_rows:
            self._check(row.ids, row.messages, False)
        if renderer.tags == "ignore" or not has_generation_tags(self.tokenizer, self.tools, self.options):
            return
        text, tagged = tagged_characters(self.tokenizer, row.messages, self.tools, self.options)
        fault = None if text == row.ids.text else "their places are not known, because the tokenizer renders in its own way"
        encoder = renderer._encoder or PieceEncoder(self.tokenizer, pieces=False)
        for turn in row.turns:
            fault = fault or tags_fault(self.tokenizer, row.ids, turn, tagged, lambda part: encoder.encode(part, row.ids))
            if fault:
                reason = f"the template's {{% generation %}} tags disagree with message {turn.index}: {fault}; mend the tags"
                raise RenderError("tags_disagree", f"{reason}, or have them ignored")

    def difference(self, before: Encoded, after: Encoded) -> str:
        """Where two renderings part, in words."""
        place = next((at for at, pair in enumerate(zip(before.text, after.text)) if pair[0] != pair[1]), None)
        place = min(len(before.text), len(after.text)) if place is None else place
        old, new = (text[max(0, place - 10) : place + 30] for text in (before.text, after.text))
        return f"{old!r} becomes {new!r}"

    def _check(self, encoded: Encoded, messages: Messages, generate: bool) -> None:
        if encoded.ids() != list(self._apply(messages, generate, True)):
            self.renderer._encoder = None
            name = getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__
            raise PieceMismatchError(f"the tokenizer {name} encodes a text otherwise than its pieces; render it as a whole")

    def _apply(self, messages: Messages, generate: bool, tokenize: bool) -> Any:
        return _apply(self.tokenizer, messages, generate, tokenize, self.tools, self.options)


def _apply(tokenizer: Any, messages: Messages, generate: bool, tokenize: bool, tools: Any, options: Mapping[str, Any]) -> Any:
    """Text or ids of messages, through the tokenizer's own method."""
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the tokenizer has no chat template; add chat_template to its tokenizer_config.json")
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=tools,
            add_generation_prompt=generate,
            tokenize=tokenize,
            return_dict=False,
            **options,
        )
    except REFUSALS as error:
        reason = f"the chat template refuses the conversation ({error}); leave it out or change its messages"
        raise RenderError("template_refused", reason) from error


def _text_fault(text: str, error: Exception) -> str:
    """Why a text has no ids."""
    half = next((character for character in text if "\ud800" <= character <= "\udfff"), None)
    return str(error) if half is None else f"it holds U+{ord(half):X}, half of a character; repair or remove it"


def _finder(tokenizer: Any, eos_ids: Collection[int]) -> TurnFinder:
    ends = {*eos_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    others = special_ids(tokenizer) - {getattr(tokenizer, "unk_token_id", None)}  # which any text can hold
    return TurnFinder(ends, others, _TextOf(tokenizer), _AnswerStart(tokenizer), _AnswerStop(tokenizer))


@dataclass(frozen=True, slots=True)
class _TextOf:
    """The text that a token id is found by."""

    tokenizer: Any

    def __call__(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token) or "")


@dataclass(frozen=True, slots=True)
class _AnswerStart:
    """Where the prompt's text ends among a rendering's ids that begin otherwise than the prompt's."""

    tokenizer: Any

    def __call__(self, prompt: Encoded, upto: Encoded) -> int | None:
        if not upto.text.startswith(prompt.text):
            return None
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            encoding = backend.encode(upto.text, add_special_tokens=False)
            return next((at for at, (start, _) in enumerate(encoding.offsets) if start >= len(prompt.text)), len(upto))
        common = prompt.common(upto)
        rest, covering = self.tokenizer.decode(prompt.ids(common)), upto.ids(common)
        enough = (at for at in range(1, len(covering)) if len(self.tokenizer.decode(covering[:at])) >= len(rest))
        return common + next(enough, len(covering))


@dataclass(frozen=True, slots=True)
class _AnswerStop:
    """Where the ids of a rendering begin to hold its last characters."""

    tokenizer: Any

    def __call__(self, upto: Encoded, closing: int) -> int:
        limit = len(upto.text) - closing
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            encoding = backend.encode(upto.text, add_special_tokens=False)
            return next((at for at, (_, stop) in enumerate(encoding.offsets) if stop > limit), len(upto))
        ids = upto.ids()
        within = (at for at in range(len(ids), 0, -1) if len(self.tokenizer.decode(ids[:at])) <= limit)
        return next(within, 0)


def render_prompt(
    tokenizer: Any, messages: Messages, tools: list[Any] | None = None, options: Mapping[str, Any] | None = None
) -> list[int]:
    """Ids after which the assistant is to speak: the messages and the template's generation prompt.

    :param options: further arguments of the chat template, such as ``enable_thinking``.
    :raises DataError: without a chat template, or when the template refuses the messages.
    """
    return list(_apply(tokenizer, messages, True, True, tools, options or {}))


def plain_spans(
    tokenizer: Any,
    messages: Messages,
    tools: list[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    eos_ids: Collection[int] = (),
) -> list[Turn]:
    """Every assistant turn that answers something, found the plain way: nothing shared between renderings, nothing remembered.

    :raises DataError: as :func:`render_prompt`.
    :raises UnstableHistoryError: when the messages before a turn change with it.
    """

    def render(part: Messages, generate: bool) -> Encoded:
        ids = _apply(tokenizer, part, generate, True, tools, options or {})
        return Encoded([list(ids)], _apply(tokenizer, part, generate, False, tools, options or {}))

    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index > 0]
    return [_finder(tokenizer, eos_ids).find(render, messages, index) for index in answers]


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
    template = _Template(TemplateRenderer(tokenizer, pieces=False), tools, options)
    found = find_turns(template.render, messages, _finder(tokenizer, eos_ids), template.difference)
    kept = [turn for turn in found.turns if turn.start < turn.stop <= found.whole.common(turn.upto)]
    if not kept:
        raise NothingSupervisedError(
            "nothing in the conversation is supervised; its answers are empty, or the template drops them"
        )
    return FoundRow(found.messages, found.whole, kept).rendered()


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
    return TemplateRenderer(tokenizer, eos_ids=eos_ids, tags="ignore", pieces=False).rows(messages, tools, options)


def on_policy_row(row_id: int, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Row:
    """Row of a prompt and the answer that the verifier generated after it, ids as they are and never rendered again.

    :raises DataError: for an empty answer.
    """
    if not len(answer_ids):
        raise DataError(f"the answer to row {row_id} is empty; leave the row out")
    ids = np.concatenate([np.asarray(prompt_ids, dtype=np.int64), np.asarray(answer_ids, dtype=np.int64)])
    return Row(row_id, ids, np.arange(len(ids)) >= len(prompt_ids))
