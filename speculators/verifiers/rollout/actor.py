"""The actor that runs the verifier on some node of the cluster."""

from __future__ import annotations

import os
from typing import Literal

from speculators.data.rows import Row
from speculators.verifiers.rollout.settings import TransferDtype
from speculators.verifiers.rollout.transfer import PackedStates, pack
from speculators.verifiers.source import NextTokens, StatesDescription

__all__ = ["RolloutActor"]


class RolloutActor:
    """A verifier of transformers, loaded on the actor's node.

    It runs the very groups of rows that it is asked for, as the same verifier in the asking process would: the bits are the
    same where the number of threads is.

    :param verifier: folder or hub id, as this node sees it.
    """

    def __init__(
        self,
        verifier: str,
        layer_ids: tuple[int, ...],
        final_state: Literal["pre_norm", "post_norm"],
        token_budget: int,
        *,
        trust_remote_code: bool,
        transfer_dtype: TransferDtype,
        threads: int,
    ) -> None:
        import torch

        from speculators.verifiers.loading import load_verifier
        from speculators.verifiers.transformers_source import TransformersSource

        torch.set_num_threads(threads)
        self._source = TransformersSource(
            load_verifier(verifier, trust_remote_code=trust_remote_code), layer_ids, final_state, token_budget
        )
        self._transfer_dtype = transfer_dtype

    def describe(self) -> tuple[StatesDescription, int]:
        """What the states are, and this actor's process id."""
        return self._source.description, os.getpid()

    def prefill(self, rows: list[Row]) -> PackedStates:
        """States of the rows of one pass or more."""
        return pack(self._source.fetch(rows), self._transfer_dtype)

    def next_tokens(self, row: Row, positions: list[int], count: int) -> NextTokens:
        """See :class:`speculators.verifiers.source.TellsNextTokens`."""
        return self._source.next_tokens(row, positions, count)
