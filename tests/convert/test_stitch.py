"""Stitching a trained MTP layer into its verifier: only the layer's bytes change, whatever the files look like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculators.cli.app import run
from speculators.convert import stitch_mtp
from speculators.convert.mtp_names import draft_tensors, verifier_tensors
from speculators.errors import ConfigError, VerifierError
from tests.convert.foreign import HIDDEN, VOCAB, Random, equal, write
from tests.convert.mtp import mtp_tensors, mtp_verifier

EXPERTS = [None, "single", "stacked"]


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("experts", EXPERTS)
def test_names_there_and_back(experts: str | None) -> None:
    theirs, ours = mtp_tensors(Random(0), experts)
    assert equal(draft_tensors(theirs), ours)
    assert equal(verifier_tensors(ours, theirs), theirs)


def test_names_that_no_draft_has() -> None:
    theirs, _ = mtp_tensors(Random(0), "single")
    with pytest.raises(ConfigError, match=r"mtp\.layers\.1\.norm has no place in an MTP draft"):
        draft_tensors(theirs | {"mtp.layers.1.norm": torch.zeros(1)})
    del theirs["mtp.layers.0.mlp.experts.1.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"no mtp\.layers\.0\.mlp\.experts\.1\.up_proj\.weight"):
        draft_tensors(theirs)


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_stitch(experts: str | None, shards: int, tmp_path: Path) -> None:
    verifier, before, _ = mtp_verifier(tmp_path / "verifier", {"model_type": "x"}, experts=experts, shards=shards)
    trained, ours = mtp_tensors(Random(5), experts)
    random = Random(6)
    frozen = {"embed_tokens.weight": random.weight(VOCAB, HIDDEN), "lm_head.weight": random.weight(VOCAB, HIDDEN)}
    # A draft trained in float32 is written in the verifier's bfloat16.
    draft = write(tmp_path / "draft", {}, {name: tensor.float() for name, tensor in ours.items()} | frozen)
    result = stitch_mtp(draft, verifier, tmp_path / "out")
    after = all_tensors(result)
    assert equal(after, before | trained)
    assert not equal(after, before)
    assert sorted(path.relative_to(result) for path in result.rglob("*")) == sorted(
        path.relative_to(verifier) for path in verifier.rglob("*")
    )
    for name in ("config.json", "tokenizer.json", "extra/note.txt"):
        assert (result / name).read_bytes() == (verifier / name).read_bytes()
    for path in verifier.glob("*.safetensors"):
        assert (result / path.name).stat().st_size == path.stat().st_size
    if shards > 1:
        assert json.loads((result / "model.safetensors.index.json").read_text())["weight_map"].keys() == before.keys()
    # Its own layer stitched back changes nothing at all.
    assert equal(all_tensors(verifier), before)


def test_a_read_only_verifier_and_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, before, ours = mtp_verifier(tmp_path / "verifier", {})
    (verifier / "model.safetensors").chmod(0o444)
    draft = write(tmp_path / "draft", {}, ours)
    monkeypatch.chdir(tmp_path)
    assert stitch_mtp(draft, verifier) == tmp_path / "verifier-stitched"
    assert (tmp_path / "verifier-stitched" / "model.safetensors").read_bytes() == (verifier / "model.safetensors").read_bytes()
    assert equal(all_tensors(tmp_path / "verifier-stitched"), before)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verifier, before, _ = mtp_verifier(tmp_path / "verifier", {}, shards=2)
    trained, ours = mtp_tensors(Random(5), None)
    draft = write(tmp_path / "draft", {}, ours)
    arguments = ["stitch-mtp", str(draft), str(verifier), "--output-path", str(tmp_path / "out")]
    assert run(arguments) == 0
    assert capsys.readouterr().out == f"stitched into {tmp_path / 'out'}\n"
    assert equal(all_tensors(tmp_path / "out"), before | trained)
    assert run(arguments) == 2
    assert "name an empty folder with --output-path" in capsys.readouterr().err


def test_refusals(tmp_path: Path) -> None:
    verifier, _, _ = mtp_verifier(tmp_path / "verifier", {}, experts="single")
    _, ours = mtp_tensors(Random(5), "single")

    def stitched(draft: Path, into: Path = verifier) -> None:
        stitch_mtp(draft, into, tmp_path / "out")

    dense = write(tmp_path / "dense", {}, mtp_tensors(Random(5), None)[1])
    with pytest.raises(ConfigError, match="does not fit the verifier's MTP layer"):
        stitched(dense)
    name = "mtp_layers.0.input_proj.weight"
    with pytest.raises(ConfigError, match=r"missing \['mtp\.fc\.weight'\], unexpected nothing"):
        stitched(write(tmp_path / "short", {}, {key: value for key, value in ours.items() if key != name}))
    with pytest.raises(ConfigError, match=r"mtp\.fc\.weight is \[32, 63\] in the draft and \[32, 64\] in the verifier"):
        stitched(write(tmp_path / "narrow", {}, ours | {name: ours[name][:, :-1]}))
    plain = write(tmp_path / "plain", {}, {"model.norm.weight": torch.ones(4)})
    draft = write(tmp_path / "draft", {}, ours)
    with pytest.raises(VerifierError, match="has no tensor under mtp"):
        stitched(draft, plain)
    pickled = write(tmp_path / "pickled", {}, mtp_tensors(Random(0), "single")[0], pickled=True)
    with pytest.raises(VerifierError, match="lies in a pickled file"):
        stitched(draft, pickled)
    with pytest.raises(VerifierError, match="there is no verifier at"):
        stitched(draft, tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()
