"""Texts to token ids, piece by piece: what stands in many texts of a conversation is tokenised once.

Tokenizers of the Hugging Face library first take their added tokens out of the raw text, from the left and the longest
first, and then normalise, split and encode every stretch between them on its own. So a text may be cut before an added
token and its pieces encoded apart, provided that the same added token is found there whatever stands around it
(:func:`cut_tokens` picks those). Every piece but the first begins with such a token, so that rules for the beginning of a
text (sentencepiece's leading space) hold in the pieces as they do in the whole.

That is by construction; it is checked by running as well. A renderer compares some of its texts with what the tokenizer
says of the whole, and :class:`PieceMismatchError` stops it before a wrong id is used.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import Any

from speculators.errors import SpeculatorsError

__all__ = ["Encoded", "PieceEncoder", "PieceMismatchError", "cut_tokens", "longest_prefix", "runs_own_code"]

#: Characters of pieces that are remembered from one conversation to the next, and of the longest piece among them.
REMEMBERED = 1 << 20
LONGEST_REMEMBERED = 1 << 14


class PieceMismatchError(SpeculatorsError):
    """The tokenizer encodes a whole text otherwise than its pieces: nothing the encoder gave so far is to be used.

    Rendering again with ``pieces=False`` gives the right ids.
    """


def longest_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of items with which both lists begin."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:  # the first `low` items are equal, the first `high` are not
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True, eq=False)
class Encoded:
    """The ids of one text, as the chunks that its pieces were encoded to; equal pieces may share a chunk."""

    chunks: list[list[int]]
    text: str = ""  #: empty where only ids are known
    starts: list[int] = field(default_factory=list)  #: where in the text the chunks begin

    def __len__(self) -> int:
        return sum(map(len, self.chunks))

    def ids(self, start: int = 0) -> list[int]:
        """All ids from ``start`` on."""
        for place, chunk in enumerate(self.chunks):
            if start < len(chunk):
                return list(chain(chunk[start:], *self.chunks[place + 1 :]))
            start -= len(chunk)
        return []

    def common(self, other: Encoded) -> int:
        """Number of ids with which both begin."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(self.chunks, other.chunks)))
        # Chunks of other pieces can still begin alike, and pieces that are cut in other places hold the same ids.
        rests = self.chunks[same:], other.chunks[same:]
        length = min(sum(map(len, rest)) for rest in rests)
        first, second = (list(islice(chain.from_iterable(rest), length)) for rest in rests)
        return sum(map(len, self.chunks[:same])) + longest_prefix(first, second)


def _added_tokens(tokenizer: Any) -> list[Any]:
    """The tokenizer's ``AddedToken`` objects."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    tokens: Mapping[int, Any] = (
        backend.get_added_tokens_decoder() if backend is not None else getattr(tokenizer, "added_tokens_decoder", {})
    )
    return list(tokens.values())


def cut_tokens(tokenizer: Any) -> list[str]:
    """The added tokens before which every text may be cut, sorted; empty for a tokenizer that encodes them as text.

    Such a token is special and looked for in the raw text, takes no white space from its left and needs no word boundary,
    nor makes one where another token needs it.
    No added token may begin before it and reach into it, and one that begins as it does must be such a token too: then
    wherever its text stands, the tokenizer finds an added token that begins there.
    """
    if getattr(tokenizer, "split_special_tokens", False):
        return []
    raw = [token for token in _added_tokens(tokenizer) if token.content and not token.normalized]
    texts = sorted({token.content for token in raw})
    whole_words = any(token.single_word for token in raw)
    candidates = {
        token.content
        for token in raw
        if token.special and not (token.lstrip or token.single_word or token.content[0].isspace())
        if not (whole_words and re.match(r"\w", token.content))
    }
    inner: dict[str, list[str]] = {}  # first character -> what may stand in texts from a second or later character on
    for text in texts:
        for place in range(1, len(text)):
            inner.setdefault(text[place], []).append(text[place:])
    chosen = {
        text
        for text in candidates
        if not any(rest.startswith(text) or text.startswith(rest) for rest in inner.get(text[0], ()))
    }
    # A longer token takes the place of a shorter one that begins alike, so both must be good to cut before.
    while bad := {text for text in chosen if any(longer.startswith(text) for longer in texts if longer not in chosen)}:
        chosen -= bad
    return sorted(chosen)


def runs_own_code(tokenizer: Any) -> bool:
    """Whether code other than the Hugging Face libraries' own decides on the ids, so that nothing holds by construction."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return True
    methods = (getattr(type(tokenizer), name, None) for name in ("__call__", "_encode_plus", "apply_chat_template"))
    return any(not getattr(method, "__module__", "").startswith("transformers.") for method in methods)


class PieceEncoder:
    """Encodes texts with one tokenizer, without special tokens of its own making (templates write them).

    :param pieces: whether to cut texts; without, every text is one piece.
    """

    def __init__(self, tokenizer: Any, *, pieces: bool = True) -> None:
        self.tokenizer = tokenizer
        self._backend = None if runs_own_code(tokenizer) else tokenizer.backend_tokenizer
        cuts = cut_tokens(tokenizer) if pieces else []
        # Where one of these stands there is a cut, so it does not matter which of several that begin alike is found.
        self._cut = re.compile("|".join(map(re.escape, cuts))) if cuts else None
        self._remembered: OrderedDict[str, list[int]] = OrderedDict()
        self._characters = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_remembered": OrderedDict(), "_characters": 0}

    def encode(self, text: str, like: Encoded | None = None) -> Encoded:
        """The ids of ``text``.

        :param like: a text already encoded; chunks of the pieces with which both begin are taken from it.
        :raises TypeError, ValueError: for text that is no valid Unicode.
        """
        starts, chunks = self._shared(text, like)
        scan = starts.pop() if starts else 0
        places = [scan, *(found for found in self._cuts(text, scan) if found > scan)]
        pieces = [text[start:stop] for start, stop in zip(places, [*places[1:], len(text)])]
        known = self._encode_pieces(piece for piece in pieces if piece)
        return Encoded([*chunks, *(known[piece] if piece else [] for piece in pieces)], text, [*starts, *places])

    def _cuts(self, text: str, start: int) -> Iterator[int]:
        return (match.start() for match in self._cut.finditer(text, start)) if self._cut else iter(())

    def _shared(self, text: str, like: Encoded | None) -> tuple[list[int], list[list[int]]]:
        """Starts of the pieces that ``text`` shares with ``like`` and of the first that is its own, and the shared chunks."""
        if like is None or not like.starts:
            return [], []
        count = bisect_right(like.starts, len(text)) - 1
        while count > 0:
            place = like.starts[count]
            if self._cut and self._cut.match(text, place) and text.startswith(like.text[:place]):
                return like.starts[: count + 1], like.chunks[:count]
            count = count - 1 if count > len(like.starts) - 8 else count // 2  # near the end, or far from it
        return [], []

    def _encode_pieces(self, pieces: Iterable[str]) -> dict[str, list[int]]:
        known: dict[str, list[int]] = {}
        unknown: list[str] = []
        for piece in pieces:
            if piece in known:
                continue
            ids = self._remembered.get(piece)
            if ids is None:
                unknown.append(piece)
                known[piece] = []
            else:
                self._remembered.move_to_end(piece)
                known[piece] = ids
        for piece, ids in zip(unknown, self._tokenise(unknown) if unknown else (), strict=True):
            known[piece] = ids
            self._remember(piece, ids)
        return known

    def _remember(self, piece: str, ids: list[int]) -> None:
        if len(piece) > LONGEST_REMEMBERED:
            return
        self._remembered[piece] = ids
        self._characters += len(piece)
        while self._characters > REMEMBERED:
            dropped, _ = self._remembered.popitem(last=False)
            self._characters -= len(dropped)

    def _tokenise(self, texts: list[str]) -> list[list[int]]:
        backend = self._backend
        if backend is None:
            return [list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        # Calls of the tokenizer elsewhere may have left these set; transformers resets them at every call too.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        split = bool(getattr(self.tokenizer, "split_special_tokens", False))
        if backend.encode_special_tokens != split:
            backend.encode_special_tokens = split
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
