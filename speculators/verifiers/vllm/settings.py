"""What a client of vLLM servers is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from speculators.errors import ConfigError
from speculators.verifiers.server_protocol import base_address

__all__ = ["Backend", "MooncakeSettings", "OnGenerate", "OnMissing", "ServedVerifier", "VllmSettings", "launch_command"]

Backend = Literal["file", "fp8", "mooncake"]
OnMissing = Literal["generate", "skip", "warn", "raise"]
OnGenerate = Literal["cache", "delete"]


class ServedVerifier(Protocol):
    """What has to be known of the verifier, without its weights."""

    @property
    def name(self) -> str: ...

    @property
    def hash(self) -> str: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """``--mooncake-*``: how to reach the store that servers and trainer are members of."""

    master: str = "127.0.0.1:50051"
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device: str = ""
    global_segment_gib: float = 4.0
    local_buffer_gib: float = 2.0


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """The settings of ``--hidden-states vllm``; their defaults are the training config's.

    :param endpoint: addresses of the servers, separated by commas.
    :param folder: that servers and client share, for the backends ``file`` and ``fp8``; kept states lie in it too.
    :param on_missing: what becomes of a row for which the folder keeps no states: they are generated, or the row is left out
        without or with a warning, or it is an error.
    :param on_generate: whether generated states are kept in the folder for the next time.
    :param request_timeout: seconds for one request, from sending it to holding its states.
    :param max_retries: further tries of a request that failed, with waits of 2, 4, 8, ... seconds.
    :param validation_retries: whole repeats of a request whose states are not what was asked for.
    :param max_consecutive_failures: rows in a row without states that end the run.
    :param mooncake: of the backend ``mooncake``.
    """

    endpoint: str
    backend: Backend
    folder: Path
    on_missing: OnMissing
    on_generate: OnGenerate
    request_timeout: float
    max_retries: int
    validation_retries: int
    max_consecutive_failures: int
    mooncake: MooncakeSettings = MooncakeSettings()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """``http://host:port/v1`` of every server, each once.

        :raises ConfigError: when there is none, or one has a password in it.
        """
        addresses = [base_address(part, "--vllm-endpoint") for part in self.endpoint.split(",") if part.strip()]
        if not addresses:
            raise ConfigError("--vllm-endpoint is empty; give the addresses of the servers, separated by commas")
        return tuple(dict.fromkeys(addresses))


def launch_command(verifier: str, layer_ids: Sequence[int], settings: VllmSettings) -> str:
    """The command that starts a server whose states fit."""
    parts = ["speculators launch-vllm", verifier, "--target-layer-ids", *map(str, layer_ids)]
    if settings.backend != "file":
        parts += ["--hidden-states-backend", settings.backend]
    if settings.backend != "mooncake":
        parts += ["--hidden-states-path", str(settings.folder)]
    return " ".join(parts)
