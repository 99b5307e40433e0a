"""The base of token proposal configs: a registry told apart by ``proposal_type``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from speculators.errors import ConfigError

__all__ = ["TokenProposalConfig"]

Registered = TypeVar("Registered", bound="type[TokenProposalConfig]")


class TokenProposalConfig(BaseModel):
    """A token proposal method; concrete methods register under their ``proposal_type``."""

    registry: ClassVar[dict[str, type[TokenProposalConfig]]] = {}

    proposal_type: str

    @classmethod
    def register(cls, name: str) -> Callable[[Registered], Registered]:
        """Decorator that registers a method's config class under ``name``.

        :raises ValueError: ``name`` is already taken by another class.
        """

        def add(subclass: Registered) -> Registered:
            if TokenProposalConfig.registry.get(name, subclass) is not subclass:
                raise ValueError(f"the proposal type {name!r} is already registered")
            TokenProposalConfig.registry[name] = subclass
            return subclass

        return add

    @classmethod
    def registered_classes(cls) -> tuple[type[TokenProposalConfig], ...]:
        return tuple(TokenProposalConfig.registry.values())

    @classmethod
    def reload_schema(cls) -> None:
        """Rebuild the pydantic schema; needed after registering a class in a module imported late."""
        cls.model_rebuild(force=True)

    @classmethod
    def from_value(cls, value: Any) -> TokenProposalConfig:
        """The config of the registered class that ``value["proposal_type"]`` names; a config passes through.

        :raises ConfigError: the type is missing or unknown.
        """
        if isinstance(value, TokenProposalConfig):
            return value
        name = value.get("proposal_type") if isinstance(value, dict) else None
        if name not in TokenProposalConfig.registry:
            known = ", ".join(sorted(TokenProposalConfig.registry))
            raise ConfigError(f"the proposal method {value!r} has no known proposal_type; use one of: {known}")
        return TokenProposalConfig.registry[name].model_validate(value)
