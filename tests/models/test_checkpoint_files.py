"""One code reads and writes every kind of weight file: shards, pickles, what is torn, foreign or malicious."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators import SpeculatorModel
from speculators.errors import ConfigError, VerifierError
from speculators.models.checkpoint_files import TensorEntry, WeightFiles, has_weights, write_weights
from speculators.models.verifier_weights import read_verifier_weights
from tests.models.test_checkpoints import draft, files, same_state
from tests.tiny import tiny_verifier

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "t2d": torch.tensor([True, False, True]),
    "d2t": torch.tensor([0, 1]),
}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def save(folder: Path, layout: str) -> None:
    folder.mkdir(exist_ok=True)
    pickled = layout.startswith("bin")
    name = "pytorch_model.bin" if pickled else "model.safetensors"

    def write(tensors: dict[str, Tensor], path: Path) -> None:
        if pickled:
            torch.save(tensors, path, _use_new_zipfile_serialization=layout != "bin before torch 1.6")
        else:
            save_file(tensors, path)

    if not layout.endswith("shards"):
        write(TENSORS, folder / name)
        return
    parts = {f"part1-{name}": ["a"], f"part2-{name}": ["b", "t2d", "d2t"]}
    for part, names in parts.items():
        write({key: TENSORS[key] for key in names}, folder / part)
    weight_map = {key: part for part, names in parts.items() for key in names}
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("layout", ["safetensors", "safetensors shards", "bin", "bin shards", "bin before torch 1.6"])
def test_every_layout_is_read(layout: str, tmp_path: Path) -> None:
    assert not has_weights(tmp_path)
    save(tmp_path, layout)
    assert has_weights(tmp_path)
    source = WeightFiles(tmp_path)
    assert equal(source.read(), TENSORS)
    assert list(source.read(["t2d", "a"])) == ["t2d", "a"]
    assert source.entries() == [
        TensorEntry("a", (3, 4), "float32", 48),
        TensorEntry("b", (5,), "bfloat16", 10),
        TensorEntry("d2t", (2,), "int64", 16),
        TensorEntry("t2d", (3,), "bool", 3),
    ]


@pytest.mark.parametrize("size", [40, "5GB"])
def test_what_is_written_is_read(size: int | str, tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS, size)
    names = files(tmp_path)
    if size == 40:
        assert names[-1] == "model.safetensors.index.json"
        index = json.loads((tmp_path / names[-1]).read_text())
        assert set(index["weight_map"].values()) == set(names[:-1])
        assert len(names) > 2
        assert index["metadata"]["total_size"] == 48 + 10 + 3 + 16
    else:
        assert names == ["model.safetensors"]
    assert equal(WeightFiles(tmp_path).read(), TENSORS)
    (tmp_path / "plain").write_text("")
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "plain").stat().st_mode}


def test_an_earlier_checkpoints_files_do_not_stay(tmp_path: Path) -> None:
    """Neither shards beside one file, nor one file beside shards, nor more shards than there are."""
    other = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    (tmp_path / "README.md").write_text("mine")
    sharded = [
        "README.md",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    for size, expected in ((20, None), (60, sharded), ("1GB", ["README.md", "model.safetensors"]), (60, sharded)):
        other = {name: ~tensor if tensor.dtype == torch.bool else tensor + 1 for name, tensor in other.items()}
        write_weights(tmp_path, other, size)
        assert expected is None or files(tmp_path) == expected
        assert equal(WeightFiles(tmp_path).read(), other)


@pytest.mark.parametrize("size", ["five", "5 parsecs", "GB"])
def test_sizes_that_are_none(size: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no size; give bytes or a text such as '5GB'"):
        write_weights(tmp_path, TENSORS, size)


@pytest.mark.parametrize("layout", ["sharded", "bin", "bin shards"])
def test_drafts_are_read_from_every_layout(layout: str, tmp_path: Path) -> None:
    model = draft(None)
    model.save_pretrained(tmp_path, include_embeddings=True, max_shard_size=8000 if layout == "sharded" else "50GB")
    if layout != "sharded":
        tensors = load_file(tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors").unlink()
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        if layout == "bin shards":
            (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-00001-of-00001.bin")
            weight_map = dict.fromkeys(tensors, "pytorch_model-00001-of-00001.bin")
            (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "model.safetensors" not in files(tmp_path)
    assert same_state(SpeculatorModel.from_pretrained(tmp_path), model)


class Malicious:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("how", ["torch", "plain pickle"])
def test_nothing_in_a_pickle_is_executed(how: str, tmp_path: Path) -> None:
    model, trap = draft(None), tmp_path / "trap"
    folder = tmp_path / "draft"
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    content = {"fc.weight": Malicious(trap)}
    if how == "torch":
        torch.save(content, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    with pytest.raises(ConfigError, match=r"cannot read the draft's .*pytorch_model.bin .*torn or foreign"):
        SpeculatorModel.from_pretrained(folder)
    with pytest.raises(VerifierError, match=r"cannot read the verifier's .*pytorch_model.bin"):
        read_verifier_weights(folder, ["norm"])
    assert not trap.exists()


def test_broken_files_are_refused_with_one_sentence(tmp_path: Path) -> None:
    def refused(sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence) as caught:
            WeightFiles(tmp_path).read()
        assert "\n" not in str(caught.value)

    refused(r"no draft weights at .*; give the folder with the draft's model.safetensors")
    torch.save({"epoch": 3, "state_dict": TENSORS}, tmp_path / "pytorch_model.bin")
    refused("holds more than tensors; save the draft's weights as model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused("torn or foreign")
    index = tmp_path / "model.safetensors.index.json"
    for text in ("[]", "{}", "not json", '{"weight_map": 3}'):
        index.write_text(text)
        refused(r"cannot read the draft's .*index.json")
    for outside in ("../other/model.safetensors", "/etc/model.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": outside}}))
        refused("outside its folder")
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    refused(r"lacks its weight file gone.safetensors; fetch it again")
    save_file({"b": torch.ones(2)}, tmp_path / "gone.safetensors")
    refused(r"cannot read the draft's .*gone.safetensors")


def test_the_verifiers_files_are_read_by_the_same_code(tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path)
    expected = read_verifier_weights(folder, ("embed_tokens", "lm_head", "norm"))
    tensors = load_file(folder / "model.safetensors")
    write_weights(folder, tensors, 5000)
    assert "model.safetensors" not in files(folder)
    assert len(files(folder)) > 5
    found = read_verifier_weights(folder, ("embed_tokens", "lm_head", "norm"))
    assert all(torch.equal(found[part], expected[part]) for part in expected)
    for path in folder.glob("model*"):
        path.unlink()
    save_file(tensors, folder / "consolidated.safetensors")
    assert torch.equal(read_verifier_weights(folder, ["norm"])["norm"], expected["norm"])


def test_an_index_and_a_pickle_of_other_things(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": ["b"]}}))
    with pytest.raises(ConfigError, match="outside its folder"):
        _ = WeightFiles(tmp_path).index
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="nested too deep"):
        _ = WeightFiles(tmp_path).index
    (tmp_path / "model.safetensors.index.json").unlink()
    torch.save({1: torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="holds more than tensors"):
        _ = WeightFiles(tmp_path).index
