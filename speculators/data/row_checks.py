"""What looks wrong about a row: pure functions on ids and mask, with what the tokenizer's template says about them.

A check looks for one mistake and says nothing where it cannot know. Its finding is a key of :data:`FAULTS`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from speculators.data.rendering import render_conversation, render_prompt
from speculators.data.token_text import TokenTexts
from speculators.errors import DataError

__all__ = ["FAULTS", "SMALL_SHARE", "TemplateFacts", "faults_of", "spans_of"]

#: Supervised share of a row's tokens below which it is hardly worth its computation.
SMALL_SHARE = 0.01

#: Template text after an end of turn is at most this long; a later end of turn belongs to the middle of the span.
_AFTER_END = 4

#: What can be wrong with rows, and what it means; what is found is said by ``inspection``.
FAULTS = {
    "no-end-of-turn": "no row teaches the draft where an answer ends; check that the end-of-turn token is in the mask",
    "truncated": (
        "the answer is cut off before its end-of-turn token; a larger --seq-length of prepare-data, or --max-tokens where the "
        "verifier answered, keeps it whole"
    ),
    "end-not-supervised": "the answer goes on to its end inside the row, but its end-of-turn token is not in the mask",
    "after-end-supervised": "template text that no model generates is trained on; upstream's prepare-data makes such rows",
    "header-supervised": "the mask begins too early: the generation prompt is given when serving and never drafted",
    "newline-first": "answers seldom begin with a line break; the template's own may be in the mask",
    "role-token-supervised": "tokens that open a user's or system's turn are never drafted; the mask covers too much",
    "all-supervised": "the prompt is supervised with the answer, so there is no mask; prepare the conversations again",
    "nothing-supervised": "the row costs computation and teaches nothing; leave it out",
    "small-share": "nearly all of the row is context, which costs verifier time and teaches nothing",
    "two-bos": "the rendered text was given a beginning-of-text token a second time; serving has one",
    "unknown-id": "the tokenizer has no such id; the rows were made with another one",
    "duplicate": "equal rows are trained on more than once, and may be on both sides of the split",
}


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What is known about where answers begin and end; empty facts switch off the checks that need them."""

    ends: frozenset[int] = frozenset()  #: ids that end a turn
    header: tuple[int, ...] = ()  #: the ids that stand before every answer, up to its first token
    roles: frozenset[int] = frozenset()  #: special ids of other turns that no answer has
    bos: int | None = None
    vocab_size: int | None = None  #: one more than the largest id
    texts: TokenTexts | None = field(default=None, repr=False)

    @classmethod
    def of(cls, tokenizer: Any | None, texts: TokenTexts, eos_ids: Collection[int] = ()) -> TemplateFacts:
        """The facts of a tokenizer, asked by rendering two tiny conversations with its template.

        :param eos_ids: end-of-turn ids besides the tokenizer's own.
        """
        if tokenizer is None:
            return cls()
        vocabulary = tokenizer.get_vocab()
        ends = {int(token) for token in eos_ids}
        if tokenizer.eos_token_id is not None:
            ends.add(int(tokenizer.eos_token_id))
        header: tuple[int, ...] = ()
        roles: set[int] = set()
        try:
            prompt, other = (render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in "01")
            answered = render_conversation(
                tokenizer, [{"role": "user", "content": "0"}, {"role": "assistant", "content": "1"}], eos_ids=sorted(ends)
            )
        except DataError:  # no template, or one that wants more than this
            pass
        else:
            answer = answered.input_ids[answered.loss_mask].tolist()
            if answer[-1] in texts.special:
                ends.add(int(answer[-1]))
            header = tuple(prompt[len(prompt) - _common_end(prompt, other) :])
            roles = {token for token in prompt[: len(prompt) - len(header)] if token in texts.special} - {*ends, *answer}
        return cls(
            ends=frozenset(ends),
            header=header,
            roles=frozenset(roles),
            bos=tokenizer.bos_token_id,
            vocab_size=max(vocabulary.values(), default=-1) + 1,
            texts=texts,
        )


def _common_end(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for a, b in zip(reversed(left), reversed(right), strict=False):
        if a != b:
            break
        count += 1
    return count


def spans_of(mask: np.ndarray) -> np.ndarray:
    """Supervised spans of a mask ``[T]``: (start, stop) of each, int64 ``[spans, 2]``."""
    padded = np.zeros(len(mask) + 2, dtype=np.int8)
    padded[1:-1] = mask
    return np.flatnonzero(np.diff(padded)).reshape(-1, 2)


def faults_of(ids: np.ndarray, mask: np.ndarray, facts: TemplateFacts) -> Iterator[tuple[str, int]]:
    """What is wrong with a row of T tokens: keys of :data:`FAULTS`, each with the position where it is seen.

    :param ids: int64 ``[T]``.
    :param mask: bool ``[T]``.
    """
    supervised = int(mask.sum())
    if facts.bos is not None and len(ids) > 1 and ids[0] == ids[1] == facts.bos:
        yield "two-bos", 1
    if facts.vocab_size is not None and len(ids):
        outside = (ids < 0) | (ids >= facts.vocab_size)
        if outside.any():
            yield "unknown-id", int(np.argmax(outside))
    if not supervised:
        yield "nothing-supervised", 0
        return
    if supervised == len(ids) and len(ids) > 1:
        yield "all-supervised", 0
        return
    if supervised < SMALL_SHARE * len(ids):
        yield "small-share", int(np.argmax(mask))
    seen: dict[str, int] = {}
    for start, stop in spans_of(mask).tolist():
        for fault, place in _span_faults(ids, start, stop, facts):
            seen.setdefault(fault, place)
    yield from seen.items()


def _span_faults(ids: np.ndarray, start: int, stop: int, facts: TemplateFacts) -> Iterator[tuple[str, int]]:
    span = ids[start:stop].tolist()
    early = _header_tokens(ids, start, stop, facts.header)
    if early:
        yield "header-supervised", start
    elif facts.texts is not None and facts.texts.text(span[0])[:1] in ("\n", "\r"):
        yield "newline-first", start
    for place, token in enumerate(span[early:], early):
        if token in facts.roles:
            yield "role-token-supervised", start + place
            break
    if not facts.ends:
        return
    for place, token in enumerate(span[:-1]):
        if token in facts.ends and span[place + 1] not in facts.ends:
            yield "after-end-supervised", start + place
            break
    if not facts.ends.intersection(span[-1 - _AFTER_END :]):
        yield "truncated" if stop == len(ids) else "end-not-supervised", stop - 1


def _header_tokens(ids: np.ndarray, start: int, stop: int, header: tuple[int, ...]) -> int:
    """How many tokens of the header that should stand before the span are in it."""
    for count in range(min(len(header), stop - start), 0, -1):
        # Two tokens before it tell a header's last line break from one that an answer begins with.
        before = header[max(0, len(header) - count - 2) : len(header) - count]
        if len(before) > start:
            continue
        if tuple(ids[start - len(before) : start + count].tolist()) == before + header[len(header) - count :]:
            return count
    return 0
