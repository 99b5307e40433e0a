"""A trained draft is tried as its config says and otherwise: the right reading wins, and a falsified config is caught."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.__main__ import main
from speculators.checks import Diagnosis, ReadingResult, ReadingSettings, ReadingsReport, examine
from speculators.models.verifier_weights import VerifierHead
from tests.checks.broken import Change, both, drop, put, tensor
from tests.checks.drafts import good_checkpoint
from tests.checks.trained import ANSWER, learned_by_heart
from tests.tiny import tiny_verifier

BLOCK = {"block_size": 6, "markov_rank": 16}
MTP: dict[str, Any] = {"block_size": ..., "markov_rank": ..., "target_layer_ids": ..., "num_layers": ..., "mask_token_id": ...}
CHAIN: dict[str, Any] = {"block_size": ..., "markov_rank": ..., "ttt_steps": 3, "norm_before_residual": False}
DECODER, PROPOSAL = "transformer_layer_config", ("speculators_config", "proposal_methods", 0)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """What a training of seconds learns hangs on the order of sums: the same on every machine with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def dspark(folder: Path) -> Path:
    return learned_by_heart(folder, "dspark", **BLOCK)


@pytest.fixture(scope="module")
def eagle3(folder: Path) -> Path:
    return learned_by_heart(folder, "eagle3", **CHAIN)


def tried(checkpoint: Path, folder: Path, **settings: Any) -> Diagnosis:
    wanted = ReadingSettings(**({"max_new_tokens": ANSWER} | settings))
    return examine(checkpoint, str(folder / "verifier"), data=[folder / "prompts.jsonl"], settings=wanted)


def changed(checkpoint: Path, to: Path, change: Change) -> Path:
    shutil.copytree(checkpoint, to)
    change(to)
    return to


def verdict(diagnosis: Diagnosis) -> list[str]:
    """Ids of the errors."""
    return [finding.id for finding in diagnosis.findings if finding.level == "error"]


def best(report: ReadingsReport) -> ReadingResult:
    """The reading that accepts most among those that win."""
    return max((result for result in report.results if result.wins), key=lambda result: result.acceptance_length or 0.0)


@pytest.mark.parametrize("family", ["dspark", "eagle3"])
def test_the_right_reading_wins(family: str, folder: Path, request: pytest.FixtureRequest) -> None:
    diagnosis = tried(request.getfixturevalue(family), folder)
    assert verdict(diagnosis) == []
    assert diagnosis.readings is not None
    own, *wrong = diagnosis.readings.results
    assert own.acceptance_length is not None
    assert own.acceptance_length > 1.8
    assert len(wrong) == {"dspark": 11, "eagle3": 8}[family]
    for result in wrong:
        assert result.acceptance_length is not None, result.reason
        assert result.acceptance_length < own.acceptance_length
        assert not result.wins
    names = {result.name for result in wrong}
    assert {"layer ids -1", "layer ids +1", "normed features", "unnormed targets", "twice-normed targets"} <= names


@pytest.mark.parametrize(
    ("change", "expected", "name"),
    [
        (
            both(put("sample_from_anchor", value=False), put(*PROPOSAL, "speculative_tokens", value=5)),
            "trained-other-layout",
            "the anchor-first layout",
        ),
        (put("aux_hidden_state_layer_ids", value=[0, 1, 2]), "trained-layer-ids-shifted", "layer ids +1"),
        (put("aux_hidden_state_layer_ids", value=[2, 3, 4]), "trained-layer-ids-shifted", "layer ids -1"),
        (put(DECODER, "rope_parameters", "rope_theta", value=1e6), "trained-other-rope-theta", "rope theta 10000"),
        (put(DECODER, "rope_parameters", "rope_theta", value=100.0), "trained-other-rope-theta", "rope theta 10000"),
        (
            both(
                put(DECODER, "layer_types", value=["sliding_attention"] * 2),
                put(DECODER, "sliding_window", value=512),
                put(DECODER, "use_sliding_window", value=True),
            ),
            "trained-other-block-attention",
            "bidirectional blocks",
        ),
        (
            both(
                put(DECODER, "layer_types", value=["sliding_attention"] * 2),
                put(DECODER, "sliding_window", value=3),
                put(DECODER, "use_sliding_window", value=True),
                put("sliding_window_non_causal", value=True),
            ),
            "trained-without-window",
            "no window",
        ),
        (tensor("markov_head.markov_w1.weight", lambda old: old.flip(0) * 3), "markov-head-hurts", "no Markov head"),
    ],
)
def test_a_falsified_config_is_caught(
    change: Change, expected: str, name: str, dspark: Path, folder: Path, tmp_path: Path
) -> None:
    diagnosis = tried(changed(dspark, tmp_path / "changed", change), folder)
    assert verdict(diagnosis) == [expected]
    assert diagnosis.exit_code == 1
    assert diagnosis.readings is not None
    assert best(diagnosis.readings).name == name


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (put("eagle_aux_hidden_state_layer_ids", value=[0, 1, 2]), "trained-layer-ids-shifted"),
        (put("norm_before_residual", value=True), "trained-other-residual"),
        (put("norm_output", value=False), "trained-other-output-norm"),
        (put(DECODER, "rope_parameters", "rope_theta", value=1e6), "trained-other-rope-theta"),
    ],
)
def test_a_falsified_chain_is_caught(change: Change, expected: str, eagle3: Path, folder: Path, tmp_path: Path) -> None:
    assert verdict(tried(changed(eagle3, tmp_path / "changed", change), folder)) == [expected]


def test_a_falsified_mtp_state_is_caught(folder: Path, tmp_path: Path) -> None:
    draft = learned_by_heart(folder, "mtp", **MTP)
    diagnosis = tried(draft, folder)
    assert verdict(diagnosis) == []
    assert diagnosis.readings is not None
    assert [result.name for result in diagnosis.readings.results[1:3]] == ["the other state", "unnormed targets"]
    wrong = changed(draft, tmp_path / "changed", put("hidden_state_input", value="pre_norm"))
    assert verdict(tried(wrong, folder)) == ["trained-other-state"]


def test_the_command_line_reports_the_flipped_layout(
    dspark: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip = both(put("sample_from_anchor", value=False), put(*PROPOSAL, "speculative_tokens", value=5))
    flipped = changed(dspark, tmp_path / "flipped", flip)
    arguments = ["doctor", str(flipped), "--verifier", str(folder / "verifier"), "--data", str(folder / "prompts.jsonl")]
    arguments += ["--max-new-tokens", str(ANSWER)]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "trained-other-layout" in shown.replace("\n", "")
    assert "clearly" in shown
    assert main([*arguments, "--json", "--limit", "5"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["readings"]["rows"] == 5
    first = max(report["readings"]["results"], key=lambda result: result["acceptance_length"])
    assert first["name"] == "the anchor-first layout"
    assert first["wins"]
    (error,) = (finding for finding in report["findings"] if finding["level"] == "error")
    assert f"{first['acceptance_length']:.2f} tokens a round" in error["finding"]


# ---- trainings that went wrong ------------------------------------------------------------------------------------


def test_training_on_normed_features_is_caught(folder: Path, tmp_path: Path) -> None:
    """With one captured layer, hidden_norm takes a token's scale out again: dividing fc's columns by the verifier's norm
    makes of a draft the one that a training on normed features would have given."""
    draft = learned_by_heart(folder, "dspark", **BLOCK, target_layer_ids=[2], save_as="one")
    assert verdict(tried(draft, folder)) == []
    norm = VerifierHead.from_folder(folder / "verifier").norm_weight
    assert norm is not None
    wrong = changed(draft, tmp_path / "wrong", tensor("fc.weight", lambda old: (old.float() / norm).to(old.dtype)))
    assert verdict(tried(wrong, folder)) == ["trained-features-normed"]


def test_training_towards_twice_normed_targets_is_caught(folder: Path, dspark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from speculators.models import family

    head, right = VerifierHead.from_folder(folder / "verifier"), family.gather_block_targets

    def twice(*arguments: Any) -> Any:
        targets = right(*arguments)
        targets.states = head.normalize(targets.states)
        return targets

    monkeypatch.setattr(family, "gather_block_targets", twice)
    draft = learned_by_heart(folder, "dspark", **BLOCK, save_as="twice")
    monkeypatch.undo()
    assert verdict(tried(draft, folder)) == ["trained-wrong-targets"]


def test_training_with_shifted_positions_is_caught(folder: Path, dspark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from speculators.models import backbone

    right: Callable[..., Any] = backbone.slot_position
    monkeypatch.setattr(backbone, "slot_position", lambda anchor, slot: right(anchor, slot) - 1)
    draft = learned_by_heart(folder, "dspark", **BLOCK, save_as="shifted")
    monkeypatch.undo()
    diagnosis = tried(draft, folder)
    assert verdict(diagnosis) == ["trained-positions-shifted"]
    assert diagnosis.readings is not None
    assert best(diagnosis.readings).name == "positions -1"


# ---- what keeps the doctor from a verdict -------------------------------------------------------------------------


def test_a_random_draft_is_of_no_use_under_any_reading(tmp_path: Path) -> None:
    verifier = tiny_verifier(tmp_path, layers=8)
    draft = good_checkpoint(verifier, tmp_path / "draft")
    diagnosis = examine(draft, str(verifier), settings=ReadingSettings(prompts=6, max_new_tokens=24))
    assert "acceptance-low" in diagnosis.ids
    assert diagnosis.exit_code == 0


def test_few_answers_give_no_verdict(dspark: Path, folder: Path, tmp_path: Path) -> None:
    wrong = changed(dspark, tmp_path / "changed", put("aux_hidden_state_layer_ids", value=[2, 3, 4]))
    diagnosis = tried(wrong, folder, prompts=3)
    assert verdict(diagnosis) == []
    assert "too-few-answers" in diagnosis.ids


def test_a_checkpoint_that_cannot_be_loaded_is_not_tried(dspark: Path, folder: Path, tmp_path: Path) -> None:
    broken = changed(dspark, tmp_path / "changed", drop("mask_token_id"))
    diagnosis = tried(broken, folder)
    assert {"required-key-missing", "readings-not-tried"} <= diagnosis.ids
    assert diagnosis.readings is not None
    assert "mask_token_id" in diagnosis.readings.skipped


def test_a_verifier_that_is_not_rebuilt_is_said(dspark: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = VerifierHead.full_logits
    monkeypatch.setattr(VerifierHead, "full_logits", lambda self, states: right(self, states).flip(-1))
    assert "verifier-not-rebuilt" in tried(dspark, folder).ids


def test_readings_leave_the_draft_as_it_was(dspark: Path, folder: Path) -> None:
    """All readings are measured on one loaded draft."""
    from speculators.checks.checkpoint import read_checkpoint
    from speculators.checks.facts import CheckpointFacts
    from speculators.checks.reading_kinds import readings_of
    from speculators.checks.trial import measure, prepare_trial
    from speculators.checks.verifier import find_verifier

    name = str(folder / "verifier")
    facts = CheckpointFacts(read_checkpoint(dspark), find_verifier(name))
    trial = prepare_trial(facts, name, [folder / "prompts.jsonl"], ReadingSettings(max_new_tokens=ANSWER))
    own, wrong = readings_of(trial.draft, trial.teacher, facts, longest_row=trial.longest_row)
    before = measure(trial, own)
    state = {key: value.clone() for key, value in trial.draft.state_dict().items()}
    differing = sum(bool((measure(trial, reading) != before).any()) for reading in wrong)
    assert differing == len(wrong)
    assert (measure(trial, own) == before).all()
    assert all(torch.equal(value, state[key]) for key, value in trial.draft.state_dict().items())
