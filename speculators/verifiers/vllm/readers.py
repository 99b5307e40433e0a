"""How generated states come from the server: what a backend of the client has to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from speculators.errors import ConfigError
from speculators.verifiers.vllm.settings import VllmSettings

__all__ = ["TOKEN_IDS", "BadStates", "Received", "StatesReader", "open_reader"]

TOKEN_IDS = "token_ids"


class BadStates(Exception):
    """A server's answer, or the states it leads to, are not what was asked for; asking again may help."""


@dataclass(frozen=True, slots=True)
class Received:
    """One row's states as they came.

    ``hidden_states [T, n, H]``, ``token_ids [T]`` and with fp8 ``hidden_states_scales [T, 1, 1]``; their sizes are not
    checked against the request yet.

    :param record: what the producer says of them (``layer_ids``, ``dtype``, ``verifier_hash``, ...), all as texts; empty where
        the server runs vLLM's own connector.
    """

    tensors: Mapping[str, Tensor]
    record: Mapping[str, str] = field(default_factory=dict)


class StatesReader(Protocol):
    """One way from the server. All of it is called from several threads at once.

    ``params`` is the ``kv_transfer_params`` of the server's answer: not to be trusted.
    """

    def read(self, params: Mapping[str, Any], timeout: float, most_bytes: int) -> Received:
        """The states, as soon as they are there.

        :param timeout: seconds to wait for them.
        :param most_bytes: what takes more cannot be what was asked for; it is refused before room is made for it.
        :raises BadStates: when none come, or what comes is no record of tensors.
        :raises VerifierError: when no repetition can help.
        """
        ...

    def forget(self, params: Mapping[str, Any]) -> None:
        """States are not needed (any more): free what they take. Never raises; also called after :meth:`read` failed."""
        ...

    def close(self) -> None:
        """Nothing is read any more."""
        ...


def open_reader(settings: VllmSettings) -> StatesReader:
    """The reader of ``--hidden-states-backend``.

    :raises ConfigError: for a backend that is not installed or not known here.
    :raises VerifierError: when its store does not answer.
    """
    if settings.backend in ("file", "fp8"):
        from speculators.verifiers.vllm.files import FileReader

        return FileReader(settings.folder, fp8=settings.backend == "fp8")
    if settings.backend == "mooncake":
        from speculators.verifiers.vllm.mooncake import MooncakeReader

        return MooncakeReader(settings.mooncake)
    raise ConfigError(f"states cannot be read by the backend {settings.backend!r}; choose file, fp8 or mooncake")
