"""MTP drafts: one layer that is served from inside its verifier."""

from __future__ import annotations

from collections.abc import Iterator

from speculators.checks.facts import CheckpointFacts
from speculators.checks.findings import Finding, Kind

__all__ = ["KINDS", "check_mtp"]

PRE_NORM = Kind(
    "mtp-state-before-norm",
    "warning",
    "The MTP layer was trained on the verifier's last state before its final norm.",
    "vLLM feeds the state after the norm, another input than in training. Upstream trains on the state before it and has no "
    "key for that.",
    "Run with `--verifier`, which compares both; train with `hidden_state_input` post_norm (the default here) for vLLM.",
)
STITCH = Kind(
    "mtp-needs-stitching",
    "note",
    "An MTP checkpoint in the speculators format.",
    "vLLM's speculators loader does not know it; an MTP layer is served from its verifier's checkpoint.",
    "Put it into the verifier with `speculators stitch-mtp`.",
)
LAYERS = Kind(
    "mtp-verifier-layers",
    "error",
    "`num_hidden_layers` is not the verifier's.",
    "An MTP config is the verifier's own: the draft reads the state after that many layers.",
    "Write the verifier's number, or give the verifier that the draft was trained for.",
)
KINDS = (PRE_NORM, STITCH, LAYERS)


def check_mtp(facts: CheckpointFacts) -> Iterator[Finding]:
    """Faults of MTP drafts; nothing for other families."""
    if facts.family != "mtp":
        return
    yield STITCH.found("speculators_model_type is mtp")
    written = facts.config.get("hidden_state_input")
    if facts.value("hidden_state_input") == "pre_norm":
        text = "hidden_state_input is pre_norm" if written else "no hidden_state_input, which means upstream's pre_norm"
        yield PRE_NORM.found(text)
    if facts.verifier is not None and facts.num_layers not in (None, facts.verifier.num_layers):
        yield LAYERS.found(f"the draft's is {facts.num_layers}, the verifier's {facts.verifier.num_layers}")
