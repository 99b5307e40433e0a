"""The data set on disk: round trip, upstream's form, replacing, and everything that can be wrong with it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pytest

from speculators.data import AnswerRecord, DataManifest, Origin, Row, RowBatch, RowDataset, SourceRecord, row_files, write_rows
from speculators.data.row_batches import regrouped
from speculators.errors import DataError
from tests.tiny import random_rows


def batch_of(rows: list[Row], first: int = 0) -> RowBatch:
    """Rows that say where they come from: two of a conversation each, of records counted down."""
    numbers = np.arange(first, first + len(rows))
    return replace(
        RowBatch.of(rows, conversations=numbers // 2),
        source=(numbers % 3).astype(np.int32),
        record=100 - numbers // 2,
        turn=(numbers % 2).astype(np.int32) * 2 + 1,
    )


def same(left: RowDataset, right: list[Row]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(a.input_ids, b.input_ids) and np.array_equal(a.loss_mask, b.loss_mask)
        for a, b in zip(left, right, strict=True)
    )


def test_round_trip(tmp_path: Path) -> None:
    rows = random_rows(7)
    manifest = DataManifest(
        verifier="tiny",
        answers=AnswerRecord(on_policy=True, temperature=0.5),
        sources=[SourceRecord(name="a", hash="0f", records=9, broken="line 9 breaks off")],
        options={"seq_length": 64},
        seed=3,
        counts={"kept": 7},
    )
    saved = RowDataset.save(tmp_path / "rows", rows, manifest)
    loaded = RowDataset.load(tmp_path / "rows")
    assert same(saved, rows)
    assert same(loaded, rows)
    assert loaded.manifest == saved.manifest
    assert loaded.manifest.answers == manifest.answers
    assert loaded.fingerprint == saved.fingerprint != ""
    assert loaded.lengths.tolist() == [len(row) for row in rows]
    assert loaded.row(3).row_id == 3
    assert loaded.row(0).loss_mask.dtype == bool
    assert loaded.supervised_tokens == sum(int(row.loss_mask.sum()) for row in rows)
    assert [row.row_id for row in loaded[2:4]] == [2, 3]
    assert json.loads((tmp_path / "rows" / "manifest.json").read_text())["schema"] == 2
    for ask in (loaded.row, loaded.origin):
        with pytest.raises(IndexError):
            ask(7)
    assert loaded.conversations is None
    assert loaded.origin(6) == Origin(None, None, None, None)


def test_upstream_reads_it_and_it_reads_upstreams(tmp_path: Path) -> None:
    rows = random_rows(3)
    RowDataset.save(tmp_path / "ours", rows, DataManifest())
    theirs = datasets.load_from_disk(str(tmp_path / "ours"))
    assert set(theirs.column_names) == {"input_ids", "loss_mask", "seq_len"}
    assert theirs[1]["input_ids"].tolist() == rows[1].input_ids.tolist()  # torch format
    assert int(theirs[1]["seq_len"]) == len(rows[1])
    # As upstream writes it: no manifest, here with shuffled indices over several chunks.
    records = [
        {"input_ids": r.input_ids.tolist(), "loss_mask": r.loss_mask.astype(int).tolist(), "seq_len": len(r)} for r in rows
    ]
    parts = [datasets.Dataset.from_list([record]) for record in records]
    datasets.concatenate_datasets(parts).select([2, 0, 1]).save_to_disk(str(tmp_path / "theirs"))
    loaded = RowDataset.load(tmp_path / "theirs")
    assert same(loaded, [rows[2], rows[0], rows[1]])
    assert loaded.manifest.answers is None


def test_replacing_leaves_other_files_alone(tmp_path: Path) -> None:
    folder = tmp_path / "output"
    (folder / "hidden_states").mkdir(parents=True)
    (folder / "hidden_states" / "hs_0.safetensors").write_text("x")
    RowDataset.save(folder, random_rows(4), DataManifest())
    with pytest.raises(DataError, match="already holds a data set"):
        RowDataset.save(folder, random_rows(5), DataManifest())
    assert len(RowDataset.load(folder)) == 4
    RowDataset.save(folder, random_rows(5, seed=1), DataManifest(), overwrite=True)
    assert len(RowDataset.load(folder)) == 5
    assert len(list(folder.glob("*.arrow"))) == 1
    assert (folder / "hidden_states" / "hs_0.safetensors").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_a_full_disk_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "output"
    RowDataset.save(folder, random_rows(4), DataManifest())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="disk is full"):
        RowDataset.save(folder, random_rows(5), DataManifest(), overwrite=True)
    assert len(RowDataset.load(folder)) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows to write"):
        RowDataset.save(tmp_path / "rows", [], DataManifest())


def test_unreadable_data_sets(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no data set"):
        RowDataset.load(tmp_path / "nowhere")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "text"))
    with pytest.raises(DataError, match="lacks the columns"):
        RowDataset.load(tmp_path / "text")
    for name, mask, message in [("ragged", [[1]], "mask values"), ("weights", [[0, 2]], "other than 0 and 1")]:
        datasets.Dataset.from_dict({"input_ids": [[1, 2]], "loss_mask": mask}).save_to_disk(str(tmp_path / name))
        with pytest.raises(DataError, match=message):
            RowDataset.load(tmp_path / name)
    datasets.Dataset.from_dict({"input_ids": [1], "loss_mask": [1]}).save_to_disk(str(tmp_path / "scalars"))
    with pytest.raises(DataError, match="not a list"):
        RowDataset.load(tmp_path / "scalars")


def test_torn_data_sets(tmp_path: Path) -> None:
    RowDataset.save(tmp_path / "a", random_rows(4), DataManifest())
    RowDataset.save(tmp_path / "b", random_rows(4, seed=1), DataManifest())
    (tmp_path / "a" / "manifest.json").write_bytes((tmp_path / "b" / "manifest.json").read_bytes())
    with pytest.raises(DataError, match="do not belong together"):
        RowDataset.load(tmp_path / "a")
    (tmp_path / "b" / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"^.*manifest\.json cannot be read \(Invalid JSON.*\); make the data set again.*$"):
        RowDataset.load(tmp_path / "b")
    arrow = next((tmp_path / "b").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        RowDataset.load(tmp_path / "b")


def test_ids_outside_the_vocabulary() -> None:
    dataset = RowDataset.from_rows(random_rows(3, vocab=64))
    dataset.check_vocabulary(64)
    with pytest.raises(DataError, match=r"row \d has token id"):
        dataset.check_vocabulary(8)


def test_a_row_needs_a_mask_value_per_token() -> None:
    with pytest.raises(DataError, match="one mask value"):
        Row(0, np.arange(3), np.ones(2, bool))


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(40)
    monkeypatch.setattr(row_files, "SHARD_BYTES", 4000)
    monkeypatch.setattr("speculators.data.rows.regrouped", partial(regrouped, tokens=100))
    cuts = [0, 3, 3, 20, 40]
    batches = (batch_of(rows[a:b], a) for a, b in pairwise(cuts))
    asked: list[bool] = []

    def manifest() -> DataManifest:
        asked.append(next(batches, None) is None)
        return DataManifest(verifier="tiny")

    written = write_rows(tmp_path / "rows", batches, manifest)
    assert asked == [True]  # when all rows had come
    assert same(written, rows)
    assert written.manifest.verifier == "tiny"
    assert written.fingerprint == RowDataset.from_rows(rows).fingerprint
    assert written.conversations is not None
    assert written.conversations.tolist() == [number // 2 for number in range(40)]
    assert written.origin(33) == Origin(conversation=16, source=0, record=84, turn=3)
    files = sorted((tmp_path / "rows").glob("*.arrow"))
    assert len(files) > 3
    assert all(file.stat().st_size < 8000 for file in files)
    # How they came is not seen in the files.
    write_rows(tmp_path / "once", [batch_of(rows)], DataManifest(verifier="tiny"))
    assert [file.read_bytes() for file in sorted((tmp_path / "once").glob("*.arrow"))] == [file.read_bytes() for file in files]
    # Ranges come out whole, wherever parts end.
    parts = list(written.batches(7, 29))
    assert np.array_equal(np.concatenate([part.input_ids for part in parts]), np.concatenate([r.input_ids for r in rows[7:29]]))
    assert [number for part in parts for number in part.record] == [100 - number // 2 for number in range(7, 29)]


def test_the_fingerprint_is_that_of_earlier_versions(tmp_path: Path) -> None:
    rows = random_rows(5)
    ids, mask = (np.concatenate([getattr(row, name) for row in rows]) for name in ("input_ids", "loss_mask"))
    offsets = np.cumsum([0, *map(len, rows)])
    content = ids.astype("<i8").tobytes() + mask.astype("u1").tobytes() + offsets.astype("<i8").tobytes()
    assert RowDataset.save(tmp_path / "a", rows, DataManifest()).fingerprint == hashlib.sha256(content).hexdigest()[:16]


def test_data_sets_of_earlier_versions(tmp_path: Path) -> None:
    rows = random_rows(3)
    records = [{"input_ids": row.input_ids, "loss_mask": row.loss_mask.astype(int), "seq_len": len(row)} for row in rows]
    datasets.Dataset.from_list(records).with_format("torch").save_to_disk(str(tmp_path / "old"))
    fingerprint = RowDataset.from_rows(rows).fingerprint
    facts = {
        "schema": 1,
        "verifier": "v",
        "tokenizer_hash": "0a",
        "sources": ["a.jsonl", "b.jsonl"],
        "fingerprint": fingerprint,
    }
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(facts))
    loaded = RowDataset.load(tmp_path / "old")
    assert same(loaded, rows)
    assert loaded.manifest.schema_version == 1
    assert (loaded.manifest.tokenizer_hash, loaded.manifest.combined_hash) == ("", "0a")
    assert loaded.manifest.sources == [SourceRecord(name="a.jsonl"), SourceRecord(name="b.jsonl")]
    assert loaded.conversations is None
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(facts | {"schema": 3}))
    with pytest.raises(DataError, match="newer than the 2 of this version"):
        RowDataset.load(tmp_path / "old")


def test_other_types_and_columns(tmp_path: Path) -> None:
    table = {"input_ids": [[5, 6], [7]], "loss_mask": [[False, True], [True]], "conversation": ["a", "b"], "turn": [1, 2]}
    kinds = {
        "input_ids": datasets.LargeList(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "conversation": datasets.Value("string"),
        "turn": datasets.Value("int16"),
    }
    datasets.Dataset.from_dict(table, features=datasets.Features(kinds)).save_to_disk(str(tmp_path / "other"))
    loaded = RowDataset.load(tmp_path / "other")
    assert loaded.row(0).input_ids.tolist() == [5, 6]
    assert loaded.row(0).input_ids.dtype == np.int64
    assert loaded.row(0).loss_mask.tolist() == [False, True]
    assert loaded.origin(1) == Origin(None, None, None, 2)
    assert loaded.supervised_tokens == 2
    for name, ids in (("floats", [[1.0]]), ("nulls", [[1, None]]), ("text", [["a"]])):
        datasets.Dataset.from_dict({"input_ids": ids, "loss_mask": [[1] * len(ids[0])]}).save_to_disk(str(tmp_path / name))
        with pytest.raises(DataError, match=r"whole numbers|not a list of numbers"):
            RowDataset.load(tmp_path / name)


def test_batches_that_do_not_fit(tmp_path: Path) -> None:
    rows = random_rows(4)
    with pytest.raises(DataError, match="one mask value"):
        RowBatch(np.arange(3), np.ones(2, bool), np.array([3]))
    with pytest.raises(DataError, match="one value a row"):
        RowBatch.of(rows, conversations=[1])
    with pytest.raises(DataError, match="all of them or none"):
        write_rows(tmp_path / "rows", [RowBatch.of(rows), batch_of(rows)], DataManifest())

    def unreadable() -> Iterator[RowBatch]:
        yield batch_of(rows)
        yield RowBatch.of(json.loads((tmp_path / "missing").read_text()))

    with pytest.raises(FileNotFoundError):  # what goes wrong in reading is not said to be the folder's fault
        write_rows(tmp_path / "rows", unreadable(), DataManifest())
    assert not list(tmp_path.iterdir())


class Killed(BaseException):
    """Stands for the end of the process."""


def test_a_kill_while_installing_leaves_one_of_the_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rename = tmp_path / "rows", os.replace
    old, new = random_rows(4), random_rows(5, seed=1)
    left: list[int] = []
    for moment in range(20):
        # The old set lacks the columns that the new one has, as one of an earlier version does.
        RowDataset.save(folder, old, DataManifest(verifier="old"), overwrite=True)
        done = 0

        def killed(*names: Path, moment: int = moment) -> None:
            nonlocal done
            if done == moment:
                raise Killed
            done += 1
            rename(*names)

        monkeypatch.setattr(os, "replace", killed)
        try:
            write_rows(folder, [batch_of(new)], DataManifest(verifier="new"), overwrite=True)
        except Killed:
            loaded = RowDataset.load(folder)
            left.append(len(loaded))
            assert same(loaded, new if loaded.manifest.verifier == "new" else old)
        else:
            break
        finally:
            monkeypatch.setattr(os, "replace", rename)
    assert set(left) == {4, 5}
    assert left == sorted(left)
    assert same(RowDataset.load(folder), new)
    assert len(list(folder.iterdir())) == 4


def test_a_data_set_goes_to_another_process_by_its_path(tmp_path: Path) -> None:
    rows = random_rows(50)
    dataset = RowDataset.save(tmp_path / "rows", rows, DataManifest())
    sent = pickle.dumps(dataset)
    assert len(sent) < 1000
    assert same(pickle.loads(sent), rows)
    assert same(pickle.loads(pickle.dumps(RowDataset.from_rows(rows))), rows)
    RowDataset.save(tmp_path / "rows", rows[1:], DataManifest(), overwrite=True)
    with pytest.raises(DataError, match="replaced while it was in use"):
        pickle.loads(sent)
    assert same(dataset, rows)  # what is mapped stays


MEMORY = """
import sys
from pathlib import Path
import numpy as np
from speculators.data import DataManifest, RowBatch, RowDataset, write_rows

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) // 1024

most = [0]

def noted(things):
    for thing in things:
        most[0] = max(most[0], anonymous())
        yield thing

def batches(count):
    rng = np.random.default_rng(0)
    for number in range(count):
        ids = rng.integers(0, 50_000, 64_000)
        yield RowBatch(ids, ids % 2 == 0, np.full(320, 200), np.full(320, number))

def use(folder, count):
    write_rows(folder, noted(batches(count)), DataManifest())
    dataset = RowDataset.load(folder)
    dataset.check_vocabulary(50_000)
    assert dataset.supervised_tokens > 0
    for row_id in noted(range(0, len(dataset), 97)):
        assert len(dataset[row_id]) == 200

folder = Path(sys.argv[1])
use(folder / "small", 16)
small = most[0]
use(folder / "large", 128)
print(small, most[0], "torch" in sys.modules, "datasets" in sys.modules)
"""


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """8 million tokens, 128 MB on disk and 72 MB as arrays, against 1 million."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    small, large, *heavy = done.stdout.split()
    assert int(large) - int(small) < 12, done.stdout
    assert heavy == ["False", "False"]  # a process that writes rows need not load them
