"""Cutting JSON text into records without parsing it: arrays of any size, objects one after another, and lines.

An array is cut at the commas of its top level. Those are found by numpy over the few bytes that matter (quotes, backslashes,
brackets and commas), several times faster than a parser in Python could read them; whether a record is JSON is for its
reader to say. Only where the array's own structure is in doubt does the real parser look, and say where it breaks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Protocol

import numpy as np

__all__ = ["ArraySplitter", "LineSplitter", "ObjectSplitter", "Splitter", "first_value"]

QUOTE, BACKSLASH, COMMA, OPENING, CLOSING, CLOSING_BRACKET = b'"\\,{}]'

#: Bit that tells ``[`` and ``]`` from ``{`` and ``}``.
FOLD = 0x20

#: Bytes scanned at once: few enough for numpy's intermediate arrays to stay in the processor's cache.
PIECE = 1 << 16

#: A record that grows beyond this many bytes is parsed, in case it only grows because its text is broken.
DOUBTFUL = 4 << 20

#: Longest text of one token that may be cut off at the end of a record: half of an escaped pair of surrogates.
LONGEST_TOKEN = 12


class Splitter(Protocol):
    """Takes text in chunks and gives the records that are whole."""

    fault: str | None  #: why nothing behind the records given so far can be read

    def feed(self, chunk: bytes) -> list[bytes]:
        """The records that end in this chunk."""
        ...

    def finish(self, torn: bool = False) -> list[bytes]:
        """What the end of the text makes whole; sets :attr:`fault` when the text ends inside a record.

        :param torn: whether the text is known to go on where it cannot be read.
        """
        ...


class LineSplitter:
    """One record a line. Only newlines count: JSON leaves U+2028 and the like unescaped inside strings."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        head, newline, rest = chunk.partition(b"\n")
        self._pending += head
        if not newline:
            return []
        lines = [bytes(self._pending), *rest.split(b"\n")]
        self._pending = bytearray(lines.pop())
        return [line for line in lines if not (line.isspace() or not line)]

    def finish(self, torn: bool = False) -> list[bytes]:
        last = bytes(self._pending).strip()
        return [last] if last and (not torn or _is_whole(last)) else []


class _Scanner:
    """Follows strings and brackets through text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._inside = 0  # 1 in a string
        self._escape = False  # whether the text so far ends in a backslash that escapes what follows

    def events(self, piece: bytes) -> Iterator[tuple[int, bool]]:
        """(place, whether the depth falls to 0) of the commas at depth 1 and of the brackets that close the top level."""
        shift = int(self._escape)
        if shift:
            piece = b"\\" + piece
        text = np.frombuffer(piece, np.uint8)
        folded = text | FOLD
        marked = text == QUOTE
        marked |= text == BACKSLASH
        marked |= text == COMMA
        marked |= folded == OPENING
        marked |= folded == CLOSING
        places = np.flatnonzero(marked)
        codes = text[places]
        quotes = codes == QUOTE
        slashes = codes == BACKSLASH
        if slashes.any():
            quotes[quotes] = ~_escaped(places[quotes], places[slashes])
        self._escape = (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 1
        inside = (np.cumsum(quotes) + self._inside) & 1
        if len(inside):
            self._inside = int(inside[-1])
        structural = (inside == 0) & (codes != QUOTE) & ~slashes
        places, codes = places[structural], codes[structural]
        folded = codes | FOLD
        steps = (folded == OPENING).astype(np.int64) - (folded == CLOSING)
        depths = np.cumsum(steps) + self._depth
        if len(depths):
            self._depth = int(depths[-1])
        closes = (depths == 0) & (steps < 0)
        chosen = np.flatnonzero(((depths == 1) & (codes == COMMA)) | closes)
        yield from zip((places[chosen] - shift).tolist(), closes[chosen].tolist(), strict=True)


def _escaped(quotes: np.ndarray, slashes: np.ndarray) -> np.ndarray:
    """Which quotes stand behind an odd number of backslashes; both arguments are places in ascending order."""
    starts = slashes[np.diff(slashes, prepend=-2) != 1]  # of runs of backslashes
    last = np.searchsorted(slashes, quotes) - 1
    behind = (last >= 0) & (slashes[last] == quotes - 1)
    run = starts[np.searchsorted(starts, quotes) - 1]
    return behind & ((quotes - run) % 2 == 1)


def first_value(text: bytes) -> tuple[int, str | None, bool]:
    """Look at the JSON value that ``text`` begins with: (byte, why it is none there or None, whether it ends in the text).

    A fault that more text could mend is none: the value then only does not end here.
    """
    characters = text.decode("utf-8", errors="surrogateescape")
    blank = len(characters) - len(characters.lstrip())
    fault, ended = None, True
    try:
        _, place = json.JSONDecoder().raw_decode(characters, blank)
    except json.JSONDecodeError as error:
        fault, place = error.msg, error.pos
        ended = not (fault.startswith("Unterminated string") or place >= len(characters) - LONGEST_TOKEN)
    except (RecursionError, ValueError) as error:  # too many brackets in one another, or digits of a number
        fault, place = str(error).split(";")[0], blank
    return len(characters[:place].encode("utf-8", errors="surrogateescape")), fault if ended else None, ended


def _is_whole(text: bytes) -> bool:
    """Whether text that may be cut off is a whole object; of a number nobody could tell."""
    place, fault, ended = first_value(text)
    return text.startswith(b"{") and fault is None and ended and place == len(text)


class _StructureSplitter:
    """What arrays and objects have in common: text is gathered up to a cut, and doubted when it grows too long."""

    def __init__(self, offset: int) -> None:
        self.fault: str | None = None
        self._scanner = _Scanner()
        self._count = 0  # of records given so far
        self._pending = bytearray()
        self._begin = offset  # place in the whole text of what is pending
        self._doubtful = DOUBTFUL

    def feed(self, chunk: bytes) -> list[bytes]:
        found: list[bytes] = []
        for start in range(0, len(chunk), PIECE):
            if self.fault is None:
                self._take(chunk[start : start + PIECE], found)
        return found

    def _take(self, piece: bytes, found: list[bytes]) -> None:
        """Append to ``found`` what ends in ``piece``, and keep the rest."""
        raise NotImplementedError

    def _keep(self, text: bytes) -> None:
        self._pending += text
        if len(self._pending) > self._doubtful:
            self._doubtful = 2 * len(self._pending)
            self._doubt()

    def _next(self, record: bytes | None, found: list[bytes], behind: int = 0) -> None:
        """Give a record that is all that is pending, and begin the next one ``behind`` bytes after it."""
        if record is not None:
            found.append(record)
            self._count += 1
        self._begin += len(self._pending) + behind
        self._pending.clear()
        self._doubtful = DOUBTFUL

    def _doubt(self) -> bool:
        """Let the parser look at what is pending; True when it finds a fault that no further text could mend."""
        text = bytes(self._pending)
        place, fault, ended = first_value(text)
        if fault is None and ended and text[place:].strip():
            fault = "more text where a comma is due"
        if fault is not None:
            self._break(place, fault)
        return fault is not None

    def _break(self, place: int, reason: str) -> None:
        """Set the fault, ``place`` bytes into what is pending."""
        self.fault = f"breaks off at byte {self._begin + place}, in record {self._count} ({reason})"


class ArraySplitter(_StructureSplitter):
    """The records of one array.

    A record that is no JSON inside its own braces is given like any other, so that it alone is lost. Where the array
    itself cannot be followed, :attr:`fault` says at which byte and why.

    :param offset: place in the whole text of the array's bracket, with which the first chunk begins.
    """

    def __init__(self, offset: int = 0) -> None:
        super().__init__(offset)
        self._opened = self._closed = False

    def _take(self, piece: bytes, found: list[bytes]) -> None:
        taken = 0
        if not self._opened:
            self._opened, taken = True, 1
            self._begin += 1
        for place, closes in self._scanner.events(piece) if not self._closed else ():
            self._pending += piece[taken:place]
            taken = place + 1
            record = bytes(self._pending).strip()
            if closes and piece[place] != CLOSING_BRACKET:
                self._break(len(self._pending), "a brace closes the array")
                return
            # Text outside braces is rare as a record and likely where the quotes or brackets of a broken one do not match.
            if not (record.startswith(b"{") and record.endswith(b"}")) and record and self._doubt():
                return
            self._next(record if record or not closes else None, found, 1)
            if closes:
                self._closed = True
                break
        if self._closed and piece[taken:].strip():
            self._break(0, "more text behind the end of the array")
        elif not self._closed:
            self._keep(piece[taken:])

    def finish(self, torn: bool = False) -> list[bytes]:
        found: list[bytes] = []
        if not self._closed and self.fault is None:
            last = bytes(self._pending).strip()
            if _is_whole(last):  # only its comma or the closing bracket is gone
                self._next(last, found)
            if not (last and self._doubt()):
                self._break(len(self._pending), "the text ends there")
        return found


class ObjectSplitter(_StructureSplitter):
    """Objects one after another, each over any number of lines.

    :param offset: place in the whole text of the first object.
    """

    def __init__(self, offset: int = 0) -> None:
        super().__init__(offset)

    def _take(self, piece: bytes, found: list[bytes]) -> None:
        taken = 0
        for place, closes in self._scanner.events(piece):
            if closes:
                self._pending += piece[taken : place + 1]
                taken = place + 1
                self._next(bytes(self._pending).strip(), found)
        self._keep(piece[taken:])

    def finish(self, torn: bool = False) -> list[bytes]:
        if self._pending.strip() and self.fault is None and not self._doubt():
            self._break(len(self._pending), "the text ends there")
        return []
