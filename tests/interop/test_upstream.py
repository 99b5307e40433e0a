"""Checkpoints of ours in upstream 0.9.0 and upstream's in ours: same tensors, same logits, same greedy drafts, same config."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import yaml

from speculators.config import SpeculatorModelConfig
from speculators.losses import eager
from speculators.models import SpeculatorModel
from speculators.train.config import TrainConfig
from tests.interop import outputs as ours
from tests.interop.cases import Case
from tests.interop.records import Direction, Measurement, record
from tests.interop.upstream_run import BLOCK_SIZE, CASES, DIRECTIONS, DRAFT_VOCAB_SIZES, RUN_SETTINGS, UpstreamRun

pytestmark = pytest.mark.interop

#: Draft logits must agree to this in float32.
TOLERANCE = 1e-4

FAMILIES = list(dict.fromkeys(case.family for case in CASES))
GROUPS = list(dict.fromkeys((case.family, case.field) for case in CASES))

#: Keys that each reader sets to what it is, one that upstream's save alone writes, and a stray of transformers in the decoder's
#: part, whose value is in `rope_parameters` too and counts there.
NOT_COMPARED = {"transformers_version", "auto_map", "partial_rotary_factor"}

#: What upstream says of any file with these options, its own too.
EXPECTED_COMPLAINTS = ("DFlash with sample_from_anchor=True may not be supported", "--target-layer-ids is not explicitly set")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> UpstreamRun:
    return UpstreamRun(tmp_path_factory.mktemp("upstream"))


def load_ours(run: UpstreamRun, case: Case, direction: Direction) -> Any:
    """The checkpoint in our model; no warning is let pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder = run.checkpoint(case, direction)
        config = SpeculatorModelConfig.from_pretrained(folder, **ours.our_keys(case.family))
        return SpeculatorModel.from_pretrained(folder, config=config)


@pytest.mark.parametrize(("family", "field"), GROUPS, ids=[f"{family}-{field}" for family, field in GROUPS])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_same_logits_and_drafts(run: UpstreamRun, direction: Direction, family: str, field: str) -> None:
    cases = [case for case in CASES if (case.family, case.field) == (family, field)]
    worst, drafted, equal, wrong = 0.0, 0, 0, []
    compared: set[str] = set()
    for case in cases:
        mine = ours.outputs_of(load_ours(run, case, direction), run.inputs, run.verifier)
        theirs = run.outputs(case, direction)
        assert set(mine) == set(theirs)
        same = mine.pop("tokens") == theirs.pop("tokens")
        error = max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
        worst, drafted, equal = max(worst, error), drafted + same.numel(), equal + int(same.sum())
        compared |= set(mine)
        if not error <= TOLERANCE or not same.all():
            wrong.append(f"{case.name}: error {error:.1e}, {int((~same).sum())} tokens differ")
    names = [case.name.removeprefix(f"{field} ") for case in cases]
    values = f"{len(names)} more combinations" if " x " in field else "; ".join(names)
    record(
        Measurement(
            family,
            direction,
            run.peer,
            f"{field}: {values}" if field != "base" else field,
            "logits, confidence, greedy drafts" if "confidence" in compared else "logits, greedy drafts",
            f"max error {worst:.1e}; {equal} of {drafted} tokens equal",
        )
    )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_same_tensors(run: UpstreamRun, direction: Direction, family: str) -> None:
    """The reader holds every tensor of the file, bit for bit, knows all names and lacks none but the verifier's."""
    cases = [case for case in CASES if case.family == family]
    total, wrong = 0, {}
    for case in cases:
        stored = run.stored(case, direction)
        total += len(stored)
        if direction == "ours -> peer":
            found = {name: run.case_report(case, direction)[name] for name in ("unknown", "absent", "changed", "not_finite")}
            complaints = run.case_report(case, direction)["complaints"]
            found["complaints"] = [text for text in complaints if not text.startswith(EXPECTED_COMPLAINTS)]
        else:
            state = load_ours(run, case, direction).state_dict()
            found = {
                "unknown": sorted(set(stored) - set(state)),
                "absent": sorted(set(state) - set(stored) - {"embed_tokens.weight", "lm_head.weight"}),
                "changed": [
                    name
                    for name in set(stored) & set(state)
                    if not torch.equal(stored[name].to(state[name].dtype), state[name])
                ],
            }
        if any(found.values()):
            wrong[case.name] = found
    record(
        Measurement(
            family,
            direction,
            run.peer,
            "all",
            "tensors of the file",
            f"{len(wrong)} of {len(cases)} checkpoints differ; {total} tensors",
        )
    )
    assert not wrong


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_same_config(run: UpstreamRun, direction: Direction, family: str) -> None:
    """What the reader says of a config is what the file says, key for key, in the decoder's part too."""
    cases = [case for case in CASES if case.family == family]
    wrong, keys = {}, 0
    for case in cases:
        file = run.written_config(case, direction)
        if direction == "ours -> peer":
            read = run.case_report(case, direction)["config"]
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                read = SpeculatorModelConfig.from_pretrained(run.checkpoint(case, direction)).to_dict()
        differences = different(file, read)
        keys += len(file)
        if differences:
            wrong[case.name] = differences
    record(
        Measurement(
            family,
            direction,
            run.peer,
            "all",
            "config.json",
            f"{len(wrong)} of {len(cases)} configs differ; {keys} keys",
        )
    )
    assert not wrong


def different(file: dict[str, Any], read: dict[str, Any]) -> dict[str, Any]:
    """Keys of the file that the reader has not, or has otherwise: (in the file, as read)."""
    found = {}
    for key in sorted(set(file) - NOT_COMPARED):
        if key == "transformer_layer_config":
            found |= {f"{key}.{name}": pair for name, pair in different(file[key], read[key]).items()}
        elif file[key] != read.get(key, "absent"):
            found[key] = (file[key], read.get(key, "absent"))
    return found


def test_same_losses(run: UpstreamRun) -> None:
    """The seven losses, elementwise and reduced, and the decays."""
    logits, targets, mask = (run.inputs[name] for name in ("loss_logits", "loss_targets", "loss_mask"))
    slots = (torch.arange(logits.shape[1]) % BLOCK_SIZE)[None].float()
    names = [name for name in eager.__all__ if name.endswith("_loss") and name != "compound_loss"]
    mine = {name: getattr(eager, name)(logits, targets) for name in names}
    for anchor_first in (True, False):
        mine[f"dflash_loss_decay-{anchor_first}"] = eager.dflash_loss_decay(slots, gamma=4.0, sample_from_anchor=anchor_first)
    mine["exp_loss_decay"] = eager.exp_loss_decay(slots, gamma=0.8)
    mine["dpace_loss_decay"] = eager.dpace_loss_decay(slots, mask, BLOCK_SIZE, 0.5, mine["ce_loss"])
    for name in names:
        mine[f"{name}-reduced"] = eager.loss_function(
            logits,
            targets,
            mask,
            slots,
            loss_fn=getattr(eager, name),
            decay_fn=lambda pos_idx, **_: eager.dflash_loss_decay(pos_idx, gamma=4.0),
        )
    theirs = run.tensors("losses")
    assert set(mine) == set(theirs)
    errors = {name: float((mine[name] - theirs[name]).abs().max()) for name in mine}
    for name in ("loss", "loss-reduced", "decay"):
        kind = {key: error for key, error in errors.items() if name == key.split("_")[-1] or (name == "decay" and name in key)}
        record(Measurement("all", "ours -> peer", run.peer, ", ".join(kind), name, f"max error {max(kind.values()):.1e}"))
    assert max(errors.values()) < 1e-5, errors


def test_same_vocabulary(run: UpstreamRun) -> None:
    """From one count of tokens both keep the same ids; upstream reads our files."""
    equal = 0
    for size in DRAFT_VOCAB_SIZES:
        mapping, theirs = ours.vocabulary(size), run.tensors(f"vocabulary-{size}")
        same = torch.equal(torch.from_numpy(mapping.d2t), theirs["d2t"])
        equal += same and torch.equal(torch.from_numpy(mapping.t2d), theirs["t2d"]) and run.report["vocabulary"][str(size)]
    sizes = ", ".join(map(str, DRAFT_VOCAB_SIZES))
    record(
        Measurement(
            "all",
            "ours -> peer",
            run.peer,
            f"draft vocabularies of {sizes}",
            "d2t and t2d, in memory and in files",
            f"{equal} of {len(DRAFT_VOCAB_SIZES)} equal",
        )
    )
    assert equal == len(DRAFT_VOCAB_SIZES)


def test_settings_go_both_ways(run: UpstreamRun) -> None:
    """``--dump-config`` of ours is read by upstream to the same values, and upstream's dump by ours."""
    theirs = run.report["run"]["settings"]
    back = TrainConfig.from_flat({}).flatten() | flat(yaml.safe_load(run.report["run"]["dump"])["train"])
    mine = flat(yaml.safe_load((run.folder / "run.yaml").read_text(encoding="utf-8"))["train"])
    wrong = {name: (value, theirs.get(name)) for name, value in mine.items() if theirs.get(name) != value}
    wrong_back = {name: (value, back.get(name)) for name, value in mine.items() if back.get(name) != value}
    record(
        Measurement(
            "all",
            "ours -> peer",
            run.peer,
            "run.yaml",
            "training settings",
            f"{len(mine) - len(wrong)} of {len(mine)} equal",
        )
    )
    assert set(mine) >= set(RUN_SETTINGS)
    assert not wrong
    assert not wrong_back
    assert not run.report["run"]["complaints"]


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without their groups."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= value if isinstance(value, dict) else {name: value}
    return found
