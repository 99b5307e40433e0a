"""What kills, disks and quotas do to a store: it stays usable, damage is named, and the bits come back the same."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from speculators.data.rows import Row
from speculators.errors import DataError, VerifierError
from speculators.verifiers.source import HiddenStates
from speculators.verifiers.store import DamagedShardError, StatesStore, StoreFullError, StoreSource, StoreWriter
from speculators.verifiers.store.index import StoreIndex
from tests.verifiers.store.stores import MadeUpSource, contents, cut, filled, rows, same
from tests.verifiers.store.test_store import cached


def _flip(path: Path) -> None:
    file = bytearray(path.read_bytes())
    file[-3] ^= 16
    path.write_bytes(file)


def _flip_ids(path: Path) -> None:
    file = bytearray(path.read_bytes())
    file[8 + int.from_bytes(file[:8], "little")] ^= 1  # the first byte after the header: a token id
    path.write_bytes(file)


def _swap(path: Path) -> None:
    path.write_bytes(path.with_name("00000-000000.safetensors").read_bytes())


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit flip": (_flip, "do not fit their checksum"),
    "bit flip in an id": (_flip_ids, "do not fit their checksum"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 7), "it is cut or lies"),
    "truncated in the header": (lambda path: os.truncate(path, 50), "header would be"),
    "empty": (lambda path: os.truncate(path, 0), "has 0 bytes"),
    "missing": (Path.unlink, "No such file"),
    "a pickle": (lambda path: path.write_bytes(b"\x80\x04."), "a pickle"),
    "another shard": (_swap, "a copy of 00000-000000"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "no ordinary file"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_shard_is_named_and_made_again(tmp_path: Path, how: str) -> None:
    dataset, store = rows(), tmp_path / "store"
    filled(store, dataset)
    before = contents(store)
    path = store / "shards" / "00000-000001.safetensors"
    harm, problem = DAMAGE[how]
    harm(path)
    held = [row.row_id for row in StoreIndex(store, StatesStore(store).record).shards[path.name].rows()]
    for on_missing in ("raise", "skip"):
        source = StoreSource(store, dataset, MadeUpSource, on_missing)  # type: ignore[arg-type]
        if on_missing == "raise":
            with pytest.raises(DataError, match=rf"{path.name} is damaged: .*{problem}"):
                source.fetch([cut(dataset, row_id) for row_id in range(24)])
        else:  # rows that cannot be read are left out, the others are what they were
            found = {one.row_id for one in source.fetch([cut(dataset, row_id) for row_id in range(24)])}
            assert set(range(24)) - found <= set(held)
            assert len(found) < 24
    with pytest.raises(DataError, match=rf"{path.name} is damaged: .* name a --store-source"):
        StoreSource(store, dataset).fetch([cut(dataset, row_id) for row_id in range(24)])
    if how == "a folder":
        path.rmdir()
    made = MadeUpSource()
    source, wanted = StoreSource(store, dataset, lambda: made), cached(dataset)
    with pytest.warns(UserWarning, match=rf"{path.name} is damaged: .*; its states are made again") as seen:
        found = [source.fetch([cut(dataset, row_id)])[0] for row_id in range(24)]
    assert all(same(one, wanted.fetch([cut(dataset, one.row_id)])[0]) for one in found)
    assert len(seen) == 1
    assert sorted(row_id for group in made.asked for row_id in group) == sorted(held)  # and no other rows
    source.close()
    assert contents(store) == before


def test_filling_again_mends_what_is_damaged(tmp_path: Path) -> None:
    dataset, store = rows(), tmp_path / "store"
    filled(store, dataset)
    before = contents(store)
    shards = sorted((store / "shards").iterdir())
    _flip(shards[0])
    shards[2].unlink()
    with pytest.warns(UserWarning, match="000002.safetensors is damaged"):
        assert filled(store, dataset).repaired == 1  # a header shows that a file is missing, not that a bit is wrong
    with pytest.warns(UserWarning, match="000000.safetensors is damaged"):
        assert filled(store, dataset, validate_outputs=True).repaired == 1
    assert contents(store) == before


def test_what_another_data_set_would_mend_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    filled(store, rows())
    _flip(store / "shards" / "00000-000001.safetensors")
    with pytest.warns(UserWarning, match="another data set"):
        source = StoreSource(store, rows(seed=6), MadeUpSource)
    with pytest.warns(UserWarning, match="made again"), pytest.raises(DataError, match="has other tokens than"):
        source.fetch([cut(rows(), row_id) for row_id in range(24)])


def test_a_source_that_fails_leaves_the_damage_to_the_next_run(tmp_path: Path) -> None:
    dataset, store = rows(), tmp_path / "store"
    filled(store, dataset)
    _flip(store / "shards" / "00000-000001.safetensors")
    source = StoreSource(store, dataset, lambda: MadeUpSource(failing=range(24)))
    with pytest.warns(UserWarning, match="made again"), pytest.raises(VerifierError, match="out of order"):
        source.fetch([cut(dataset, row_id) for row_id in range(24)])
    with pytest.raises(DataError, match="is damaged"):
        StoreSource(store, dataset, on_missing="raise").fetch([cut(dataset, row_id) for row_id in range(24)])


def test_rows_that_a_source_leaves_out_have_failed(tmp_path: Path) -> None:
    class Forgetful(MadeUpSource):
        def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
            return [states for states in super().fetch(rows) if states.row_id != 7]

    report = filled(tmp_path / "store", rows(), Forgetful())
    assert (report.written, report.failed) == (23, 1)
    with pytest.raises(DataError, match="gave no states of row 7; mend it"):
        filled(tmp_path / "other", rows(), Forgetful(), fail_on_error=True)


@pytest.mark.filterwarnings("ignore:a line of the index")
@pytest.mark.parametrize("harm", ["torn", "flipped", "gone", "garbage"])
def test_a_damaged_index_costs_nothing(tmp_path: Path, harm: str) -> None:
    dataset, store = rows(), tmp_path / "store"
    filled(store, dataset)
    index = store / "index" / "00000.jsonl"
    text, before = index.read_bytes(), contents(store)
    changed = {
        "torn": text[:-9],
        "flipped": text.replace(b'"passes":[[[', b'"passes":[[[9', 1),
        "gone": b"",
        "garbage": b"\xff\n" + text,
    }
    index.write_bytes(changed[harm])
    source, wanted = StoreSource(store, on_missing="raise"), cached(dataset)
    if harm in ("flipped", "garbage"):
        with pytest.warns(UserWarning, match=r"00000.jsonl is damaged and was passed over"):
            source = StoreSource(store, on_missing="raise")
    for row_id in range(24):
        assert same(source.fetch([cut(dataset, row_id)])[0], wanted.fetch([cut(dataset, row_id)])[0])
    source.close()
    report = filled(store, dataset)
    assert (report.written, report.present) == (0, 24)
    if harm in ("torn", "gone"):
        assert contents(store) == before


@contextmanager
def _files_of_at_most(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("most", [3000, 500])
def test_a_full_disk(tmp_path: Path, most: int) -> None:
    """No room for a shard, or not even for the record: one sentence, nothing torn, and the same command goes on."""
    dataset = rows()
    filled(tmp_path / "whole", dataset)
    with _files_of_at_most(most), pytest.raises(DataError, match=r"the disk is full while writing .*; free some space"):
        filled(tmp_path / "store", dataset)
    assert not list((tmp_path / "store").rglob("*.tmp*"))
    filled(tmp_path / "store", dataset)
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")


def test_a_full_disk_does_not_stop_a_training(tmp_path: Path) -> None:
    dataset, store = rows(), tmp_path / "store"
    filled(store, dataset, max_samples=12)
    source, wanted = StoreSource(store, dataset, MadeUpSource), cached(dataset)
    found = [source.fetch([cut(dataset, row_id)])[0] for row_id in range(12, 24)]
    with _files_of_at_most(300), pytest.warns(UserWarning, match="are not kept: the disk is full"):
        source.close()  # writes the shard
    assert all(same(one, wanted.fetch([cut(dataset, one.row_id)])[0]) for one in found)


def test_a_folder_that_cannot_be_written_does_not_stop_a_training(tmp_path: Path) -> None:
    dataset, store = rows(), tmp_path / "store"
    filled(store, dataset, max_samples=12)
    (store / ".made0000.lock").mkdir()  # cannot be opened, whoever runs this
    source = StoreSource(store, dataset, MadeUpSource)
    with pytest.warns(UserWarning, match="no longer kept: .* cannot be written .* another --hidden-states-path"):
        [found] = source.fetch([cut(dataset, 20)])
    assert same(found, cached(dataset).fetch([cut(dataset, 20)])[0])


def test_quota_stops(tmp_path: Path) -> None:
    dataset, store = rows(), tmp_path / "store"
    filled(tmp_path / "whole", dataset)
    with pytest.raises(StoreFullError, match="raise --max-gib, or train from what there is") as caught:
        filled(store, dataset, max_bytes=20 << 10)
    assert caught.value.exit_code == 1
    assert 0 < StatesStore(store).nbytes <= 20 << 10
    source = StoreSource(store, on_missing="skip")
    found = source.fetch([cut(dataset, row_id) for row_id in range(24)])
    assert 0 < len(found) < 24
    assert filled(store, dataset, max_bytes=1 << 30).present == len(found)
    whole = contents(tmp_path / "whole")
    assert {name: text for name, text in contents(store).items() if name != "hidden_states.json"} == {
        name: text for name, text in whole.items() if name != "hidden_states.json"
    }


def test_quota_evicts_the_oldest_that_nobody_reads(tmp_path: Path) -> None:
    dataset, store = rows(60), tmp_path / "store"
    filled(store, dataset, max_samples=14, max_bytes=50 << 10, on_full="evict")
    oldest = sorted(path.name for path in (store / "shards").iterdir())[0]
    reader = StoreSource(store, on_missing="skip")
    row = StatesStore(store).index.shards[oldest].passes[0][0].row_id
    [held] = reader.fetch([cut(dataset, row)])
    report = filled(store, dataset, max_bytes=50 << 10, on_full="evict")
    assert report.evicted > 0
    assert StatesStore(store).nbytes <= 50 << 10
    left = {path.name for path in (store / "shards").iterdir()}
    assert oldest in left  # in use
    assert "00000-000001.safetensors" not in left
    assert same(held, reader.fetch([cut(dataset, row)])[0])
    # Rows that were evicted are missing, not damaged, for a reader from before and for a new one.
    for source in (reader, StoreSource(store, on_missing="skip")):
        found = source.fetch([cut(dataset, row_id) for row_id in range(60)])
        assert len(found) == 60 - report.evicted
    made, wanted = MadeUpSource(), cached(dataset)
    source = StoreSource(store, dataset, lambda: made, keep=False)
    last = cut(dataset, 59)
    assert same(source.fetch([last])[0], wanted.fetch([last])[0])


def test_a_shard_larger_than_the_quota(tmp_path: Path) -> None:
    with pytest.raises(StoreFullError, match="is full"):
        filled(tmp_path / "store", rows(), max_bytes=100, on_full="evict")


@pytest.mark.parametrize("moment", ["before the rename", "before the line"])
def test_a_kill_between_two_steps(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import speculators.verifiers.store.writer as writing

    dataset, store = rows(), tmp_path / "store"
    filled(tmp_path / "whole", dataset)

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "before the line":
            patch.setattr(writing, "append_line", killed)
        else:
            patch.setattr(os, "replace", killed)
            (store / "shards").mkdir(parents=True)
            (store / "index").mkdir()
            patch.setattr("speculators.verifiers.store.store._write_record", lambda *_: None)
            (store / "hidden_states.json").write_bytes((tmp_path / "whole" / "hidden_states.json").read_bytes())
            (store / "next_tokens.json").write_bytes((tmp_path / "whole" / "next_tokens.json").read_bytes())
        with pytest.raises(Killed):
            filled(store, dataset)
    filled(store, dataset)
    assert contents(store) == contents(tmp_path / "whole")


def test_states_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    import torch

    dataset = rows(4)

    class Overflowing(MadeUpSource):
        def fetch(self, rows):  # type: ignore[no-untyped-def]
            answers = super().fetch(rows)
            for one in answers:
                one.final[0, 0] = {0: 7e4, 1: float("nan")}.get(one.row_id, 0.0)
            return answers

    with pytest.raises(DataError, match=r"row \d: a hidden state .*(not finite|70000 is out of the range of float16)"):
        filled(tmp_path / "store", dataset, Overflowing(), dtype="float16")

    class Short(MadeUpSource):
        def fetch(self, rows):  # type: ignore[no-untyped-def]
            answers = super().fetch(rows)
            for one in answers:
                one.features = one.features[:-1]
            return answers

    with pytest.raises(DataError, match="have shapes"):
        filled(tmp_path / "short", dataset, Short())

    class Other(MadeUpSource):
        def fetch(self, rows):  # type: ignore[no-untyped-def]
            answers = super().fetch(rows)
            answers[0].token_ids = torch.zeros_like(answers[0].token_ids)
            return answers

    with pytest.raises(DataError, match="states of other tokens than those of row"):
        filled(tmp_path / "other", dataset, Other())


def test_what_cannot_be_read_back_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import speculators.verifiers.store.writer as writing

    written = writing.write_shard

    def flipping(path: Path, *rest: object) -> None:
        written(path, *rest)  # type: ignore[arg-type]
        _flip(path)

    monkeypatch.setattr(writing, "write_shard", flipping)
    with pytest.raises(DamagedShardError, match="do not fit their checksum"):
        filled(tmp_path / "store", rows(), validate_outputs=True)


def test_names_from_an_index_do_not_lead_out(tmp_path: Path) -> None:
    from speculators.verifiers.store.records import line_of

    dataset, store = rows(4), tmp_path / "store"
    filled(store, dataset)
    index = store / "index" / "00000.jsonl"
    for name in ("../x.safetensors", "/x.safetensors", ".x.safetensors", "x.pt"):
        index.write_text(line_of({"shard": name, "passes": [[[3, 4, "ab", 5]]]}) + "\n")
        with pytest.warns(UserWarning, match="is damaged and was passed over"):
            assert name not in StatesStore(store).index.shards


def test_a_writer_name_frees_with_its_process(tmp_path: Path) -> None:
    filled(tmp_path / "store", rows(4))
    store = StatesStore(tmp_path / "store")
    for _ in range(2):
        with StoreWriter(store, "00000") as writer:
            assert writer.flush() is None
