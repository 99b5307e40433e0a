""":class:`TrainConfig`: the settings of one training, with where each value came from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, PrivateAttr
from pydantic.fields import FieldInfo

from speculators.train.config.families import (
    FAMILY_GROUPS,
    BackendSettings,
    DFlash2Settings,
    DFlashSettings,
    DSparkSettings,
    MTPSettings,
    PEagleSettings,
    RaySettings,
    XPressSettings,
)
from speculators.train.config.fields import Group, setting
from speculators.train.config.schema import (
    DataSettings,
    DraftSettings,
    GenerationSettings,
    LoggingSettings,
    LossSettings,
    OptimizerSettings,
    SchedulerSettings,
    TrainerSettings,
    VerifierSettings,
)

__all__ = ["Provenance", "TrainConfig"]

Provenance = Literal["flag", "yaml", "default"]


class TrainConfig(BaseModel):
    """Settings of ``speculators train``; ``config.<group>.<setting>``, the root's four without a group.

    Values are as given; None means derived (see :func:`speculators.train.config.derived.derive`). Build one with
    :meth:`resolve` (a command line), :meth:`from_sources` or :meth:`from_flat`; all raise
    :class:`~speculators.errors.ConfigError` with one sentence, except that :meth:`resolve` exits with 2.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    speculator_type: Literal["eagle3", "dflash", "dspark", "peagle", "mtp", "dflash2", "xpress"] = setting(
        "eagle3", "Family of the draft."
    )
    dry_run: bool = setting(False, "Build the draft, save its first weights to the save path and stop.", cosmetic=True)
    seed: int = setting(42, "Seed of every random choice.", ge=0, lt=2**63)
    deterministic_cuda: bool = setting(False, "Only deterministic CUDA kernels.")

    verifier: VerifierSettings = VerifierSettings()
    draft: DraftSettings = DraftSettings()
    data: DataSettings = DataSettings()
    generation: GenerationSettings = GenerationSettings()
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    trainer: TrainerSettings = TrainerSettings()
    logging: LoggingSettings = LoggingSettings()
    dflash: DFlashSettings = DFlashSettings()
    dflash2: DFlash2Settings = DFlash2Settings()
    dspark: DSparkSettings = DSparkSettings()
    xpress: XPressSettings = XPressSettings()
    peagle: PEagleSettings = PEagleSettings()
    mtp: MTPSettings = MTPSettings()
    backend: BackendSettings = BackendSettings()
    ray: RaySettings = RaySettings()

    _provenance: dict[str, Provenance] = PrivateAttr(default_factory=dict)
    _argv: tuple[str, ...] = PrivateAttr(default=())

    def __eq__(self, other: object) -> bool:
        """Equal settings; where they came from does not count."""
        return isinstance(other, TrainConfig) and self.flatten() == other.flatten()

    __hash__ = None  # type: ignore[assignment]

    # -- the table of settings -------------------------------------------------------------------------------------------

    @classmethod
    def groups(cls) -> dict[str, type[Group]]:
        """Group name -> its class, in the order of the help."""
        found = {}
        for name, field in cls.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Group):
                found[name] = field.annotation
        return found

    @classmethod
    def settings(cls) -> Iterator[tuple[str | None, str, FieldInfo]]:
        """Every setting as (group or None for the root, name, field)."""
        groups = cls.groups()
        for name, field in cls.model_fields.items():
            if name not in groups:
                yield None, name, field
        for group, group_class in groups.items():
            for name, field in group_class.model_fields.items():
                yield group, name, field

    @classmethod
    def group_of(cls, name: str) -> str | None:
        """Group of a setting, None for a root setting; KeyError if there is none of that name."""
        for group, setting_name, _ in cls.settings():
            if setting_name == name:
                return group
        raise KeyError(name)

    # -- ways in -----------------------------------------------------------------------------------------------------------

    @classmethod
    def resolve(cls, argv: Sequence[str] | None = None) -> TrainConfig:
        """From a command line (default ``sys.argv[1:]``); a bad one prints one line and exits with 2."""
        from speculators.train.config.resolution import resolve

        return resolve(argv)

    @classmethod
    def from_sources(
        cls,
        cli: Mapping[str, Any] | None = None,
        config_path: str | Path | None = None,
        argv: Sequence[str] = (),
        backend_cli: Mapping[str, Any] | None = None,
    ) -> TrainConfig:
        """Merge flat flag values over a YAML file over the defaults.

        :param cli: setting name -> value, for the flags that were given.
        :param argv: the command line, kept for ``train_command.txt``.
        :param backend_cli: the same for the backend's flags.
        """
        from speculators.train.config.resolution import from_sources

        return from_sources(cli, config_path, argv, backend_cli)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any] | None = None, /, **more: Any) -> TrainConfig:
        """From setting name -> value; what is not named keeps its default."""
        return cls.from_sources(cli={**(values or {}), **more})

    # -- ways out ----------------------------------------------------------------------------------------------------------

    @property
    def provenance(self) -> dict[str, Provenance]:
        """Setting name -> "flag", "yaml" or "default"."""
        return {name: self._provenance.get(name, "default") for _, name, _ in self.settings()}

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line this was resolved from, without the program."""
        return self._argv

    @property
    def backend_args(self) -> dict[str, Any]:
        """Values of the hidden-states backend's settings."""
        return self.backend.model_dump()

    def given(self, name: str) -> bool:
        """Whether a flag or the file set ``name``, if only to its default."""
        return self._provenance.get(name, "default") != "default"

    def flatten(self) -> dict[str, Any]:
        """Setting name -> value, of all settings."""
        return {name: getattr(getattr(self, group) if group else self, name) for group, name, _ in self.settings()}

    def own_settings(self) -> set[str]:
        """Names of the settings that the draft's family uses."""
        from speculators.train.config.fields import setting_info

        names = set()
        for group, name, field in self.settings():
            families = FAMILY_GROUPS.get(group or "", None) or setting_info(field).families
            if families is None or self.speculator_type in families:
                names.add(name)
        return names

    def changed(self) -> dict[str, Any]:
        """What :meth:`dump_yaml` writes: nested values that are not the defaults."""
        out: dict[str, Any] = {}
        for group, name, field in self.settings():
            value = getattr(getattr(self, group) if group else self, name)
            if value != field.get_default(call_default_factory=True):
                # Loss weights as JSON text, the only form that upstream reads.
                written = json.dumps(value) if isinstance(value, dict) else value
                (out.setdefault(group, {}) if group else out)[name] = written
        return out

    def dump_yaml(self) -> str:
        """``run.yaml``: only non-default values, under ``train:``; reading it gives an equal config."""
        return yaml.safe_dump({"train": self.changed()}, sort_keys=False, allow_unicode=True)

    def save(self, directory: str | Path) -> None:
        """Write ``run.yaml`` and ``train_command.txt`` into ``directory``."""
        from speculators.train.config.artifacts import save_artifacts

        save_artifacts(self, Path(directory))

    def command_line(self) -> str:
        """The shell command of this run; without an argv, one that says the same."""
        if self._argv:
            return shlex.join(["speculators", "train", *self._argv])
        from speculators.train.config.resolution import flags_of

        return shlex.join(["speculators", "train", *flags_of(self)])
