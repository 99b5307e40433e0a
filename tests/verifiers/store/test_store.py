"""A store gives back what was put in, in every dtype, and says what it does not have."""

from __future__ import annotations

import json
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from speculators.data import CutRows, Row, RowDataset
from speculators.errors import ConfigError, DataError, SpeculatorsError
from speculators.verifiers.source import CachedSource
from speculators.verifiers.store import StatesStore, StoreRecord, StoreSource, StoreWriter
from speculators.verifiers.store.records import line_of, read_line
from tests.verifiers.store.stores import MadeUpSource, contents, cut, filled, rows, same


def cached(dataset, **source: object) -> CachedSource:  # type: ignore[no-untyped-def]
    """What training without a store reads."""
    return CachedSource(MadeUpSource(**source), CutRows(dataset, 32), 1 << 30, token_budget=128)  # type: ignore[arg-type]


@pytest.mark.parametrize("captured", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16", "fp8"])
def test_reading_gives_what_was_written(tmp_path: Path, captured: str, dtype: str | None) -> None:
    dataset = rows()
    report = filled(tmp_path / "store", dataset, MadeUpSource(captured), dtype=dtype)
    assert (report.rows, report.written, report.present) == (24, 24, 0)
    source, wanted = StoreSource(tmp_path / "store"), cached(dataset, dtype=captured)
    read = captured if dtype in (None, "float16", "fp8") else dtype
    precision = dtype if dtype in ("float16", "fp8") else None
    assert source.description == replace(wanted.description, dtype=read, precision=precision)
    for row_id in range(24):
        [found], [whole] = source.fetch([cut(dataset, row_id)]), wanted.fetch([cut(dataset, row_id)])
        assert (str(found.features.dtype), str(found.final.dtype)) == (f"torch.{read}", f"torch.{read}")
        if read == captured and dtype in (None, captured):
            assert same(found, whole)
        for left, right in ((found.features, whole.features), (found.final, whole.final)):
            assert left.shape == right.shape
            assert float((left.float() - right.float()).abs().max()) <= (0.0 if dtype in (None, captured) else 0.07)
    assert len(list((tmp_path / "store" / "shards").iterdir())) > 1


def test_states_are_read_where_they_lie(tmp_path: Path) -> None:
    dataset = rows(4)
    filled(tmp_path / "store", dataset)
    source = StoreSource(tmp_path / "store")
    first, again = source.fetch([cut(dataset, 0)])[0], source.fetch([cut(dataset, 0)])[0]
    assert first.features.data_ptr() == again.features.data_ptr()
    source.close()
    assert same(first, cached(dataset).fetch([cut(dataset, 0)])[0])  # outlives the source


def test_a_prefix_of_a_stored_row_is_there_and_a_longer_row_is_not(tmp_path: Path) -> None:
    dataset = rows(6)
    filled(tmp_path / "store", dataset)
    source = StoreSource(tmp_path / "store", on_missing="skip")
    stored = cut(dataset, 2)
    [part] = source.fetch([cut(dataset, 2, 5)])
    assert same(part, source.fetch([stored])[0].first(5))
    store = StatesStore(tmp_path / "store")
    longer = Row(2, np.append(stored.input_ids, 7), np.append(stored.loss_mask, True))
    other = Row(2, (stored.input_ids + 1) % 64, stored.loss_mask)
    other_begin = Row(2, other.input_ids[:5], other.loss_mask[:5])
    unknown = Row(77, stored.input_ids, stored.loss_mask)
    for row in (longer, other, other_begin, unknown):
        assert not store.has(row)
        assert source.fetch([row]) == []
    assert store.has(stored)
    assert store.has(cut(dataset, 2, 5))
    with pytest.raises(DataError, match="fill another store with a larger --seq-length"):
        StoreSource(tmp_path / "store", dataset, MadeUpSource).fetch([Row(0, np.zeros(40, np.int64), np.ones(40, bool))])


@pytest.mark.parametrize("how", ["skip", "warn", "raise", "generate"])
def test_missing_rows(tmp_path: Path, how: str) -> None:
    dataset = rows()
    filled(tmp_path / "store", dataset, max_samples=10)
    made = MadeUpSource()
    source = StoreSource(tmp_path / "store", dataset, lambda: made, how)  # type: ignore[arg-type]
    asked = [cut(dataset, row_id) for row_id in (3, 20)]
    if how == "raise":
        with pytest.raises(DataError, match="has no states of row 20; run generate-offline-data again, or pass --on-missing"):
            source.fetch(asked)
    elif how == "generate":
        assert [one.row_id for one in source.fetch(asked)] == [3, 20]
        wanted = cached(dataset)
        for row_id in range(10, 24):
            assert same(source.fetch([cut(dataset, row_id)])[0], wanted.fetch([cut(dataset, row_id)])[0])
        calls = len(made.asked)
        assert sorted(map(sorted, made.asked)) == sorted(map(sorted, {tuple(group) for group in made.asked}))  # each pass once
        source.close()
        assert made.closed
        again = StoreSource(tmp_path / "store", dataset, lambda: made, "raise")
        assert all(same(again.fetch([cut(dataset, i)])[0], wanted.fetch([cut(dataset, i)])[0]) for i in range(10, 24))
        assert len(made.asked) == calls
    else:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert [one.row_id for one in source.fetch(asked)] == [3]
        assert ["row 20; it is left out" in str(one.message) for one in seen] == ([True] if how == "warn" else [])
    assert (how == "generate") == bool(made.asked)


def test_made_states_need_not_be_kept(tmp_path: Path) -> None:
    dataset = rows()
    filled(tmp_path / "store", dataset, max_samples=10)
    before = contents(tmp_path / "store")
    source = StoreSource(tmp_path / "store", dataset, MadeUpSource, keep=False)
    assert same(source.fetch([cut(dataset, 20)])[0], cached(dataset).fetch([cut(dataset, 20)])[0])
    source.close()
    assert contents(tmp_path / "store") == before


def test_without_a_source_missing_states_cannot_be_made(tmp_path: Path) -> None:
    dataset = rows()
    filled(tmp_path / "store", dataset, max_samples=10)
    with pytest.raises(DataError, match="name a --store-source"):
        StoreSource(tmp_path / "store", dataset).fetch([cut(dataset, 20)])


def test_another_source_than_the_one_that_filled(tmp_path: Path) -> None:
    dataset = rows()
    filled(tmp_path / "store", dataset, max_samples=10)
    source = StoreSource(tmp_path / "store", dataset, lambda: MadeUpSource("bfloat16"))
    with pytest.raises(ConfigError, match="states of dtype float32 and the source gives bfloat16"):
        source.fetch([cut(dataset, 20)])


def test_another_data_set(tmp_path: Path) -> None:
    filled(tmp_path / "store", rows())
    with pytest.warns(UserWarning, match="from another data set"):
        source = StoreSource(tmp_path / "store", rows(seed=6), MadeUpSource, "raise")
    with pytest.raises(DataError, match="has no states of row 0"):
        source.fetch([cut(rows(seed=6), 0)])
    other = RowDataset.from_rows([Row(0, np.arange(5), np.ones(5, bool))])  # shorter than what is stored as row 0
    with pytest.warns(UserWarning, match="from another data set"):
        source = StoreSource(tmp_path / "store", other, MadeUpSource)
    assert same(*source.fetch([other[0]]), *MadeUpSource().fetch([other[0]]))
    with pytest.raises(ConfigError, match=r"holds other states \(dataset .* there, .* asked for\)"):
        filled(tmp_path / "store", rows(seed=6))
    with pytest.raises(ConfigError, match="seq_length 32 there, 16 asked for"):
        filled(tmp_path / "store", rows(), seq_length=16)


def test_next_tokens_are_those_of_the_source(tmp_path: Path) -> None:
    dataset = rows()
    filled(tmp_path / "store", dataset)
    source = StoreSource(tmp_path / "store")
    assert source.probed_rows == (0, 1, 2, 3)
    row = cut(dataset, 1)
    found = source.next_tokens(row, [0], 5)
    wanted = MadeUpSource().next_tokens(row, list(range(len(row))), 32)
    assert torch.equal(found.positions, wanted.positions)
    assert torch.equal(found.ids, wanted.ids[:, :5])
    assert torch.equal(found.logprobs, wanted.logprobs[:, :5])
    assert source.next_tokens(cut(dataset, 1, 4), [0], 5).positions.tolist() == [0, 1, 2, 3]
    for other in (cut(dataset, 9), Row(1, dataset[2].input_ids, dataset[2].loss_mask)):
        with pytest.raises(DataError, match="no predictions"):
            source.next_tokens(other, [0], 5)


def test_a_reader_sees_what_is_written_meanwhile(tmp_path: Path) -> None:
    dataset = rows()
    filled(tmp_path / "store", dataset, max_samples=1)
    source = StoreSource(tmp_path / "store", on_missing="skip")
    assert source.fetch([cut(dataset, 8)]) == []
    filled(tmp_path / "store", dataset)
    assert [one.row_id for one in source.fetch([cut(dataset, 8)])] == [8]


def test_many_threads_read_and_make(tmp_path: Path) -> None:
    dataset = rows()
    filled(tmp_path / "store", dataset, max_samples=12)
    made = MadeUpSource()
    source, wanted = StoreSource(tmp_path / "store", dataset, lambda: made), cached(dataset)
    found: dict[int, bool] = {}

    def work(start: int) -> None:
        for row_id in range(start, 24, 3):
            found[row_id] = same(source.fetch([cut(dataset, row_id)])[0], wanted.fetch([cut(dataset, row_id)])[0])

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24
    assert all(found[row_id] for row_id in range(12, 24))  # the first ones were captured in other company
    assert len(made.asked) == len({tuple(group) for group in made.asked})


def test_ranks_fill_one_folder_at_once(tmp_path: Path) -> None:
    dataset, world = rows(60), 3
    threads = [
        threading.Thread(target=filled, args=(tmp_path / "store", dataset), kwargs={"world_size": world, "rank": rank})
        for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    source, wanted = StoreSource(tmp_path / "store", on_missing="raise"), cached(dataset)
    assert all(same(source.fetch([cut(dataset, i)])[0], wanted.fetch([cut(dataset, i)])[0]) for i in range(60))
    for rank in range(world):  # each rank's files are those of a run in which it is alone
        filled(tmp_path / "alone", dataset, world_size=world, rank=rank)
    assert contents(tmp_path / "store") == contents(tmp_path / "alone")


def test_one_writer_of_a_name(tmp_path: Path) -> None:
    dataset = rows(4)
    filled(tmp_path / "store", dataset)
    store = StatesStore(tmp_path / "store")
    with StoreWriter(store, "00000"), pytest.raises(SpeculatorsError, match=r"part 00000 of the store .* is in use"):
        StoreWriter(store, "00000")


def test_shards_are_ordinary_files_for_others(tmp_path: Path) -> None:
    """A program that knows safetensors and the page on the format reads a row."""
    dataset = rows(4)
    filled(tmp_path / "store", dataset)
    lines = [json.loads(line) for line in (tmp_path / "store/index/00000.jsonl").read_text().splitlines()]
    [(shard, tokens)] = [(line["shard"], row[1]) for line in lines for group in line["passes"] for row in group if row[0] == 2]
    tensors = load_file(tmp_path / "store/shards" / shard)
    assert tensors["2.token_ids"].tolist() == dataset[2].input_ids[:32].tolist()
    wanted = cached(dataset).fetch([cut(dataset, 2)])[0]
    assert tokens == len(wanted.token_ids)
    assert torch.equal(tensors["2.hidden_states"], torch.cat([wanted.features, wanted.final[:, None]], dim=1))


def test_folders_that_are_no_store(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fill it with `speculators generate-offline-data`"):
        StoreSource(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds other files \(notes.txt\)"):
        filled(tmp_path, rows(2))
    (tmp_path / "hidden_states.json").write_text("{")
    with pytest.raises(DataError, match=r"hidden_states.json cannot be used"):
        StoreSource(tmp_path)


RECORD = StoreRecord(MadeUpSource().description, "float32", "float32", "abc", 32, 128).to_json()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 2}, "reads format 1"),
        ({"dtype": "int4"}, "int4"),
        ({"captured_dtype": ["float32"]}, "a dtype is wrong"),
        ({"states": RECORD["states"] | {"dtype": "save"}}, "a dtype is wrong"),
        ({"seq_length": "8"}, "a number"),
        ({"on_full": "explode"}, "a number or --on-full"),
        ({"more": 1}, "no record"),
        ({"states": {}}, "not a description"),
        ({"states": RECORD["states"] | {"layer_id_convention": "before"}}, "convention"),
    ],
)
def test_records_of_others(change: dict[str, object], problem: str) -> None:
    assert StoreRecord.from_json(RECORD).to_json() == RECORD
    with pytest.raises(ConfigError, match=problem):
        StoreRecord.from_json(RECORD | change)


@given(st.binary(max_size=8), st.integers(0, 200), st.integers(1, 255))
def test_lines_that_are_not_whole(more: bytes, place: int, change: int) -> None:
    line = bytearray(line_of({"shard": "a.safetensors", "passes": [[[1, 2, "é", 3]]]}).encode())
    assert read_line(bytes(line))["passes"] == [[[1, 2, "é", 3]]]
    line[place % len(line)] ^= change
    with pytest.raises(ValueError, match=r"line of an index|checksum"):
        read_line(bytes(line) + more)
