"""DeepSpec's EAGLE-3 for Qwen3 verifiers: five captured layers, the whole vocabulary, no optional norm.

A flat Qwen3 config; its reader takes no defaults. ``target_layer_ids`` are outputs of decoder layers. Tensor names are this
library's. Source: the project's modelling and config code (deepseek-ai/DeepSpec).
"""

from __future__ import annotations

from speculators.convert.adapter import Adapter, Conversion, capture_ids, check_fit, check_layer_count, refuse_final_layer
from speculators.convert.decoders import decoder_config
from speculators.convert.notes import ConversionNotes, FlatConfig
from speculators.convert.options import ConversionOptions
from speculators.convert.source import ForeignCheckpoint
from speculators.convert.verifier import VerifierFacts
from speculators.models.eagle3 import Eagle3SpeculatorConfig

__all__ = ["DeepSpecEagle3"]

ARCHITECTURE = "Qwen3Eagle3Model"

#: Read by DeepSpec's trainer only.
_TRAINING_KEYS = ("target_model_name_or_path", "step_loss_decay", "draft_num_hidden_layers", "layer_types")


class DeepSpecEagle3(Adapter):
    name = "deepspec-eagle3"
    title = "DeepSpec EAGLE-3 (Qwen3Eagle3Model)"
    algorithms = ("eagle3",)
    options = frozenset({"eagle_aux_hidden_state_layer_ids"})

    def recognises(self, source: ForeignCheckpoint) -> bool:
        return ARCHITECTURE in source.architectures

    def read(
        self, source: ForeignCheckpoint, verifier: VerifierFacts, algorithm: str | None, options: ConversionOptions
    ) -> Conversion:
        notes = ConversionNotes()
        flat = FlatConfig(source.config, "DeepSpec EAGLE-3", notes)
        decoder = decoder_config(flat, "qwen3")
        flat.skip(*_TRAINING_KEYS)
        check_layer_count(flat, verifier)
        for key in ("fc_norm", "fc_norm_perslice"):
            flat.refuse_other(key, (False,), "norms of a fork of DeepSpec")
        ids = options.eagle_aux_hidden_state_layer_ids or capture_ids(flat.required("target_layer_ids"))
        why = "DeepSpec's network has it so, always"
        config = Eagle3SpeculatorConfig.build(
            decoder,
            verifier.record,
            draft_vocab_size=decoder.vocab_size,
            eagle_aux_hidden_state_layer_ids=ids,
            speculative_tokens=options.speculative_tokens or int(flat.required("ttt_length")),
            norm_before_residual=notes.assume("norm_before_residual", False, why),
            norm_before_fc=notes.assume("norm_before_fc", False, why),
            norm_output=notes.assume("norm_output", False, why),
        )
        check_fit(config, ids, verifier)
        refuse_final_layer(ids, verifier, "train it on others, as DeepSpec's evaluation demands")
        flat.remark_unread()
        return Conversion(config, source.tensors(), notes)
