"""``kv_connector_extra_config``: what a server can be told about its connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["BACKENDS", "ConnectorSettings"]

BACKENDS = ("file", "fp8", "mooncake")


@dataclass(frozen=True)
class ConnectorSettings:
    """See the table in the README."""

    shared_storage_path: str = ""
    backend: str = "file"
    retention_seconds: float = 1800.0
    num_writer_threads: int = 4
    max_pending_gib: float = 4.0
    use_synchronization_lock: bool = True

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> tuple[ConnectorSettings, dict[str, Any]]:
        """Settings, and the keys that belong to a backend (``mooncake_*``).

        :raises ValueError: for a key or a value that means nothing here.
        """
        own = {field.name for field in fields(cls)}
        backend = {key: value for key, value in values.items() if key.startswith("mooncake_")}
        unknown = sorted(set(values) - own - set(backend))
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config has {', '.join(unknown)}, which this connector does not know; it takes "
                f"{', '.join(sorted(own))} and mooncake_*"
            )
        settings = cls(**{key: value for key, value in values.items() if key in own})
        settings.check()
        return settings, backend

    def check(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"the connector's backend is {self.backend!r}; it is one of {', '.join(BACKENDS)}")
        if self.backend != "mooncake" and not self.shared_storage_path:
            raise ValueError("kv_connector_extra_config needs shared_storage_path, a folder that server and trainer both see")
        if self.retention_seconds < 0 or self.num_writer_threads < 1 or self.max_pending_gib <= 0:
            raise ValueError("retention_seconds must be at least 0, num_writer_threads at least 1 and max_pending_gib above 0")
