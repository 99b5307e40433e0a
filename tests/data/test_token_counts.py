"""Counts of supervised tokens: parallel as serial, merged as the union, and files that belong to other rows."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators.data import (
    DataManifest,
    Row,
    RowDataset,
    TokenCounts,
    count_dataset,
    count_tokens,
    load_counts,
    load_token_frequencies,
    merge_counts,
    save_counts,
    save_token_frequencies,
)
from speculators.data import token_counts as module
from speculators.data.token_counts import StaleCountsError, TokenCounter
from speculators.data.tokenizers import vocabulary_size
from speculators.errors import DataError, SpeculatorsError
from tests.tiny import random_rows, tiny_tokenizer

COUNTS = np.array([0, 5, 2, 0, 9, 2, 0, 2, 0, 1])
VOCAB = 64


def dataset(count: int, seed: int = 0, tokenizer_hash: str = "abc") -> RowDataset:
    return RowDataset.from_rows(random_rows(count, vocab=VOCAB, seed=seed), DataManifest(tokenizer_hash=tokenizer_hash))


def plainly(rows: Any) -> list[int]:
    counts = [0] * VOCAB
    for row in rows:
        for token, supervised in zip(row.input_ids.tolist(), row.loss_mask.tolist()):
            counts[token] += supervised
    return counts


def test_only_supervised_tokens_are_counted() -> None:
    rows = [
        Row(0, np.array([1, 2, 2, 3]), np.array([False, True, True, True])),
        Row(1, np.array([3, 1]), np.array([True, False])),
        Row(2, np.array([4]), np.array([False])),
    ]
    assert count_tokens(rows, 6).tolist() == [0, 0, 2, 2, 0, 0]
    with pytest.raises(DataError, match="token id 3 lies outside the vocabulary of 3"):
        count_tokens(rows, 3)
    with pytest.raises(DataError, match="token id -1 lies outside"):
        count_tokens([*rows, Row(7, np.array([-1]), np.array([True]))], 6)
    assert count_tokens([], 6).tolist() == [0] * 6


@pytest.mark.parametrize("batch", [1, 7, 1 << 20])
def test_batches_change_nothing(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH", batch)
    rows = random_rows(50, vocab=VOCAB)
    assert count_tokens(rows, VOCAB).tolist() == plainly(rows)


@pytest.mark.parametrize("processes", [1, 2, 3, 40])
def test_in_processes_as_in_one(processes: int) -> None:
    data = dataset(20)
    counted = count_dataset(data, VOCAB, processes=processes)
    assert counted.counts.tolist() == plainly(data)
    assert (counted.rows, counted.tokenizer_hash, counted.sources) == (20, "abc", (data.fingerprint,))
    assert counted.supervised_tokens == data.supervised_tokens


def test_what_goes_wrong_in_a_process_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="outside the vocabulary of 10; render"):
        count_dataset(dataset(20), 10, processes=2)

    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(module, "_count_range", killed)
    with pytest.raises(SpeculatorsError, match="was killed"):
        count_dataset(dataset(20), VOCAB, processes=2)


parts = st.lists(
    st.lists(st.integers(0, 9), min_size=0, max_size=30).map(lambda ids: np.array(ids, dtype=np.int64)), min_size=1, max_size=5
)


@given(parts, st.randoms())
@settings(max_examples=50, deadline=None)
def test_merged_counts_are_those_of_the_union_in_any_order(ids: list[np.ndarray], random: Any) -> None:
    rows = [Row(number, own, np.ones(len(own), bool)) for number, own in enumerate(ids)]
    counted = [TokenCounts(count_tokens([row], 10), 1, "t", (f"f{row.row_id}",)) for row in rows]
    shuffled = list(counted)
    random.shuffle(shuffled)
    merged, other = merge_counts(counted), merge_counts(shuffled)
    assert merged.counts.tolist() == other.counts.tolist() == count_tokens(rows, 10).tolist()
    assert merged.sources == other.sources
    assert merged.rows == len(rows)


def test_what_cannot_be_merged() -> None:
    one = TokenCounts(COUNTS, 3, "t", ("f",))
    with pytest.raises(DataError, match=r"different tokenizers \(t and u\)"):
        one.merge(TokenCounts(COUNTS, 3, "u", ("g",)))
    with pytest.raises(DataError, match="of 9 and of 10 ids"):
        one.merge(TokenCounts(COUNTS[:9], 3, "t", ("g",)))
    with pytest.raises(DataError, match="fingerprint f would be counted twice"):
        one.merge(one)
    with pytest.raises(DataError, match="no token counts"):
        merge_counts([])
    # A file that does not say may be anybody's.
    assert one.merge(TokenCounts(COUNTS, 0)).tokenizer_hash == "t"


def test_another_vocabulary_size() -> None:
    counts = TokenCounts(COUNTS, 1)
    assert counts.resized(12).counts.tolist() == [*COUNTS.tolist(), 0, 0]
    with pytest.raises(DataError, match="reach id 9, beyond the verifier's 8"):
        counts.resized(8)


def test_rows_that_come_one_by_one() -> None:
    rows = random_rows(9, vocab=VOCAB)
    counter = TokenCounter(VOCAB)
    for row in rows:
        counter.add(row.input_ids, row.loss_mask)
    counted = counter.result("t", ["f"])
    assert counted.counts.tolist() == plainly(rows)
    assert (counted.rows, counted.tokenizer_hash, counted.sources) == (9, "t", ("f",))
    tokenizer = tiny_tokenizer()
    assert vocabulary_size(tokenizer) == len(tokenizer)


def test_counts_and_their_record(tmp_path: Path) -> None:
    path = tmp_path / "token_freq.pt"
    saved = TokenCounts(COUNTS, 3, "t", ("f",))
    save_counts(path, saved)
    assert {file.name for file in tmp_path.iterdir()} == {"token_freq.pt", "token_freq.json"}
    for expect in (None, "f"):
        loaded = load_counts(path, expect, tokenizer_hash="t")
        assert loaded.counts.tolist() == COUNTS.tolist()
        assert (loaded.rows, loaded.tokenizer_hash, loaded.sources) == (3, "t", ("f",))
    with pytest.raises(StaleCountsError, match="counts other rows than those with fingerprint g"):
        load_counts(path, expect="g")
    with pytest.raises(DataError, match="counted with the tokenizer t, but this one is u"):
        load_counts(path, tokenizer_hash="u")
    # Merged counts are not those of one of their parts.
    save_counts(path, saved.merge(TokenCounts(COUNTS, 3, "t", ("g",))))
    with pytest.raises(StaleCountsError, match="other rows"):
        load_counts(path, expect="f")


def test_a_file_that_is_not_the_one_recorded(tmp_path: Path) -> None:
    path = tmp_path / "token_freq.pt"
    save_counts(path, TokenCounts(COUNTS, 3, "t", ("f",)))
    torch.save({1: 1}, path)  # as upstream does
    with pytest.raises(StaleCountsError, match=r"is not the file that token_freq.json describes"):
        load_counts(path)
    save_token_frequencies(path, COUNTS)  # takes the record away
    assert load_counts(path).counts.tolist() == COUNTS.tolist()
    assert load_counts(path).sources == ()
    with pytest.raises(StaleCountsError, match="does not say which rows"):
        load_counts(path, expect="f")
    (tmp_path / "token_freq.json").write_text("{")
    with pytest.raises(StaleCountsError, match=r"token_freq.json cannot be read"):
        load_counts(path)


def test_token_frequencies(tmp_path: Path) -> None:
    path = tmp_path / "token_freq.pt"
    save_token_frequencies(path, COUNTS)
    assert torch.load(path, weights_only=True) == {4: 9, 1: 5, 2: 2, 5: 2, 7: 2, 9: 1}
    assert load_token_frequencies(path).tolist() == COUNTS.tolist()
    save_token_frequencies(path, np.zeros(4, np.int64))
    assert load_token_frequencies(path).tolist() == []
    with pytest.raises(DataError, match="no token frequency file"):
        load_token_frequencies(tmp_path / "missing.pt")
    path.write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot be read"):
        load_token_frequencies(path)
    for wrong in ({"a": 1}, {1: 0.5}, {-1: 1}, {1 << 60: 1}, {1: 1 << 70}, {True: 1}, [1]):
        torch.save(wrong, path)
        with pytest.raises(DataError, match="does not map ids"):
            load_token_frequencies(path)
    torch.save(Path("x"), path)  # a pickle of something else is never executed
    with pytest.raises(DataError, match="cannot be read"):
        load_token_frequencies(path)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token_freq.pt"
    saved = TokenCounts(COUNTS, 3, "t", ("f",))
    save_counts(path, saved)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(DataError, match="disk is full"):
            save_counts(path, TokenCounts(COUNTS * 2, 3, "t", ("g",)))
    assert load_counts(path, expect="f").counts.tolist() == COUNTS.tolist()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(DataError, match="disk is full"):
            save_counts(path, TokenCounts(COUNTS * 2, 3, "t", ("g",)))
    with pytest.raises(StaleCountsError):  # new counts under the old record are never taken for either
        load_counts(path)
    assert len(list(tmp_path.iterdir())) == 2
