"""A diagnosis for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from speculators.checks.doctor import Diagnosis
from speculators.checks.findings import LEVELS
from speculators.checks.readings import ReadingsReport

__all__ = ["rich_report"]

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def rich_report(diagnosis: Diagnosis) -> RenderableType:
    """Findings, then the readings, then one line that adds them up."""
    parts: list[RenderableType] = []
    if diagnosis.findings:
        parts.append(_findings(diagnosis))
    if diagnosis.readings is not None and diagnosis.readings.results:
        parts.append(_readings(diagnosis.readings))
    parts.append(Text(_summary(diagnosis)))
    return Group(*parts)


def _findings(diagnosis: Diagnosis) -> Table:
    table = Table(title=f"{diagnosis.family or 'unknown'} checkpoint {diagnosis.checkpoint}", show_lines=True)
    table.add_column("level")
    table.add_column("finding", overflow="fold", ratio=4)
    table.add_column("causes", overflow="fold", ratio=4)
    table.add_column("fix", overflow="fold", ratio=4)
    for finding in diagnosis.findings:
        level = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(level, Text(f"{finding.id}\n{finding.text}"), Text(finding.kind.causes), Text(finding.kind.fix))
    return table


def _readings(report: ReadingsReport) -> Table:
    title = (
        f"tokens a round of drafting {report.num_draft_tokens}, predicted for {report.rows} greedy answers "
        f"({report.tokens:,} tokens)"
    )
    table = Table(title=title, caption="difference: to the config's own reading, 99 % interval over answers")
    table.add_column("reading", overflow="fold")
    table.add_column("acceptance length", justify="right")
    table.add_column("difference", justify="right")
    table.add_column("verdict", overflow="fold")
    for index, result in enumerate(report.results):
        length = "-" if result.acceptance_length is None else f"{result.acceptance_length:.2f}"
        gain = "-" if result.gain is None else f"{result.gain[0]:+.2f} to {result.gain[1]:+.2f}"
        verdict = result.reason or ("clearly better" if result.wins else "as written" if index == 0 else "no better")
        table.add_row(Text(f"{result.name}: {result.text}"), length, gain, verdict)
    return table


def _summary(diagnosis: Diagnosis) -> str:
    counts = [f"{diagnosis.count(level)} {level}{'' if diagnosis.count(level) == 1 else 's'}" for level in LEVELS]
    against = f"compared with {diagnosis.verifier}" if diagnosis.verifier else "compared with no verifier"
    return f"{', '.join(counts)}; {against}"
