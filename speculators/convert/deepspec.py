"""DeepSpec's block drafts for Qwen3 verifiers: DSpark, and DFlash, which is DSpark without heads.

A flat Qwen3 config with the draft's keys beside it; its reader takes no defaults, so a missing key is an error. Blocks are
anchor-first, always. ``target_layer_ids`` are outputs of decoder layers, -1 the embeddings. Tensor names are this library's.
Source: the project's modelling and config code (deepseek-ai/DeepSpec).
"""

from __future__ import annotations

from typing import Any

from speculators.convert.adapter import Adapter, Conversion, capture_ids, check_fit, check_layer_count, refuse_final_layer
from speculators.convert.decoders import decoder_config
from speculators.convert.notes import ConversionNotes, FlatConfig
from speculators.convert.options import ConversionOptions
from speculators.convert.source import ForeignCheckpoint
from speculators.convert.verifier import VerifierFacts
from speculators.errors import ConfigError
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dspark import DSparkSpeculatorConfig

__all__ = ["DeepSpecBlocks"]

BLOCK_ARCHITECTURE = "Qwen3DSparkModel"

#: Read by DeepSpec's trainer only.
_TRAINING_KEYS = ("num_anchors", "enable_d2_feature", "d2_prefix_weight_base")


class DeepSpecBlocks(Adapter):
    """``Qwen3DSparkModel`` of DeepSpec, told from vLLM's use of the same name by ``num_anchors``, which its reader demands."""

    name = "deepspec"
    title = "DeepSpec DSpark or DFlash (Qwen3DSparkModel)"
    algorithms = ("dspark", "dflash")
    options = frozenset({"mask_token_id", "aux_hidden_state_layer_ids"})

    def recognises(self, source: ForeignCheckpoint) -> bool:
        return BLOCK_ARCHITECTURE in source.architectures and "num_anchors" in source.config

    def read(
        self, source: ForeignCheckpoint, verifier: VerifierFacts, algorithm: str | None, options: ConversionOptions
    ) -> Conversion:
        notes = ConversionNotes()
        flat = FlatConfig(source.config, "DeepSpec", notes)
        decoder = decoder_config(flat, "qwen3")
        flat.skip(*_TRAINING_KEYS)
        check_layer_count(flat, verifier)
        ids = options.aux_hidden_state_layer_ids or capture_ids(flat.required("target_layer_ids"))
        values: dict[str, Any] = {
            "aux_hidden_state_layer_ids": ids,
            "mask_token_id": flat.required("mask_token_id") if options.mask_token_id is None else options.mask_token_id,
            "block_size": flat.required("block_size"),
            "sample_from_anchor": notes.assume("sample_from_anchor", True, "DeepSpec's blocks are anchor-first, always"),
            "draft_vocab_size": decoder.vocab_size,
        }
        heads = _heads(flat)
        chosen = algorithm or ("dspark" if heads["markov_rank"] or heads["enable_confidence_head"] else "dflash")
        if chosen == "dflash" and (heads["markov_rank"] or heads["enable_confidence_head"]):
            raise ConfigError(
                "the draft has DSpark's heads, so it cannot become a DFlash draft; convert it with --algorithm dspark"
            )
        config_class: Any = DSparkSpeculatorConfig if chosen == "dspark" else DFlashSpeculatorConfig
        config = config_class.build(decoder, verifier.record, **values, **(heads if chosen == "dspark" else {}))
        check_fit(config, ids, verifier)
        refuse_final_layer(ids, verifier, "train it on others, as DeepSpec's evaluation demands")
        flat.remark_unread()
        return Conversion(config, source.tensors(), notes)


def _heads(flat: FlatConfig) -> dict[str, Any]:
    """DSpark's head settings, all of which DeepSpec's reader demands where they matter."""
    rank = int(flat.required("markov_rank"))
    confident = bool(flat.required("enable_confidence_head"))
    return {
        "markov_rank": rank,
        "markov_head_type": str(flat.required("markov_head_type")).lower() if rank else "vanilla",
        "enable_confidence_head": confident,
        "confidence_head_with_markov": bool(flat.required("confidence_head_with_markov")) if confident else False,
    }
