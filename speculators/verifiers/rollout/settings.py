"""What a rollout on a Ray cluster is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["RolloutSettings", "TransferDtype"]

TransferDtype = Literal["native", "bfloat16", "fp8"]


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Where the verifier runs on the cluster, and how its states travel.

    :param workers: actors; None: as many as the cluster has room for, and more when it grows.
    :param cpus: of each actor; ``gpus`` and ``resources`` likewise.
    :param transfer_dtype: form of the states in the object store; ``native`` is the verifier's own and keeps the bits.
    :param max_restarts: actors that may be started in place of lost ones, all together.
    :param request_timeout: seconds for one pass, from handing it to an actor to holding its states.
    :param threads: of torch in each actor; None: as many as this process uses, which the bits depend on.
    """

    workers: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    transfer_dtype: TransferDtype = "native"
    max_restarts: int = 20
    request_timeout: float = 600.0
    threads: int | None = None
