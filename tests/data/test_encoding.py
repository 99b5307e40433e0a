"""Texts encoded piece by piece have the ids of the whole, whatever the tokenizer's added tokens and rules are."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from speculators.data import encoding
from speculators.data.encoding import Encoded, PieceEncoder, PieceMismatchError, cut_tokens, longest_prefix, runs_own_code
from speculators.data.rendering import TemplateRenderer
from tests.data.kinds import KINDS
from tests.tiny import tiny_tokenizer

ALPHABET = "\n abcdefghijklmnopqrstuvwxyz0123456789.,<>|/_"


def special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, **({"special": True, "normalized": False} | flags))


#: Added tokens of all sorts: some hold others, overlap them, begin alike, are words, take white space, or are line breaks.
TOKENS = (
    special("<a>"),
    special("<b>"),
    special("<b>c"),
    special("<left>", lstrip=True),
    special("<right>", rstrip=True),
    special("<normal>", normalized=True),
    special("word", single_word=True),
    special("z<c>"),
    special("<c>"),
    special("<d>"),
    special("<d><"),
    special("<d>x", lstrip=True),
    special("<e|"),
    special("|e>"),
    special(" <f>"),
    AddedToken("<plain>", normalized=False),
    AddedToken("\n\n", normalized=False),
    AddedToken("<NORM>", normalized=True),
)
#: Those of them that begin a piece wherever they stand, unless a token ends in "<" and so reaches into them: ``<d>`` can turn
#: out as ``<d>x``, which takes white space from its left; ``|e>`` as the end of ``<e|``; a letter decides about ``word``.
CUT = ["<a>", "<b>", "<b>c", "<e|", "<right>"]


def wrap(tokenizer: Tokenizer, tokens: tuple[AddedToken, ...] = TOKENS) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([token for token in tokens if token.special])
    tokenizer.add_tokens([token for token in tokens if not token.special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def without(*texts: str) -> tuple[AddedToken, ...]:
    return tuple(token for token in TOKENS if token.content not in texts)


def byte_level(prefix_space: bool, normalizer: Any = None) -> Callable[[], PreTrainedTokenizerFast]:
    def make() -> PreTrainedTokenizerFast:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = [("Ġ", "a"), ("b", "c"), ("a", "b"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("<", "a")]
        vocab = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
        tokenizer.decoder = decoders.ByteLevel()
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        return wrap(tokenizer, without("<d><"))

    return make


def metaspace(scheme: str) -> Callable[[], PreTrainedTokenizerFast]:
    def make() -> PreTrainedTokenizerFast:
        letters = ["<unk>", "▁", *ALPHABET]
        scores = [(token, -float(rank % 7) - 1) for rank, token in enumerate([*letters, "▁a", "ab", "bc", "▁▁"])]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme == "always")
        return wrap(tokenizer, without("<d><"))

    return make


def normalizing(normalizer: Any) -> Callable[[], PreTrainedTokenizerFast]:
    def make() -> PreTrainedTokenizerFast:
        letters = ["<unk>", "▁", *dict.fromkeys(ALPHABET)]
        merges = [("▁", "a"), ("a", "b"), ("▁", "▁")]
        vocab = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizer
        return wrap(tokenizer, without("<d><", "word"))

    return make


MAKERS = {
    "byte level": byte_level(False),
    "byte level, prefix space, NFKC": byte_level(True, normalizers.NFKC()),
    "metaspace first": metaspace("first"),
    "metaspace always": metaspace("always"),
    "prepend": normalizing(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "lower case, strip": normalizing(normalizers.Sequence([normalizers.Lowercase(), normalizers.Strip()])),
}
PIECES = [
    *(token.content for token in TOKENS),
    "a",
    "b",
    "ab",
    " ",
    "\n",
    "  ",
    "<",
    ">",
    "c",
    "x",
    "<norm>",
    "é",
    "ﬁ",
    "漢",
    "e|",
    "A",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@pytest.mark.parametrize("name", MAKERS)
def test_pieces_have_the_ids_of_the_whole(name: str) -> None:
    tokenizer = MAKERS[name]()
    encoder = PieceEncoder(tokenizer)

    def whole(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    @settings(deadline=None, max_examples=150)
    @given(shared=TEXTS, first=TEXTS, second=TEXTS)
    def check(shared: str, first: str, second: str) -> None:
        one = encoder.encode(shared + first)
        other = encoder.encode(shared + second, one)
        assert one.ids() == whole(shared + first)
        assert other.ids() == whole(shared + second)
        assert "".join(other.text[a:b] for a, b in zip(other.starts, [*other.starts[1:], None])) == shared + second
        common = one.common(other)
        assert one.ids()[:common] == other.ids()[:common]
        assert common == min(len(one), len(other)) or one.ids()[common] != other.ids()[common]
        assert one.ids(common) == one.ids()[common:]
        assert len(one) == len(one.ids())

    check()


def test_what_may_begin_a_piece() -> None:
    assert cut_tokens(MAKERS["byte level"]()) == CUT
    assert cut_tokens(MAKERS["prepend"]()) == [*CUT, "z<c>"]
    greedy = MAKERS["prepend"]()
    greedy.add_tokens([AddedToken("<d><", normalized=False)])
    assert cut_tokens(greedy) == ["z<c>"]
    assert cut_tokens(KINDS["chatml"].tokenizer) == ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    assert "<|im_middle|>" in cut_tokens(KINDS["kimi"].tokenizer)
    split = tiny_tokenizer()
    split.split_special_tokens = True
    assert cut_tokens(split) == []
    assert PieceEncoder(split).encode("<|im_start|>a").ids() == split("<|im_start|>a", add_special_tokens=False)["input_ids"]


def test_a_piece_is_encoded_once_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "REMEMBERED", 100)
    monkeypatch.setattr(encoding, "LONGEST_REMEMBERED", 60)
    tokenizer = tiny_tokenizer()
    encoder = PieceEncoder(tokenizer)
    asked: list[str] = []
    tokenise = encoder._tokenise
    monkeypatch.setattr(encoder, "_tokenise", lambda texts: asked.extend(texts) or tokenise(texts))
    text = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    for word in ("a", "b"):
        encoder.encode(text.format(word))
    assert asked == [
        "<|im_start|>system\nbe kind",
        "<|im_end|>\n",
        "<|im_start|>user\na",
        "<|im_start|>user\nb",
    ]
    encoder.encode(text.format("c" * 70))  # too long to be remembered
    for word in range(30):
        encoder.encode(text.format(word))
        assert sum(map(len, encoder._remembered)) == encoder._characters <= 100
    assert asked.count("<|im_end|>\n") == 1  # used all the time, so never forgotten
    monkeypatch.undo()
    assert not pickle.loads(pickle.dumps(encoder))._remembered  # a copy for a worker begins anew


def test_state_left_by_others_does_not_reach_the_ids() -> None:
    tokenizer = tiny_tokenizer()
    encoder = PieceEncoder(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    tokenizer.backend_tokenizer.encode_special_tokens = True
    assert len(encoder.encode("<|im_start|>hello").ids()) == 6


def test_prefixes() -> None:
    assert longest_prefix([], [1]) == 0
    assert longest_prefix([1, 2], [1, 2, 3]) == 2
    assert longest_prefix([1, 2, 3, 4, 5], [1, 2, 3, 9, 5]) == 3
    assert longest_prefix([2], [3]) == 0
    # Chunks that are cut in other places.
    assert Encoded([[1, 2], [3]]).common(Encoded([[1], [2, 3, 4]])) == 3
    chunk = [1, 2]
    assert Encoded([chunk]).common(Encoded([chunk, [3]])) == 2


class Collapsing(PreTrainedTokenizerFast):
    """Code of its own: what the assistant says depends on what the user said."""

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super()._encode_plus(text.replace("yes", "no") if "hi" in text else text, *args, **kwargs)


MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
]


def test_a_tokenizer_that_does_not_keep_to_pieces_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_tokenizer()
    own = Collapsing(tokenizer_object=plain.backend_tokenizer, eos_token="<|im_end|>", unk_token="<|unk|>")
    own.chat_template = plain.chat_template
    assert runs_own_code(own)
    assert runs_own_code(KINDS["kimi"].tokenizer)
    assert not runs_own_code(plain)
    renderer = TemplateRenderer(own)
    renderer._encoded = 1001  # past the texts that are always compared; the rows of such a tokenizer all are
    with pytest.raises(PieceMismatchError, match="Collapsing encodes a text otherwise than its pieces"):
        renderer.rows(MESSAGES)
    expected = TemplateRenderer(own, pieces=False).rows(MESSAGES)[0].input_ids.tolist()
    assert expected == own.apply_chat_template(MESSAGES, return_dict=False)
    assert renderer.rows(MESSAGES)[0].input_ids.tolist() == expected  # it has given up pieces

    # A tokenizer without code of its own is compared too, now and then.
    monkeypatch.setattr(encoding, "cut_tokens", lambda tokenizer: ["assistant", "an"])
    byte_pairs = KINDS["chatml"].tokenizer
    assert (
        PieceEncoder(byte_pairs).encode("hi assistant").ids() != byte_pairs("hi assistant", add_special_tokens=False).input_ids
    )
    renderer = TemplateRenderer(byte_pairs)
    renderer._encoded = 1024
    with pytest.raises(PieceMismatchError):
        renderer.prompt([{"role": "user", "content": "hi assistant"}])
