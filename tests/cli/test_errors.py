"""What the command line refuses: one sentence on standard error, an exit code, no traceback."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speculators.__main__ import main
from tests.evaluation.drafts import random_checkpoint
from tests.tiny import tiny_verifier


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny verifier, a draft for it, one for another verifier, and prompts."""
    folder = tmp_path_factory.mktemp("cli")
    verifier = tiny_verifier(folder)
    random_checkpoint(verifier, folder / "draft")
    random_checkpoint(verifier, folder / "fill-in", sample_from_anchor=False)
    other = tiny_verifier(folder, hidden=48, seed=1, name="other")
    random_checkpoint(other, folder / "draft-of-other")
    (folder / "prompts.jsonl").write_text('{"prompt": "hello there"}\n{"prompt": "what is 1+1?"}\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "a" * 600}) + "\n")
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and the one line of the error."""
    code = main([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert "Traceback" not in error
    line = error.strip().splitlines()[-1]
    assert line.startswith("error: ")
    return code, line


def test_a_checkpoint_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(capsys, "evaluate", folder / "absent", "--data", folder / "prompts.jsonl")
    assert code == 2
    assert "has no config.json" in line


def test_a_verifier_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(
        capsys, "evaluate", folder / "draft", "--verifier", folder / "absent", "--data", folder / "prompts.jsonl"
    )
    assert code == 1
    assert str(folder / "absent") in line


@pytest.mark.parametrize(
    ("name", "reason"),
    [("absent.jsonl", "there is no data file"), ("empty.jsonl", "is empty"), ("binary.jsonl", "no JSON text in UTF-8")],
)
def test_data_that_cannot_be_used(folder: Path, name: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(capsys, "evaluate", folder / "draft", "--data", folder / name)
    assert code == 1
    assert reason in line
    assert name in line


def test_a_prompt_longer_than_the_context(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(capsys, "evaluate", folder / "draft", "--data", folder / "long.jsonl")
    assert code == 1
    assert "prompt 0 of long" in line
    assert "context of 512" in line


@pytest.mark.parametrize(("draft", "n", "most"), [("draft", "9", "8"), ("fill-in", "8", "7")])
def test_more_tokens_than_a_block_has(folder: Path, draft: str, n: str, most: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(
        capsys, "evaluate", folder / draft, "--data", folder / "prompts.jsonl", "--num-speculative-tokens", "3", n
    )
    assert code == 2
    assert f"use at most {most}" in line


def test_a_verifier_of_another_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(
        capsys, "evaluate", folder / "draft-of-other", "--verifier", folder / "verifier", "--data", folder / "prompts.jsonl"
    )
    assert code == 1
    assert "hidden size 32" in line


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--num-speculative-tokens", "three"], "whole numbers of at least 1"),
        (["--top-p", "0"], "--top-p 0.0 is out of range"),
        (["--dtype", "int8"], "--dtype int8 is not one of"),
        (["--temperature", "inf"], "--temperature inf is out of range"),
        (["--temperature", "1e-300"], "give 0 for greedy decoding"),
        (["--device", "abacus"], "--device abacus is no device to compute on"),
        (["--device", "meta"], "--device meta is no device to compute on"),
    ],
)
def test_values_out_of_range(folder: Path, flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(capsys, "evaluate", folder / "draft", "--data", folder / "prompts.jsonl", *flags)
    assert code == 2
    assert reason in line


def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate"]) == 2
    assert main(["evaluate", "x", "--unknown"]) == 2
    assert main(["no-such-command"]) == 2
    assert main(["train"]) == 2
    assert main(["evaluate", "x", "--data", "x", "--seed", "-1"]) == 2
    assert main(["quickstart", "--minutes", "inf"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import speculators.cli.train

    def full(_: list[str]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/runs/model.safetensors")

    monkeypatch.setattr(speculators.cli.train, "main", full)
    code, line = refused(capsys, "train", "--verifier-name-or-path", "x")
    assert code == 1
    assert "the disk is full for /runs/model.safetensors" in line


def test_a_path_that_the_system_refuses_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import speculators.cli.train

    def denied(_: list[str]) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/runs/metrics.jsonl")

    monkeypatch.setattr(speculators.cli.train, "main", denied)
    assert refused(capsys, "train") == (1, "error: /runs/metrics.jsonl: Permission denied; check the path and its permissions")


@pytest.mark.parametrize("text", ["3", "[]", "{bad", "{}"])
def test_a_checkpoint_config_that_is_none(text: str, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    code, line = refused(capsys, "evaluate", tmp_path, "--data", folder / "prompts.jsonl")
    assert code == 2
    assert str(tmp_path) in line


@pytest.mark.parametrize("name", ["./absent", "", "a/b/c"])
def test_prepare_data_without_a_model(name: str, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(
        capsys, "prepare-data", "--model", name, "--data", folder / "prompts.jsonl", "--output", tmp_path / "out"
    )
    assert code == 1
    assert f"there is no verifier folder {name!r}" in line


def test_an_empty_array_of_records(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.json").write_text("[]")
    data = tmp_path / "none.json"
    code, line = refused(capsys, "prepare-data", "--model", folder / "verifier", "--data", data, "--output", tmp_path / "out")
    assert code == 1
    assert f"there are no records in {data}" in line


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import speculators.cli.train

    def broken(_: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(speculators.cli.train, "main", broken)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_version_and_help_are_fast_and_load_nothing_heavy() -> None:
    code = (
        "import sys; from speculators.__main__ import main; codes = [main(['--version']), main(['--help']), "
        "main(['evaluate', '--help']), main(['quickstart', '--help'])]; "
        "assert codes == [0] * 4, codes; assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "speculators version: 0." in done.stdout
    for command in ("quickstart", "prepare-data", "train", "evaluate"):
        assert command in done.stdout
    assert time.monotonic() - began < 10


def test_train_reads_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert "--verifier-name-or-path" in capsys.readouterr().out
