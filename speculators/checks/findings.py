"""What a check says: kinds of finding with fixed ids, and single findings of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["LEVELS", "Finding", "Kind", "Level"]

#: ``error``: drafting fails or loses its acceptance; ``warning``: it may, or a reader must guess; ``note``: worth knowing.
Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of finding.

    :param id: stable: scripts may rely on it.
    :param what: the fault in one phrase.
    :param causes: what it does to drafting, and in which engine.
    :param fix: what to do.
    """

    id: str
    level: Level
    what: str
    causes: str
    fix: str

    def found(self, text: str) -> Finding:
        """A finding of this kind; ``text`` says what was found, with the checkpoint's own values."""
        return Finding(self, text)


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault found."""

    kind: Kind
    text: str

    @property
    def id(self) -> str:
        return self.kind.id

    @property
    def level(self) -> Level:
        return self.kind.level

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "level": self.level,
            "finding": self.text,
            "causes": self.kind.causes,
            "fix": self.kind.fix,
        }
