"""Our side of the parity tests: the inputs, random checkpoints, and what our models and drafters make of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculators.batch import PackedBatch
from speculators.config import SpeculatorModelConfig
from speculators.data.vocabulary import VocabularyMapping, build_mapping
from speculators.layout import previous_position, state_position
from speculators.models import SpeculatorModel
from speculators.models.verifier_weights import VerifierHead
from speculators.sampling import SamplingParams
from tests.interop.cases import HIDDEN, VERIFIER_LAYERS, VOCAB, Case, written

__all__ = ["inputs", "outputs_of", "packed_row", "save_ours", "token_counts", "vocabulary"]

#: Lengths of the documents of the packed row, and its padding.
DOCUMENTS, PADDING = (14, 17, 12), 5
#: Anchors: a document's first and last token, and some between.
ANCHORS = (0, 3, 9, 13, 14, 20, 26, 30, 31, 36, 41)


def inputs() -> dict[str, Tensor]:
    """One packed row of three documents for all cases, and logits for the losses."""
    generator = torch.Generator().manual_seed(11)
    total = sum(DOCUMENTS) + PADDING
    lengths = (*DOCUMENTS, PADDING)
    documents = (*range(len(DOCUMENTS)), -1)
    return {
        "input_ids": torch.randint(0, VOCAB, (total,), generator=generator),
        "document_ids": torch.repeat_interleave(torch.tensor(documents), torch.tensor(lengths)),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "anchors": torch.tensor(ANCHORS),
        "features": torch.randn(total, VERIFIER_LAYERS, HIDDEN, generator=generator),
        "final_states": torch.randn(total, HIDDEN, generator=generator),
        "loss_logits": 3 * torch.randn(1, 20, VOCAB, generator=generator),
        "loss_targets": 3 * torch.randn(1, 20, VOCAB, generator=generator),
        "loss_mask": torch.rand(1, 20, generator=generator) < 0.7,
    }


def packed_row(values: dict[str, Tensor], num_features: int) -> PackedBatch:
    """The inputs as our models take them."""
    return PackedBatch(
        input_ids=values["input_ids"],
        loss_mask=torch.ones_like(values["input_ids"], dtype=torch.bool),
        document_ids=values["document_ids"],
        position_ids=values["position_ids"],
        row_ids=tuple(range(len(DOCUMENTS))),
        anchors=values["anchors"],
        features=values["features"][:, :num_features].contiguous(),
        final_states=values["final_states"],
    )


def token_counts() -> dict[int, int]:
    """Frequencies with ties, and ids never seen, for the reduced vocabulary."""
    rng = np.random.default_rng(3)
    return dict(Counter(int(token) for token in rng.zipf(1.3, size=400) if token < VOCAB))


def vocabulary(size: int) -> VocabularyMapping:
    """The draft vocabulary of our builder."""
    counts = np.zeros(VOCAB, dtype=np.int64)
    for token, count in token_counts().items():
        counts[token] = count
    return build_mapping(counts, size, VOCAB)


def our_keys(family: str) -> dict[str, str]:
    """Keys that only this library has, at what upstream's forward passes do: measure a window from the anchor, but in P-EAGLE
    from the slot."""
    return {"sliding_window_reference": "slot" if family == "peagle" else "anchor"}


def save_ours(case: Case, verifier: Path, folder: Path, seed: int) -> None:
    """Save a checkpoint of random weights, as large as to make distributions far from uniform."""
    config = SpeculatorModelConfig.from_dict(written(case.family, case.options, str(verifier)) | our_keys(case.family))
    tables = {}
    if case.options.get("draft_vocab_size", VOCAB) != VOCAB:
        mapping = vocabulary(case.options["draft_vocab_size"])
        tables = {"d2t": torch.from_numpy(mapping.d2t), "t2d": torch.from_numpy(mapping.t2d)}
    model: Any = SpeculatorModel.from_verifier(config, **tables)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(std=0.4 if "markov" in name else 0.2, generator=generator)
    model.save_pretrained(folder, dtype=getattr(torch, case.dtype), include_embeddings=case.include_embeddings)


@torch.no_grad()
def outputs_of(model: Any, values: dict[str, Tensor], verifier: Path) -> dict[str, Tensor]:
    """Logits and confidence over the packed row, the verifier's own logits, and every anchor's greedy draft.

    A chain's later slots read the row's tokens: past the document's end, where upstream's row has others, all is 0.
    """
    mtp = model.config.speculators_model_type == "mtp"
    row = packed_row(values, len(model.target_layer_ids))
    if mtp:
        row.features = values["final_states"][:, None]
    row.anchors = row.anchors[row.anchor_positions >= model.layout.first_anchor]
    slot_states = model.draft_hidden(row)
    hidden, heads = model.predicting(slot_states), model.heads_of(slot_states, row.anchor_ids)
    depths = torch.arange(hidden.shape[1])
    previous = row.input_ids[previous_position(row.anchors[:, None], depths)]
    head = VerifierHead.from_folder(verifier, model.t2d)
    # Upstream norms the verifier's state with the draft's epsilon, which only one case here makes another than the verifier's.
    head.eps = model.config.transformer_layer_config.rms_norm_eps
    states = values["final_states"][state_position(row.anchors[:, None], depths)]
    results = {
        "logits": heads.logits(hidden, previous),
        "targets": head.draft_logits(head.normalize(states)),
        "confidence": heads.confidence_logits(hidden, previous),
    }
    if model.layout.first_anchor:
        inside = row.document_ids[row.anchors[:, None] + depths] == row.document_ids[row.anchors, None]
        results = {name: value * inside[..., None] for name, value in results.items() if value is not None}
    drafts = [draft_after(model, row, int(anchor), model.layout.max_draft_tokens) for anchor in row.anchors]
    results["tokens"] = torch.stack([draft.tokens for draft in drafts])
    if drafts[0].confidence is not None:
        results["draft_confidence"] = torch.stack([draft.confidence for draft in drafts])
    if mtp:
        # Only the first step is upstream's: see docs/differences.md. Its loss is against the row's tokens, not the verifier's.
        return {name: results[name][:, :1] for name in ("logits", "tokens")}
    return {name: value for name, value in results.items() if value is not None}


def draft_after(model: Any, row: PackedBatch, anchor: int, num_tokens: int) -> Any:
    """The drafter's greedy draft after a row position, with the position's document as its context."""
    start = anchor - int(row.position_ids[anchor])
    drafter = model.drafter()
    drafter.start(1)
    drafter.extend([row.input_ids[start:anchor]], [row.features[start:anchor]])
    (draft,) = drafter.propose([int(row.input_ids[anchor])], num_tokens, SamplingParams())
    return draft
