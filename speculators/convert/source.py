"""A foreign checkpoint as it lies there: its ``config.json``, and its tensors by name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from speculators.errors import ConfigError
from speculators.files import read_json
from speculators.models.checkpoint_files import WeightFiles, locate

__all__ = ["ForeignCheckpoint"]


class ForeignCheckpoint:
    """A folder or hub repository with ``config.json`` and weights of any kind that :class:`WeightFiles` reads.

    :raises ConfigError: there is no readable ``config.json``.
    """

    def __init__(self, name_or_path: str | os.PathLike[str], cache_dir: str | None = None) -> None:
        self.name = str(name_or_path)
        self._where = {"cache_dir": cache_dir}
        self._weights = WeightFiles(self.name, where=self._where)
        path = self.locate("config.json")
        if path is None:
            raise ConfigError(f"no config.json at {self.name!r}; give the folder or hub id of the checkpoint to convert")
        try:
            self.config: dict[str, Any] = read_json(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path} ({error}); fetch the file again") from error
        if not isinstance(self.config, dict):
            raise ConfigError(f"{path} holds no JSON object; fetch the file again")

    def locate(self, filename: str) -> Path | None:
        """A file of the checkpoint on this machine, or None."""
        return locate(self.name, filename, self._where)

    @property
    def architectures(self) -> list[str]:
        names = self.config.get("architectures")
        return [str(name) for name in names] if isinstance(names, list) else []

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors.

        :raises ConfigError: there are no weights, or they cannot be read.
        """
        return tuple(self._weights.index)

    def has(self, *fragments: str) -> bool:
        """Whether every fragment occurs in the name of some tensor; False where there are no weights."""
        try:
            names = self.names
        except ConfigError:
            return False
        return all(any(fragment in name for name in names) for fragment in fragments)

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Tensors by name (all when None), on the CPU in their own dtypes.

        :raises ConfigError: a file is missing or torn.
        """
        return self._weights.read(names)
