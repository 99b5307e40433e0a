"""Tokens as text: nothing of a row is lost, doubled or torn, and nothing that could act is printed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from speculators.data.token_text import TokenTexts, _byte_alphabet, shown_ranges, visible


def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte, and one for a word with its space, as byte-level tokenizers have."""
    vocab = _byte_alphabet() | {"Ġt": 256, "Ġâ": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t"), ("Ġ", "â")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As sentencepiece: ``▁`` for spaces, bytes for what is unknown, and a first space that decoding drops."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", *"abcdefghijklmnopqrstuvwxyz"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocab |= {"▁t": len(vocab), "▁th": len(vocab) + 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
def test_pieces_are_the_text_without_gaps(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = TokenTexts(tokenizer).pieces(ids)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces)][: len(pieces)]
    assert sum(piece.count for piece in pieces) == len(ids)
    joined = "".join(piece.text for piece in pieces)
    # A space that sentencepiece puts before a text, and drops when it decodes one, is part of its first token.
    assert joined == text or (name == "byte_fallback" and joined.removeprefix(" ") in (text, text.removeprefix(" ")))
    assert not any(piece.broken or "\ufffd" in piece.text for piece in pieces if "\ufffd" not in text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_character_of_several_tokens_is_one_piece_and_part_of_one_is_escaped(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("a日b", add_special_tokens=False)[-5:]
    assert [(piece.start, piece.count, piece.text) for piece in texts.pieces(ids)] == [(0, 1, "a"), (1, 3, "日"), (4, 1, "b")]
    cut = texts.pieces(ids[:3])
    assert [(piece.count, piece.text, piece.broken) for piece in cut] == [
        (1, "a", False),
        (1, "\\xe6", True),
        (1, "\\x97", True),
    ]


def test_special_and_added_tokens_are_markers_and_unknown_ids_are_numbers() -> None:
    texts = TokenTexts(TOKENIZERS["byte_level"])
    ids = TOKENIZERS["byte_level"].encode("a<think><|end|>", add_special_tokens=False)
    assert [(piece.text, piece.marker) for piece in texts.pieces(ids)] == [("a", False), ("<think>", True), ("<|end|>", True)]
    assert texts.special == set(ids[1:])
    assert [piece.text for piece in texts.pieces([99_999, ids[0]])] == ["⟨99999⟩", "a"]
    assert [piece.text for piece in TokenTexts(None).pieces([5, 6])] == ["⟨5⟩", "⟨6⟩"]


def test_a_tokenizer_whose_bytes_cannot_be_asked_for_is_shown_by_decoding_together() -> None:
    class Opaque:
        """Tokens without names, as tokenizers of remote code may have them."""

        all_special_ids: tuple[int, ...] = ()

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return list(text.encode())

        def decode(self, ids: list[int], **_: object) -> str:
            return bytes(ids).decode("utf-8", "replace")

        def convert_ids_to_tokens(self, token: int) -> None:
            return None

    pieces = TokenTexts(Opaque()).pieces(list("é日!".encode()))
    assert [(piece.count, piece.text) for piece in pieces] == [(2, "é"), (3, "日"), (1, "!")]
    assert [piece.broken for piece in TokenTexts(Opaque()).pieces([0xE6, 0x97])] == [True, True]


@given(st.text())
def test_visible_text_has_nothing_that_acts_or_hides(text: str) -> None:
    shown = visible(text)
    assert all(char.isprintable() or char in "\n\u200c\u200d" for char in shown)
    assert shown.count("\n") == text.count("\n")


def test_what_is_invisible_has_a_sign() -> None:
    assert visible("a b") == "a b"
    assert visible("  ") == "··"
    assert visible("\t\r\n") == "⇥␍⏎\n"
    assert visible("\x1b[31m\x07\x7f\x9b") == "␛[31m␇␡<U+009B>"
    assert visible("x\u202ey\u00a0\ufeff\u2028\ud800") == "x<U+202E>y<U+00A0><U+FEFF><U+2028><U+D800>"
    assert visible("\u200d") == "<U+200D>"
    assert visible("क\u200dष") == "क\u200dष"


@given(st.lists(st.integers(1, 999), unique=True).map(sorted), st.integers(1, 1000), st.integers(0, 300))
def test_shown_ranges_ascend_and_hold_both_ends(borders: list[int], length: int, limit: int) -> None:
    borders = [border for border in borders if border < length]
    ranges = shown_ranges(borders, length, limit)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == length
    assert all(start < stop for start, stop in ranges)
    assert all(before[1] < after[0] for before, after in pairwise(ranges))
    if not limit or length <= limit:
        assert ranges == [(0, length)]


def test_what_is_left_out_lies_away_from_the_borders() -> None:
    assert shown_ranges([400], 1000, 100) == [(0, 25), (375, 425), (975, 1000)]
    assert sum(stop - start for start, stop in shown_ranges(list(range(10, 5000, 10)), 6000, 600)) < 700
