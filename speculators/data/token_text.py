"""Tokens as text that a person can look at: what each token adds to the text, with nothing invisible and nothing dangerous.

Token ids do not map to characters one to one: a character outside ASCII may be made of several tokens, and sentencepiece
drops the space of a first token. A :class:`Piece` is the smallest stretch of tokens that is text of its own. What data
holds is hostile until shown otherwise (escape sequences, bidirectional overrides), so everything that is printed goes
through :func:`visible`.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["NEWLINE", "Piece", "TokenTexts", "shown_ranges", "visible"]

#: What stands for a line feed; :func:`visible` puts the line feed itself behind it.
NEWLINE = "⏎"

#: What a tokenizer writes for bytes that are no text yet.
_REPLACEMENT = "\ufffd"
#: Tokens of an unknown kind of tokenizer that are tried together for a character; four bytes are the most a character has.
_LONGEST_RUN = 8
#: Fewer tokens than these are not left out: a note of them would take more room.
_SMALLEST_GAP = 12
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARKER = re.compile(r"<.*>|\[.*\]", re.DOTALL)
#: Zero-width joiner and non-joiner: part of how emoji and several scripts are written.
_JOINERS = "\u200c\u200d"


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that make up one stretch of text."""

    start: int  #: position in the row of its first token
    count: int  #: tokens
    text: str  #: as the tokenizer decodes it; not fit to be printed, see :func:`visible`
    marker: bool = False  #: a special or added token such as ``<|im_start|>``
    broken: bool = False  #: bytes that are no character; escaped in ``text``

    @property
    def stop(self) -> int:
        return self.start + self.count


class TokenTexts:
    """Texts of a tokenizer's tokens; of any tokenizer of transformers, with or without offsets.

    :param tokenizer: None shows ids in place of text.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._markers: dict[int, str] = {}
        if tokenizer is None:
            return
        special = {int(token) for token in tokenizer.all_special_ids}
        for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
            if token in special or getattr(added, "special", False) or _MARKER.fullmatch(str(added)):
                self._markers[int(token)] = str(added)
        for token in special - set(self._markers):
            self._markers[token] = str(tokenizer.convert_ids_to_tokens(token))
        # A token before the one that is asked for keeps decoders from stripping its leading space.
        first = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._before: list[int] = [int(token) for token in first]
        self._skip = len(self._decode([]))

    @property
    def special(self) -> frozenset[int]:
        """Ids of special and other marker tokens."""
        return frozenset(self._markers)

    def text(self, token: int) -> str:
        """What ``token`` alone decodes to; ``⟨id⟩`` where that is nothing, as for an id the tokenizer does not have."""
        if token not in self._known:
            self._known[token] = self._markers.get(token) or self._alone([token]) or f"⟨{token}⟩"
        return self._known[token]

    def pieces(self, ids: Sequence[int]) -> list[Piece]:
        """The pieces of a row of T ids, in order, without gaps.

        Tokens that are part of a character are joined with the others of it.
        """
        ids = [int(token) for token in ids]
        pieces: list[Piece] = []
        place = 0
        while place < len(ids):
            token = ids[place]
            text = self.text(token)
            marker = token in self._markers
            if marker or _REPLACEMENT not in text:
                pieces.append(Piece(place, 1, text, marker))
            else:
                pieces.append(self._character(ids, place))
            place = pieces[-1].stop
        return pieces

    def _decode(self, ids: list[int]) -> str:
        try:
            text = self._tokenizer.decode(  # type: ignore[union-attr]
                [*self._before, *ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        except Exception:  # tokenizers with code of their own raise what they like for an id they do not have
            return ""
        return str(text)

    def _alone(self, ids: list[int]) -> str:
        return "" if self._tokenizer is None else self._decode(ids)[self._skip :]

    def _character(self, ids: list[int], place: int) -> Piece:
        """The piece that begins with the incomplete character at ``place``."""
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        text = ""
        for stop in range(place, len(ids)):
            raw = self._bytes(ids[stop])
            if raw is None and stop == place:
                return self._joint(ids, place)
            if raw is None:
                break
            try:
                text += decoder.decode(raw)
            except UnicodeDecodeError:
                break
            if not decoder.getstate()[0]:
                return Piece(place, stop + 1 - place, text)
        return Piece(place, 1, (self._bytes(ids[place]) or b"").decode("utf-8", "backslashreplace"), broken=True)

    def _joint(self, ids: list[int], place: int) -> Piece:
        """The same where the bytes of tokens cannot be asked for."""
        for count in range(1, _LONGEST_RUN + 1):
            text = self._alone(ids[place : place + count])
            if _REPLACEMENT not in text:
                return Piece(place, count, text)
        return Piece(place, 1, self.text(ids[place]), broken=True)

    def _bytes(self, token: int) -> bytes | None:
        """Bytes of a token of a byte-level or byte-fallback tokenizer."""
        name = self._tokenizer.convert_ids_to_tokens(token)  # type: ignore[union-attr]
        if isinstance(name, bytes):
            return name
        if not isinstance(name, str):
            return None
        if match := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        alphabet = _byte_alphabet()
        return bytes(alphabet[char] for char in name) if all(char in alphabet for char in name) else None


@cache
def _byte_alphabet() -> dict[str, int]:
    """Byte of every character that byte-level tokenizers write for one: printable bytes stand for themselves, the others
    are numbered from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


def visible(text: str) -> str:
    """``text`` as it can be printed in a terminal or a page: what is invisible, or would act, is shown by a sign or number.

    A line feed becomes ⏎ and a line feed; a tab ⇥; spaces are dots where there is nothing else; control characters
    (an escape sequence's first one, too) are shown by the Unicode pictures of them or as ``<U+202E>``.
    """
    if text and not text.strip(" "):
        return "·" * len(text)
    if text.isascii() and text.isprintable():
        return text
    joined = any(char not in _JOINERS for char in text)
    return "".join(char if joined and char in _JOINERS else _sign(char) for char in text)


@cache
def _sign(char: str) -> str:
    if char == "\n":
        return NEWLINE + "\n"
    if char == "\t":
        return "⇥"
    if char < " ":
        return chr(0x2400 + ord(char))
    if char == "\x7f":
        return "␡"
    category = unicodedata.category(char)
    if category.startswith("C") or (category.startswith("Z") and char != " "):
        return f"<U+{ord(char):04X}>"
    return char


def shown_ranges(borders: Sequence[int], length: int, limit: int) -> list[tuple[int, int]]:
    """Which positions of a row of ``length`` tokens to show when no more than about ``limit`` can be.

    The beginning, the end, and what lies around the borders between context and supervised text; of many borders, the
    first and the last ones.

    :param borders: positions where the mask changes, ascending.
    :param limit: 0 shows everything.
    :return: ranges (start, stop), ascending, that do not touch.
    """
    if not limit or length <= limit:
        return [(0, length)]
    points = [0, *borders, length]
    if len(points) > 16:
        points = [*points[:8], *points[-8:]]
    # The two ends have one side only.
    half = max(1, limit // (2 * len(points) - 2))
    ranges: list[tuple[int, int]] = []
    for point in points:
        start, stop = max(0, point - half), min(length, point + half)
        if ranges and start <= ranges[-1][1] + _SMALLEST_GAP:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], stop))
        else:
            ranges.append((start, stop))
    return ranges
