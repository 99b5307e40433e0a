"""From sources to blocks of raw records, in constant memory; and from blocks to records, which is another process's work."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from speculators.data.byte_streams import ByteStream
from speculators.data.hub_sets import stream_tables
from speculators.data.json_array import ArraySplitter, LineSplitter, ObjectSplitter, Splitter, first_value
from speculators.data.sources import Source, saved_files, source_files
from speculators.errors import DataError, SpeculatorsError, last_line

__all__ = ["ArrowRecords", "Block", "block_records", "parse_json", "read_blocks"]

#: Text looked at to tell an array from objects and from lines.
HEAD = 1 << 16

#: Rows read at once from columns.
ROWS = 512

BOM = b"\xef\xbb\xbf"
#: Endings of files of lines.
LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})

WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class ArrowRecords:
    """Rows in columns, as an Arrow stream: several times cheaper to hand to another process than dictionaries."""

    stream: bytes
    count: int

    @classmethod
    def of(cls, table: pa.Table) -> ArrowRecords:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return cls(sink.getvalue().to_pybytes(), table.num_rows)

    def __len__(self) -> int:
        return self.count

    def table(self) -> pa.Table:
        with pa.ipc.open_stream(self.stream) as reader:
            return reader.read_all()


@dataclass(frozen=True, slots=True)
class Block:
    """Records of one source that follow one another; cheap to hand to another process."""

    source: int  #: place in the list of sources
    first: int  #: index in its source of the first record
    records: list[bytes] | ArrowRecords  #: JSON texts, or rows
    broken: str | None = None  #: a sentence: where and why the source breaks off behind these records; one more record
    name: str = ""  #: of the source
    consumed: int = 0  #: bytes of the source's file that were read up to here, for progress; 0 where that is not known

    def __len__(self) -> int:
        """How many records there are to account for."""
        return len(self.records) + (self.broken is not None)


def read_blocks(sources: Sequence[Source], *, block_bytes: int = 1 << 20) -> Iterator[Block]:
    """All records of all sources, source by source and in order, about ``block_bytes`` of text or columns in a block.

    Blocks are a function of the sources' content and ``block_bytes`` alone. Records are only cut out, not parsed. Memory
    does not grow with a source; a record larger than a block comes whole. A source that breaks off gives the records
    before the break and then a block with :attr:`Block.broken`.

    :raises DataError: a source is gone, or a hub cannot be reached.
    """
    readers = {"json": _json_blocks, "parquet": _parquet_blocks, "arrow": _arrow_blocks, "hub": _hub_blocks}
    for number, source in enumerate(sources):
        yield from readers[source.kind](number, source, block_bytes)


def block_records(block: Block) -> Iterator[tuple[int, Any]]:
    """(index in the source, record) of a block, with a :class:`DataError` in place of a record that is no JSON."""
    if isinstance(block.records, ArrowRecords):
        yield from enumerate(_rows(block.records.table(), block), block.first)
    else:
        for index, text in enumerate(block.records, block.first):
            yield index, parse_json(text, f"record {index} of {block.name}")
    if block.broken is not None:
        yield block.first + len(block.records), DataError(block.broken)


def _rows(table: pa.Table, block: Block) -> list[Any]:
    try:
        return list(table.to_pylist())
    except ValueError as error:  # one value that Python cannot hold, such as bytes that are no UTF-8: find its row
        if table.num_rows > 1:
            half = table.num_rows // 2
            return _rows(table.slice(0, half), block) + _rows(table.slice(half), block)
        return [DataError(f"a record of {block.name} cannot be read ({last_line(error)}); repair or remove it")]


def parse_json(text: bytes, where: str) -> Any:
    """What a JSON text holds, or the :class:`DataError` that says why it is none.

    NaN and infinities are taken, as Python writes them; a key that is there twice with different values is not, because
    which of them is meant nobody knows.
    """
    try:
        record = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        # Escapes can spell half a pair of surrogates, which is no text and would fail much later, in a tokenizer.
        if b"\\ud" in text or b"\\uD" in text:
            json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        reason = "half a pair of surrogates is escaped in it"
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} of it is not UTF-8"
    except json.JSONDecodeError as error:
        reason = error.msg
    except RecursionError:
        reason = "it is nested too deep"
    except ValueError as error:  # a number of too many digits, or a key twice
        reason = str(error).split(";")[0]
    else:
        return record
    return DataError(f"{where} is not JSON ({reason}); repair or remove it")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        for key, value in pairs:
            if result[key] != value:
                raise ValueError(f"the key {key!r} is there twice with different values")
    return result


def _json_blocks(number: int, source: Source, block_bytes: int) -> Iterator[Block]:
    path = _present(source)
    first = 0
    with ByteStream(path, block_bytes) as stream:
        head = stream.head(HEAD)
        text = head.removeprefix(BOM).lstrip()
        skip = len(head) - len(text)
        if head.startswith(WIDE_BOMS) or b"\0" in head:
            yield Block(number, 0, [], f"{source.name} is no JSON text in UTF-8; convert it", source.name)
            return
        splitter = _splitter(text, skip, path)
        for chunk in stream:
            records = splitter.feed(chunk[skip:])
            skip = max(0, skip - len(chunk))
            if records:
                yield Block(number, first, records, None, source.name, stream.consumed)
                first += len(records)
            if splitter.fault is not None:
                break
        last = splitter.finish(torn=stream.fault is not None)
        if last:
            yield Block(number, first, last, None, source.name, stream.consumed)
            first += len(last)
        fault = splitter.fault
        if stream.fault is not None:
            fault = f"breaks off at byte {stream.position} of its text, in record {first} ({stream.fault})"
    if fault is not None:
        yield _broken(number, source, first, fault)
    elif not first and not isinstance(splitter, ArraySplitter):
        yield Block(number, 0, [], f"{source.name} is empty; give one JSON object a line", source.name)


def _broken(number: int, source: Source, first: int, fault: str) -> Block:
    advice = "repair it" + (f", or go on with the {first} records before" if first else "")
    return Block(number, first, [], f"{source.name} {fault}; {advice}", source.name)


def _present(source: Source) -> Path:
    """:raises DataError: the source's file or folder is not there, or cannot be opened."""
    assert source.path is not None
    try:
        for file in source_files(source):
            file.open("rb").close()
    except FileNotFoundError:
        raise DataError(f"there is no data file {source.path}; check the path") from None
    except OSError as error:
        raise DataError(f"the data file {source.path} cannot be read ({error.strerror}); check its permissions") from error
    return source.path


def _splitter(head: bytes, offset: int, path: Path) -> Splitter:
    """How the text that begins with ``head`` is laid out; its name decides only where the beginning leaves it open.

    :param offset: place of the head in the whole text.
    """
    if head.startswith(b"["):
        return ArraySplitter(offset)
    line, newline, _ = head.partition(b"\n")
    if not newline or not head.startswith(b"{"):
        return LineSplitter()
    place, fault, ended = first_value(line)
    if ended and fault is None and not line[place:].strip():
        return LineSplitter()
    # The first line is no object: either an object goes on over the next lines, or this one is broken.
    _, fault, ended = first_value(head)
    named_lines = any(suffix in LINE_SUFFIXES for suffix in path.suffixes)
    return LineSplitter() if fault or (named_lines and not ended) else ObjectSplitter(offset)


def _table_blocks(number: int, source: Source, tables: Iterable[pa.Table], block_bytes: int) -> Iterator[Block]:
    first = 0
    try:
        for table in tables:
            rows = max(1, block_bytes * table.num_rows // max(table.nbytes, 1))
            for start in range(0, table.num_rows, rows):
                piece = ArrowRecords.of(table.slice(start, rows))
                yield Block(number, first, piece, None, source.name)
                first += len(piece)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, SpeculatorsError):
            raise
        yield _broken(number, source, first, f"breaks off behind {first} rows ({last_line(error)})")


def _parquet_blocks(number: int, source: Source, block_bytes: int) -> Iterator[Block]:
    path = _present(source)

    def tables() -> Iterator[pa.Table]:
        # Buffered instead of whole column chunks: a row group can be as large as the file.
        with pa.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            for batch in file.iter_batches(batch_size=ROWS):
                yield pa.Table.from_batches([batch])

    return _table_blocks(number, source, tables(), block_bytes)


def _arrow_blocks(number: int, source: Source, block_bytes: int) -> Iterator[Block]:
    folder = _present(source)

    def tables() -> Iterator[pa.Table]:
        for path in saved_files(folder):
            with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
                for batch in reader:
                    yield pa.Table.from_batches([batch])

    return _table_blocks(number, source, tables(), block_bytes)


def _hub_blocks(number: int, source: Source, block_bytes: int) -> Iterator[Block]:
    assert source.hub is not None
    return _table_blocks(number, source, stream_tables(source.hub, ROWS), block_bytes)
