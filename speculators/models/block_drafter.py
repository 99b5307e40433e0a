"""Drafting with DFlash and DSpark models: one parallel pass per block, then one cheap step per token.

Per request and layer, the rotated keys and values of the context are cached (never those of a block), so that a round costs
the new context rows and one block. Shape letters: t context tokens, K slots, N predicted tokens, H hidden size, D draft
vocabulary, g key/value heads, c head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speculators.layout import sees_context
from speculators.models.attention import attend
from speculators.models.backbone import AttendBlocks
from speculators.models.drafter import Draft
from speculators.sampling import SamplingParams, probabilities, sample

if TYPE_CHECKING:
    from speculators.models.dflash import DFlashDraftModel

__all__ = ["BlockDrafter"]

#: Context rows by which a full cache grows; it also at least doubles, so that appending is cheap.
GROWTH = 256


@dataclass(slots=True)
class _Context:
    """One request's cached keys and values: per layer ``[capacity, g, c]``, of which ``length`` rows are filled."""

    length: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def append(self, keys_values: list[tuple[Tensor, Tensor]]) -> None:
        added = keys_values[0][0].shape[0]
        needed = self.length + added
        if not self.keys:
            self.keys = [keys.new_empty(0, *keys.shape[1:]) for keys, _ in keys_values]
            self.values = [values.new_empty(0, *values.shape[1:]) for _, values in keys_values]
        if needed > self.keys[0].shape[0]:
            capacity = max(needed + GROWTH, 2 * self.keys[0].shape[0])
            self.keys = [self._grown(keys, capacity) for keys in self.keys]
            self.values = [self._grown(values, capacity) for values in self.values]
        for layer, (keys, values) in enumerate(keys_values):
            self.keys[layer][self.length : needed] = keys
            self.values[layer][self.length : needed] = values
        self.length = needed

    def _grown(self, rows: Tensor, capacity: int) -> Tensor:
        grown = rows.new_empty(capacity, *rows.shape[1:])
        grown[: self.length] = rows[: self.length]
        return grown

    def rows(self, start: int) -> list[tuple[Tensor, Tensor]]:
        """Per layer, keys and values from row ``start`` on."""
        return [(keys[start : self.length], values[start : self.length]) for keys, values in zip(self.keys, self.values)]


class BlockDrafter:
    """A :class:`~speculators.models.drafter.Drafter` over a block-drafting model.

    :param model: on its device and in its dtype; put into evaluation mode.
    :param markov: whether the Markov head corrects the logits.
    """

    def __init__(self, model: DFlashDraftModel, *, markov: bool = True) -> None:
        self.model = model.eval()
        self.markov = markov
        self.max_draft_tokens = model.layout.max_draft_tokens
        self.layer_ids = tuple(model.target_layer_ids)
        self._contexts: list[_Context] = []
        # Rows that no layer can see any more are skipped; None if a layer sees everything.
        windows = [layer.window for layer in model.windows]
        self._reach = None if None in windows else max(window for window in windows if window is not None)

    @property
    def verifier_ids(self) -> Tensor | None:
        if not self.model.reduced_vocabulary:
            return None
        return self.model.draft_to_verifier(torch.arange(self.model.draft_vocab_size, device=self.model.norm.weight.device))

    def start(self, num_requests: int) -> None:
        self._contexts = [_Context() for _ in range(num_requests)]

    def context_length(self, request: int) -> int:
        return self._contexts[request].length

    def drop(self, request: int) -> None:
        self._contexts[request] = _Context()

    @torch.no_grad()
    def extend(self, token_ids: list[Tensor], features: list[Tensor]) -> None:
        """Append tokens; a block draft reads their features only.

        :raises ValueError: lists or lengths do not match the requests.
        """
        if not len(token_ids) == len(features) == len(self._contexts):
            raise ValueError(
                f"expected {len(self._contexts)} requests, got {len(token_ids)} token lists and {len(features)} features"
            )
        device = self.model.norm.weight.device
        for context, ids, states in zip(self._contexts, token_ids, features, strict=True):
            if ids.shape[0] != states.shape[0]:
                raise ValueError(f"{ids.shape[0]} tokens came with features of {states.shape[0]}")
            if ids.shape[0] == 0:
                continue
            positions = torch.arange(context.length, context.length + ids.shape[0], device=device)
            rows = self.model.context(states.to(device))
            context.append(self.model.context_keys_values(rows, positions))

    @torch.no_grad()
    def propose(
        self,
        anchors: list[int],
        n: int,
        sampling: SamplingParams,
        generator: torch.Generator | None = None,
        full_block: bool = False,
    ) -> list[Draft]:
        """Draft n tokens per request.

        :raises ValueError: n is outside the layout's range, or a list has the wrong length.
        """
        if len(anchors) != len(self._contexts):
            raise ValueError(f"expected {len(self._contexts)} anchors, got {len(anchors)}")
        needed = self.model.layout.query_slots(n)
        num_slots = self.model.layout.block_size if full_block else needed
        return [
            self._propose(context, anchor, n, num_slots, sampling, generator)
            for context, anchor in zip(self._contexts, anchors, strict=True)
        ]

    def block_hidden(self, request: int, anchor: int, num_slots: int) -> Tensor:
        """Post-norm states ``[N, H]`` of the predicting slots of a block that starts at the request's anchor."""
        return self._block_hidden(self._contexts[request], anchor, num_slots)

    def _block_hidden(self, context: _Context, anchor: int, num_slots: int) -> Tensor:
        model = self.model
        device = model.norm.weight.device
        position = context.length
        start = 0 if self._reach is None else max(0, position - self._reach)
        if not context.keys:
            empty = model.context_keys_values(
                model.norm.weight.new_zeros(0, model.fc.out_features), torch.zeros(0, dtype=torch.long, device=device)
            )
            context.append(empty)
        embeds = model.embed_blocks(torch.tensor([anchor], device=device), num_slots)
        positions = torch.arange(start, position, device=device)
        anchor_position = torch.full((1, 1, 1), position, device=device)
        slots = torch.arange(num_slots, device=device)
        attend_layers: list[AttendBlocks] = []
        for window in model.windows:
            visible = None
            if window.window is not None:
                visible = sees_context(positions, anchor_position, slots[None, :, None], window.window, model.window_reference)
            attend_layers.append(partial(attend, visible=visible, causal_block=window.causal_block))
        hidden = model.run_cached(embeds, position, attend_layers, context.rows(start))
        return model.predicting(hidden)[0]

    def _propose(
        self,
        context: _Context,
        anchor: int,
        n: int,
        num_slots: int,
        sampling: SamplingParams,
        generator: torch.Generator | None,
    ) -> Draft:
        model, heads = self.model, self.model.heads
        hidden = self._block_hidden(context, anchor, num_slots)[:n]  # [n, H]
        base = heads.lm_head(hidden)  # [n, D]
        markov: Any = heads.markov if self.markov else None
        state = None if markov is None else markov.start(1)
        previous = torch.tensor([anchor], device=hidden.device)
        draft_sampling = sampling.without_filters()
        draft_ids, tokens, distributions, before = [], [], [], []
        for depth in range(n):
            logits = base[depth : depth + 1]
            if markov is not None:
                code, state = markov.step(hidden[depth : depth + 1], previous, state)
                logits = logits + markov.markov_w2(code)
            before.append(previous)
            if sampling.greedy:
                drawn = logits.argmax(dim=-1)
            else:
                distribution = probabilities(logits, draft_sampling)
                drawn = sample(distribution, generator)
                distributions.append(distribution)
            previous = model.draft_to_verifier(drawn)
            draft_ids.append(drawn)
            tokens.append(previous)
        confidence = heads.confidence_logits(hidden, torch.cat(before))
        return Draft(
            tokens=torch.cat(tokens),
            draft_ids=torch.cat(draft_ids),
            probabilities=torch.cat(distributions) if distributions else None,
            confidence=None if confidence is None else confidence.sigmoid(),
        )
