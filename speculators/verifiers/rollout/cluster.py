"""Joining a Ray cluster, or starting Ray on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from speculators.errors import ConfigError, VerifierError, last_line

__all__ = ["open_cluster", "require_ray"]

NAMESPACE = "speculators"


def require_ray() -> ModuleType:
    """The package ray.

    :raises ConfigError: when it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ConfigError("a rollout on Ray needs the package ray: pip install 'speculators[ray]'") from None
    return ray


@contextmanager
def open_cluster(address: str | None) -> Iterator[ModuleType]:
    """Ray, connected while the context is open; what was connected before stays so.

    What Ray moves between the processes of its cluster it serialises itself: whoever can join the cluster is trusted.

    :param address: ``auto`` for the cluster of this machine, ``host:port`` of another one; None starts Ray on this machine, for
        this process alone.
    :raises VerifierError: when there is no such cluster.
    """
    ray = require_ray()
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(
            address="local" if address is None else address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({"include_dashboard": False} if address is None else {}),
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        where = "Ray cannot be started here" if address is None else f"there is no Ray cluster at {address}"
        hint = "check memory and /dev/shm" if address is None else "start one with `ray start --head`, or drop --ray-address"
        raise VerifierError(f"{where} ({last_line(error)}); {hint}") from error
    try:
        yield ray
    finally:
        ray.shutdown()
