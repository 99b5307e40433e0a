"""How one setting is declared: its default, its help, and who it is for, written once for command line, YAML and checks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

__all__ = ["FAMILIES", "Group", "SettingInfo", "mapping_of_text", "setting", "setting_info"]

#: Values of ``--speculator-type``, upstream's names and order.
FAMILIES = ("eagle3", "dflash", "dspark", "peagle", "mtp", "dflash2", "xpress")


class Group(BaseModel):
    """A block of settings: one mapping in the YAML file, one section of ``--help``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """What is known of a setting beside its type and default.

    :param families: speculator types that use it; None for all.
    :param shaping: it shapes the draft decoder, so it contradicts ``--from-pretrained``.
    :param own: it is not an upstream flag.
    :param sources: the hidden-states sources that use it; None for all.
    :param cosmetic: it cannot change any loss, so a resumed run may change it; what paths lead to is compared elsewhere
        (:meth:`~speculators.train.run_folder.TrainingFolder.check_identity`).
    """

    families: tuple[str, ...] | None = None
    shaping: bool = False
    own: bool = False
    sources: tuple[str, ...] | None = None
    cosmetic: bool = False


def setting(
    default: Any,
    description: str,
    *,
    families: tuple[str, ...] | None = None,
    shaping: bool = False,
    own: bool = False,
    sources: tuple[str, ...] | None = None,
    cosmetic: bool = False,
    **constraints: Any,
) -> Any:
    """A pydantic field with a :class:`SettingInfo`; ``constraints`` are pydantic's (``ge``, ``gt``, ...)."""
    info = SettingInfo(families=families, shaping=shaping, own=own, sources=sources, cosmetic=cosmetic)
    field: FieldInfo
    if isinstance(default, list):
        field = Field(default_factory=lambda: list(default), description=description, **constraints)
    else:
        field = Field(default=default, description=description, **constraints)
    field.metadata.append(info)
    return field


def setting_info(field: FieldInfo) -> SettingInfo:
    """The :class:`SettingInfo` of a field made by :func:`setting`."""
    return next((entry for entry in field.metadata if isinstance(entry, SettingInfo)), SettingInfo())


def mapping_of_text(value: Any) -> Any:
    """The mapping that a JSON text says, as ``run.yaml`` has mappings; any other value as it is.

    Text that only looks like one stays text, and is refused with a sentence where it is used.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
