"""Upstream's forward passes with chosen inputs; runs in upstream's environment, on upstream's own modules alone.

Every family's function returns tensors by name: ``logits`` of teacher-forced predictions, ``tokens`` of greedy drafts (verifier
ids), and what else the family computes. Upstream has no decoder: its greedy drafts are the argmax of its own logits, with the
drafted tokens fed where training feeds the row's. Shape letters: T tokens, A anchors, K slots, N predicted tokens, H hidden
size, D draft vocabulary.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import Any

import torch
from speculators.models.eagle3.data import shift_batch
from torch import Tensor

#: Tokens drafted by the families that draft one after another.
NUM_STEPS = 3


@contextmanager
def captured_metrics(model: Any):
    """Take the loss's place: yields the list of what every call was given, as (positional, by name)."""
    calls: list[tuple[tuple, dict]] = []
    modules = [sys.modules[base.__module__] for base in type(model).__mro__ if hasattr(base, "config_class")]
    module = next(module for module in modules if hasattr(module, "compute_metrics"))
    original = module.compute_metrics

    def capture(*arguments: Any, **named: Any):
        calls.append((arguments, named))
        return torch.zeros(()), {}

    module.compute_metrics = capture
    try:
        yield calls
    finally:
        module.compute_metrics = original


@contextmanager
def captured_output(module: Any):
    """Yields a list of everything the module returns."""
    outputs: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def to_verifier_ids(model: Any, draft_ids: Tensor) -> Tensor:
    return draft_ids if model.d2t is None else draft_ids + model.d2t[draft_ids]


def blocks(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """DFlash and DSpark. Upstream samples its anchors from the loss mask: the mask given here is true at the anchors alone."""
    num_slots, num_features = model.block_size, len(model.target_layer_ids)
    anchors = inputs["anchors"]
    loss_mask = torch.zeros_like(inputs["input_ids"])
    loss_mask[anchors] = 1
    with captured_metrics(model) as calls, captured_output(model.norm) as hidden, captured_output(model.lm_head) as base:
        model(
            hidden_states=inputs["features"][:, :num_features].flatten(1)[None],
            input_ids=inputs["input_ids"][None],
            loss_mask=loss_mask[None],
            verifier_last_hidden_states=inputs["final_states"][None],
            document_ids=inputs["document_ids"][None],
            position_ids=inputs["position_ids"][None],
            max_anchors=len(anchors),
        )
    (arguments, _), first = calls[0], 0 if model.config.sample_from_anchor else 1

    def by_slot(tensor: Tensor) -> Tensor:
        return tensor.reshape(len(anchors), num_slots, -1)

    results = {"logits": by_slot(arguments[0])[:, first:], "targets": by_slot(arguments[1])[:, first:]}
    confidence = getattr(model, "confidence_head", None)
    if confidence is not None:
        results["confidence"] = by_slot(arguments[2])[:, first:, 0]
    results |= draft_blocks(model, by_slot(hidden[0]), by_slot(base[0]), inputs["input_ids"][anchors], first)
    return results


def draft_blocks(model: Any, hidden: Tensor, base: Tensor, anchor_ids: Tensor, first: int) -> dict[str, Tensor]:
    """Greedy drafts ``[A, N]`` and their confidence, from states ``[A, K, H]`` and base logits ``[A, K, D]``.

    :param first: the first slot that predicts; the slot before it reads the anchor too, as in training.
    """
    markov, confidence = getattr(model, "markov_head", None), getattr(model, "confidence_head", None)
    previous = [anchor_ids] * (first + 1)
    tokens, trust = [], []
    for slot in range(first, hidden.shape[1]):
        logits = base[:, slot]
        ids, states = torch.stack(previous, dim=1), hidden[:, : slot + 1]
        if markov is not None:
            logits = logits + markov.block_bias(prev_token_ids=ids, hidden_states=states)[:, -1]
        if confidence is not None:
            features = states[:, -1]
            if model.config.confidence_head_with_markov:
                features = torch.cat([features, markov.prev_embeddings(ids[:, -1])], dim=-1)
            trust.append(confidence(features).sigmoid())
        tokens.append(to_verifier_ids(model, logits.argmax(dim=-1)))
        previous.append(tokens[-1])
    results = {"tokens": torch.stack(tokens, dim=1)}
    if trust:
        results["draft_confidence"] = torch.stack(trust, dim=1)
    return results


def chain_anchors(inputs: dict[str, Tensor]) -> list[int]:
    """Anchors that a chain can start from: a document's first token has no state before it."""
    return [anchor for anchor in inputs["anchors"].tolist() if int(inputs["position_ids"][anchor]) > 0]


def shifted(
    inputs: dict[str, Tensor], num_features: int, document: int | None = None, end: int | None = None
) -> dict[str, Tensor]:
    """Upstream's training row of Eagle3: every document shifted by its own function, packed and padded.

    :param document: only this one, and of it only the tokens before ``end``.
    """
    wanted = range(int(inputs["document_ids"].max()) + 1) if document is None else [document]
    parts = []
    for index in wanted:
        rows = (inputs["document_ids"] == index).nonzero().squeeze(-1)[:end]
        part = shift_batch(
            {
                "input_ids": inputs["input_ids"][rows],
                "hidden_states": inputs["features"][rows, :num_features].flatten(1),
                "verifier_last_hidden_states": inputs["final_states"][rows],
                "loss_mask": torch.ones(len(rows)),
                "lengths": torch.tensor([len(rows)]),
                "position_ids": inputs["position_ids"][rows],
            }
        )
        parts.append(part | {"document_ids": torch.full((len(rows) - 1,), index)})
    last = parts[-1]
    padding = {name: value.new_zeros(NUM_STEPS, *value.shape[1:]) for name, value in last.items() if name != "lengths"}
    padding["position_ids"] += last["position_ids"][-1] + 1 + torch.arange(NUM_STEPS)
    padding["document_ids"] += -1 if document is None else document
    return {name: torch.cat([part[name] for part in (*parts, padding)])[None] for name in padding}


def shifted_row(inputs: dict[str, Tensor], anchor: int) -> int:
    """Place of an anchor in the shifted row, where every document up to its own lost the first token."""
    return anchor - int(inputs["document_ids"][anchor]) - 1


def eagle3(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Eagle3: ``logits`` and ``targets`` ``[A, N, D]`` of the training-time-test steps at the anchors.

    A later step reads the row's tokens; those past the document's end are another's, so what follows from them is left 0.
    """
    num_features = model.fc.in_features // model.hidden_size
    row = shifted(inputs, num_features)
    with captured_metrics(model) as calls, captured_output(model.lm_head) as by_step:
        model(**row, ttt_steps=NUM_STEPS)
    all_targets = calls[0][0][1][0]
    anchors = chain_anchors(inputs)
    logits, targets = (torch.zeros(len(anchors), NUM_STEPS, all_targets.shape[-1]) for _ in range(2))
    drafts = []
    for place, anchor in enumerate(anchors):
        start, document = shifted_row(inputs, anchor), int(inputs["document_ids"][anchor])
        for step in range(NUM_STEPS):
            if int(inputs["document_ids"][anchor + step]) == document:
                logits[place, step], targets[place, step] = by_step[step][0, start], all_targets[start + step]
        drafts.append(draft_eagle3(model, inputs, num_features, document, int(inputs["position_ids"][anchor])))
    return {"logits": logits, "targets": targets, "tokens": torch.stack(drafts)}


def draft_eagle3(model: Any, inputs: dict[str, Tensor], num_features: int, document: int, position: int) -> Tensor:
    """Greedy draft ``[N]`` after the token at a document's position: its tokens are put where training reads the row's."""
    row = shifted(inputs, num_features, document, position + 1)
    tokens: list[Tensor] = []
    for step in range(NUM_STEPS):
        with captured_metrics(model), captured_output(model.lm_head) as by_step:
            model(**row, ttt_steps=step + 1)
        tokens.append(to_verifier_ids(model, by_step[step][0, position - 1].argmax(dim=-1)))
        row["input_ids"][0, position + step] = tokens[-1]
    return torch.stack(tokens)


def peagle(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """P-EAGLE: ``logits`` and ``targets`` ``[A, N, D]`` of the anchors' chains, which take the place of upstream's sample.

    Past the document's end all is left 0, as for Eagle3.
    """
    core = sys.modules[type(model).__module__]
    row = shifted(inputs, model.fc.in_features // model.hidden_size)
    length, anchors = row["input_ids"].shape[1], chain_anchors(inputs)
    starts = torch.tensor([shifted_row(inputs, anchor) for anchor in anchors])
    anchor_pos = torch.cat([torch.arange(length), starts.repeat(NUM_STEPS - 1)])
    depth = torch.cat([torch.zeros(length, dtype=torch.long), torch.arange(1, NUM_STEPS).repeat_interleave(len(starts))])
    original = core.generate_cod_sample_indices
    core.generate_cod_sample_indices = lambda **_: (anchor_pos, depth)
    try:
        with captured_metrics(model) as calls:
            model(**row, num_depths=NUM_STEPS)
    finally:
        core.generate_cod_sample_indices = original
    chains = torch.stack(
        [starts, *(length + step * len(starts) + torch.arange(len(starts)) for step in range(NUM_STEPS - 1))], 1
    )
    logits, targets = (calls[0][1][name][0][chains] for name in ("logits", "targets"))
    tokens = to_verifier_ids(model, logits.argmax(dim=-1))
    ends = torch.tensor(anchors)[:, None] + torch.arange(NUM_STEPS)
    inside = (inputs["document_ids"][ends] == inputs["document_ids"][ends[:, :1]])[..., None]
    return {"logits": logits * inside, "targets": targets * inside, "tokens": tokens}


def mtp(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """MTP: ``logits`` ``[A, 1, V]`` and ``tokens`` ``[A, 1]`` of the first step, over the packed row.

    Row t has the state of token t and reads token t + 1, the anchor.
    """
    by_step, _, _ = model(
        input_ids=inputs["input_ids"][None],
        hidden_states=inputs["final_states"][None],
        position_ids=inputs["position_ids"][None],
    )
    logits = by_step[0][0, torch.tensor(chain_anchors(inputs)) - 1][:, None]
    return {"logits": logits, "tokens": logits.argmax(dim=-1)}


FORWARD = {"dflash": blocks, "dspark": blocks, "eagle3": eagle3, "peagle": peagle, "mtp": mtp}
