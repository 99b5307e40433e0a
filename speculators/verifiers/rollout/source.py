"""Hidden states that actors on a Ray cluster compute, through Ray's object store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any, Literal

import torch

from speculators.data.rows import Row
from speculators.errors import VerifierError
from speculators.verifiers.rollout.actor import RolloutActor
from speculators.verifiers.rollout.cluster import open_cluster
from speculators.verifiers.rollout.pool import ActorPool, Member
from speculators.verifiers.rollout.settings import RolloutSettings
from speculators.verifiers.rollout.transfer import unpack
from speculators.verifiers.source import HiddenStates, NextTokens, StatesDescription

__all__ = ["RaySource"]

#: Calls of fetch that make sense at once for an actor: one that it works on and one that waits there.
CALLS_PER_ACTOR = 2


class RaySource:
    """Asks a rollout's actors; see :class:`speculators.verifiers.source.HiddenStateSource`.

    With ``transfer_dtype`` native the states are, bit for bit, those of a
    :class:`~speculators.verifiers.transformers_source.TransformersSource` in this process.

    :param verifier: folder or hub id, which every node with an actor can read.
    :param address: as of :func:`~speculators.verifiers.rollout.cluster.open_cluster`.
    :param token_budget: most tokens of one pass of an actor.
    :raises ConfigError: without the package ray.
    :raises VerifierError: when there is no cluster, or no actor starts.
    """

    def __init__(
        self,
        verifier: str,
        layer_ids: Sequence[int],
        final_state: Literal["pre_norm", "post_norm"] = "post_norm",
        token_budget: int = 2048,
        *,
        address: str | None = None,
        settings: RolloutSettings | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        settings = settings or RolloutSettings()
        self.token_budget = token_budget
        self._open = ExitStack()
        ray = self._open.enter_context(open_cluster(address))
        threads = settings.threads or torch.get_num_threads()
        actor = ray.remote(RolloutActor).options(
            num_cpus=settings.cpus, num_gpus=settings.gpus, resources=dict(settings.resources), max_restarts=0
        )

        def start() -> Any:
            return actor.remote(
                verifier,
                tuple(layer_ids),
                final_state,
                token_budget,
                trust_remote_code=trust_remote_code,
                transfer_dtype=settings.transfer_dtype,
                threads=threads,
            )

        try:
            self._pool = self._open.enter_context(closing(ActorPool(ray, settings, start)))
            found: StatesDescription = self._pool.first_description()
        except BaseException:
            self._open.close()
            raise
        precision = None if settings.transfer_dtype == "native" else settings.transfer_dtype
        self._description = dataclasses.replace(found, precision=precision)

    @property
    def description(self) -> StatesDescription:
        return self._description

    @property
    def concurrency(self) -> int:
        """Grows and shrinks with the actors."""
        return CALLS_PER_ACTOR * max(1, self._pool.status()["actors"])

    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        """See :meth:`speculators.verifiers.source.HiddenStateSource.fetch`.

        Native states stay in the object store while an answer lives.

        :raises DataError: for rows that the verifier cannot run.
        :raises VerifierError: when no actor is left, or one gives other states than were asked for.
        """
        asked = list(rows)
        if not asked:
            return []
        tokens = sum(map(len, asked))

        def ask(member: Member) -> Any:
            return self._pool.get(member.handle.prefill.remote(asked))

        packed = self._pool.call(tokens, ask)
        self._pool.received(tokens, packed.nbytes)
        answers = unpack(packed, asked, self._description)
        for one in answers:
            if not bool(torch.isfinite(one.final).all()):
                raise VerifierError(f"the states of row {one.row_id} are not finite; run the verifier in another dtype")
        return answers

    def next_tokens(self, row: Row, positions: Sequence[int], count: int) -> NextTokens:
        """The verifier's own predictions; see :class:`speculators.verifiers.source.TellsNextTokens`.

        :raises VerifierError: when no actor is left.
        """

        def ask(member: Member) -> NextTokens:
            return self._pool.get(member.handle.next_tokens.remote(row, list(positions), count))

        return self._pool.call(len(row), ask)

    def status(self) -> dict[str, int]:
        """See :meth:`~speculators.verifiers.rollout.pool.ActorPool.status`."""
        return self._pool.status()

    def processes(self) -> list[int]:
        """Process ids of the actors that are ready, each on its own node."""
        return [member.process for member in self._pool.members if member.process is not None]

    def close(self) -> None:
        """End the actors, and Ray if it was started for them."""
        self._open.close()
