"""An answer of an engine as what a row holds: ids exactly as generated or, from servers without ids, tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speculators.data.answer_text import message_of_answer
from speculators.data.rendering import TemplateRenderer
from speculators.verifiers.answering import Answer, Question

__all__ = ["GivenAnswer", "RowMaker"]


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """A prompt and its answer."""

    prompt: list[int]
    ids: list[int]
    text: str  #: of the ids, special tokens included, without the one that ends the turn
    message: dict[str, Any]  #: as it stands in the history of the next turn
    exact: bool  #: whether the ids are those that were generated


class RowMaker:
    """Turns answers into what rows hold.

    :param eos_ids: ids that end an answer.
    :param template: source of the chat template.
    """

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int], template: str) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._template = template
        self._renderer = TemplateRenderer(tokenizer, eos_ids=eos_ids, history="turn", last_turn_only=True, tags="ignore")

    def message(self, text: str) -> dict[str, Any]:
        """The assistant's message that a row's text amounts to."""
        return message_of_answer(text, self._template)

    def make(self, question: Question, answer: Answer) -> GivenAnswer:
        """What the row of an answer holds.

        :raises DataError: when the chat template refuses the message of a server.
        """
        if answer.message is None:
            text = self._text(answer.ids)
            return GivenAnswer(list(question.prompt), answer.ids, text, self.message(text), True)
        return self._tokenised_again(question, answer, dict(answer.message))

    def _tokenised_again(self, question: Question, answer: Answer, message: dict[str, Any]) -> GivenAnswer:
        """As the chat template renders the message; without an end of turn if the answer was cut."""
        assert question.chat is not None
        tools = None if question.chat.tools is None else list(question.chat.tools)
        rendered = self._renderer.rows([*question.chat.messages, message], tools, question.chat.options)[0]
        places = rendered.loss_mask.nonzero()[0]
        start, stop = int(places[0]), int(places[-1]) + 1
        prompt, ids = rendered.input_ids[:start].tolist(), rendered.input_ids[start:stop].tolist()
        while answer.finish_reason == "length" and len(ids) > 1 and ids[-1] in self._eos_ids:
            ids.pop()
        return GivenAnswer(prompt, ids, self._text(ids), message, False)

    def _text(self, ids: Sequence[int]) -> str:
        ended = bool(ids) and ids[-1] in self._eos_ids
        return str(self._tokenizer.decode(list(ids[:-1] if ended else ids), skip_special_tokens=False))
