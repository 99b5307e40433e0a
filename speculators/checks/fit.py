"""Draft against verifier: sizes, rotary embedding, norms, context, and the copies of the verifier's frozen parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from speculators.checks.facts import CheckpointFacts, integer, number, rope_of
from speculators.checks.findings import Finding, Kind
from speculators.errors import SpeculatorsError
from speculators.models.draft_config import build_draft_config
from speculators.models.mtp import build_mtp_decoder

__all__ = ["KINDS", "NOT_FOUND", "check_fit"]

NOT_FOUND = Kind(
    "verifier-not-found",
    "warning",
    "The verifier that the checkpoint names is not on this machine.",
    "Engines that take the verifier from the checkpoint fail; here nothing was compared with it.",
    "Give it with `--verifier`; write a hub id or the right path into speculators_config.verifier.name_or_path.",
)
HIDDEN = Kind(
    "hidden-size-mismatch",
    "error",
    "The draft's hidden size is not the verifier's.",
    "Features and embeddings do not fit: loading or the first round fails.",
    "Give the verifier that the draft was trained for.",
)
VOCAB = Kind(
    "vocab-size-mismatch",
    "error",
    "`vocab_size` in transformer_layer_config is not the verifier's.",
    "Embedding, Markov table and vocabulary tables are of another vocabulary.",
    "vocab_size is the verifier's config value, not the tokenizer's and not the draft's.",
)
ARCHITECTURE = Kind(
    "verifier-architecture-differs",
    "warning",
    "The checkpoint was made for a verifier of another architecture.",
    "If it is not merely renamed, states and acceptance are another model's.",
    "Give the verifier that the draft was trained for.",
)
ROPE_THETA = Kind(
    "rope-theta-mismatch",
    "warning",
    "The draft's rope_theta is not the verifier's.",
    "Harmless if it was trained so; if the key was lost or filled in later, acceptance falls with depth and context length.",
    "Run with `--verifier`, which compares both; write the value of the training.",
)
ROPE_SCALING = Kind(
    "rope-scaling-mismatch",
    "warning",
    "The draft's rope scaling is not the verifier's.",
    "Harmless if it was trained so; else acceptance falls at long contexts.",
    "Write the settings of the training.",
)
HEAD_DIM = Kind(
    "head-dim-differs",
    "note",
    "The draft's head size is not the one that a draft of this verifier gets.",
    "None by itself: a draft may have heads of its own.",
    "Check that the key was not lost on the way; the shapes of q_proj and k_proj depend on it.",
)
EPS = Kind(
    "norm-eps-mismatch",
    "warning",
    "The draft's `rms_norm_eps` is not the verifier's.",
    "A small difference of every norm; engines use the config's value.",
    "Write the value of the training; drafts take the verifier's.",
)
POSITIONS = Kind(
    "positions-below-verifier",
    "warning",
    "The draft's `max_position_embeddings` is below the verifier's.",
    "Engines limit the context to the smaller one, or read past the rotary table.",
    "Write the verifier's value if the rotary settings allow it.",
)
WINDOW = Kind(
    "window-shorter-than-context",
    "note",
    "All draft layers slide, and the verifier sees its whole context.",
    "The draft sees the last tokens only; acceptance may fall where the answer depends on earlier ones.",
    "Measure at the context lengths that are served.",
)
EMBEDDING = Kind(
    "embedding-differs",
    "warning",
    "The shipped embedding is not the verifier's.",
    "Readers that share the verifier's embedding (upstream does, always) run another network than those that load the file's.",
    "If it was not trained (`embed_requires_grad`), save without it; else it must be shipped and loaded.",
)
HEAD = Kind(
    "lm-head-differs",
    "warning",
    "Rows of `lm_head` are not the verifier's rows of the kept ids.",
    "The head is frozen in training, so the rows or the vocabulary tables belong to another mapping or verifier.",
    "Build lm_head again from the verifier and d2t.",
)
KINDS = (
    NOT_FOUND,
    HIDDEN,
    VOCAB,
    ARCHITECTURE,
    ROPE_THETA,
    ROPE_SCALING,
    HEAD_DIM,
    EPS,
    POSITIONS,
    WINDOW,
    EMBEDDING,
    HEAD,
)

#: Largest difference of a frozen weight: bfloat16 copies of values below 1 are off by up to 0.004, larger ones in proportion.
TOLERANCE = 1e-2

#: Rows of the verifier's embedding and head that are compared; a wrong table shows in any.
COMPARED_ROWS = 4096


def check_fit(facts: CheckpointFacts, known: frozenset[str] = frozenset()) -> Iterator[Finding]:
    """Faults against the verifier; nothing without one.

    :param known: ids already found, whose consequences are not reported again.
    """
    if facts.verifier is None or facts.family is None or not facts.decoder:
        return
    sizes = list(_sizes(facts))
    yield from sizes
    if not sizes:  # against another model nothing else means anything
        yield from _architecture(facts)
        yield from _settings(facts)
        yield from _frozen(facts, known)


def _sizes(facts: CheckpointFacts) -> Iterator[Finding]:
    verifier = facts.verifier
    assert verifier is not None
    hidden, vocab = verifier.setting("hidden_size"), verifier.setting("vocab_size")
    if facts.hidden is not None and hidden != facts.hidden:
        yield HIDDEN.found(f"the draft's is {facts.hidden}, the verifier's {hidden}")
    if facts.vocab is not None and vocab != facts.vocab:
        yield VOCAB.found(f"the draft's is {facts.vocab:,}, the verifier's {vocab:,}")


def _architecture(facts: CheckpointFacts) -> Iterator[Finding]:
    verifier = facts.verifier
    assert verifier is not None
    record = facts.speculators.get("verifier")
    made_for = record.get("architectures") if isinstance(record, dict) else None
    own = list(verifier.config.architectures or [])
    if made_for and own and not set(made_for) & set(own):
        yield ARCHITECTURE.found(f"made for {', '.join(map(str, made_for))}, the verifier is {', '.join(own)}")


def _settings(facts: CheckpointFacts) -> Iterator[Finding]:
    """The settings that a draft takes from its verifier, against those a new draft would get."""
    verifier, decoder = facts.verifier, facts.decoder
    assert verifier is not None
    try:
        mtp = facts.family == "mtp"
        usual = build_mtp_decoder(verifier.config) if mtp else build_draft_config(verifier.config, num_layers=1)
    except SpeculatorsError:
        return
    rope, own = rope_of(decoder), dict(usual.rope_parameters or {})
    theta = number(rope.get("rope_theta")) if rope is not None else None
    if rope is not None and theta is not None:
        if theta != float(own.get("rope_theta", 10000.0)):
            yield ROPE_THETA.found(f"the draft's is {theta:g}, the verifier's {own.get('rope_theta', 10000.0):g}")
        if _scaling(rope) != _scaling(own):
            yield ROPE_SCALING.found(f"the draft's is {_scaling(rope)}, the verifier's {_scaling(own)}")
    latent = "kv_lora_rank" in decoder
    if not latent and decoder.get("head_dim") is not None and decoder["head_dim"] != usual.head_dim:
        yield HEAD_DIM.found(f"the draft's is {decoder['head_dim']}, one of this verifier has {usual.head_dim}")
    eps = number(decoder.get("rms_norm_eps"))
    if eps is not None and eps != float(usual.rms_norm_eps):
        yield EPS.found(f"the draft's is {eps:g}, the verifier's {usual.rms_norm_eps:g}")
    positions = integer(decoder.get("max_position_embeddings"))
    if positions is not None and positions < usual.max_position_embeddings:
        yield POSITIONS.found(f"the draft's is {positions:,}, the verifier's {usual.max_position_embeddings:,}")
    window = decoder.get("sliding_window")
    if mtp:
        return
    slides = set(facts.layer_types) == {"sliding_attention"} and not verifier.setting("sliding_window")
    if slides and isinstance(window, int) and window < usual.max_position_embeddings:
        yield WINDOW.found(f"windows of {window:,} tokens in a context of {usual.max_position_embeddings:,}")


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings beside theta; keys with None say nothing."""
    return {key: value for key, value in sorted(rope.items()) if key not in ("rope_theta", "type") and value is not None}


def _frozen(facts: CheckpointFacts, known: frozenset[str]) -> Iterator[Finding]:
    """The draft's copies of the verifier's embedding and head, some rows of each."""
    raw, verifier = facts.raw, facts.verifier
    assert verifier is not None
    for name, part, kind in (
        ("embed_tokens.weight", "embed_tokens", EMBEDDING),
        ("lm_head.weight", "lm_head", HEAD),
    ):
        if part == "embed_tokens" and facts.value("embed_requires_grad"):
            continue  # trained, and so the draft's own
        if part == "lm_head" and not facts.drafts_blocks:
            continue  # EAGLE repositories train it
        tables_wrong = part == "lm_head" and any(id_.startswith(("d2t-", "t2d-", "lm-head-")) for id_ in known)
        if not raw.readable(name) or tables_wrong or "tensor-not-finite" in known:
            continue
        theirs = verifier.part(part)  # type: ignore[arg-type]
        if theirs is None or raw.tensors[name].shape[1:] != theirs.shape[1:]:
            continue
        ours = raw.read(name, slice(0, COMPARED_ROWS))
        ids = torch.arange(ours.shape[0]) if name != "lm_head.weight" else _kept_ids(facts, ours.shape[0])
        if ids is None or int(ids.max()) >= theirs.shape[0]:
            continue
        wrong = _rows_apart(ours, theirs[ids])
        if part == "embed_tokens" and "mask-embedding-zero" in known:
            wrong -= 1  # that row's fault is named already
        if wrong > 0:
            yield kind.found(f"{wrong:,} of the first {ours.shape[0]:,} rows of {name} differ")


def _kept_ids(facts: CheckpointFacts, rows: int) -> Tensor | None:
    """Verifier ids of the first draft ids; None where the table is missing or wrong."""
    if not facts.reduced:
        return torch.arange(rows)
    if not facts.raw.readable("d2t"):
        return None
    d2t = facts.raw.read("d2t").long()
    if d2t.dim() != 1 or d2t.shape[0] < rows:
        return None
    ids = d2t[:rows] + torch.arange(rows)
    return ids if int(ids.min()) >= 0 else None


def _rows_apart(ours: Tensor, theirs: Tensor) -> int:
    """Rows that differ by more than rounding."""
    first, second = ours.float(), theirs.float()
    allowed = TOLERANCE * second.abs().amax(dim=1, keepdim=True).clamp_min(1e-6)
    return int(((first - second).abs() > allowed).any(dim=1).sum())
