"""What a checkpoint's config says, key by key and without trusting it: a key that is absent or of a wrong type is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from speculators.checks.checkpoint import RawCheckpoint
from speculators.checks.verifier import VerifierFacts
from speculators.config import SpeculatorModelConfig
from speculators.layout import BlockLayout
from speculators.models.family import MAX_LAYERS

__all__ = ["BLOCK_FAMILIES", "EAGLE_FAMILIES", "LAYER_ID_KEYS", "CheckpointFacts", "integer", "number", "rope_of"]

#: Families that draft a whole block in one pass, by :mod:`speculators.layout`.
BLOCK_FAMILIES = frozenset({"dflash", "dspark"})

#: Families that draft as EAGLE-3 does, slot by slot.
EAGLE_FAMILIES = frozenset({"eagle3", "peagle"})

#: Key of the captured layers' ids, which differs between families.
LAYER_ID_KEYS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")


def integer(value: Any) -> int | None:
    """``value`` if it is a whole number (a bool is none)."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    """``value`` if it is a number that a float can hold (a bool is none)."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except OverflowError:
        return None


def rope_of(decoder: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rotary settings of a decoder's config in today's form; None if it has none.

    Older configs keep ``rope_theta`` and ``rope_scaling`` at the top. Sets per layer type give the sliding layers', as drafts
    take them.
    """
    rope = decoder.get("rope_parameters")
    if not isinstance(rope, Mapping):
        scaling = decoder.get("rope_scaling")
        rope = dict(scaling) if isinstance(scaling, Mapping) else {}
        if decoder.get("rope_theta") is None and not rope:
            return None
    for layer_type in ("sliding_attention", "full_attention"):
        if isinstance(rope.get(layer_type), Mapping):
            rope = rope[layer_type]
            break
    settings = dict(rope)
    settings.setdefault("rope_type", settings.pop("type", "default"))
    if settings.get("rope_theta") is None:
        settings.pop("rope_theta", None)
        if decoder.get("rope_theta") is not None:
            settings["rope_theta"] = decoder["rope_theta"]
    return settings


@dataclass
class CheckpointFacts:
    """A checkpoint, its config's values, and what is known of its verifier."""

    raw: RawCheckpoint
    verifier: VerifierFacts | None = None
    config: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.config = self.raw.config or {}

    @cached_property
    def family(self) -> str | None:
        """``speculators_model_type`` if this library knows it."""
        name = self.config.get("speculators_model_type")
        classes = {
            str(cls.model_fields["speculators_model_type"].default) for cls in SpeculatorModelConfig.registered_classes()
        }
        return name if isinstance(name, str) and name in classes else None

    @property
    def drafts_blocks(self) -> bool:
        return self.family in BLOCK_FAMILIES

    @property
    def reads_like_eagle(self) -> bool:
        return self.family in EAGLE_FAMILIES

    @cached_property
    def config_class(self) -> type[SpeculatorModelConfig] | None:
        return SpeculatorModelConfig.registry.get(self.family) if self.family else None

    def default(self, key: str) -> Any:
        """What upstream, and so this library, assumes where a key is absent; None if it assumes nothing."""
        if self.config_class is not None and key in self.config_class.meaning_of_absent:
            return self.config_class.meaning_of_absent[key]
        fields = {} if self.config_class is None else self.config_class.model_fields
        return None if key not in fields or fields[key].is_required() else fields[key].get_default(call_default_factory=True)

    def value(self, key: str) -> Any:
        """A key's value, or what upstream assumes."""
        return self.config[key] if self.config.get(key) is not None else self.default(key)

    @property
    def decoder(self) -> dict[str, Any]:
        """``transformer_layer_config``, or nothing."""
        decoder = self.config.get("transformer_layer_config")
        return decoder if isinstance(decoder, dict) else {}

    @property
    def hidden(self) -> int | None:
        """H."""
        return integer(self.decoder.get("hidden_size"))

    @property
    def vocab(self) -> int | None:
        """V, the verifier's vocabulary as the draft's config says."""
        return integer(self.decoder.get("vocab_size"))

    @property
    def draft_vocab(self) -> int | None:
        """D."""
        return integer(self.config.get("draft_vocab_size")) or (self.vocab if self.family == "mtp" else None)

    @property
    def reduced(self) -> bool:
        """Whether the draft's vocabulary is said to be a part of the verifier's."""
        return self.draft_vocab is not None and self.vocab is not None and self.draft_vocab != self.vocab

    @property
    def num_layers(self) -> int | None:
        """Draft layers."""
        return integer(self.decoder.get("num_hidden_layers"))

    @property
    def layer_types(self) -> list[str]:
        """One per draft layer; all full where the config says nothing."""
        types = self.decoder.get("layer_types")
        if isinstance(types, list):
            return [str(kind) for kind in types]
        return ["full_attention"] * min(self.num_layers or 0, MAX_LAYERS)

    @property
    def layer_id_key(self) -> str:
        """The family's key of :attr:`layer_ids`."""
        return LAYER_ID_KEYS[0] if self.drafts_blocks or self.family is None else LAYER_ID_KEYS[1]

    @property
    def layer_ids(self) -> list[int] | None:
        """Captured verifier layers; None if absent or no list of whole numbers."""
        ids = self.config.get(self.layer_id_key)
        return ids if isinstance(ids, list) and ids and all(integer(k) is not None for k in ids) else None

    @property
    def num_features(self) -> int | None:
        """M."""
        return len(self.layer_ids) if self.layer_ids is not None else None

    @property
    def mask_token(self) -> int | None:
        return integer(self.config.get("mask_token_id"))

    @property
    def block_size(self) -> int | None:
        """K."""
        return integer(self.value("block_size"))

    @property
    def layout(self) -> BlockLayout | None:
        """The layout as upstream would read it; None if the config describes none."""
        flag = self.value("sample_from_anchor")
        if not self.drafts_blocks or self.block_size is None or not isinstance(flag, bool):
            return None
        return BlockLayout(self.block_size, flag) if self.block_size >= (1 if flag else 2) else None

    @property
    def speculative_tokens(self) -> int | None:
        """Of the first proposal method, which is the one engines read."""
        methods = self.speculators.get("proposal_methods")
        first = methods[0] if isinstance(methods, list) and methods else None
        return integer(first.get("speculative_tokens")) if isinstance(first, dict) else None

    @property
    def speculators(self) -> dict[str, Any]:
        """``speculators_config``, or nothing."""
        values = self.config.get("speculators_config")
        return values if isinstance(values, dict) else {}

    @property
    def verifier_name(self) -> str | None:
        """The verifier that the checkpoint names."""
        record = self.speculators.get("verifier")
        name = record.get("name_or_path") if isinstance(record, dict) else None
        return name if isinstance(name, str) and name else None
