"""DSpark: DFlash's parallel block plus a light serial correction, and a calibrated guess of how far to trust it.

A Markov head adds to each token's logits a low-rank term of the token before it, so that a block is drafted
semi-autoregressively; a confidence head predicts each token's acceptance. Paper: arXiv 2607.05147.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import nn

from speculators.config import SpeculatorModelConfig
from speculators.errors import ConfigError
from speculators.models.base import SpeculatorModel
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.heads import HEAD_STD, ConfidenceHead, DraftHeads, MarkovHead, MarkovHeadType

__all__ = ["DSparkDraftModel", "DSparkSpeculator", "DSparkSpeculatorConfig"]


@SpeculatorModelConfig.register("dspark")
class DSparkSpeculatorConfig(DFlashSpeculatorConfig):
    """Config of a DSpark draft; the keys are those of ``config.json``."""

    #: Missing, it is fill-in for vLLM and for trees older than the key, anchor-first for upstream's class.
    must_be_written: ClassVar[frozenset[str]] = frozenset({"sample_from_anchor"})

    speculators_model_type: Literal["dspark"] = "dspark"  # type: ignore[assignment]
    architectures: list[str] | None = Field(default_factory=lambda: ["DSparkSpeculator"])
    sample_from_anchor: bool = True

    #: R; 0 leaves the Markov head out.
    markov_rank: int = Field(default=256, ge=0)
    markov_head_type: MarkovHeadType = "vanilla"
    enable_confidence_head: bool = True
    #: Whether the confidence head reads the Markov embedding of the previous token.
    confidence_head_with_markov: bool = True

    # Keys of this library only; other readers ignore them.
    #: What the confidence head was trained to predict: acceptance with the verifier's distribution renormalised over the draft
    #: vocabulary, or true acceptance over the full one.
    confidence_target: Literal["draft", "full"] = "draft"
    #: Whether the confidence loss is kept from the backbone and the Markov embedding.
    confidence_detach: bool = False

    def check(self) -> None:
        super().check()
        if self.markov_rank == 0 and self.enable_confidence_head and self.confidence_head_with_markov:
            raise ConfigError(
                "dspark: confidence_head_with_markov needs a Markov head; set markov_rank above 0 or switch "
                "confidence_head_with_markov off"
            )

    def _fill_engine_keys(self) -> None:
        """Nothing: engines do not apply ``sliding_window_non_causal`` to DSpark."""


@SpeculatorModel.register("dspark")
class DSparkDraftModel(DFlashDraftModel):
    """The DSpark draft."""

    config_class: Any = DSparkSpeculatorConfig
    config: DSparkSpeculatorConfig
    optional_tensors = frozenset({"confidence_head.proj.bias"})

    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None

    def add_heads(self, config: Any) -> None:
        hidden_size = config.transformer_layer_config.hidden_size
        self.markov_head = None
        if config.markov_rank > 0:
            self.markov_head = MarkovHead(
                config.markov_head_type,
                hidden_size,
                config.markov_rank,
                self.verifier_vocab_size,
                self.draft_vocab_size,
            )
        self.confidence_head = None
        if config.enable_confidence_head:
            rank = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(hidden_size, rank, config.confidence_detach)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # Heads start near zero whatever the decoder's range: the first steps then do not fight a random bias.
        heads = [head for head in (self.markov_head, self.confidence_head) if head is not None]
        if isinstance(module, (nn.Linear, nn.Embedding)) and any(module is part for head in heads for part in head.modules()):
            nn.init.normal_(module.weight, std=HEAD_STD)

    @property
    def heads(self) -> DraftHeads:
        return DraftHeads(self.lm_head, self.markov_head, self.confidence_head, self.config.confidence_head_with_markov)


#: The name by which models are usually read: ``DSparkSpeculator.from_pretrained(folder)``.
DSparkSpeculator = DSparkDraftModel
