"""A run folder whose steps survive a kill at any point.

Every finished step leaves ``steps/<name>.json``, written by atomic rename after the step's product is complete; a rerun reads
it instead of doing the step again. A step that makes many small things appends them to a JSONL file as they finish, so that
a rerun loses the one that was being written and no more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speculators.errors import ConfigError
from speculators.evaluation.results import write_json_atomically
from speculators.files import locked_folder, sweep_temporaries

__all__ = ["RunFolder"]

_SETTINGS_FILE = "settings.json"


class RunFolder:
    """The folder of one run, bound to the settings it was begun with."""

    def __init__(self, path: Path, command: str) -> None:
        self.path = path
        self._command = command

    @contextmanager
    def opened(self, settings: Mapping[str, Any]) -> Iterator[RunFolder]:
        """Create the folder or go on with it, keeping other processes out meanwhile.

        :param settings: what a continued run must agree in.
        :raises ConfigError: when the folder was begun with other settings, or holds something else.
        :raises SpeculatorsError: when it cannot be written, or another process works in it.
        """
        with locked_folder(self.path, "--output"):
            for written in (self.path, self.path / "steps", self.path / "data"):
                sweep_temporaries(written)
            self._check(json.loads(json.dumps(settings)))
            yield self

    def _check(self, settings: dict[str, Any]) -> None:
        file = self.path / _SETTINGS_FILE
        if not file.exists():
            foreign = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
            if foreign:
                raise ConfigError(
                    f"{self.path} holds files of something else ({', '.join(foreign[:3])}); choose an empty --output"
                )
            write_json_atomically(file, {"command": self._command, "settings": settings})
            return
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            command, before = found["command"], found["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} is not a run of `{self._command}`; choose another --output") from error
        differing = sorted(key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key))
        if command != self._command or differing:
            what = ", ".join(f"{key} {before.get(key)!r} there, {settings.get(key)!r} asked for" for key in differing)
            raise ConfigError(
                f"{self.path} holds a run of `{command}` with another configuration ({what or 'another command'}); "
                "give the same options to go on with it, or choose another --output"
            )

    def product(self, step: str) -> dict[str, Any] | None:
        """What a finished step recorded; None while it is not finished."""
        try:
            record: dict[str, Any] = json.loads(self._record(step).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return record

    def finish(self, step: str, product: Mapping[str, Any]) -> dict[str, Any]:
        """Record a step as finished and return its record."""
        write_json_atomically(self._record(step), dict(product))
        return dict(product)

    def _record(self, step: str) -> Path:
        return self.path / "steps" / f"{step}.json"
