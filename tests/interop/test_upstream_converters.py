"""The same foreign checkpoints through upstream's converters and ours: tensors are equal, configs differ in known keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from speculators.convert import convert_model, stitch_mtp
from tests.convert.foreign import HIDDEN, MASK, VERIFIER_LAYERS, VOCAB, eagle3_checkpoint, read, zlab_checkpoint
from tests.convert.test_mtp_format import verifier_with_mtp
from tests.convert.test_stitch import all_tensors
from tests.interop.environments import peer_python, run_peer
from tests.interop.records import Measurement, record
from tests.tiny import tiny_verifier

pytestmark = pytest.mark.interop

#: Keys of ours only, of upstream's stray ones, and of versions; everything else is equal.
OURS_ONLY = {"final_state", "sliding_window_reference", "hidden_state_input", "training_answers"}
KNOWN = OURS_ONLY | {"architectures", "auto_map", "dtype", "speculators_version", "transformers_version"}
#: vLLM applies the key to full layers too, so an all-full draft says true here.
KNOWN |= {"sliding_window_non_causal"}
#: Upstream raises ``max_position_embeddings`` to the verifier's and keeps keys of the foreign config that no layer reads.
KNOWN_OF_DECODERS = {"dtype", "tie_word_embeddings", "max_position_embeddings", "partial_rotary_factor", "transformers_version"}


@dataclass(frozen=True)
class Case:
    name: str
    algorithm: str
    options: dict[str, Any]
    changes: dict[str, Any]
    lost: str = ""  #: beginning of the names of tensors that upstream's converter leaves out, against the config it writes


CASES = [
    Case("z-lab DFlash", "dflash", {}, {}),
    Case("z-lab DFlash, keys inside dflash_config", "dflash", {}, {"block_size": None, "dflash_config": {"block_size": 6}}),
    Case("EAGLE-3", "eagle3", {}, {}),
    Case("EAGLE-3, norm_before_residual", "eagle3", {"norm_before_residual": True}, {}),
    Case("EAGLE-3, norm_before_fc and norm_output", "eagle3", {}, {"norm_before_fc": True, "norm_output": True}, "input_norm."),
    Case("EAGLE-3, fc_norm", "eagle3", {}, {"fc_norm": True}, "fc_norm."),
    Case("MTP of qwen3_next", "mtp", {"num_speculative_steps": 4}, {}),
    Case("MTP of qwen3_5", "mtp", {}, {}),
    Case("MTP of qwen3_5_moe", "mtp", {}, {}),
]


class Converted:
    """Every case by both; and the MTP drafts stitched by both."""

    def __init__(self, folder: Path) -> None:
        peer_python("upstream")
        verifier = str(tiny_verifier(folder, vocab=VOCAB, hidden=HIDDEN, layers=VERIFIER_LAYERS))
        self.folder = folder
        job: dict[str, list[dict[str, Any]]] = {"converted": [], "stitched": []}
        for number, case in enumerate(CASES):
            source, options, own = folder / f"{number}-foreign", dict(case.options), verifier
            if case.algorithm == "dflash":
                changes = dict(case.changes)
                if "dflash_config" in changes:
                    changes["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 3]} | changes["dflash_config"]
                zlab_checkpoint(source, **changes)
            elif case.algorithm == "eagle3":
                eagle3_checkpoint(source, **case.changes)
                options["eagle_aux_hidden_state_layer_ids"] = [2, 3, 5]
            else:
                verifier_with_mtp(source, case.name.rpartition(" ")[2])
                own = str(source)
            convert_model(source, own, case.algorithm, folder / f"{number}-ours", **options)
            output = str(folder / f"{number}-theirs")
            one = {"model": str(source), "verifier": own, "algorithm": case.algorithm, "output": output, "options": options}
            job["converted"].append(one)
            if case.algorithm == "mtp":
                stitch_mtp(folder / f"{number}-ours", source, folder / f"{number}-stitched-ours")
                stitched = {"verifier": str(source), "output": str(folder / f"{number}-stitched-theirs")}
                job["stitched"].append({"draft": str(folder / f"{number}-ours"), **stitched})
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        answer = run_peer("upstream", "upstream_convert.py", folder / "job.json")
        self.peer = f"speculators {answer['version']}"
        self.errors: dict[str, str] = answer["errors"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return Converted(tmp_path_factory.mktemp("converters"))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_upstream_converts_the_same(converted: Converted, number: int) -> None:
    case, theirs_at = CASES[number], converted.folder / f"{number}-theirs"

    def row(what: str, measured: str) -> None:
        record(Measurement(case.algorithm, "peer -> ours", converted.peer, f"converted: {case.name}", what, measured))

    assert str(theirs_at) not in converted.errors, converted.errors[str(theirs_at)]
    our_config, ours = read(converted.folder / f"{number}-ours")
    their_config, theirs = read(theirs_at)
    theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith(("verifier_lm_head", "verifier_norm"))}
    equal = [name for name in ours if name in theirs and torch.equal(ours[name], theirs[name])]
    lost = [name for name in ours if case.lost and name.startswith(case.lost)]
    row("tensors", f"{len(equal)} of {len(theirs)} equal" + (f"; upstream loses {len(lost)}" if lost else ""))
    different = {key for key in our_config.keys() | their_config.keys() if our_config.get(key) != their_config.get(key)}
    our_decoder, their_decoder = our_config["transformer_layer_config"], their_config["transformer_layer_config"]
    inside = {key for key in our_decoder.keys() | their_decoder.keys() if our_decoder.get(key) != their_decoder.get(key)}
    row("config", f"{len(different - KNOWN - {'transformer_layer_config'}) + len(inside - KNOWN_OF_DECODERS)} unexplained keys")
    assert bool(lost) is bool(case.lost)
    assert sorted(set(ours) - set(lost)) == sorted(theirs) == sorted(equal)
    assert different - KNOWN - {"transformer_layer_config"} == set()
    assert inside - KNOWN_OF_DECODERS == set()


@pytest.mark.parametrize("number", [n for n, case in enumerate(CASES) if case.algorithm == "mtp"])
def test_upstream_stitches_the_same(converted: Converted, number: int) -> None:
    ours = all_tensors(converted.folder / f"{number}-stitched-ours")
    theirs_at = converted.folder / f"{number}-stitched-theirs"

    def row(measured: str) -> None:
        record(Measurement("mtp", "ours -> peer", converted.peer, f"stitched: {CASES[number].name}", "verifier", measured))

    error = converted.errors.get(str(theirs_at))
    if error is not None:
        row(f"refused: {error.splitlines()[0][:120]}")
        # Upstream splits stacked experts even for a verifier that keeps them stacked.
        assert CASES[number].name.endswith("qwen3_5_moe")
        assert ".experts.0." in error
        return
    theirs = {name: tensor for path in theirs_at.glob("*.safetensors") for name, tensor in load_file(path).items()}
    equal = [name for name in ours if name in theirs and torch.equal(ours[name], theirs[name])]
    row(f"{len(equal)} of {len(theirs)} tensors equal")
    assert sorted(ours) == sorted(theirs) == sorted(equal)
