"""Data files that are broken in the ways real ones are: what they hold, what can still be read, and what is said."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet


@dataclass(frozen=True)
class BrokenFile:
    """A file with ``good`` whole conversations, in this order, and ``bad`` records that cannot be read."""

    name: str  #: of the file
    content: bytes
    good: int
    bad: int
    says: str  #: regular expression that the first sentence about it matches


def conversation(index: int) -> dict[str, object]:
    messages = [{"role": "user", "content": f"What is {index}?"}, {"role": "assistant", "content": f"The number {index}."}]
    return {"id": f"c{index}", "messages": messages}


def conversations(count: int) -> list[dict[str, object]]:
    return [conversation(index) for index in range(count)]


def lines(count: int) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in conversations(count))


def array(count: int) -> bytes:
    return json.dumps(conversations(count), indent=1).encode()


def zstd(*parts: bytes) -> bytes:
    """The parts in one frame, each in a compressed block of its own."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        for part in parts:
            stream.write(part)
            stream.flush()
    return sink.getvalue().to_pybytes()


def parquet(count: int, group: int) -> bytes:
    sink = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_pylist(conversations(count)), sink, row_group_size=group, compression="none")
    return sink.getvalue()


def _varied(count: int) -> bytes:
    """Lines that compress badly, so that half of the compressed data is about half of them."""
    noise = [str(pow(7, index, 10**60 + 7)) for index in range(count)]
    return b"".join(json.dumps(conversation(i) | {"noise": each}).encode() + b"\n" for i, each in enumerate(noise))


def _cut_gzip() -> tuple[bytes, int]:
    """(compressed data without its second half, whole lines in what is left)"""
    data = gzip.compress(_varied(400), mtime=0)
    half = data[: len(data) // 2]
    return half, zlib.decompressobj(wbits=31).decompress(half).count(b"\n")


def broken_files() -> list[BrokenFile]:
    """One of each kind, none of which may stop a run or lose a good record."""
    one, two, three = (json.dumps(conversation(index)).encode() for index in range(3))
    cut, whole = _cut_gzip()
    damaged = bytearray(parquet(6, 2))
    damaged[-1] = 0
    return [
        BrokenFile("cut_array.json", array(4)[:-40], 3, 1, r"breaks off at byte \d+, in record 3 \(the text ends there\)"),
        BrokenFile("unclosed_array.json", b"[" + one + b"," + two, 2, 1, r"breaks off at byte \d+, in record 2"),
        BrokenFile("two_arrays.json", array(2) + array(1), 2, 1, "more text behind the end of the array"),
        BrokenFile("bad_record.json", b"[%b, {'id': 1}, %b]" % (one, three), 2, 1, r"record 1 of .* is not JSON"),
        BrokenFile(
            "open_quote.json",
            b'[%b, {"id": "x"", "messages": "no"}, %b]' % (one, three + b"," + three),
            1,
            1,
            r"breaks off at byte \d+, in record 1",
        ),
        BrokenFile(
            "cut_object.json", json.dumps(conversation(0), indent=1).encode()[:-9], 0, 1, r"in record 0 \(the text ends"
        ),
        BrokenFile("bad_line.jsonl", b"\n".join([one, b'{"messages": ', three]), 2, 1, r"record 1 of .* is not JSON"),
        BrokenFile("cut_line.jsonl", lines(3)[:-20], 2, 1, r"record 2 of .* is not JSON"),
        BrokenFile("latin.jsonl", b"\n".join([one, b'{"prompt": "caf\xe9"}', three]), 2, 1, r"byte 15 of it is not UTF-8"),
        BrokenFile("deep.jsonl", b"\n".join([one, b"[" * 100_000, three]), 2, 1, "nested too deep"),
        BrokenFile("digits.jsonl", b"\n".join([one, b'{"id": %b}' % (b"9" * 5000), three]), 2, 1, "integer string conversion"),
        BrokenFile("twice.jsonl", b"\n".join([one, b'{"id": 1, "id": 2}', three]), 2, 1, "key 'id' is there twice"),
        BrokenFile("surrogate.jsonl", b"\n".join([one, b'{"prompt": "\\ud83d"}', three]), 2, 1, "half a pair of surrogates"),
        BrokenFile("wide.jsonl", lines(2).decode().encode("utf-16"), 0, 1, "no JSON text in UTF-8"),
        BrokenFile("picture.json", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", 0, 1, "no JSON text in UTF-8"),
        BrokenFile("empty.jsonl", b"\n \n", 0, 1, "is empty"),
        BrokenFile(
            "cut.jsonl.gz", cut, whole, 1, r"breaks off at byte \d+ of its text, in record \d+ \(its gzip data ends too early\)"
        ),
        BrokenFile("damaged.jsonl.gz", gzip.compress(lines(3)) + b"more", 3, 1, "its gzip data is damaged"),
        BrokenFile("checksum.jsonl.gz", gzip.compress(lines(3))[:-8] + bytes(8), 3, 1, "its checksum tells of damage"),
        BrokenFile("cut.jsonl.zst", zstd(lines(3), lines(1))[:-12], 3, 1, "its zstd data ends too early"),
        BrokenFile("cut_array.json.gz", gzip.compress(array(3))[:-8], 3, 1, "its gzip data ends too early"),
        BrokenFile("footless.parquet", bytes(damaged), 0, 1, "breaks off behind 0 rows"),
    ]


def write_broken(folder: Path, choose: Callable[[BrokenFile], bool] = lambda _: True) -> dict[Path, BrokenFile]:
    """Write the files that ``choose`` takes into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {folder / broken.name: broken for broken in broken_files() if choose(broken)}
    for path, broken in written.items():
        path.write_bytes(broken.content)
    return written
