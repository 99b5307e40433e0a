"""A run folder whose steps survive a kill at any point.

Every finished step leaves ``steps/<name>.json``, written by atomic rename after the step's product is complete; a rerun reads
it instead of doing the step again. A step that makes many small things appends them to a JSONL file as they finish, so that
a rerun loses the one that was being written and no more.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speculators.errors import ConfigError, SpeculatorsError
from speculators.evaluation.results import write_json_atomically

__all__ = ["AppendedRecords", "RunFolder"]

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
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w", encoding="utf-8")
        except OSError as error:
            raise SpeculatorsError(f"cannot write to {self.path} ({error.strerror}); choose another --output") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise SpeculatorsError(
                    f"another process is working in {self.path}; wait for it or choose another --output"
                ) from error
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


class AppendedRecords:
    """A JSONL file that grows by one flushed line per record; a torn last line is dropped when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                try:
                    record = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    record = None
                if not isinstance(record, dict):
                    break
                self.records.append(record)
                whole += len(line)
            if whole < path.stat().st_size:
                os.truncate(path, whole)
        self._stream = path.open("ab")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record through to the disk."""
        self._stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.records.append(dict(record))

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> AppendedRecords:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
