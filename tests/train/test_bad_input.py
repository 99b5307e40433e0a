"""Trainings that cannot be what was meant stop with one sentence, and lose nothing that was saved."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators.data import DataManifest, RowDataset, template_hash, tokenizer_hash
from speculators.errors import ConfigError, DataError, SpeculatorsError
from speculators.train import train
from tests.tiny import CHATML, tiny_tokenizer
from tests.train.helpers import loaded_verifier, settings, tiny_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad-input")


@pytest.fixture
def run(folder: Path, tmp_path: Path):
    def do(name: str = "run", dataset: RowDataset | None = None, **changes: Any):
        verifier = loaded_verifier(folder)
        config = settings(folder, **{"save_path": str(tmp_path / name), **changes})
        return train(config, dataset=dataset or tiny_rows(), verifier=verifier, progress=False)

    return do


def test_rows_too_short_to_learn_from(run) -> None:
    with pytest.raises(DataError, match="within --total-seq-len 2, so there is nothing to learn"):
        run(total_seq_len=2, block_size=2)


def rows_made_by(tokenizer: Any, **facts: Any) -> RowDataset:
    hashes = {"tokenizer_hash": tokenizer_hash(tokenizer), "template_hash": template_hash(tokenizer)}
    return RowDataset.from_rows(tiny_rows(), DataManifest(verifier="some-model", **{**hashes, **facts}))


def test_rows_of_another_tokenizer(run) -> None:
    other = tiny_tokenizer()
    other.add_tokens(["<tool>"])
    with pytest.raises(DataError, match=r"rows in memory were made with the tokenizer of some-model \(hash \w+\), and that of"):
        run(dataset=rows_made_by(other))


def test_rows_of_another_chat_template(run) -> None:
    other = tiny_tokenizer(CHATML.replace("assistant", "user"))
    with pytest.warns(UserWarning, match="another chat template than that of"):
        run(dataset=rows_made_by(other), max_steps=1)


def test_rows_of_an_earlier_version(run, recwarn: pytest.WarningsRecorder) -> None:
    """One hash stood for vocabulary and template: equal is equal, and what differs is not known."""
    own = tiny_tokenizer()
    content = {"vocabulary": sorted(own.get_vocab().items()), "template": own.chat_template}
    old = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    run("same", dataset=rows_made_by(own, schema=1, tokenizer_hash=old, template_hash=""), max_steps=1)
    assert not [warning for warning in recwarn if "tokenizer" in str(warning.message)]
    with pytest.warns(UserWarning, match="earlier version that cannot tell"):
        run("other", dataset=rows_made_by(own, schema=1, tokenizer_hash="0a", template_hash=""), max_steps=1)


def test_a_layer_below_the_embeddings(run) -> None:
    with pytest.raises(ConfigError, match=r"must lie within \[0, \w"):
        run(target_layer_ids=[-1, 2])


def test_a_draft_config_that_is_no_object(run, tmp_path: Path) -> None:
    (tmp_path / "shape.json").write_text("3")
    with pytest.raises(ConfigError, match="no readable model config"):
        run(draft_config=str(tmp_path / "shape.json"))


def test_a_log_folder_that_is_a_file(run, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with pytest.raises(SpeculatorsError, match="--logger tensorboard cannot start"):
        run(logger="tensorboard", log_dir=str(tmp_path / "logs"))


def test_a_diverging_training_stops_before_it_is_saved(run, tmp_path: Path) -> None:
    with pytest.raises(SpeculatorsError, match=r"the training diverged: .* lower --lr"):
        run(lr=1e30, optimizer="adamw", epochs=5)
    for path in tmp_path.glob("run/*/model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())


def _garbage(path: Path) -> None:
    """As many bytes as before, none of them right."""
    file = path / "training_state.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)


def _without_generators(path: Path) -> None:
    file = path / "training_state.json"
    state = json.loads(file.read_text())
    del state["rng"]
    file.write_text(json.dumps(state))


def _without_a_weight(path: Path) -> None:
    file = path / "training_state.safetensors"
    tensors = load_file(file)
    tensors.pop("weights/fc.weight")
    save_file(tensors, file)
    state = json.loads((path / "training_state.json").read_text())
    state["files"][file.name] = file.stat().st_size
    (path / "training_state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("damage", [_garbage, _without_generators, _without_a_weight])
def test_a_damaged_training_state_is_named_and_the_one_before_it_serves(damage, run, tmp_path: Path) -> None:
    undisturbed = run(epochs=2)
    assert undisturbed.checkpoint == tmp_path / "run" / "1"
    damage(undisturbed.checkpoint)
    with pytest.raises(SpeculatorsError, match=r"run/1 is damaged .* remove that folder"):
        run(epochs=2)
    undisturbed.checkpoint.rename(tmp_path / "removed")
    assert run(epochs=2).resumed_from == tmp_path / "run" / "0"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda tensor: tensor * float("nan"), "fc.weight in .* holds NaN or infinite values"),
        (lambda tensor: tensor.to(torch.int8), "fc.weight in .* holds int8 values"),
    ],
)
def test_a_draft_whose_weights_are_none(spoil, words: str, run) -> None:
    path = run(max_steps=1).checkpoint
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "fc.weight": spoil(tensors["fc.weight"])}, path / "model.safetensors")
    shape = dict.fromkeys(("num_layers", "block_size", "markov_rank", "target_layer_ids", "mask_token_id"), ...)
    with pytest.raises(ConfigError, match=words):
        run("more", from_pretrained=str(path), **shape)
