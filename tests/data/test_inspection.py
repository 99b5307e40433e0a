"""Warnings: each by a data set that has exactly that fault, none on a good one; which rows are chosen; samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from speculators.data.inspection import Survey, choose_rows, rows_of_conversation, rows_of_source, survey
from speculators.data.rendering import render_conversation, render_rows
from speculators.data.row_checks import FAULTS, TemplateFacts, spans_of
from speculators.data.row_views import view_row
from speculators.data.rows import DataManifest, Row, RowBatch, RowDataset, SourceRecord, write_rows
from speculators.data.token_text import TokenTexts
from speculators.errors import ConfigError, DataError
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TOKENIZER.bos_token = "<|endoftext|>"
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")

Pair = tuple[np.ndarray, np.ndarray]


def pair(question: str, *answers: str) -> Pair:
    """Ids and mask of a conversation, as they should be."""
    messages = []
    for answer in answers:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    rendered = render_conversation(TOKENIZER, messages)
    return rendered.input_ids.copy(), rendered.loss_mask.copy()


def good(count: int = 6) -> list[Pair]:
    """Rows with nothing wrong: one or two answers, one of them empty, one of a single letter."""
    pairs = [pair(f"question {index}", f"answer {index}", "more"[: index % 3]) for index in range(count - 1)]
    return [*pairs, pair("last one", "x")]


def looked_at(pairs: Sequence[Pair], **options: int) -> Survey:
    dataset = RowDataset.from_rows([Row(index, *each) for index, each in enumerate(pairs)])
    texts = TokenTexts(TOKENIZER)
    return survey(dataset, TemplateFacts.of(TOKENIZER, texts), texts, **options)


def moved(pair: Pair, start: int = 0, stop: int = 0) -> Pair:
    """With the first span beginning ``start`` tokens later, and the last ending ``stop`` tokens later."""
    ids, mask = pair
    spans = spans_of(mask).tolist()
    spans[0][0] += start
    spans[-1][1] += stop
    moved_mask = np.zeros_like(mask)
    for first, last in spans:
        moved_mask[first:last] = True
    return ids, moved_mask


def cut(pair: Pair, tokens: int) -> Pair:
    return pair[0][:-tokens], pair[1][:-tokens]


def flagged(fault: str, count: int = 1) -> Callable[[list[Pair]], list[int]]:
    """Applies a fault to the last ``count`` rows and says which these are."""

    def apply(pairs: list[Pair]) -> list[int]:
        rows = list(range(len(pairs) - count, len(pairs)))
        for row in rows:
            pairs[row] = BROKEN[fault](row, pairs[row])
        return rows

    return apply


BROKEN: dict[str, Callable[[int, Pair], Pair]] = {
    "truncated": lambda row, each: cut(each, 2),  # the end of turn and the newline after it
    "end-not-supervised": lambda row, each: moved(each, stop=-1),
    "after-end-supervised": lambda row, each: moved(each, stop=1),
    "header-supervised": lambda row, each: moved(each, start=-1 - row % 3),
    "newline-first": lambda row, each: pair(f"line {row}", "\n\nanswer"),
    "role-token-supervised": lambda row, each: pair(f"token {row}", "say <|im_start|> now"),
    "all-supervised": lambda row, each: (each[0], np.ones_like(each[1])),
    "nothing-supervised": lambda row, each: (each[0], np.zeros_like(each[1])),
    "small-share": lambda row, each: pair(f"{row} " + 300 * "word ", "x"),
    "two-bos": lambda row, each: (np.concatenate([[0, 0], each[0]]), np.concatenate([[False, False], each[1]])),
    "unknown-id": lambda row, each: (np.where(np.arange(len(each[0])) == 4, 5000, each[0]), each[1]),
    "duplicate": lambda row, each: pair("question 0", "answer 0", ""),
}


def test_a_good_data_set_has_no_warning() -> None:
    assert looked_at(good()).warnings == ()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("fault", BROKEN)
def test_each_fault_is_warned_of_alone_and_with_its_rows(fault: str, count: int) -> None:
    pairs = good()
    rows = flagged(fault, count)(pairs)
    found = looked_at(pairs).warnings
    assert [warning.id for warning in found] == [fault]
    assert found[0].count == count
    assert found[0].rows == (tuple(rows) if fault != "duplicate" else (0, *rows))
    assert found[0].meaning == FAULTS[fault]


def test_a_data_set_in_which_no_answer_ends_is_warned_of_once() -> None:
    for fault in ("truncated", "end-not-supervised"):
        pairs = [pair(f"question {index}", f"answer {index}") for index in range(7)]
        flagged(fault, len(pairs))(pairs)
        (warning,) = looked_at(pairs).warnings
        assert (warning.id, warning.count, warning.rows) == ("no-end-of-turn", 7, (0, 1, 2, 3, 4))
        assert "<|im_end|>" in warning.text


def test_every_fault_has_a_test() -> None:
    assert {*BROKEN, "no-end-of-turn"} == set(FAULTS)


def test_upstreams_mask_is_named_by_what_it_supervises() -> None:
    pairs = [moved(pair(f"question {index}", f"answer {index}"), stop=1) for index in range(4)]
    (warning,) = looked_at(pairs).warnings
    assert warning.text == "the newline after <|im_end|> is supervised in 4 rows"


def test_two_spans_that_miss_their_end_count_as_one_row() -> None:
    ids, mask = pair("question", "one", "two")
    mask &= ids != END
    found = looked_at([*good(), (ids, mask)]).warnings
    assert [(warning.id, warning.count) for warning in found] == [("end-not-supervised", 1)]


def test_a_line_break_that_few_answers_begin_with_is_the_answers_own() -> None:
    pairs = [pair(f"question {index}", f"answer {index}") for index in range(19)]
    assert looked_at([*pairs, pair("last", "\nanswer")]).warnings == ()


def test_without_a_tokenizer_only_masks_are_judged() -> None:
    pairs = good()
    faults = ("all-supervised", "truncated", "header-supervised", "two-bos")
    dataset = RowDataset.from_rows([Row(row, *BROKEN[fault](row, pairs[row])) for row, fault in enumerate(faults)])
    found = survey(dataset, TemplateFacts(), TokenTexts(None)).warnings
    assert [warning.id for warning in found] == ["all-supervised"]


def test_a_template_that_refuses_the_probe_leaves_the_other_checks() -> None:
    tokenizer = tiny_tokenizer("{{ raise_exception('no') }}")
    facts = TemplateFacts.of(tokenizer, TokenTexts(tokenizer))
    assert (facts.header, facts.roles, facts.ends) == ((), frozenset(), {END})


def test_the_end_of_turn_is_found_where_it_is_no_eos_of_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    facts = TemplateFacts.of(tokenizer, TokenTexts(tokenizer))
    assert facts.ends == {0, END}
    assert TOKENIZER.decode(list(facts.header)) == "<|im_end|>\n<|im_start|>assistant\n"
    assert [TOKENIZER.decode([token]) for token in facts.roles] == ["<|im_start|>"]


def test_numbers_are_of_all_rows_or_say_of_which() -> None:
    pairs = [pair(f"question {index}", "answer"[: index % 7]) for index in range(50)]
    whole = looked_at(pairs)
    assert (whole.sampled, whole.scope) == (False, "all 50 rows")
    assert whole.lengths.tolist() == [len(ids) for ids, _ in pairs]
    assert whole.supervised.tolist() == [mask.sum() for _, mask in pairs]
    assert whole.counts.sum() == whole.supervised.sum()
    assert whole.counts[END] == 50
    part = looked_at(pairs, sample=10, seed=3)
    assert (part.sampled, part.scope) == (True, "a sample of 10 rows")
    assert part.supervised.tolist() == whole.supervised[part.checked].tolist()
    assert looked_at(pairs, sample=10, seed=3).checked.tolist() == part.checked.tolist()
    assert looked_at(pairs, sample=10, seed=4).checked.tolist() != part.checked.tolist()


def test_warnings_of_a_sample_say_so_and_duplicates_are_complete_in_it() -> None:
    pairs = [pair(f"question {index}", "answer") for index in range(100)]  # two lengths
    pairs[10:20] = 10 * [pairs[3]]
    for index in range(50, 100):
        pairs[index] = cut(pairs[index], 2)
    found = {warning.id: warning for warning in looked_at(pairs, sample=60).warnings}
    assert "of the 60 sampled ones" in found["truncated"].text
    assert {"--seq-length", "--max-tokens"} <= set(found["truncated"].meaning.split()), "either may have cut an answer"
    assert 0 < found["truncated"].count < 50
    # All rows of a length are compared, or none of it: 10 of 110 rows are found to be copies, or nothing is said.
    counts = set()
    for seed in range(8):
        seen = looked_at([*pairs[:50], *(pair("other", f"answer {index}") for index in range(60))], sample=80, seed=seed)
        counts.add(next((each.count for each in seen.warnings if each.id == "duplicate"), 0))
    assert counts == {0, 10}


def test_chosen_rows_are_the_ends_and_others() -> None:
    lengths = np.array([5, 9, 2, 7, 30, 8, 6])
    chosen = choose_rows(lengths, 4, seed=1)
    assert chosen[:2] == [2, 4]
    assert len(set(chosen)) == 4
    assert chosen[2:] == sorted(chosen[2:])
    assert chosen == choose_rows(lengths, 4, seed=1)
    assert {tuple(choose_rows(lengths, 4, seed=seed)) for seed in range(20)} != {tuple(chosen)}
    assert choose_rows(lengths, 1) == [2]
    assert sorted(choose_rows(lengths, 99)) == list(range(7))
    assert choose_rows(lengths, 3, among=np.array([1, 5])) == [5, 1]
    assert choose_rows(lengths, 0) == choose_rows(lengths[:0], 3) == []
    assert choose_rows(lengths[:1], 3) == [0]


@pytest.fixture
def stored(tmp_path) -> RowDataset:
    def batches():
        for index in range(6):
            rendered = render_rows(
                TOKENIZER, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"answer {index}"}]
            )[0]
            yield RowBatch(
                rendered.input_ids,
                rendered.loss_mask,
                np.array([len(rendered.input_ids)]),
                conversation=np.array([index // 2]),
                source=np.array([index // 3], dtype=np.int32),
                record=np.array([index]),
                turn=np.array([-1 if index else 3], dtype=np.int32),
            )

    manifest = DataManifest(sources=[SourceRecord(name="a/chat.jsonl"), SourceRecord(name="b/code\x1b.jsonl")])
    return write_rows(tmp_path / "data", batches(), manifest)


def test_rows_are_found_by_conversation_and_by_source(stored: RowDataset) -> None:
    assert rows_of_conversation(stored, 1).tolist() == [2, 3]
    assert rows_of_source(stored, "a/chat.jsonl").tolist() == rows_of_source(stored, "chat.jsonl").tolist() == [0, 1, 2]
    with pytest.raises(DataError, match="no row is of the conversation 9"):
        rows_of_conversation(stored, 9)
    with pytest.raises(ConfigError, match=r"there is no source wrong; the data set has a/chat.jsonl, b/code␛.jsonl"):
        rows_of_source(stored, "wrong")
    plain = RowDataset.from_rows([Row(0, *pair("q", "a"))])
    with pytest.raises(DataError, match="does not say which source"):
        rows_of_source(plain, "chat.jsonl")
    with pytest.raises(DataError, match="does not say which conversation"):
        rows_of_conversation(plain, 0)


def test_sources_add_up_to_the_data_set(stored: RowDataset) -> None:
    texts = TokenTexts(TOKENIZER)
    seen = survey(stored, TemplateFacts.of(TOKENIZER, texts), texts)
    assert [(source.name, source.rows) for source in seen.sources] == [("a/chat.jsonl", 3), ("b/code\x1b.jsonl", 3)]
    assert sum(source.tokens for source in seen.sources) == seen.lengths.sum()
    assert sum(source.supervised for source in seen.sources) == stored.supervised_tokens


def test_a_view_says_where_its_row_is_from(stored: RowDataset) -> None:
    texts = TokenTexts(TOKENIZER)
    view = view_row(stored, 0, texts, {END})
    assert view.facts()[:4] == ["a/chat.jsonl", "record 0", "conversation 0", "message 3"]
    length, supervised = len(view.input_ids), int(view.loss_mask.sum())
    assert view.facts()[4:] == [f"{length} tokens", f"{supervised} supervised ({100 * supervised / length:.1f} %)"]
    assert view_row(stored, 3, texts).facts()[:4] == ["b/code␛.jsonl", "record 3", "conversation 1", "all turns"]
    ends = [piece.start for stretch in view.stretches for piece in stretch.pieces if view.ends_turn(piece)]
    assert ends == [length - 2]  # not the one of the user's turn


def test_a_view_of_a_long_row_accounts_for_every_token() -> None:
    dataset = RowDataset.from_rows([Row(0, *pair("q" * 400, "a" * 600))])
    view = view_row(dataset, 0, TokenTexts(TOKENIZER), limit=100)
    shown = sum(piece.count for stretch in view.stretches for piece in stretch.pieces)
    left_out = sum(stretch.left_out for stretch in view.stretches) + view.left_out
    assert shown + left_out == len(dataset.row(0))
    assert shown <= 104
    assert view.stretches[-1].pieces[-1].stop == len(dataset.row(0))


def test_a_character_cut_in_two_by_the_mask_is_shown_in_parts() -> None:
    from tests.data.test_token_text import byte_level

    texts = TokenTexts(byte_level())
    dataset = RowDataset.from_rows([Row(0, np.array(list("日".encode())), np.array([False, True, True]))])
    pieces = view_row(dataset, 0, texts).stretches[0].pieces
    assert [(piece.start, piece.count, piece.broken) for piece in pieces] == [(0, 1, True), (1, 1, True), (2, 1, True)]


def test_the_page_of_the_docs_explains_every_warning() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data" / "inspect.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE) == list(FAULTS)
