"""All checks of one checkpoint, in an order in which a fault is reported once, where it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculators.checks.chains import check_chains
from speculators.checks.checkpoint import read_checkpoint
from speculators.checks.config_keys import check_config, check_whole_config
from speculators.checks.facts import CheckpointFacts
from speculators.checks.findings import LEVELS, Finding, Level
from speculators.checks.fit import NOT_FOUND, check_fit
from speculators.checks.layers import check_layers
from speculators.checks.mtp import check_mtp
from speculators.checks.readings import ReadingSettings, ReadingsReport, compare_readings, untried
from speculators.checks.serving import check_serving
from speculators.checks.tensors import check_tensors
from speculators.checks.verifier import find_verifier, is_at_hand
from speculators.checks.vocabulary import check_vocabulary
from speculators.errors import DataError, VerifierError

__all__ = ["Diagnosis", "examine"]


@dataclass(slots=True)
class Diagnosis:
    """What was found in one checkpoint."""

    checkpoint: str
    family: str | None
    verifier: str | None  #: the one that was compared with, if any
    findings: list[Finding] = field(default_factory=list)
    readings: ReadingsReport | None = None  #: None if no verifier was given

    def count(self, level: Level) -> int:
        return sum(finding.level == level for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """1 with an error, else 0."""
        return 1 if self.count("error") else 0

    def add(self, findings: Iterable[Finding]) -> None:
        self.findings.extend(findings)

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(finding.id for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``; keys are stable."""
        return {
            "schema": 1,
            "checkpoint": self.checkpoint,
            "family": self.family,
            "verifier": self.verifier,
            "counts": {level: self.count(level) for level in LEVELS},
            "findings": [finding.to_json() for finding in self.findings],
            "readings": None if self.readings is None else self.readings.to_json(),
        }


def examine(
    checkpoint: str | Path,
    verifier: str | None = None,
    *,
    data: Sequence[Path] = (),
    settings: ReadingSettings | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Examine a checkpoint folder.

    :param verifier: folder or hub id; with it, drafting is tried under the right and under wrong readings. Without it, the
        verifier that the checkpoint names is compared with if it is at hand, and nothing is drafted.
    :param data: files of prompts; the package's examples by default.
    :param settings: of the trial.
    :param progress: told what is being done, in a few words.
    :raises ConfigError: the folder cannot be read.
    :raises DataError: ``data`` cannot be used.
    :raises VerifierError: the given verifier cannot be read.
    """
    progress("reading the checkpoint")
    facts = CheckpointFacts(read_checkpoint(Path(checkpoint)))
    diagnosis = Diagnosis(str(checkpoint), facts.family, verifier)
    diagnosis.add(facts.raw.findings)
    diagnosis.add(_find_verifier(facts, verifier))
    diagnosis.verifier = facts.verifier.name if facts.verifier is not None else None
    for check in (check_config, check_layers, check_vocabulary, check_chains, check_mtp, check_serving):
        diagnosis.add(check(facts))
    progress("looking at the tensors")
    diagnosis.add(check_tensors(facts, diagnosis.ids))
    diagnosis.add(check_fit(facts, diagnosis.ids))
    if not diagnosis.count("error"):
        diagnosis.add(check_whole_config(facts))
    if verifier is not None:
        try:
            diagnosis.readings = compare_readings(facts, verifier, data, settings or ReadingSettings(), progress)
        except DataError:
            raise
        except Exception as error:  # a draft with errors may fail in any way; one without them must not
            if not diagnosis.count("error"):
                raise
            diagnosis.readings = untried(str(error) or type(error).__name__)
        diagnosis.add(diagnosis.readings.findings)
    diagnosis.findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return diagnosis


def _find_verifier(facts: CheckpointFacts, given: str | None) -> list[Finding]:
    """Fill in the verifier's facts."""
    if given is not None:
        facts.verifier = find_verifier(given)
        return []
    name = facts.verifier_name
    if name is None:
        return []
    if not is_at_hand(name):
        return [NOT_FOUND.found(f"the checkpoint names {name!r}")]
    try:
        facts.verifier = find_verifier(name, read_weights=Path(name).is_dir())
    except VerifierError as error:
        return [NOT_FOUND.found(f"the checkpoint names {name!r}: {error}")]
    return []
