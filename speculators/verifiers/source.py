"""Hidden states of the frozen verifier for training rows: the interface, and a bounded cache.

Shape letters: T tokens of a row, M captured layers, H hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from speculators.data.rows import Row
from speculators.errors import ConfigError, DataError
from speculators.verifiers.grouping import length_groups

__all__ = [
    "CachedSource",
    "HiddenStateSource",
    "HiddenStates",
    "NextTokens",
    "StatesDescription",
    "TellsNextTokens",
    "length_groups",
]


@dataclass(frozen=True, slots=True)
class StatesDescription:
    """What a source's states are; a record that travels with them.

    :param layer_ids: captured layers in the order of concatenation; id k is the residual stream after k decoder layers.
    :param final_state: whether the last state was taken before or after the verifier's final norm.
    :param dtype: torch dtype name of the states.
    :param verifier: folder or hub id.
    :param verifier_hash: of its config and weight files.
    :param precision: the coarsest form that the states have been in, such as ``fp8`` of states that were stored so and are
        float32 again; None: that of ``dtype``.
    """

    layer_ids: tuple[int, ...]
    final_state: Literal["pre_norm", "post_norm"]
    dtype: str
    hidden_size: int
    verifier: str
    verifier_hash: str
    layer_id_convention: Literal["after_k_layers"] = "after_k_layers"
    precision: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"layer_ids": list(self.layer_ids)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> StatesDescription:
        """:raises ConfigError: for a record of another convention or with other fields."""
        if values.get("layer_id_convention", "after_k_layers") != "after_k_layers":
            raise ConfigError(f"unknown layer id convention {values['layer_id_convention']!r}; capture the states again")
        try:
            return cls(**(values | {"layer_ids": tuple(values["layer_ids"])}))
        except (TypeError, KeyError) as error:
            raise ConfigError(f"not a description of hidden states ({error}); capture the states again") from error

    @property
    def bytes_per_token(self) -> int:
        """Captured states and the final one."""
        return (len(self.layer_ids) + 1) * self.hidden_size * getattr(torch, self.dtype).itemsize


@dataclass(slots=True, eq=False)
class HiddenStates:
    """One row's states."""

    row_id: int
    token_ids: Tensor  #: int64 ``[T]``, the tokens that were run
    features: Tensor  #: ``[T, M, H]``
    final: Tensor  #: ``[T, H]``

    def first(self, length: int) -> HiddenStates:
        """The states of the first ``length`` tokens; the verifier is causal, so they do not depend on the rest."""
        if length == self.token_ids.shape[0]:
            return self
        return HiddenStates(self.row_id, self.token_ids[:length], self.features[:length], self.final[:length])


@dataclass(frozen=True, slots=True, eq=False)
class NextTokens:
    """The verifier's own next-token distribution at some positions of a row, as far as its most probable ids.

    Natural logarithms, temperature 1, over the whole vocabulary.
    """

    positions: Tensor  #: int64 ``[P]``
    ids: Tensor  #: int64 ``[P, k]``
    logprobs: Tensor  #: float32 ``[P, k]``


class HiddenStateSource(Protocol):
    """Where hidden states come from.

    A source that several threads may ask at once says how many make sense as ``concurrency``; one that can be asked for a
    row again at no price is true in ``keeps_states``; one that can tell the verifier's own predictions is a
    :class:`TellsNextTokens`.
    """

    @property
    def description(self) -> StatesDescription: ...

    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        """States of ``rows``, in their order; a row that the source is allowed to have no states for is left out.

        The bits depend on nothing but the rows of this call, except from a live server.
        """
        ...

    def close(self) -> None:
        """Release what the source holds; it is not used afterwards."""
        ...


@runtime_checkable
class TellsNextTokens(Protocol):
    """A source that knows what the verifier itself predicts: the witness of the check at the start of a training."""

    def next_tokens(self, row: Row, positions: Sequence[int], count: int) -> NextTokens:
        """The ``count`` most probable next tokens at ``positions`` of a row.

        The answer says of which positions it tells: a store knows those that were recorded.

        :raises SpeculatorsError: when it knows of none.
        """
        ...


class CachedSource:
    """Keeps a data set's states in memory for all epochs when they fit, and passes calls through when they do not.

    Either way, which rows share a pass of the verifier is a pure function of the data set or of the call, never of what
    happens to be cached: a resumed run computes the same bits. When all states fit, passes are over fixed groups of rows of
    like length, so that packed rows of any composition waste no padding.

    :param source: where states come from.
    :param dataset: all rows, indexed by row id.
    :param max_bytes: most memory for cached states.
    :param token_budget: tokens of one pass; by default the source's own.
    """

    def __init__(
        self, source: HiddenStateSource, dataset: Sequence[Row], max_bytes: int, token_budget: int | None = None
    ) -> None:
        self._source = source
        self._dataset = dataset
        self._cache: dict[int, HiddenStates] = {}
        self._asked: set[int] = set()  # groups; a row of theirs that is not in the cache was left out by the source
        self._lock = threading.Lock()
        lengths = getattr(dataset, "lengths", None)
        lengths = [len(row) for row in dataset] if lengths is None else [int(length) for length in lengths]
        #: Memory for all states, in the dtype the source gives them, and for the token ids beside them.
        self.bytes_needed = sum(lengths) * (source.description.bytes_per_token + torch.int64.itemsize)
        self.caching = self.bytes_needed <= max_bytes
        self._groups: list[list[int]] = []
        self._group_of: dict[int, int] = {}
        if self.caching:
            budget = token_budget if token_budget is not None else int(getattr(source, "token_budget", 2048))
            self._groups = length_groups(lengths, budget)
            self._group_of = {row_id: index for index, group in enumerate(self._groups) for row_id in group}

    @property
    def description(self) -> StatesDescription:
        return self._source.description

    @property
    def concurrency(self) -> int:
        """Calls of :meth:`fetch` that make sense at once."""
        return 1 if self.caching else self.source_concurrency

    @property
    def source_concurrency(self) -> int:
        """Calls of :attr:`source` that make sense at once."""
        return max(1, int(getattr(self._source, "concurrency", 1)))

    @property
    def source(self) -> HiddenStateSource:
        """Where the states come from that are not kept yet."""
        return self._source

    @property
    def keeps_states(self) -> bool:
        """Whether a row may be asked for again at no price, so that nobody else need keep its states."""
        return self.caching or bool(getattr(self._source, "keeps_states", False))

    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        """See :meth:`HiddenStateSource.fetch`. A row may be a prefix of the data set's row.

        :raises DataError: when a row is not one of the data set's.
        """
        if not self.caching:
            return self._source.fetch(rows)
        for row in rows:
            if not self._holds(row):
                raise DataError(f"row {row.row_id} is not the one of the data set whose states are cached; pass its own rows")
        with self._lock:  # the prefetching thread and validation may ask at once
            for index in sorted({self._group_of[row.row_id] for row in rows} - self._asked):
                group = [self._dataset[row_id] for row_id in self._groups[index]]
                self._cache.update((states.row_id, states) for states in self._source.fetch(group))
                self._asked.add(index)
            return [self._cache[row.row_id].first(len(row)) for row in rows if row.row_id in self._cache]

    @property
    def missing_groups(self) -> list[list[int]]:
        """Row ids that are asked for together and have not been yet, if all states are kept."""
        return [group for index, group in enumerate(self._groups) if index not in self._asked]

    def keep(self, group: Sequence[int], states: Sequence[HiddenStates]) -> None:
        """Keep what :attr:`source` gave for one of :attr:`missing_groups`."""
        with self._lock:
            self._cache.update((one.row_id, one) for one in states)
            self._asked.add(self._group_of[group[0]])

    def _holds(self, row: Row) -> bool:
        return row.row_id in self._group_of and len(row) <= len(self._dataset[row.row_id])

    def close(self) -> None:
        self._cache.clear()
        self._asked.clear()
        self._source.close()
