"""The MTP layer that a verifier comes with (Qwen3-Next, Qwen3.5), taken out as a draft to train; :mod:`stitch` puts it back.

Only ``mtp.*`` is read, out of whichever files hold it; embedding and head stay with the verifier. The draft's decoder config
is the verifier's own.
"""

from __future__ import annotations

from speculators.convert.adapter import Adapter, Conversion, check_fit
from speculators.convert.mtp_names import MTP_PREFIX, draft_tensors
from speculators.convert.notes import ConversionNotes
from speculators.convert.options import ConversionOptions
from speculators.convert.source import ForeignCheckpoint
from speculators.convert.verifier import VerifierFacts
from speculators.errors import ConfigError
from speculators.models.mtp import DECODER_KINDS, MTPSpeculatorConfig, build_mtp_decoder
from speculators.models.verifier_weights import read_verifier_config, text_config

__all__ = ["VerifierMtp"]

#: Upstream's default.
SPECULATIVE_STEPS = 3


class VerifierMtp(Adapter):
    name = "mtp"
    title = "verifiers with an MTP layer (mtp.*)"
    algorithms = ("mtp",)
    options = frozenset({"num_speculative_steps"})

    def recognises(self, source: ForeignCheckpoint) -> bool:
        return source.has(f"{MTP_PREFIX}fc.")

    def default_verifier(self, source: ForeignCheckpoint) -> str | None:
        return source.name

    def read(
        self, source: ForeignCheckpoint, verifier: VerifierFacts, algorithm: str | None, options: ConversionOptions
    ) -> Conversion:
        notes = ConversionNotes()
        theirs = read_verifier_config(source.name)
        kind = text_config(theirs).model_type
        if kind not in DECODER_KINDS:
            raise ConfigError(
                f"the MTP layer of a {kind} verifier cannot be taken out; the kinds are {', '.join(DECODER_KINDS)}"
            )
        tensors = draft_tensors(source.tensors(name for name in source.names if name.startswith(MTP_PREFIX)))
        steps = options.num_speculative_steps or options.speculative_tokens
        config = MTPSpeculatorConfig.build(
            build_mtp_decoder(theirs),
            verifier.record,
            num_verifier_layers=verifier.num_hidden_layers,
            speculative_tokens=steps or notes.assume("num_speculative_steps", SPECULATIVE_STEPS, "upstream's default"),
            hidden_state_input=notes.assume("hidden_state_input", "post_norm", "what vLLM feeds a verifier's own MTP layer"),
        )
        check_fit(config, [], verifier)
        return Conversion(config, tensors, notes)
