"""Checkpoints of the speculators format itself, from trees that wrote fewer keys or more tensors than today's.

What those trees left out, and what their readers took for it:

- ``sample_from_anchor``: absent before the layout could be chosen (upstream's pull request 760); every block was fill-in.
- ``sliding_window_non_causal``: absent before it could be chosen; sliding layers were causal inside the block.
- norm settings of EAGLE-3: absent before they existed; none was applied.
- sizes and heads: read off the tensors, which cannot be wrong.

Trees before 0.9.0 also wrote ``embed_tokens``, ``lm_head``, ``verifier_lm_head`` and ``verifier_norm``; the last two are
training aids and are left out. Keys of other programs (``auto_map``, ``torch_dtype``, ...) are left out or respelt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from speculators.config import SpeculatorModelConfig
from speculators.convert.adapter import Adapter, Conversion, check_default_layers, check_fit
from speculators.convert.notes import ConversionNotes
from speculators.convert.options import ConversionOptions
from speculators.convert.source import ForeignCheckpoint
from speculators.convert.verifier import VerifierFacts
from speculators.errors import ConfigError
from speculators.models.draft_config import default_layer_ids

__all__ = ["OlderSpeculators"]

_OLD_LAYOUT = "trees without this key had fill-in blocks only"
_ABSENT = "trees without this key had no such part"

#: Values of keys that a tree had not yet, per family; block drafts share theirs.
_MISSING: dict[str, dict[str, tuple[Any, str]]] = {
    "dflash": {
        "sample_from_anchor": (False, _OLD_LAYOUT),
        "sliding_window_non_causal": (False, "trees without this key had causal sliding layers only"),
        "block_size": (8, "upstream's default in all trees"),
    },
    "eagle3": {
        "norm_before_residual": (False, "upstream's default in all trees"),
        "norm_before_fc": (False, _ABSENT),
        "fc_norm": (False, _ABSENT),
        "norm_output": (False, _ABSENT),
        "embed_requires_grad": (False, _ABSENT),
    },
    "mtp": {"num_nextn_predict_layers": (1, "the only number in any tree")},
}
_MISSING["dspark"] = _MISSING["dflash"]
_MISSING["peagle"] = _MISSING["eagle3"] | {"embed_requires_grad": (True, "upstream's default in all trees")}

#: Tensors of the training run.
_TRAINING_TENSORS = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")

#: Where each family keeps its captured layers.
_LAYER_KEYS = {
    "dflash": "aux_hidden_state_layer_ids",
    "dspark": "aux_hidden_state_layer_ids",
    "eagle3": "eagle_aux_hidden_state_layer_ids",
    "peagle": "eagle_aux_hidden_state_layer_ids",
}


class OlderSpeculators(Adapter):
    name = "speculators"
    title = "speculators checkpoints of any version"
    algorithms = ("dspark", "dflash", "eagle3", "peagle", "mtp")
    options = frozenset(
        {
            "aux_hidden_state_layer_ids",
            "eagle_aux_hidden_state_layer_ids",
            "mask_token_id",
            "sample_from_anchor",
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
        }
    )

    def recognises(self, source: ForeignCheckpoint) -> bool:
        return "speculators_model_type" in source.config

    def default_verifier(self, source: ForeignCheckpoint) -> str | None:
        record = source.config.get("speculators_config")
        verifier = record.get("verifier") if isinstance(record, Mapping) else None
        name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
        return None if name is None else str(name)

    def read(
        self, source: ForeignCheckpoint, verifier: VerifierFacts, algorithm: str | None, options: ConversionOptions
    ) -> Conversion:
        notes = ConversionNotes()
        values = dict(source.config)
        family = str(values["speculators_model_type"])
        config_class = self._config_class(family)
        tensors = {name: tensor for name, tensor in source.tensors().items() if not name.startswith(_TRAINING_TENSORS)}
        for name in ("aux_hidden_state_layer_ids", "mask_token_id", "sample_from_anchor", *_MISSING["eagle3"]):
            if getattr(options, name, None) is not None and name in config_class.model_fields:
                values[name] = getattr(options, name)
        if options.eagle_aux_hidden_state_layer_ids is not None:
            values["eagle_aux_hidden_state_layer_ids"] = options.eagle_aux_hidden_state_layer_ids
        values["transformer_layer_config"] = _decoder_values(values.get("transformer_layer_config"), family)
        self._fill(values, family, tensors, verifier, notes)
        known = {key: value for key, value in values.items() if key in config_class.model_fields}
        dropped = sorted(set(values) - set(known) - {"torch_dtype", "model_type"})
        if dropped:
            notes.remark(f"keys of the config that were left out: {', '.join(dropped)}")
        config = config_class(**known)
        record = config.speculators_config
        if record is None:
            raise ConfigError("the config has no 'speculators_config', so it is incomplete; fetch config.json again")
        record.verifier = verifier.record
        check_fit(config, list(getattr(config, _LAYER_KEYS.get(family, ""), None) or []), verifier)
        return Conversion(config, tensors, notes)

    @staticmethod
    def _config_class(family: str) -> Any:
        SpeculatorModelConfig.registered_classes()
        if family not in SpeculatorModelConfig.registry:
            known = ", ".join(sorted(SpeculatorModelConfig.registry))
            age = " (which upstream gave up)" if family in ("eagle", "mlp") else ""
            raise ConfigError(f"speculators_model_type {family!r}{age} cannot be converted; this library has {known}")
        return SpeculatorModelConfig.registry[family]

    @staticmethod
    def _fill(
        values: dict[str, Any], family: str, tensors: Mapping[str, Tensor], verifier: VerifierFacts, notes: ConversionNotes
    ) -> None:
        """Complete the config in place."""
        for key, value in SpeculatorModelConfig.registry[family].meaning_of_absent.items():
            if values.get(key) is None:
                values[key] = notes.assume(key, value, "what other writers mean, who have no such key")
        for key, (value, reason) in _MISSING.get(family, {}).items():
            if values.get(key) is None:
                values[key] = notes.assume(key, value, reason)
        if family != "mtp" and values.get("draft_vocab_size") is None:
            values["draft_vocab_size"] = notes.assume("draft_vocab_size", *_draft_vocabulary(values, tensors))
        if family == "dspark":
            for key, value in _dspark_heads(tensors, values).items():
                if values.get(key) is None:
                    values[key] = notes.assume(key, value, "read off the tensors")
        layers = _LAYER_KEYS.get(family)
        if layers is not None and values.get(layers) is None:
            values[layers] = notes.assume(layers, _default_ids(tensors, verifier, layers), "upstream's default layers")


def _decoder_values(value: Any, family: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"the {family} config has no 'transformer_layer_config', so it is incomplete; fetch config.json again"
        )
    return {key: part for key, part in value.items() if key not in ("torch_dtype", "dtype", "transformers_version")}


def _draft_vocabulary(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    for name in ("d2t", "lm_head.weight", "markov_head.markov_w2.weight"):
        if name in tensors:
            return tensors[name].shape[0], f"the size of {name}"
    return int(values["transformer_layer_config"]["vocab_size"]), "no tensor of a reduced vocabulary is in the file"


def _dspark_heads(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    first = tensors.get("markov_head.markov_w1.weight")
    rank = 0 if first is None else first.shape[1]
    kinds = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
    confidence = tensors.get("confidence_head.proj.weight")
    hidden = values["transformer_layer_config"]["hidden_size"]
    return {
        "markov_rank": rank,
        "markov_head_type": next((kind for name, kind in kinds.items() if name in tensors), "vanilla"),
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None and confidence.shape[1] > hidden,
    }


def _default_ids(tensors: Mapping[str, Tensor], verifier: VerifierFacts, key: str) -> list[int]:
    if "fc.weight" not in tensors:
        raise ConfigError("the checkpoint has no fc.weight, so it is incomplete; fetch its weights again")
    ids = default_layer_ids(verifier.num_hidden_layers)
    check_default_layers(ids, tensors["fc.weight"], verifier, key)
    return ids
