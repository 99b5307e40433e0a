"""EAGLE-3 drafts as EAGLE's own repository, SpecForge and vLLM keep them: a flat config, the layer called ``midlayer`` or
``layers.0``; to and fro. The decoder is Llama-style, or Qwen3-style where the file has head norms.

What is missing takes the value that all three readers share: no optional norm, the residual before the norm, a rotary base of
10000. Captured layers are the trap, for two conventions share one key, ``eagle_aux_hidden_state_layer_ids``:

- outside ``eagle_config``: k is the residual stream after k layers, as here (vLLM);
- inside it, beginning with 1: outputs of decoder layers, k + 1 here (SpecForge; sglang tells them by the 1);
- inside it, beginning otherwise: as here (drafts made for vLLM);
- nowhere: after 2, n // 2 and n - 3 layers of the verifier (EAGLE's repository and every engine).

Sources: SafeAILab/EAGLE, sgl-project/SpecForge and sglang's pull request 25454, vLLM 0.32's ``llama_eagle3.py``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from speculators.convert.adapter import Adapter, Conversion, capture_ids, check_default_layers, check_fit
from speculators.convert.decoders import DecoderKind, decoder_config, flat_decoder
from speculators.convert.notes import ConversionNotes, FlatConfig
from speculators.convert.options import ConversionOptions
from speculators.convert.source import ForeignCheckpoint
from speculators.convert.verifier import VerifierFacts
from speculators.errors import ConfigError
from speculators.models.draft_config import default_layer_ids
from speculators.models.eagle3 import Eagle3SpeculatorConfig

__all__ = ["EAGLE3_OPTIONS", "Eagle3Repository", "read_eagle3", "write_flat_eagle3"]

EAGLE3_OPTIONS = frozenset(
    {"eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"}
)

#: What upstream's converter writes for every EAGLE-3 draft, whose files do not say.
SPECULATIVE_TOKENS = 3

_ARCHITECTURES = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


class Eagle3Repository(Adapter):
    name = "eagle3"
    title = "EAGLE-3 repositories (EAGLE, SpecForge, vLLM)"
    algorithms = ("eagle3",)
    options = EAGLE3_OPTIONS

    def recognises(self, source: ForeignCheckpoint) -> bool:
        return source.has("midlayer.") or source.has("layers.0.hidden_norm.")

    def read(
        self, source: ForeignCheckpoint, verifier: VerifierFacts, algorithm: str | None, options: ConversionOptions
    ) -> Conversion:
        kind: DecoderKind = "qwen3" if source.has("self_attn.q_norm.") else "llama"
        return read_eagle3(source, verifier, options, kind, "EAGLE-3")


def read_eagle3(
    source: ForeignCheckpoint, verifier: VerifierFacts, options: ConversionOptions, kind: DecoderKind, form: str
) -> Conversion:
    """A flat EAGLE-3 checkpoint with a decoder of this kind.

    :param form: the format's name in sentences.
    """
    notes = ConversionNotes()
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor for name, tensor in source.tensors().items() if "rotary_emb." not in name
    }
    if "fc.weight" not in tensors:
        raise ConfigError(
            f"the {form} checkpoint has no fc.weight, so it captures no layers as EAGLE-3 does; it is another draft"
        )
    values = dict(source.config)
    _set_vocabulary(values, tensors, verifier, notes)
    flat = FlatConfig(values, form, notes)
    nested = flat.nested("eagle_config")
    flat.refuse_other("logit_scale", (1, 1.0), "scaled logits")
    flat.refuse_other("qkv_bias", (False,), "biases of queries, keys and values alone")
    flat.refuse_other("target_hidden_size", (verifier.hidden_size,), "states of another size than the verifier's")
    nested.refuse_other("use_aux_hidden_state", (True,), "no captured layers, as EAGLE-1 has")
    decoder = decoder_config(flat, kind)
    flat.skip("num_aux_hidden_states", "target_vocab_size", "draft_vocab_size")
    tokens = options.speculative_tokens or notes.assume(
        "speculative_tokens", SPECULATIVE_TOKENS, "upstream's number for converted EAGLE-3 drafts"
    )
    ids = options.eagle_aux_hidden_state_layer_ids or _layer_ids(flat, nested, tensors["fc.weight"], verifier)
    config = Eagle3SpeculatorConfig.build(
        decoder,
        verifier.record,
        draft_vocab_size=_draft_vocabulary(flat, tensors),
        eagle_aux_hidden_state_layer_ids=ids,
        speculative_tokens=tokens,
        **_norms(flat, nested, options),
    )
    check_fit(config, ids, verifier)
    if decoder.max_position_embeddings < (longest := verifier.text.get("max_position_embeddings") or 0):
        notes.remark(
            f"the draft's max_position_embeddings is {decoder.max_position_embeddings}, the verifier's {longest}; vLLM drafts "
            "up to the smaller one only"
        )
    for part in (flat, nested):
        part.remark_unread()
    return Conversion(config, tensors, notes)


def _set_vocabulary(
    values: dict[str, Any], tensors: dict[str, Tensor], verifier: VerifierFacts, notes: ConversionNotes
) -> None:
    """Some files' ``vocab_size`` is the draft's; ``t2d`` has an entry per verifier id, and without it the verifier knows."""
    size = tensors["t2d"].shape[0] if "t2d" in tensors else verifier.vocab_size
    if values.get("vocab_size") not in (None, size):
        notes.remark(f"vocab_size {values['vocab_size']} was read as {size}, the verifier's vocabulary")
    values["vocab_size"] = size


def _draft_vocabulary(flat: FlatConfig, tensors: dict[str, Tensor]) -> int:
    if flat.has("draft_vocab_size"):
        return int(flat.optional("draft_vocab_size"))
    name = next((name for name in ("d2t", "lm_head.weight") if name in tensors), None)
    size = tensors[name].shape[0] if name else int(flat.required("vocab_size"))
    return int(flat.notes.assume("draft_vocab_size", size, f"the size of {name}" if name else "the whole vocabulary"))


def _norms(flat: FlatConfig, nested: FlatConfig, options: ConversionOptions) -> dict[str, bool]:
    found = {}
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        value = getattr(options, key)
        inner, outer = nested.optional(key), flat.optional(key)
        value = inner if value is None else value
        value = outer if value is None else value
        found[key] = bool(flat.notes.assume(key, False, "every reader's value") if value is None else value)
    return found


def _layer_ids(flat: FlatConfig, nested: FlatConfig, fc: Tensor, verifier: VerifierFacts) -> list[int]:
    """Captured layers in this library's convention; see the module's docstring."""
    outer, inner = flat.optional(_LAYER_IDS), nested.optional(_LAYER_IDS)
    if outer:
        return [int(layer) for layer in outer]
    if not inner:
        ids = default_layer_ids(verifier.num_hidden_layers)
        check_default_layers(ids, fc, verifier, _LAYER_IDS)
        return list(flat.notes.assume(_LAYER_IDS, ids, "what EAGLE's repository and every engine capture"))
    if inner[0] != 1:
        reason = "ids in eagle_config that do not begin with 1 count layers as here, as vLLM and sglang read them"
        return list(flat.notes.assume(_LAYER_IDS, [int(layer) for layer in inner], reason))
    reason = (
        "ids in eagle_config that begin with 1 are outputs of layers, as SpecForge and sglang read them; vLLM would not add 1"
    )
    return list(flat.notes.assume(_LAYER_IDS, capture_ids(inner), reason))


def write_flat_eagle3(conversion: Conversion, architecture: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of the flat form that vLLM reads; tensor names are the same.

    :param architecture: vLLM's class; by the decoder's kind when None.
    :raises ConfigError: vLLM has no class for the decoder.
    """
    config: Eagle3SpeculatorConfig = conversion.config
    decoder = config.transformer_layer_config
    if architecture is None and decoder.model_type not in _ARCHITECTURES:
        raise ConfigError(f"vLLM has no EAGLE-3 class for {decoder.model_type} decoders; train the draft with another one")
    ids = list(config.layer_ids)
    if ids[0] == 1:
        conversion.notes.remark(
            "the captured layers begin with 1, by which sglang will take them for outputs of layers; vLLM will not"
        )
    flat = flat_decoder(decoder) | {
        "architectures": [architecture or _ARCHITECTURES[decoder.model_type]],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": decoder.hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "num_aux_hidden_states": len(ids),
        # vLLM takes the layers from the outer key and their number from the inner one.
        _LAYER_IDS: ids,
        "eagle_config": {_LAYER_IDS: ids, "use_aux_hidden_state": True},
    }
    return flat, dict(conversion.tensors)
