"""The doctor says exactly what was broken, at the right level, and nothing is wrong with a good checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speculators.__main__ import main
from speculators.checks.catalogue import CATALOGUE
from tests.checks.broken import BROKEN, Broken
from tests.checks.drafts import FAMILIES, config_of, good_checkpoint, latent_verifier
from tests.tiny import tiny_verifier

LEVEL = {kind.id: kind.level for kinds in CATALOGUE.values() for kind in kinds}

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes a good checkpoint, each kind once."""
    root = tmp_path_factory.mktemp("good")
    tiny_verifier(root, layers=8)
    tiny_verifier(root, layers=8, hidden=48, name="wide")
    tiny_verifier(root, layers=8, vocab=80, name="wordy")
    latent_verifier(root / "latent")
    made: dict[str, Path] = {}

    def good(family: str, verifier_name: str = "verifier", made_for: str = "verifier", **build: Any) -> Path:
        key = f"{family} {made_for} {sorted(build.items())}"
        if key not in made:
            made[key] = good_checkpoint(root / made_for, root / str(len(made)), family, **build)
        if verifier_name == "verifier":
            return made[key]
        folder = root / f"{len(made)} of {verifier_name}"
        shutil.copytree(made[key], folder, dirs_exist_ok=True)
        with config_of(folder) as values:
            values["speculators_config"]["verifier"]["name_or_path"] = str(root / verifier_name)
        return folder

    return good


def examined(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[int, dict[str, str]]:
    """Exit code, and levels by id, of ``speculators doctor FOLDER --json``."""
    code = main(["doctor", str(folder), "--json"])
    report = json.loads(capsys.readouterr().out)
    for finding in report["findings"]:
        assert finding["finding"]
        assert finding["causes"]
        assert finding["fix"]
    return code, {finding["id"]: finding["level"] for finding in report["findings"]}


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_good_checkpoint_has_notes_at_most(
    family: str, reduced: bool, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = examined(capsys, make(family, reduced=reduced))
    assert code == 0
    assert set(found.values()) <= {"note"}


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_the_one_fault_is_found(case: Broken, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, usual = examined(capsys, make(case.family))
    folder = tmp_path / "checkpoint"
    shutil.copytree(make(case.family, case.verifier, **case.build), folder)
    case.change(folder)
    code, found = examined(capsys, folder)
    expected = {id_: LEVEL[id_] for id_ in (case.expected, *case.also)}
    assert {id_: level for id_, level in found.items() if id_ not in usual} == expected
    assert code == (1 if LEVEL[case.expected] == "error" else 0)


def test_every_kind_is_provoked() -> None:
    """All kinds that need no trial of the draft; those of the readings have tests of their own."""
    kinds = {kind.id for topic, kinds in CATALOGUE.items() if topic != "Readings" for kind in kinds}
    of_good_ones = {"dspark-needs-v2", "confidence-head-ignored", "mtp-needs-stitching"}
    assert {case.expected for case in BROKEN} | of_good_ones == kinds
    assert len(kinds) >= 24
    assert len(LEVEL) == sum(len(kinds) for kinds in CATALOGUE.values()), "an id stands twice in the catalogue"
