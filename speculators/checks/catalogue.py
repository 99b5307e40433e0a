"""Every kind of finding, and the page of the documentation that lists them."""

from __future__ import annotations

from speculators.checks import chains, checkpoint, config_keys, fit, layers, mtp, readings, serving, tensors, vocabulary
from speculators.checks.findings import Kind

__all__ = ["CATALOGUE", "markdown_table"]

#: Kinds by topic.
CATALOGUE: dict[str, tuple[Kind, ...]] = {
    "Files": checkpoint.KINDS,
    "Config": config_keys.KINDS,
    "Captured layers": layers.KINDS,
    "Vocabulary": vocabulary.KINDS,
    "EAGLE-3 and P-EAGLE": chains.KINDS,
    "MTP": mtp.KINDS,
    "Tensors": tensors.KINDS,
    "Serving": serving.KINDS,
    "Against the verifier": fit.KINDS,
    "Readings": readings.KINDS,
}


def markdown_table(kinds: tuple[Kind, ...]) -> str:
    """One topic's table as it stands in docs/doctor.md."""
    lines = ["| id | level | what | causes | fix |", "|---|---|---|---|---|"]
    lines += [f"| `{kind.id}` | {kind.level} | {kind.what} | {kind.causes} | {kind.fix} |".replace("\n", " ") for kind in kinds]
    return "\n".join(lines)
