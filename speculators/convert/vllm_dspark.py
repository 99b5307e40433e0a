"""vLLM's native DSpark: DeepSpec's flat Qwen3 config as vLLM's own loader reads it, to and fro.

What is missing takes vLLM's values: anchor-first blocks, no confidence head, a rotary base of 1e6, the whole vocabulary. Only
the vanilla Markov head runs there. Sliding layers measure their window from each slot and are causal inside the block, unless
``is_causal`` or ``dflash_config.causal`` says otherwise for all layers. Source: vLLM 0.32, ``qwen3_dspark.py``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from speculators.convert.adapter import Adapter, Conversion, capture_ids, check_fit, foreign_ids
from speculators.convert.decoders import decoder_config, flat_decoder, non_causal_sliding
from speculators.convert.deepspec import BLOCK_ARCHITECTURE
from speculators.convert.notes import ConversionNotes, FlatConfig
from speculators.convert.options import ConversionOptions
from speculators.convert.source import ForeignCheckpoint
from speculators.convert.verifier import VerifierFacts
from speculators.errors import ConfigError
from speculators.models.dspark import DSparkSpeculatorConfig

__all__ = ["VllmDSpark", "write_vllm_dspark"]

#: What vLLM assumes for Qwen3-style drafts without a rotary base.
VLLM_ROPE_THETA = 1_000_000.0


class VllmDSpark(Adapter):
    name = "vllm-dspark"
    title = "vLLM's native DSpark (Qwen3DSparkModel)"
    algorithms = ("dspark",)
    options = frozenset({"mask_token_id", "aux_hidden_state_layer_ids", "sample_from_anchor", "enable_confidence_head"})

    def recognises(self, source: ForeignCheckpoint) -> bool:
        return BLOCK_ARCHITECTURE in source.architectures

    def read(
        self, source: ForeignCheckpoint, verifier: VerifierFacts, algorithm: str | None, options: ConversionOptions
    ) -> Conversion:
        notes = ConversionNotes()
        flat = FlatConfig(source.config, "vLLM DSpark", notes)
        flat.refuse_other("logit_scale", (1.0,), "scaled logits")
        flat.refuse_other("dspark_draft_topk", (), "a Markov term for the likeliest tokens only")
        decoder = decoder_config(flat, "qwen3", rope_theta=VLLM_ROPE_THETA)
        tensors = source.tensors()
        ids = options.aux_hidden_state_layer_ids or capture_ids(flat.required("target_layer_ids"))
        anchor_first = options.sample_from_anchor
        if anchor_first is None:
            anchor_first = flat.get("sample_from_anchor", True, "vLLM's reading of its native form")
        values: dict[str, Any] = {
            "aux_hidden_state_layer_ids": ids,
            "mask_token_id": flat.required("mask_token_id") if options.mask_token_id is None else options.mask_token_id,
            "block_size": flat.required("block_size"),
            "sample_from_anchor": bool(anchor_first),
            "draft_vocab_size": flat.get("draft_vocab_size", decoder.vocab_size, "the whole vocabulary, as vLLM reads it"),
            "sliding_window_non_causal": non_causal_sliding(flat, layer_types=decoder.layer_types),
            "sliding_window_reference": "slot",
            **self._heads(flat, tensors, options, notes),
        }
        config = DSparkSpeculatorConfig.build(decoder, verifier.record, **values)
        check_fit(config, ids, verifier)
        flat.remark_unread()
        return Conversion(config, tensors, notes)

    @staticmethod
    def _heads(
        flat: FlatConfig, tensors: dict[str, Tensor], options: ConversionOptions, notes: ConversionNotes
    ) -> dict[str, Any]:
        rank = int(flat.required("markov_rank"))
        confident = options.enable_confidence_head
        if confident is None:
            confident = flat.get("enable_confidence_head", False, "vLLM drops the head unless the config switches it on")
        if not confident and (unused := [name for name in tensors if name.startswith("confidence_head.")]):
            for name in unused:
                del tensors[name]
            notes.remark(
                "the file's confidence head was left out, because vLLM would not use it; keep it with "
                "--algorithm-kwargs '{\"enable_confidence_head\": true}'"
            )
        with_markov = False
        if confident:
            with_markov = flat.get("confidence_head_with_markov", False, "vLLM's reading of its native form")
        return {
            "markov_rank": rank,
            "markov_head_type": flat.get("markov_head_type", "vanilla", "the only Markov head that vLLM runs"),
            "enable_confidence_head": bool(confident),
            "confidence_head_with_markov": bool(with_markov),
        }


def write_vllm_dspark(conversion: Conversion) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of the native form; tensor names are the same.

    :raises ConfigError: vLLM does not run such a draft.
    """
    config: DSparkSpeculatorConfig = conversion.config
    if config.markov_head_type != "vanilla" or config.markov_rank == 0:
        kind = config.markov_head_type if config.markov_rank else "missing"
        raise ConfigError(
            f"vLLM's DSpark runs vanilla Markov heads only, and this draft's is {kind}; train it with a vanilla one"
        )
    decoder = config.transformer_layer_config
    flat = flat_decoder(decoder) | {
        "architectures": [BLOCK_ARCHITECTURE],
        "target_layer_ids": foreign_ids(config.aux_hidden_state_layer_ids),
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "sample_from_anchor": config.sample_from_anchor,
        "draft_vocab_size": config.draft_vocab_size,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }
    flat |= sliding_keys(conversion)
    return flat, dict(conversion.tensors)


def sliding_keys(conversion: Conversion) -> dict[str, Any]:
    """Keys for drafts with sliding layers; none without. Both spellings, since vLLM versions differ in the one they read."""
    config = conversion.config
    if "sliding_attention" not in (config.transformer_layer_config.layer_types or []):
        return {}
    if config.sliding_window_reference == "anchor":
        conversion.notes.remark(
            "engines measure a sliding window from each slot; this draft measures it from the anchor, so late slots of a block "
            "will see a little less context there"
        )
    return {"is_causal": False, "dflash_config": {"causal": False}} if config.sliding_window_non_causal else {}
