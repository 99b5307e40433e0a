"""Where data is looked for: files, folders in a fixed order, saved data sets, and hubs with and without a network."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet
import pytest

from speculators.data.conversations import parse_conversation
from speculators.data.hub_sets import HubSet
from speculators.data.readers import block_records, read_blocks
from speculators.data.sources import find_sources, source_hash
from speculators.errors import ConfigError, DataError
from tests.data.broken_files import array, conversations, lines, parquet, zstd


def names(*data: str | Path) -> list[str]:
    return [source.name for source in find_sources(data)]


def records(*data: str | Path) -> list[Any]:
    return [record for block in read_blocks(find_sources(data), block_bytes=300) for _, record in block_records(block)]


def test_a_folder_is_searched_in_a_fixed_order(tmp_path: Path) -> None:
    kept = ["a.jsonl", "b.JSON", "c/a.ndjson.gz", "c/d/e.parquet", "c.jsonl.zst", "z.jsonl"]
    for name in [*kept, ".hidden.jsonl", ".git/a.json", "notes.txt", "c/README.md", "dataset_dict.json", "model.json.bak"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes({".parquet": parquet(2, 2), ".zst": zstd(lines(2))}.get(Path(name).suffix, lines(2)))
    (tmp_path / "c" / "loop").symlink_to(tmp_path)
    expected = ["a.jsonl", "b.JSON", "c/a.ndjson.gz", "c/d/e.parquet", "c.jsonl.zst", "z.jsonl"]
    assert names(tmp_path) == [str(tmp_path / name) for name in expected]
    assert [source.kind for source in find_sources([tmp_path])].count("parquet") == 1
    assert records(tmp_path) == conversations(2) * 6
    # Files that are named come as they are named, whatever their name.
    assert names(tmp_path / "z.jsonl", str(tmp_path / "notes.txt")) == [str(tmp_path / "z.jsonl"), str(tmp_path / "notes.txt")]


def test_a_saved_data_set_is_one_source(tmp_path: Path) -> None:
    train, test = (datasets.Dataset.from_list(conversations(count)) for count in (4, 2))
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "saved")
    (tmp_path / "extra.jsonl").write_bytes(lines(1))
    found = find_sources([tmp_path])
    assert [(Path(source.name).name, source.kind) for source in found] == [
        ("extra.jsonl", "json"),
        ("test", "arrow"),
        ("train", "arrow"),
    ]
    assert records(tmp_path) == conversations(1) + conversations(2) + conversations(4)
    (tmp_path / "saved" / "test" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"saved data set .* cannot be read"):
        records(tmp_path / "saved")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no data file"):
        find_sources([tmp_path / "missing.jsonl"])
    with pytest.raises(DataError, match=r"holds no data file \(\.json, "):
        find_sources([tmp_path])
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="no ordinary file"):
        find_sources([tmp_path / "pipe.jsonl"])
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")
    Path(odd).touch()
    with pytest.raises(DataError, match=r"udcff\.jsonl' is not UTF-8; rename it"):
        find_sources([odd])


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    for name, content in (
        ("a.jsonl", lines(3)),
        ("b.jsonl", lines(3)),
        ("c.jsonl", lines(4)),
        ("d.gz", gzip.compress(lines(3))),
    ):
        (tmp_path / name).write_bytes(content)
    (same, copy, other, packed) = map(
        source_hash, find_sources([tmp_path / f"{n}" for n in ("a.jsonl", "b.jsonl", "c.jsonl", "d.gz")])
    )
    assert same == copy
    assert len({same, other, packed}) == 3
    datasets.Dataset.from_list(conversations(4)).save_to_disk(tmp_path / "saved", num_shards=2)
    (saved,) = find_sources([tmp_path / "saved"])
    before = source_hash(saved)
    (tmp_path / "saved" / "dataset_info.json").unlink()
    assert source_hash(saved) == before
    shard = next((tmp_path / "saved").glob("*.arrow"))
    shard.write_bytes(shard.read_bytes() + b"\0")
    assert source_hash(saved) != before


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf:org/set", ("org/set", None, None)),
        ("hf:org/set:test", ("org/set", None, "test")),
        ("hf:org/set:en:test", ("org/set", "en", "test")),
        ("hf:org/set::test", ("org/set", None, "test")),
        ("hf:/some/folder:train[:10]", None),
        ("hf:", None),
        ("hf:a:b:c:d", None),
    ],
)
def test_names_of_hub_sets(text: str, parts: tuple[str, str | None, str | None] | None) -> None:
    if parts is None:
        with pytest.raises(ConfigError, match=r"write hf:ID|a part of a split"):
            find_sources([text])
        return
    (source,) = find_sources([text])
    assert (source.kind, source.name, source.hub) == ("hub", text, HubSet(*parts))


@pytest.fixture
def local_set(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(lines(9))
    (folder / "test.jsonl").write_bytes(lines(2))
    return folder


def test_a_hub_set_that_is_on_the_disk(local_set: Path) -> None:
    assert records(f"hf:{local_set}") == conversations(9), "train, when no split is named"
    assert records(f"hf:{local_set}:test") == conversations(2)
    train, test = (source_hash(find_sources([f"hf:{local_set}:{split}"])[0]) for split in ("train", "test"))
    assert train != test
    os.utime(local_set / "train.jsonl", (0, 0))
    assert source_hash(find_sources([f"hf:{local_set}:train"])[0]) == train
    for wrong in ("validation", "subset:train"):
        with pytest.raises(DataError, match="cannot be read") as refusal:
            records(f"hf:{local_set}:{wrong}")
        assert "\n" not in str(refusal.value)


def test_splits_that_must_be_named(local_set: Path) -> None:
    (local_set / "train.jsonl").rename(local_set / "validation.jsonl")
    with pytest.raises(DataError, match="has the splits validation, test; name one"):
        records(f"hf:{local_set}")


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'org/set' on the Hub\n(LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    sources = find_sources(["hf:org/set:train"])
    for use in (lambda: list(read_blocks(sources)), lambda: source_hash(sources[0])):
        with pytest.raises(DataError, match="the data set hf:org/set:train cannot be reached") as refusal:
            use()
        assert "\n" not in str(refusal.value)


def test_one_file_of_a_hub_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, str | None]] = []
    (tmp_path / "blob").write_bytes(array(3))

    def download(repo: str, file: str, *, repo_type: str, revision: str | None) -> str:
        assert repo_type == "dataset"
        asked.append((repo, file, revision))
        if file == "missing.jsonl":
            raise huggingface_hub.errors.LocalEntryNotFoundError("cannot find it")
        return str(tmp_path / "blob")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    address = "hf://datasets/org/set@v1/data/a.json"
    assert records(address) == conversations(3)
    assert names(address) == [address]
    # A path that was made of the address has one slash less.
    assert names(Path("hf://datasets/org/set/a.json")) == ["hf://datasets/org/set/a.json"]
    assert asked[0] == ("org/set", "data/a.json", "v1")
    assert asked[-1] == ("org/set", "a.json", None)
    with pytest.raises(DataError, match=r"hf://datasets/org/set/missing.jsonl was not found"):
        find_sources(["hf://datasets/org/set/missing.jsonl"])
    for wrong in ("hf://datasets/org/set", "hf://org/set/a.json"):
        with pytest.raises(ConfigError, match="no file of a data set"):
            find_sources([wrong])


def test_columns_without_a_value_are_absent(tmp_path: Path) -> None:
    """Parquet and Arrow give every record all columns; a conversation must not see the empty ones."""
    user = {"role": "user", "content": "hi", "name": None, "thinking": None}
    columns = {"messages": [[user], None], "prompt": [None, "x"], "tools": [None, '[{"name": "f"}]'], "id": [None, "a"]}
    pa.parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    first, second = map(parse_conversation, records(tmp_path / "rows.parquet"))
    assert (first.messages, first.tools, first.conversation_id) == ([{"role": "user", "content": "hi"}], None, None)
    assert (second.messages[0]["content"], second.tools, second.conversation_id) == ("x", [{"name": "f"}], "a")
