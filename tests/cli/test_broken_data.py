"""prepare-data over files that are broken in the ways real ones are: a sentence, an exit code, and nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speculators.__main__ import main
from speculators.data import RowDataset
from tests.data.broken_files import BrokenFile, broken_files, lines
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 64}))
    return folder


def prepare(model: Path, output: Path, *arguments: object) -> int:
    return main(["prepare-data", "--model", str(model), "--output", str(output), *map(str, arguments)])


def test_there_are_ten_kinds_of_broken_files() -> None:
    assert len(broken_files()) >= 10


@pytest.mark.parametrize("broken", broken_files(), ids=lambda broken: broken.name)
def test_a_broken_file(broken: BrokenFile, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, good, bad = tmp_path / "output", tmp_path / "good.jsonl", tmp_path / broken.name
    good.write_bytes(lines(3))
    bad.write_bytes(broken.content)
    assert prepare(model, output, "--data", good) == 0
    before = RowDataset.load(output).fingerprint
    capsys.readouterr()

    code = prepare(model, output, "--data", bad, "--overwrite")
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    if broken.good:
        assert code == 0
        dataset = RowDataset.load(output)
        assert len(dataset) == broken.good
        assert dataset.manifest.counts["unreadable"] + dataset.manifest.counts["not_a_conversation"] == broken.bad
        listed = [json.loads(line) for line in (output / "rejected.jsonl").read_text().splitlines()]
        assert len(listed) == broken.bad
        assert f"{broken.good + broken.bad} records -> {broken.good} rows" in said.out
    else:
        assert code == 1
        sentence = said.err.strip().splitlines()[-1]
        assert sentence.startswith("error: ")
        assert len(sentence) < 500
        assert RowDataset.load(output).fingerprint == before
        assert "c0" not in (output / "rejected.jsonl").read_text()


def test_a_source_that_is_not_there_costs_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "good.jsonl"
    good.write_bytes(lines(3))
    assert prepare(model, tmp_path / "output", "--data", good) == 0
    before = RowDataset.load(tmp_path / "output").fingerprint
    work = tmp_path / "output" / ".prepare-0123456789abcdef"
    work.mkdir()
    for data, reason in ((tmp_path / "absent.jsonl", "there is no data file"), (work, "holds no data file")):
        capsys.readouterr()
        assert prepare(model, tmp_path / "output", "--data", good, "--data", data, "--overwrite") == 1
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("error: ")
        assert reason in line
    assert RowDataset.load(tmp_path / "output").fingerprint == before
    assert work.is_dir()  # what another run has begun
