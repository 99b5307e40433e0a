"""Hidden states from a verifier in this process, run by transformers: the default source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from speculators.data.rows import Row
from speculators.errors import DataError
from speculators.verifiers.capture import StateCapture, check_layer_ids
from speculators.verifiers.grouping import length_groups
from speculators.verifiers.loading import Verifier
from speculators.verifiers.source import HiddenStates, NextTokens, StatesDescription

__all__ = ["TransformersSource"]


class TransformersSource:
    """Runs rows through the verifier's decoder, without its output head, and keeps the layers asked for.

    The rows of a call are sorted by length and run in sub-batches padded on the right; a causal decoder's states of real
    tokens do not depend on what follows them.

    :param layer_ids: captured layers; id k is the residual stream after k decoder layers.
    :param final_state: take the last state before or after the final norm.
    :param token_budget: most tokens of one pass, padding included (a longer row is a pass of its own).
    :raises VerifierError: when a layer id is not one of the verifier's.
    """

    def __init__(
        self,
        verifier: Verifier,
        layer_ids: Sequence[int],
        final_state: Literal["pre_norm", "post_norm"] = "post_norm",
        token_budget: int = 2048,
    ) -> None:
        #: One pass at a time runs through a verifier.
        self.concurrency = 1
        self._verifier = verifier
        self.token_budget = token_budget
        self._layer_ids = check_layer_ids(layer_ids, verifier.num_layers)
        # Before the norm, the final state is the stream after the last layer, captured once if it is also asked for.
        last = verifier.num_layers
        wanted = (*self._layer_ids, last) if final_state == "pre_norm" and last not in self._layer_ids else self._layer_ids
        self._places = [wanted.index(layer_id) for layer_id in self._layer_ids]
        self._last_place = wanted.index(last) if final_state == "pre_norm" else None
        self._capture = StateCapture(verifier.parts, wanted)
        self._description = StatesDescription(
            layer_ids=self._layer_ids,
            final_state=final_state,
            dtype=str(verifier.dtype).removeprefix("torch."),
            hidden_size=verifier.hidden_size,
            verifier=verifier.name,
            verifier_hash=verifier.hash,
        )

    @property
    def description(self) -> StatesDescription:
        return self._description

    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        """See :meth:`speculators.verifiers.source.HiddenStateSource.fetch`; tensors are on the CPU.

        :raises DataError: when a row is longer than the verifier's context or has an id outside its vocabulary.
        """
        for row in rows:
            self._check(row)
        answers: dict[int, HiddenStates] = {}
        for group in length_groups([len(row) for row in rows], self.token_budget):
            for place, states in zip(group, self._run([rows[place] for place in group])):
                answers[place] = states
        return [answers[place] for place in range(len(rows))]

    @torch.no_grad()
    def next_tokens(self, row: Row, positions: Sequence[int], count: int) -> NextTokens:
        """See :meth:`speculators.verifiers.source.HiddenStateSource.next_tokens`; from the whole model, its head included.

        :raises DataError: as :meth:`fetch`.
        """
        self._check(row)
        places = torch.tensor(positions, dtype=torch.int64)
        ids = torch.tensor(row.input_ids, device=self._verifier.device).view(1, -1)
        with self._verifier.lock:
            logits = self._verifier.logits(ids, keep=places.to(self._verifier.device))[0]
        found = logits.float().log_softmax(dim=-1).topk(min(count, logits.shape[-1]), dim=-1)
        return NextTokens(places, found.indices.cpu(), found.values.cpu())

    def close(self) -> None:
        """Nothing is held beyond the verifier, which belongs to the caller."""

    def _check(self, row: Row) -> None:
        limit = self._verifier.context_length
        if limit is not None and len(row) > limit:
            raise DataError(
                f"row {row.row_id} has {len(row)} tokens and the verifier's context only {limit}; lower --total-seq-len"
            )
        if len(row) and not 0 <= int(row.input_ids.min()) <= int(row.input_ids.max()) < self._verifier.vocab_size:
            raise DataError(
                f"row {row.row_id} has token ids outside the verifier's vocabulary of {self._verifier.vocab_size}; "
                "prepare the data with this verifier's tokenizer"
            )

    @torch.no_grad()
    def _run(self, rows: Sequence[Row]) -> list[HiddenStates]:
        ids = [torch.tensor(row.input_ids) for row in rows]  # a copy: rows of a data set are read-only views
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self._verifier.device)
        with self._verifier.lock, self._capture.recording():
            final: Tensor = self._verifier.states(padded)
            captured = self._capture.take()
        if self._last_place is not None:
            final = captured[self._last_place]
        features = [captured[place] for place in self._places]
        answers = []
        for index, (row, tokens) in enumerate(zip(rows, ids)):
            length = len(row)
            # Copies, so that a cached row does not keep the whole padded batch alive.
            stacked = torch.stack([layer[index, :length] for layer in features], dim=1).cpu()
            answers.append(HiddenStates(row.row_id, tokens, stacked, final[index, :length].clone().cpu()))
        return answers
