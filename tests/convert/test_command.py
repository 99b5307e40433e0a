"""``speculators convert`` on the command line: what it prints, where it writes, and one sentence for every mistake."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from speculators import SpeculatorModel
from speculators.cli.app import run
from speculators.convert import convert_model
from speculators.convert.formats import ADAPTERS
from speculators.convert.output import staged
from speculators.errors import ConfigError
from tests.convert.foreign import FOREIGN_IDS, deepspec_checkpoint, equal, read, write, zlab_checkpoint

DOCS = Path(__file__).parents[2] / "docs" / "converters.md"


def converted(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run(["convert", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_converts_and_says_what_was_assumed(verifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, tensors = zlab_checkpoint(tmp_path / "theirs", block_size=None)
    output = tmp_path / "deep" / "ours"
    # What a killed conversion left is swept; another file's is not this one's business.
    (output.parent / ".ours.1.tmp").mkdir(parents=True)
    arguments = [str(source), "--verifier", verifier, "--algorithm", "dflash", "--output-path", str(output)]
    code, out, err = converted([*arguments, "--validate-device", "cpu"], capsys)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "read zlab-dflash as dflash"
    assert "assumed: block_size = 16 (z-lab's default)" in lines
    assert lines[-1] == f"converted to {output}"
    assert any(line.startswith("drafted on random input: [") for line in lines)
    assert equal(read(output)[1], tensors)
    # The folder holds the checkpoint and nothing else, nor does its parent.
    assert sorted(path.name for path in output.iterdir()) == ["config.json", "model.safetensors"]
    assert list(output.parent.iterdir()) == [output]

    again, _, err = converted(arguments, capsys)
    assert again == 2
    assert "already holds a checkpoint; name another folder or replace it with --overwrite" in err
    assert converted([*arguments, "--overwrite"], capsys)[0] == 0


def test_algorithm_kwargs(verifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = zlab_checkpoint(tmp_path / "theirs", dflash_config={"target_layer_ids": FOREIGN_IDS})
    arguments = [str(source), "--verifier", verifier, "--output-path", str(tmp_path / "ours")]
    for kwargs, sentence in [
        ("{", "--algorithm-kwargs is no JSON"),
        ("[" * 100_000, "--algorithm-kwargs is no JSON"),
        ("[1]", "--algorithm-kwargs must be a JSON object"),
        ('{"mask": 1}', "unknown conversion option 'mask'"),
        ('{"mask_token_id": "x"}', "wrong conversion option: mask_token_id"),
        ('{"norm_output": true}', "the option 'norm_output' means nothing to z-lab DFlash"),
    ]:
        code, _, err = converted([*arguments, "--algorithm-kwargs", kwargs], capsys)
        assert code == 2, kwargs
        assert sentence in err
        assert len(err.splitlines()) == 1
    assert converted([*arguments, "--algorithm-kwargs", '{"mask_token_id": 9}'], capsys)[0] == 0
    assert read(tmp_path / "ours")[0]["mask_token_id"] == 9


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--format", "gguf"], "there is no format 'gguf'; choose one of speculators, deepspec"),
        (["--algorithm", "eagle"], "Unsupported algorithm: eagle"),
        (["--algorithm", "dspark"], "which gives dflash drafts, not dspark"),
        (["--to", "sglang"], "cannot convert to 'sglang'"),
        (["--validate-device", "cuda:93"], "--validate-device cuda:93 is no device that can compute here"),
        (["--validate-device", "meta"], "--validate-device meta is no device that can compute here"),
        (["--format", "vllm-dspark"], "the vLLM DSpark config has no 'target_layer_ids'"),
    ],
)
def test_wrong_flags(
    arguments: list[str], sentence: str, verifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = zlab_checkpoint(tmp_path / "theirs")
    code, out, err = converted([str(source), "--verifier", verifier, "--output-path", str(tmp_path / "o"), *arguments], capsys)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "o").exists()


def test_unknown_checkpoints(verifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["--verifier", verifier, "--output-path", str(tmp_path / "o")]
    # A verifier is no draft; the sentence lists what can be read.
    code, _, err = converted([verifier, *output], capsys)
    assert code == 2
    assert all(f"{adapter.name}: {adapter.title}" in err for adapter in ADAPTERS)
    assert converted([str(tmp_path / "nowhere"), *output], capsys)[0] == 2
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    assert converted([str(tmp_path / "torn"), *output], capsys)[0] == 2
    source, _ = deepspec_checkpoint(tmp_path / "bare")
    (source / "model.safetensors").unlink()
    assert "no draft weights at" in converted([str(source), *output], capsys)[2]
    (source / "model.safetensors").write_bytes(b"\x00" * 64)
    assert "the file is torn" in converted([str(source), *output], capsys)[2]


def test_a_draft_needs_its_verifier(verifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = zlab_checkpoint(tmp_path / "theirs")
    code, _, err = converted([str(source), "--output-path", str(tmp_path / "o")], capsys)
    assert code == 2
    assert "names no verifier; give its folder or hub id with --verifier" in err
    (tmp_path / "empty").mkdir()
    code, _, err = converted([str(source), "--verifier", str(tmp_path / "empty"), "--output-path", str(tmp_path / "o")], capsys)
    assert code == 1
    assert "no readable config.json" in err


def test_the_output_folder_holds_something_else(verifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = zlab_checkpoint(tmp_path / "theirs")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    arguments = [str(source), "--verifier", verifier, "--overwrite", "--output-path"]
    code, _, err = converted([*arguments, str(tmp_path / "mine")], capsys)
    assert code == 2
    assert "holds something else (notes.txt)" in err
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"
    assert converted([*arguments, str(tmp_path / "mine" / "notes.txt")], capsys)[0] == 2


def test_a_wrong_tensor_leaves_nothing_behind(verifier: str, tmp_path: Path) -> None:
    source, tensors = zlab_checkpoint(tmp_path / "theirs")
    tensors["layers.0.self_attn.rotary.weight"] = tensors["norm.weight"].clone()
    write(source, read(source)[0], tensors)
    with pytest.raises(ValueError, match="unexpected"):
        convert_model(source, verifier, output_path=tmp_path / "ours")
    assert list(tmp_path.iterdir()) == [source]


def test_loading_a_foreign_checkpoint_names_the_command(tmp_path: Path) -> None:
    source, _ = zlab_checkpoint(tmp_path / "theirs")
    with pytest.raises(NotImplementedError, match="speculators convert"):
        SpeculatorModel.from_pretrained(source)


def test_the_documentation_has_every_format_and_option() -> None:
    from speculators.convert.options import ConversionOptions

    text = DOCS.read_text(encoding="utf-8")
    missing = [adapter.name for adapter in ADAPTERS if f"`{adapter.name}`" not in text]
    missing += [name for name in inspect.signature(ConversionOptions).parameters if f"`{name}`" not in text]
    assert missing == []


def test_two_conversions_into_one_folder(verifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = zlab_checkpoint(tmp_path / "theirs")
    output = tmp_path / "out" / "ours"
    arguments = [str(source), "--verifier", verifier, "--output-path", str(output)]
    with staged(output, overwrite=False) as staging:
        (staging / "config.json").write_text("{}")
        code, _, err = converted(arguments, capsys)
        assert code == 1
        assert "is in use by process" in err
        assert "choose another --output-path" in err
        assert (staging / "config.json").is_file(), "the other conversion's files were swept"
    assert [path.name for path in output.parent.iterdir()] == ["ours"]
    # What the other one finished meanwhile is not replaced either.
    with pytest.raises(ConfigError, match="already holds a checkpoint"), staged(output, overwrite=False):
        pass


def test_the_output_is_the_working_directory(
    verifier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = zlab_checkpoint(tmp_path / "theirs")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert converted([str(source), "--verifier", verifier, "--output-path", "."], capsys)[0] == 0
    assert sorted(path.name for path in Path().iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", 5),
        ("num_target_layers", "x"),
        ("markov_rank", []),
        ("rope_theta", {}),
        ("target_layer_ids", True),
        ("target_layer_ids", [1, "a"]),
        ("num_hidden_layers", 10**25),
        ("sliding_window", "wide"),
    ],
)
def test_a_value_of_a_wrong_type(
    key: str, value: object, verifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = deepspec_checkpoint(tmp_path / "theirs")
    config, _ = read(source)
    (source / "config.json").write_text(json.dumps(config | {key: value}))
    code, _, err = converted([str(source), "--verifier", verifier, "--output-path", str(tmp_path / "ours")], capsys)
    assert code == 2
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
