"""Reading: every layout and compression gives exactly what a parser would, in constant memory, and breaks lose one record."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from speculators.data import byte_streams, json_array
from speculators.data.conversations import parse_conversation
from speculators.data.readers import ArrowRecords, Block, block_records, read_blocks
from speculators.data.sources import find_sources
from speculators.errors import DataError
from tests.data.broken_files import (
    BrokenFile,
    array,
    broken_files,
    conversation,
    conversations,
    lines,
    parquet,
    write_broken,
    zstd,
)


def blocks_of(path: Path, block_bytes: int = 1 << 20) -> list[Block]:
    return list(read_blocks(find_sources([path]), block_bytes=block_bytes))


def read(path: Path, block_bytes: int = 1 << 20) -> list[Any]:
    """All records, after a check of their numbering."""
    found = [pair for block in blocks_of(path, block_bytes) for pair in block_records(pickle.loads(pickle.dumps(block)))]
    assert [index for index, _ in found] == list(range(len(found)))
    return [record for _, record in found]


LAYOUTS: dict[str, bytes] = {
    "array.json": array(5),
    "compact.json": json.dumps(conversations(5)).encode(),
    "lines.json": lines(5),
    "lines.jsonl": lines(5),
    "lines.ndjson": lines(5).replace(b"\n", b"\r\n\r\n"),
    "array_in.jsonl": array(5),
    "bom.json": b"\xef\xbb\xbf \n" + array(5) + b"\n\n",
    "bom.jsonl": b"\xef\xbb\xbf" + lines(5),
    "objects.json": b"\n".join(json.dumps(each, indent=2).encode() for each in conversations(5)),
    "objects.jsonl": b"".join(json.dumps(each, indent=2).encode() for each in conversations(5)),
    "comma.json": array(5)[:-1].rstrip() + b",\n]",
    "packed.json.gz": gzip.compress(array(5)),
    "members.jsonl.gz": gzip.compress(lines(5)[:100]) + gzip.compress(lines(5)[100:]) + b"\0" * 512,
    "misnamed.jsonl": gzip.compress(lines(5)),
    "misnamed.gz": lines(5),
    "packed.jsonl.zst": zstd(lines(5)),
    "frames.json.zst": zstd(array(5)[:100]) + zstd(array(5)[100:]),
    "table.parquet": parquet(5, 2),
    "table.bin": parquet(5, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_every_layout_gives_the_same_records(tmp_path: Path, name: str, block_bytes: int) -> None:
    (tmp_path / name).write_bytes(LAYOUTS[name])
    assert read(tmp_path / name, block_bytes) == conversations(5)


def test_one_object_is_one_record(tmp_path: Path) -> None:
    for name, indent in (("wide.json", 2), ("narrow.json", None), ("wide.jsonl", 2)):
        (tmp_path / name).write_text(json.dumps(conversation(0), indent=indent))
        assert read(tmp_path / name) == [conversation(0)]


def test_a_saved_data_set(tmp_path: Path) -> None:
    datasets.Dataset.from_list(conversations(7)).save_to_disk(tmp_path / "saved", num_shards=2)
    assert read(tmp_path / "saved") == conversations(7)
    blocks = blocks_of(tmp_path / "saved", 100)
    assert len(blocks) > 2
    assert all(isinstance(block.records, ArrowRecords) for block in blocks)
    # A file that is cut off loses its own batch and what is behind it, and says so.
    shard = sorted((tmp_path / "saved").glob("*.arrow"))[1]
    shard.write_bytes(shard.read_bytes()[:-200])
    *good, broken = read(tmp_path / "saved")
    assert good == conversations(4)
    assert "breaks off behind 4 rows" in str(broken)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all examples of a property."""
    return tmp_path_factory.mktemp("shared")


texts = st.text(st.characters(codec="utf-8") | st.sampled_from('"\\[]{},\u2028\n/u'), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, values, max_size=3)


@settings(max_examples=50, deadline=None)
@given(
    records=st.lists(values, max_size=6),
    indent=st.sampled_from([None, 0, 1]),
    plain=st.booleans(),
    piece=st.integers(1, 9),
    block_bytes=st.integers(1, 40),
)
@example(records=["\\", '\\"', {"a": "\\\\"}], indent=None, plain=True, piece=1, block_bytes=1)
def test_blocks_of_any_size_give_what_a_parser_gives(
    shared: Path, records: list[Any], indent: int | None, plain: bool, piece: int, block_bytes: int
) -> None:
    text = json.dumps(records, indent=indent, ensure_ascii=plain)
    (shared / "data.json").write_text(text, encoding="utf-8")
    wrapped = [{"record": each} for each in records]
    rows = "\n".join(json.dumps(each, ensure_ascii=plain) for each in wrapped)
    (shared / "data.jsonl").write_text(rows, encoding="utf-8", newline="")
    (shared / "wide.json").write_text(
        "".join(json.dumps(each, indent=1, ensure_ascii=plain) for each in wrapped), encoding="utf-8"
    )
    with patch.object(json_array, "PIECE", piece):
        assert read(shared / "data.json", block_bytes) == json.loads(text)
        if records:
            assert read(shared / "data.jsonl", block_bytes) == wrapped
            assert read(shared / "wide.json", block_bytes) == wrapped


@settings(max_examples=50, deadline=None)
@given(data=st.data(), block_bytes=st.integers(1, 60), kind=st.sampled_from(["", ".gz"]))
def test_an_array_cut_anywhere_gives_every_whole_record(shared: Path, data: st.DataObject, block_bytes: int, kind: str) -> None:
    records = data.draw(st.lists(objects, min_size=1, max_size=5))
    text, ends = "[", []
    for record in records:
        text += json.dumps(record, ensure_ascii=False)
        ends.append(len(text.encode()))
        text += ", "
    whole = text.encode()
    cut = data.draw(st.integers(1, len(whole)))
    path = shared / f"cut.json{kind}"
    path.write_bytes(gzip.compress(whole[:cut]) if kind else whole[:cut])
    with patch.object(json_array, "PIECE", 7):
        *good, broken = read(path, block_bytes)
    assert good == records[: sum(end <= cut for end in ends)]
    assert isinstance(broken, DataError)
    assert f"breaks off at byte {cut}, in record {len(good)}" in str(broken)


def without_spaces(text: bytes) -> bytes:
    return text.replace(b" ", b"")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), chunk=st.integers(1, 60))
def test_a_wrong_byte_loses_nothing_before_it(data: st.DataObject, chunk: int) -> None:
    records = [json.dumps(each, ensure_ascii=False).encode() for each in data.draw(st.lists(objects, min_size=1, max_size=5))]
    text = bytearray(b"[" + b", ".join(records) + b"]")
    place = data.draw(st.integers(1, len(text) - 1))
    text[place] = data.draw(st.sampled_from(b'"\\{}[],x'))
    splitter, found = json_array.ArraySplitter(), []
    with patch.object(json_array, "PIECE", 7):
        for start in range(0, len(text), chunk):
            found += splitter.feed(bytes(text[start : start + chunk]))
        found += splitter.finish()
    # A record ends with its comma: without it, it and the next cannot be told apart.
    ends = [sum(map(len, records[: n + 1])) + 2 * n + 1 for n in range(len(records))]
    before = [record for record, end in zip(records, ends, strict=True) if end < place]
    assert found[: len(before)] == before
    # All is there, or it is said what is missing. Spaces around a comma are nobody's, and the wrong byte may have been one.
    assert splitter.fault is not None or without_spaces(b",".join(found)) == without_spaces(bytes(text[1:-1]))


def test_the_first_line_decides_even_when_it_is_bad(tmp_path: Path) -> None:
    for first in (b'{"id": 1, "id": 2}', b'{"prompt": "caf\xe9"}', b'{"prompt": "\\ud83d"}', b'{"prompt": ', b"x"):
        (tmp_path / "data.jsonl").write_bytes(b"\n".join([first, b'{"id": 3', *lines(2).splitlines()]))
        one, two, *good = read(tmp_path / "data.jsonl")
        assert isinstance(one, DataError)
        assert isinstance(two, DataError)
        assert good == conversations(2)


@pytest.mark.parametrize("step", [1, 3, 50])
def test_compressed_data_in_steps_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr(byte_streams, "STEP", step)
    for name, packed in (("a.gz", gzip.compress(lines(20))), ("a.zst", zstd(lines(20)))):
        (tmp_path / name).write_bytes(packed)
        assert read(tmp_path / name) == conversations(20)


@pytest.mark.parametrize("broken", broken_files(), ids=lambda broken: broken.name)
@pytest.mark.parametrize("block_bytes", [50, 1 << 20])
def test_broken_files_lose_what_is_broken_and_nothing_else(tmp_path: Path, broken: BrokenFile, block_bytes: int) -> None:
    (path,) = write_broken(tmp_path, lambda each: each.name == broken.name)
    records = read(path, block_bytes)
    bad = [record for record in records if isinstance(record, DataError)]
    good = [parse_conversation(record) for record in records if not isinstance(record, DataError)]
    assert (len(good), len(bad)) == (broken.good, broken.bad)
    assert [each.conversation_id for each in good] == sorted(
        (f"c{each.messages[0]['content'][8:-1]}" for each in good), key=len
    )
    assert re.search(broken.says, str(bad[0]))
    assert broken.name in str(bad[0])
    assert "\n" not in str(bad[0])


def test_a_record_that_never_closes_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_array, "DOUBTFUL", 1000)
    path = tmp_path / "data.json"
    path.write_bytes(b'[{"id": 0}, {"open": [1, 2}, ' + lines(100).replace(b"\n", b",\n") + b"{}]")
    blocks = blocks_of(path, 100)
    assert [len(block.records) for block in blocks] == [1, 0]
    assert blocks[-1].broken is not None
    assert "in record 1 (Expecting ',' delimiter)" in blocks[-1].broken
    # A large record that is in order stays one record.
    large = {"text": ["x" * 100] * 200}
    path.write_text(json.dumps([large, {"id": 1}]))
    assert read(path, 100) == [large, {"id": 1}]


def test_blocks_are_the_same_in_every_run(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(50))
    (tmp_path / "b.json").write_bytes(array(50))
    (tmp_path / "c.parquet").write_bytes(parquet(50, 20))
    sources = find_sources([tmp_path])
    blocks = list(read_blocks(sources, block_bytes=500))
    assert blocks == list(read_blocks(sources, block_bytes=500))
    assert [block.source for block in blocks] == sorted(block.source for block in blocks)
    assert len(blocks) > 20
    for number in range(3):
        of_one = [block for block in blocks if block.source == number]
        assert [block.first for block in of_one] == [sum(map(len, of_one[:place])) for place in range(len(of_one))]


def test_values_that_python_cannot_hold_cost_one_row(tmp_path: Path) -> None:
    texts = pa.array([b"good", b"caf\xe9", b"good"]).view(pa.string())
    pa.parquet.write_table(pa.table({"prompt": texts}), tmp_path / "data.parquet")
    first, bad, last = read(tmp_path / "data.parquet")
    assert first == last == {"prompt": "good"}
    assert "cannot be read" in str(bad)


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(lines(1))
    sources = find_sources([path])
    path.unlink()
    with pytest.raises(DataError, match="there is no data file"):
        list(read_blocks(sources))


def _peak(path: Path, held: Callable[[], int] = lambda: 0) -> int:
    """Most bytes held while all blocks of a file go by."""
    sources, most = find_sources([path]), 0
    tracemalloc.start()
    try:
        for _ in read_blocks(sources, block_bytes=1 << 17):
            most = max(most, held())
        return max(most, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["json", "jsonl", "json.gz", "jsonl.zst", "objects.json", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    text = "".join(map(chr, range(32, 127))) * 10
    peaks = []
    for count in (2_000, 8_000):
        records = [{"prompt": f"{index} {text}"} for index in range(count)]
        path = tmp_path / f"{count}.{kind}"
        if kind == "parquet":
            pa.parquet.write_table(pa.Table.from_pylist(records), path, use_dictionary=False, compression="none")
        else:
            rows = "\n".join(json.dumps(each, indent=1 if kind == "objects.json" else None) for each in records)
            data = (json.dumps(records) if kind.startswith("json.") or kind == "json" else rows).encode()
            path.write_bytes(gzip.compress(data, 1) if kind.endswith("gz") else zstd(data) if kind.endswith("zst") else data)
        peaks.append(_peak(path, pa.total_allocated_bytes if kind == "parquet" else lambda: 0))
    assert peaks[1] < 1.2 * peaks[0] + 200_000, peaks
    assert peaks[1] < 6 << 20, peaks
