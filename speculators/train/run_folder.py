"""The folder of one training: its lock, whose run it is, and its metrics file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from speculators.errors import ConfigError
from speculators.files import locked_folder, naming, sweep_temporaries, write_text_atomically
from speculators.train.checkpoints import CheckpointStore
from speculators.train.config.artifacts import save_artifacts
from speculators.train.config.fields import setting_info
from speculators.train.config.model import TrainConfig

__all__ = ["MetricsFile", "TrainingFolder", "describe_differences"]

_LOCK, _IDENTITY, _RUN = ".train.lock", "run_state.json", "run.yaml"


def describe_differences(before: TrainConfig, now: TrainConfig) -> list[str]:
    """Settings that can change a loss and are not the same, as "group.name: a there, b here"."""
    first, second = before.flatten(), now.flatten()
    found = []
    for group, name, field in TrainConfig.settings():
        if not setting_info(field).cosmetic and first[name] != second[name]:
            found.append(f"{group + '.' if group else ''}{name}: {first[name]!r} there, {second[name]!r} here")
    return found


class TrainingFolder:
    """A run folder (``--save-path``) in use by this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = CheckpointStore(path)

    @contextmanager
    def locked(self) -> Iterator[TrainingFolder]:
        """Keep other trainers out; the lock dies with the process.

        :raises SpeculatorsError: when another process holds it, or the folder cannot be written.
        """
        with locked_folder(self.path, "--save-path", _LOCK, "run folder"):
            self.checkpoints.sweep()
            sweep_temporaries(self.path)
            yield self

    def move_aside(self) -> Path | None:
        """Move an earlier run into ``previous-<time>/``; None when there is none. Files that are not a run's stay."""
        names = [
            entry.name
            for entry in self.path.iterdir()
            if entry.name in (_RUN, _IDENTITY, "train_command.txt", "metrics.jsonl", "account.jsonl")
            or entry.name.isdigit()
            or entry.is_symlink()
        ]
        if not names:
            return None
        target = self.path / time.strftime("previous-%Y%m%d-%H%M%S")
        while target.exists():
            target = target.with_name(target.name + "x")
        target.mkdir()
        for name in names:
            os.rename(self.path / name, target / name)
        return target

    def check_config(self, config: TrainConfig) -> None:
        """Refuse a folder that was begun with other settings.

        :raises ConfigError: naming what differs.
        """
        path = self.path / _RUN
        if not path.exists():
            return
        try:
            mapping = yaml.safe_load(path.read_text(encoding="utf-8"))["train"] or {}
            flat: dict[str, Any] = {}
            for name, value in mapping.items():
                flat |= value if name in TrainConfig.groups() else {name: value}
            before = TrainConfig.model_validate(_nest(flat))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
            raise ConfigError(f"{path} is not a readable run.yaml; choose another --save-path") from None
        self._refuse(describe_differences(before, config))

    def check_identity(self, identity: Mapping[str, Any]) -> None:
        """Compare what the settings do not say - the rows, the verifier, the batch - with the run's, or note it down.

        :raises ConfigError: naming what differs.
        """
        path = self.path / _IDENTITY
        try:
            known = dict(json.loads(path.read_text(encoding="utf-8"))["identity"])
        except FileNotFoundError:
            write_text_atomically(path, json.dumps({"identity": dict(identity)}, indent=1))
            return
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} is not a readable run state; choose another --save-path") from None
        now = json.loads(json.dumps(identity))
        self._refuse(
            [
                f"{key}: {known.get(key)} there, {now.get(key)} here"
                for key in known  # an earlier version may have noted down less
                if known.get(key) != now.get(key)
            ]
        )

    def recorded(self, key: str) -> Any:
        """A value that :meth:`record` noted down for this run; None if there is none."""
        try:
            return json.loads((self.path / _IDENTITY).read_text(encoding="utf-8")).get(key)
        except FileNotFoundError:
            return None

    def record(self, key: str, value: Any) -> None:
        """Note down a value that a resumed run must share."""
        path = self.path / _IDENTITY
        content = json.loads(path.read_text(encoding="utf-8"))
        write_text_atomically(path, json.dumps({**content, key: value}, indent=1))

    def write_artifacts(self, config: TrainConfig) -> None:
        """``run.yaml`` and ``train_command.txt``."""
        save_artifacts(config, self.path)

    def _refuse(self, differences: list[str]) -> None:
        if differences:
            raise ConfigError(
                f"the run folder {self.path} was begun with another configuration ({'; '.join(differences)}); choose another "
                "--save-path, or go on from its draft with --from-pretrained"
            )


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        group = TrainConfig.group_of(name)
        (nested.setdefault(group, {}) if group else nested)[name] = value
    return nested


class MetricsFile:
    """``metrics.jsonl``: one record a line, each with ``global_step``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rewind(self, global_step: int) -> None:
        """Drop the records after ``global_step``, and a torn last line: the steps they tell of are about to be repeated."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("global_step", 0) <= global_step:
                kept.append(line)
        write_text_atomically(self.path, "".join(line + "\n" for line in kept))

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record."""
        with naming(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """All records."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
