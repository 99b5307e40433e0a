"""``speculators doctor`` on what is no checkpoint, on wrong verifiers, and what it prints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speculators import SpeculatorModel
from speculators.__main__ import main
from speculators.errors import ConfigError
from tests.checks.broken import put
from tests.checks.drafts import change_config, change_tensors, good_checkpoint
from tests.tiny import tiny_verifier

QUICK = ["--limit", "5", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    good_checkpoint(tiny_verifier(folder, layers=8), folder / "draft")
    tiny_verifier(folder, layers=8, hidden=48, name="wide")
    (folder / "prompts.jsonl").write_text('{"prompt": "hello"}\n' * 5)
    return folder


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.strip().splitlines()[-1]


def test_unreadable_paths_exit_with_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder / "absent")]) == 2
    assert "cannot read the checkpoint folder" in error_of(capsys)
    assert main(["doctor", str(folder / "draft" / "config.json")]) == 2
    assert "is a file; give the folder" in error_of(capsys)


def test_a_verifier_or_data_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft, verifier = str(folder / "draft"), str(folder / "verifier")
    assert main(["doctor", draft, "--verifier", str(folder / "absent")]) == 1
    assert str(folder / "absent") in error_of(capsys)
    assert main(["doctor", draft, "--verifier", verifier, "--data", str(folder / "absent.jsonl")]) == 1
    assert "there is no data file" in error_of(capsys)


def test_an_empty_folder_is_no_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {finding["id"] for finding in report["findings"]} == {"config-missing", "weights-missing"}
    assert (report["family"], report["verifier"], report["readings"]) == (None, None, None)
    assert report["counts"] == {"error": 2, "warning": 0, "note": 0}


@pytest.mark.parametrize("case", ["another verifier", "a layer that is not there", "uneven heads", "an unknown type"])
def test_a_draft_with_errors_is_examined_but_not_tried(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, verifier = tmp_path / "draft", folder / ("wide" if case == "another verifier" else "verifier")
    shutil.copytree(folder / "draft", draft)
    changes = {
        "a layer that is not there": put("aux_hidden_state_layer_ids", value=[2, 4, 12]),
        "uneven heads": put("transformer_layer_config", "num_key_value_heads", value=3),
        "an unknown type": put("speculators_model_type", value="dspark9"),
    }
    if case in changes:
        changes[case](draft)
    arguments = ["doctor", str(draft), "--verifier", str(verifier), "--data", str(folder / "prompts.jsonl"), *QUICK]
    assert main([*arguments, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "readings-not-tried" in {finding["id"] for finding in report["findings"]}
    assert report["readings"]["skipped"]


def test_the_table_names_finding_and_fix(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(folder / "draft", draft)
    put("tie_word_embeddings", value=True)(draft)
    assert main(["doctor", str(draft)]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "tied-embeddings" in shown
    assert "Setittofalse" in shown
    assert "0errors,1warning,2notes" in shown


def header(shape: object) -> bytes:
    """A safetensors file of four bytes whose header promises a tensor of some shape."""
    text = json.dumps({"fc.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4)


DECODER = "transformer_layer_config"
GARBAGE: dict[str, Callable[[Path], object]] = {
    "a type that is a list": put("speculators_model_type", value=["dspark"]),
    "a theta that is a word": put(DECODER, "rope_parameters", value={"rope_type": "default", "rope_theta": "x"}),
    "an epsilon that is a word": put(DECODER, "rms_norm_eps", value="x"),
    "positions that are a word": put(DECODER, "max_position_embeddings", value="x"),
    "a window that is a word": put(DECODER, "sliding_window", value="x"),
    "layers beyond all memory": lambda folder: change_config(
        folder, lambda config: config[DECODER].update(num_hidden_layers=10**25, layer_types=None)
    ),
    "a config without a bottom": lambda folder: (folder / "config.json").write_text('{"a":' * 100_000),
    "a shape that is not the bytes'": lambda folder: (folder / "model.safetensors").write_bytes(header([2])),
    "a shape beyond all memory": lambda folder: (folder / "model.safetensors").write_bytes(header([10**30])),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_is_an_error_and_no_crash(case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(folder / "draft", draft)
    GARBAGE[case](draft)
    assert main(["doctor", str(draft), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["counts"]["error"] > 0
    with pytest.raises(ConfigError):
        SpeculatorModel.from_pretrained(draft)


def test_eight_bit_values_are_looked_at(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(folder / "draft", draft)
    change_tensors(draft, lambda tensors: tensors.update({"norm.weight": tensors["norm.weight"].to(torch.float8_e4m3fn)}))
    assert main(["doctor", str(draft), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["warning"] > 0
