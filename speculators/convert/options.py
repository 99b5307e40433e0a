"""What a caller may say beyond the file: ``--algorithm-kwargs``, and keyword arguments of ``convert_model``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from speculators.config import one_sentence
from speculators.errors import ConfigError

__all__ = ["ConversionOptions"]


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Settings that take the place of the file's, None where nothing was said. Each format uses some of them.

    Layer ids are in this library's convention: k is the residual stream after k layers.
    """

    # Block drafts.
    aux_hidden_state_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    sample_from_anchor: bool | None = None
    enable_confidence_head: bool | None = None
    #: Leave out what has no counterpart here (the draft is then another one and must be trained further).
    drop_unsupported: bool | None = None

    # EAGLE-3.
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None

    # MTP.
    num_speculative_steps: int | None = None

    # Any format.
    #: Leave out ``embed_tokens`` and a full ``lm_head`` that equal the verifier's bit for bit.
    drop_embeddings: bool | None = None
    speculative_tokens: int | None = None
    cache_dir: str | None = None

    @classmethod
    def checked(cls, values: dict[str, Any]) -> Self:
        """From keyword arguments.

        :raises ConfigError: one is unknown or of the wrong type.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(f"unknown conversion option {unknown[0]!r}; there are {', '.join(known)}")
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            raise ConfigError(f"wrong conversion option: {one_sentence(error)}") from error

    def given(self) -> list[str]:
        """Names of the options that were given."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]
