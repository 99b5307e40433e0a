"""``speculators build-vocab``: the choice, reuse, the files, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from speculators.cli.app import run
from speculators.data import (
    DataManifest,
    RowBatch,
    RowDataset,
    SourceRecord,
    TokenCounts,
    build_mapping,
    count_tokens,
    load_counts,
    load_mapping,
    save_counts,
    save_mapping,
    save_token_frequencies,
    tokenizer_hash,
    write_rows,
)
from speculators.data.vocabulary_files import MappingOrigin
from tests.tiny import tiny_tokenizer, tiny_verifier

VOCAB = 64
HASH = tokenizer_hash(tiny_tokenizer())
#: Supervised ids of two sources: letters, the end of turn (2), a special token that is not one (1).
FIRST, SECOND = [20] * 9 + [21] * 5 + [22, 2], [30] * 4 + [20, 1, 2]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("verifier"), vocab=VOCAB, layers=1)


def rows(folder: Path, supervised: Sequence[Sequence[int]] = (FIRST, SECOND), made_by: str = HASH) -> RowDataset:
    """One row per source, after a prompt of ids 40 that is not supervised."""
    ids = np.array([token for own in supervised for token in (40, 40, 40, *own)])
    lengths = np.array([3 + len(own) for own in supervised])
    mask = ids != 40
    manifest = DataManifest(
        tokenizer_hash=made_by, verifier="v", sources=[SourceRecord(name=f"{name}.jsonl") for name in "abcd"[: len(supervised)]]
    )
    places = np.arange(len(supervised))
    origin = {"conversation": places, "source": places.astype(np.int32), "record": places, "turn": places.astype(np.int32)}
    return write_rows(folder, [RowBatch(ids, mask, lengths, **origin)], manifest)


def built(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code = run(["build-vocab", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return dict(json.loads(captured.out))


def kept(folder: Path, size: int) -> list[int]:
    return load_mapping(folder, size, VOCAB).draft_to_verifier.tolist()


def test_the_choice_by_size(tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rows(tmp_path / "data")
    report = built(capsys, "--data", tmp_path / "data", "--model", verifier, "--draft-vocab-size", 4, "--output", tmp_path)
    # The end of turn and the special token that occurs, then the two most frequent.
    assert kept(tmp_path, 4) == [1, 2, 20, 21]
    assert (report["covered"], report["tokens"], report["excluded_ids"]) == (18, 23, 2)
    assert report["mandatory"] == {"end_of_turn": [2], "special": [1], "kept": []}
    text = tiny_tokenizer().decode([30])
    assert report["excluded"][0] == {"id": 30, "count": 4, "text": text}
    assert report["sources"] == [data.fingerprint]
    assert report["tokenizer_hash"] == HASH
    assert report["coverage_by_source"] == [
        {"name": "a.jsonl", "covered": 15, "tokens": 16},
        {"name": "b.jsonl", "covered": 3, "tokens": 7},
    ]
    assert [(point["size"], point["covered"]) for point in report["curve"]] == [(4, 18), (VOCAB, 23)]
    assert np.load(report["files"]["d2t"]).tolist() == [1, 1, 18, 18]
    assert report["notes"] == []


def test_the_choice_by_coverage(tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(tmp_path)
    common = ("--data", tmp_path, "--model", verifier, "--output", tmp_path / "out", "--coverage")
    # With 1 and 2: 18 of 23 at four ids, 22 at five, 23 at six.
    assert built(capsys, *common, 0.78)["draft_vocab_size"] == 4
    assert built(capsys, *common, 0.79)["draft_vocab_size"] == 5
    assert built(capsys, *common, 1)["draft_vocab_size"] == 6
    assert built(capsys, *common, 0.79, "--multiple-of", 4)["draft_vocab_size"] == 8
    assert built(capsys, *common, 1, "--keep-ids", "50,51", 52)["draft_vocab_size"] == 9
    special = len(tiny_tokenizer().added_tokens_decoder)
    assert built(capsys, *common, 0.01, "--all-special")["draft_vocab_size"] == special


def test_several_folders_and_counts_are_merged(tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(tmp_path / "one", [FIRST])
    rows(tmp_path / "two", [SECOND])
    three = TokenCounts(count_tokens([], VOCAB), 0, HASH, ("third",))
    three.counts[33] = 100
    save_counts(tmp_path / "three.pt", three)
    report = built(
        capsys,
        *("--data", tmp_path / "one", tmp_path / "two", "--token-freq-path", tmp_path / "three.pt"),
        *("--target-model-path", verifier, "--draft-vocab-size", 5, "--output-path", tmp_path / "out"),
        *("--save-counts", tmp_path / "all.pt", "--workers", 2),
    )
    assert kept(tmp_path / "out", 5) == [1, 2, 20, 21, 33]
    assert len(report["sources"]) == 3
    assert [source["tokens"] for source in report["coverage_by_source"]] == [16, 7, 100]
    assert load_counts(tmp_path / "all.pt", tokenizer_hash=HASH).supervised_tokens == 123
    # Counting what was merged gives the same files.
    again = built(
        capsys,
        *("--token-freq-path", tmp_path / "all.pt", "--model", verifier),
        *("--draft-vocab-size", 5, "--output", tmp_path / "out"),
    )
    assert again["hash"] == report["hash"]
    assert again["source_hash"] == report["source_hash"]


def test_counts_beside_the_data_are_believed_only_if_they_are_of_these_rows(
    tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path)
    command = ("--data", tmp_path, "--model", verifier, "--draft-vocab-size", 3, "--output", tmp_path / "out")
    other = np.bincount([50] * 3, minlength=VOCAB)
    for write in (
        lambda: save_counts(tmp_path / "token_freq.pt", TokenCounts(other, 1, HASH, ("0123",))),
        lambda: save_token_frequencies(tmp_path / "token_freq.pt", other),
        lambda: (tmp_path / "token_freq.pt").write_bytes(b"torn"),
    ):
        write()
        assert built(capsys, *command)["tokens"] == 23
    save_counts(tmp_path / "token_freq.pt", TokenCounts(other, 1, HASH, (data.fingerprint,)))
    assert built(capsys, *command)["tokens"] == 3


def test_a_second_run_writes_nothing(tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(tmp_path / "data")
    command = ("--data", tmp_path / "data", "--model", verifier, "--draft-vocab-size", 4, "--output", tmp_path / "out")
    built(capsys, *command)
    before = {file.name: file.lstat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    built(capsys, *command)
    assert {file.name: file.lstat().st_mtime_ns for file in (tmp_path / "out").iterdir()} == before


def test_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_token_frequencies(tmp_path / "token_freq.pt", np.bincount([*FIRST, *SECOND]))
    common = ("--token-freq-path", tmp_path / "token_freq.pt", "--target-vocab-size", VOCAB, "--output", tmp_path)
    report = built(capsys, *common, "--draft-vocab-size", 2)
    assert kept(tmp_path, 2) == [20, 21]
    assert report["excluded"][0] == {"id": 30, "count": 4, "text": None}
    assert "does not say which tokenizer" in report["notes"][0]
    assert "name them with --keep-ids" in report["notes"][1]
    report = built(capsys, *common, "--draft-vocab-size", 2, "--keep-ids", 2)
    assert kept(tmp_path, 2) == [2, 20]
    assert len(report["notes"]) == 1


def test_for_a_person(tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(tmp_path)
    command = ["build-vocab", "--data", str(tmp_path), "--model", str(verifier), "--draft-vocab-size", "4"]
    assert run([*command, *out(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("4 of 64 ids cover 18 of 23 supervised tokens (78.2609%)", "<- chosen", "b.jsonl", "57.1429%"):
        assert words in printed
    assert "kept whatever their count: 1 end-of-turn ids, 1 other special tokens, 0 named ids" in printed
    assert repr(tiny_tokenizer().decode([30])) in printed
    key = load_mapping(tmp_path / "out", 4, VOCAB).hash[:8]
    assert f"d2t-4-{key}.npy" in printed


def out(folder: Path) -> list[str]:
    return ["--output", str(folder / "out")]


def draft(folder: Path, mapping: Any, verifier: object = "", **tables: torch.Tensor) -> Path:
    folder.mkdir()
    tensors = {"d2t": torch.from_numpy(mapping.d2t), "t2d": torch.from_numpy(mapping.t2d), "fc.weight": torch.ones(2, 2)}
    save_file({name: tensor for name, tensor in (tensors | tables).items() if tensor is not None}, folder / "model.safetensors")
    config = {"speculators_config": {"verifier": {"name_or_path": str(verifier)}}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


OLD = build_mapping(np.bincount([20, 50, 51], minlength=VOCAB), 4, VOCAB, mandatory_ids=[2])


@pytest.mark.parametrize("kind", ["checkpoint", "folder", "older names", "files"])
def test_a_reused_mapping_has_the_bytes_of_its_source(
    tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    rows(tmp_path / "data")
    old = tmp_path / "old"
    if kind == "checkpoint":
        draft(old, OLD, verifier)
        reuse: tuple[object, ...] = ("--from-checkpoint", old)
    else:
        save_mapping(old, OLD, MappingOrigin(tokenizer_hash=HASH))
        if kind == "older names":
            for table in ("d2t", "t2d"):
                (old / f"{table}-4.npy").rename(old / f"{table}.npy")
        reuse = ("--from-checkpoint", old)
        if kind == "files":
            reuse = ("--d2t-path", old / "d2t-4.npy", "--t2d-path", old / "t2d-4.npy")
    report = built(capsys, "--data", tmp_path / "data", "--model", verifier, *reuse, *out(tmp_path))
    for table, source in (("d2t", OLD.d2t), ("t2d", OLD.t2d)):
        written = np.load(report["files"][table])
        assert written.dtype == source.dtype
        assert written.tobytes() == source.tobytes()
    assert report["reused_from"] is not None
    # Kept were 2, 20, 50, 51: of the data's 23 tokens 12 can be said, 18 with the best four ids.
    assert (report["covered"], report["best_covered"], report["tokens"]) == (12, 18, 23)
    assert [token["id"] for token in report["excluded"]] == [21, 30, 1, 22]
    assert report["special_excluded"] == [{"id": 1, "count": 1, "text": "<|im_start|>"}]
    assert [source["covered"] for source in report["coverage_by_source"]] == [10, 2]
    assert report["notes"] == []
    command = ["build-vocab", "--data", str(tmp_path / "data"), "--model", str(verifier), *map(str, reuse)]
    assert run([*command, *out(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "6 tokens (26.0870%) less than the best of this size" in printed
    assert "special token lost: 1 '<|im_start|>', 1 times" in printed


def test_tables_of_other_types_are_converted_and_it_is_said(
    tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows(tmp_path / "data")
    old = draft(tmp_path / "old", OLD, verifier, d2t=torch.from_numpy(OLD.d2t).int())
    report = built(capsys, "--data", tmp_path / "data", "--model", verifier, "--from-checkpoint", old, *out(tmp_path))
    assert report["notes"] == ["d2t was int32 and is written as int64, with the same values"]
    assert np.load(report["files"]["d2t"]).tobytes() == OLD.d2t.tobytes()


@pytest.mark.parametrize("missing", ["d2t", "t2d"])
def test_one_table_gives_the_other(tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str], missing: str) -> None:
    rows(tmp_path / "data")
    old = draft(tmp_path / "old", OLD, verifier, **{missing: None})  # type: ignore[arg-type]
    report = built(capsys, "--data", tmp_path / "data", "--model", verifier, "--from-checkpoint", old, *out(tmp_path))
    assert report["hash"] == OLD.hash
    assert f"has no {missing}; it was made from the other table" in report["notes"][0]


def test_a_mapping_of_an_unknown_tokenizer_is_noted(tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(tmp_path / "data")
    old = draft(tmp_path / "old", OLD, tmp_path / "gone")
    report = built(capsys, "--data", tmp_path / "data", "--model", verifier, "--from-checkpoint", old, *out(tmp_path))
    assert "does not say which tokenizer it was made for" in report["notes"][0]


def test_a_mapping_of_another_verifier_is_refused(tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(tmp_path / "data")
    larger = build_mapping(np.ones(65, np.int64), 4, 65)
    other = tiny_verifier(tmp_path, vocab=VOCAB, layers=1, name="other")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(other)
    for number, (folder, words) in enumerate(
        [
            (draft(tmp_path / "larger", larger), "maps into 65 verifier ids, but this verifier has 64"),
            (draft(tmp_path / "foreign", OLD, other), "made for another tokenizer"),
            (draft(tmp_path / "whole", OLD, d2t=None, t2d=None), "has no vocabulary tables"),  # type: ignore[arg-type]
            (draft(tmp_path / "absolute", OLD, d2t=torch.from_numpy(OLD.draft_to_verifier)), "do not describe the same ids"),
            (draft(tmp_path / "cast", OLD, d2t=torch.ones(4, dtype=torch.bfloat16)), "numbers of type bfloat16 and shape [4]"),
            (draft(tmp_path / "scalar", OLD, d2t=torch.tensor(3)), "numbers of type int64 and shape []"),
            (draft(tmp_path / "table", OLD, d2t=None, t2d=torch.ones(1, VOCAB) > 0), "type bool and shape [1, 64]"),  # type: ignore[arg-type]
            (tmp_path / "data", "holds neither weights with d2t and t2d nor files"),
            (tmp_path / "nowhere", "no draft weights"),
        ]
    ):
        output = tmp_path / f"out{number}"
        arguments = ["--data", str(tmp_path / "data"), "--model", str(verifier), "--from-checkpoint", str(folder)]
        assert run(["build-vocab", *arguments, "--output", str(output)]) == 1
        assert words in capsys.readouterr().err
        assert not output.exists()
    assert "id 54 is '<extra>' there and None here" in _refusal(capsys, tmp_path, verifier, tmp_path / "foreign")
    # A record says so, too.
    save_mapping(tmp_path / "recorded", OLD, MappingOrigin(tokenizer_hash="0123"))
    assert "made for another tokenizer" in _refusal(capsys, tmp_path, verifier, tmp_path / "recorded")


def _refusal(capsys: pytest.CaptureFixture[str], folder: Path, verifier: Path, old: Path) -> str:
    arguments = ["--data", str(folder / "data"), "--model", str(verifier), "--from-checkpoint", str(old)]
    assert run(["build-vocab", *arguments, *out(folder)]) == 1
    return capsys.readouterr().err


#: Arguments, exit code, words. D stands for the data, M for the verifier.
WRONG: list[tuple[str, int, str]] = [
    ("--model M --draft-vocab-size 4", 2, "nothing to count"),
    ("--data D --draft-vocab-size 4", 2, "either --model or"),
    ("--data D --draft-vocab-size 4 --model M --target-vocab-size 64", 2, "either --model or"),
    ("--data D --model M", 2, "either --draft-vocab-size or --coverage"),
    ("--data D --model M --draft-vocab-size 4 --coverage 0.9", 2, "either --draft-vocab-size or --coverage"),
    ("--data D --model M --draft-vocab-size 65", 2, "does not fit a verifier of 64"),
    ("--data D --model M --draft-vocab-size 0", 2, "draft-vocab-size"),
    ("--data D --model M --draft-vocab-size 1", 2, "cannot hold 2 mandatory ids"),
    ("--data D --model M --draft-vocab-size 4 --multiple-of 4", 2, "add --coverage"),
    ("--data D --model M --coverage 1.5", 2, "choose a share above 0"),
    ("--data D --model M --coverage nan", 2, "choose a share above 0"),
    ("--data D --model M --draft-vocab-size 4 --keep-ids x", 2, "--keep-ids takes token ids such as 5,17, not 'x'"),
    ("--data D --model M --draft-vocab-size 4 --keep-ids 64", 1, r"mandatory ids [64] reach outside"),
    ("--data D --target-vocab-size 64 --draft-vocab-size 4 --all-special", 2, "--all-special needs the verifier's tokenizer"),
    ("--data D --model M --d2t-path x", 2, "are a pair"),
    ("--data D --model M --d2t-path x --t2d-path y", 1, "there is no vocabulary table x"),
    ("--data D --model M --from-checkpoint x --d2t-path x --t2d-path y", 2, "give one"),
    ("--data D --model M --from-checkpoint x --keep-ids 5", 2, "--keep-ids has no effect"),
    ("--data D --model M --from-checkpoint x --coverage 0.5", 2, "--coverage has no effect"),
    ("--data nowhere --model M --draft-vocab-size 4", 1, "holds no data set"),
    ("--data D D --model M --draft-vocab-size 4", 1, "would be counted twice"),
    ("--token-freq-path nowhere.pt --model M --draft-vocab-size 4", 1, "there is no token frequency file nowhere.pt"),
    ("--data D --model nowhere/ --draft-vocab-size 4", 1, "there is no verifier folder"),
    ("--data D --target-vocab-size 20 --draft-vocab-size 4", 1, "outside the vocabulary of 20"),
    ("--data FOREIGN --model M --draft-vocab-size 4", 1, "were made with the tokenizer of"),
    ("--data SILENT --model M --draft-vocab-size 4", 1, "no supervised token was counted"),
    ("--data D --model M --draft-vocab-size 4 --output FILE", 1, "cannot write"),
    ("--data D --model M --draft-vocab-size 4 --save-counts counts.json", 2, "end it in .pt"),
    ("--data D --target-vocab-size 100000000000000 --draft-vocab-size 4", 2, "target-vocab-size"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, verifier: Path) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    rows(folder / "data")
    rows(folder / "foreign", made_by="0123")
    rows(folder / "silent", [[40, 40]])
    (folder / "file").write_text("")
    names = {"D": "data", "FOREIGN": "foreign", "SILENT": "silent", "FILE": "file"}
    return {"M": str(verifier)} | {key: str(folder / name) for key, name in names.items()}


@pytest.mark.parametrize(("arguments", "code", "words"), WRONG, ids=[arguments for arguments, _, _ in WRONG])
def test_what_is_wrong_is_said_in_one_sentence(
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["build-vocab", *(places.get(part, part) for part in arguments.split())]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert not captured.out
    assert not list(tmp_path.iterdir())
