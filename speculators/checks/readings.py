"""Was the draft trained as its config says? Acceptance on real text under the config's reading and under each likely wrong one.

The verifier answers some prompts greedily; the exact replay (:mod:`speculators.decoding.replay`) then tells what the decoder
would accept of the draft's blocks, for every reading, without decoding again. A wrong reading does not crash: it costs the
acceptance. So if one accepts clearly more than the config's own, the config is what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from speculators.checks.facts import CheckpointFacts
from speculators.checks.findings import Finding
from speculators.checks.reading_kinds import FEW_ROWS, KINDS, LOW, NOT_REBUILT, UNTRIED, Reading, readings_of
from speculators.checks.trial import Trial, TrialSettings, measure, prepare_trial
from speculators.errors import ConfigError, SpeculatorsError

__all__ = ["KINDS", "ReadingResult", "ReadingSettings", "ReadingsReport", "compare_readings", "untried"]

ReadingSettings = TrialSettings

#: Rows below which resampling says nothing.
MIN_ROWS = 5
#: A reading wins if it accepts this many tokens a round more, and this share more, and resampling rows never says otherwise.
MIN_GAIN, MIN_SHARE = 0.1, 0.05
CONFIDENCE = 0.99
_RESAMPLES = 4000

#: Tokens a round below which the draft is of no use; 1 is what decoding without a draft yields.
LOW_ACCEPTANCE = 1.15
#: Share of the answers' tokens that the verifier's rebuilt head may not have written: near ties and rounding.
MAX_SURPRISES = 0.05


@dataclass(frozen=True, slots=True)
class ReadingResult:
    """One reading's acceptance."""

    name: str
    text: str
    acceptance_length: float | None  #: tokens a round, bonus token included; None if it could not be measured
    gain: tuple[float, float] | None = None  #: interval of its difference to the config's own reading
    wins: bool = False
    reason: str = ""  #: why it was not measured or not judged

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "reading": self.text,
            "acceptance_length": self.acceptance_length,
            "gain_interval": None if self.gain is None else list(self.gain),
            "wins": self.wins,
            "reason": self.reason,
        }


@dataclass(slots=True)
class ReadingsReport:
    """All readings; the config's own comes first."""

    num_draft_tokens: int = 0
    rows: int = 0
    tokens: int = 0  #: of the answers
    results: list[ReadingResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    skipped: str = ""  #: why nothing was tried

    def to_json(self) -> dict[str, Any]:
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "rows": self.rows,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "results": [result.to_json() for result in self.results],
        }


def compare_readings(
    facts: CheckpointFacts,
    verifier: str,
    data: Sequence[Path],
    settings: TrialSettings,
    progress: Callable[[str], None] = lambda _: None,
) -> ReadingsReport:
    """Try all readings; a checkpoint that cannot be loaded is not tried.

    :raises DataError: the prompts cannot be used.
    :raises VerifierError: the verifier cannot be run.
    """
    try:
        trial = prepare_trial(facts, verifier, data, settings, progress)
    except ConfigError as error:
        return untried(str(error))
    report = ReadingsReport(trial.num_draft_tokens, len(trial.rows))
    own, wrong = readings_of(trial.draft, trial.teacher, facts, longest_row=trial.longest_row)
    progress("drafting as the config says")
    reference = measure(trial, own)
    report.tokens = trial.tokens
    report.results.append(ReadingResult(own.name, own.text, _ratio(reference)))
    for reading in wrong:
        progress(f"drafting with {reading.name}")
        report.results.append(_judged(trial, reading, reference))
    report.findings = _verdicts(trial, report, wrong)
    return report


def untried(reason: str) -> ReadingsReport:
    """The report of a draft that could not be run."""
    return ReadingsReport(skipped=reason, findings=[UNTRIED.found(reason)])


def _judged(trial: Trial, reading: Reading, reference: np.ndarray) -> ReadingResult:
    """One wrong reading against the config's own ``[rows, 2]`` (tokens, rounds)."""
    try:
        sums = measure(trial, reading)
    except (SpeculatorsError, ValueError, IndexError) as error:
        return ReadingResult(reading.name, reading.text, None, reason=str(error))
    length = _ratio(sums)
    if reading.degenerate(trial):
        return ReadingResult(reading.name, reading.text, length, reason="its targets are mostly one token")
    gain = _gain(sums, reference)
    own = _ratio(reference)
    wins = (
        gain is not None
        and length is not None
        and own is not None
        and gain[0] > 0
        and length - own >= max(MIN_GAIN, MIN_SHARE * own)
    )
    return ReadingResult(reading.name, reading.text, length, gain, wins)


def _ratio(sums: np.ndarray) -> float | None:
    tokens, rounds = sums.sum(axis=0)
    return float(tokens / rounds) if rounds else None


def _gain(sums: np.ndarray, reference: np.ndarray, seed: int = 0) -> tuple[float, float] | None:
    """Interval of the difference of two acceptance lengths over resampled rows, the same rows for both; None for few rows."""
    usable = (sums[:, 1] > 0) & (reference[:, 1] > 0)
    if usable.sum() < MIN_ROWS:
        return None
    first, second = sums[usable], reference[usable]
    chosen = np.random.default_rng(seed).integers(0, len(first), size=(_RESAMPLES, len(first)))
    ours, theirs = first[chosen].sum(axis=1), second[chosen].sum(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ours[:, 0] / ours[:, 1] - theirs[:, 0] / theirs[:, 1], [tail, 1 - tail])
    return float(low), float(high)


def _verdicts(trial: Trial, report: ReadingsReport, wrong: Sequence[Reading]) -> list[Finding]:
    own = report.results[0].acceptance_length
    findings = []
    winners = [(result, reading) for result, reading in zip(report.results[1:], wrong, strict=True) if result.wins]
    if winners:
        # One fault makes several readings better (the other layout, and positions shifted by one): the best is the fault.
        best, reading = max(winners, key=lambda pair: pair[0].acceptance_length or 0.0)
        assert best.gain is not None
        findings.append(
            reading.kind.found(
                f"the checkpoint seems to have been trained under another reading: {best.text}; it accepts "
                f"{best.acceptance_length:.2f} tokens a round, the config's own reading {own:.2f} "
                f"(difference {best.gain[0]:.2f} to {best.gain[1]:.2f}, {report.rows} answers)"
            )
        )
    elif own is not None and own < LOW_ACCEPTANCE:
        findings.append(LOW.found(f"{own:.2f} tokens a round, and no wrong reading gives clearly more"))
    if report.rows < MIN_ROWS:
        findings.append(FEW_ROWS.found(f"{report.rows} answers; {MIN_ROWS} are needed for a verdict"))
    if trial.surprises > MAX_SURPRISES * max(trial.tokens, 1):
        findings.append(NOT_REBUILT.found(f"{trial.surprises} of {trial.tokens} tokens of the answers are not rebuilt"))
    return findings
