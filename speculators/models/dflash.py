"""DFlash: a whole block of tokens drafted in one parallel pass over the verifier's features.

A block is ``[anchor token, mask, ..., mask]``; see :mod:`speculators.layout` for what each slot predicts and
:mod:`speculators.models.backbone` for the network. The embedding and the output head are the verifier's, frozen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from torch import Tensor

from speculators.batch import PackedBatch
from speculators.config import SpeculatorModelConfig
from speculators.errors import ConfigError
from speculators.layout import BlockLayout, block_input_ids
from speculators.models.attention import AttentionImpl
from speculators.models.backbone import BlockBackbone
from speculators.models.base import SpeculatorModel
from speculators.models.draft_config import check_layer_ids
from speculators.models.family import DraftModel, DraftModelConfig

if TYPE_CHECKING:
    from speculators.models.block_drafter import BlockDrafter

__all__ = ["DFlashDraftModel", "DFlashSpeculator", "DFlashSpeculatorConfig"]


@SpeculatorModelConfig.register("dflash")
class DFlashSpeculatorConfig(DraftModelConfig):
    """Config of a DFlash draft; the keys are those of ``config.json``."""

    speculators_model_type: Literal["dflash"] = "dflash"
    architectures: list[str] | None = Field(default_factory=lambda: ["DFlashSpeculator"])

    draft_vocab_size: int = Field(default=32000, ge=1)
    target_hidden_size: int | None = None
    #: Slots per block, the anchor's included.
    block_size: int = Field(default=8, ge=1)
    #: Captured verifier layers in the order of concatenation; k is the residual stream after k layers.
    aux_hidden_state_layer_ids: list[int]
    #: Verifier id embedded in all slots but the anchor's.
    mask_token_id: int
    #: Whether sliding layers see the whole block (full layers always do).
    sliding_window_non_causal: bool = False
    #: Block layout; see :mod:`speculators.layout`.
    sample_from_anchor: bool = False

    def check(self) -> None:
        family = self.speculators_model_type
        first_legal = 1 if self.sample_from_anchor else 2
        if self.block_size < first_legal:
            raise ConfigError(
                f"{family}: block_size {self.block_size} predicts no token in this layout; use at least {first_legal}"
            )
        if self.transformer_layer_config.model_type != "qwen3":
            raise ConfigError(
                f"{family}: block drafts have Qwen3-style layers, not {self.transformer_layer_config.model_type} ones; "
                "leave draft_arch out"
            )
        self.check_mask_token(self.mask_token_id)
        super().check()
        check_layer_ids(self.layer_ids)

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.block_size, self.sample_from_anchor)

    @property
    def layer_ids(self) -> list[int]:
        return self.aux_hidden_state_layer_ids

    def _fill_engine_keys(self) -> None:
        # vLLM applies this key to full layers too, which are bidirectional here: with no sliding layer only `true` serves what
        # was trained.
        if "sliding_attention" not in (self.transformer_layer_config.layer_types or []):
            self.sliding_window_non_causal = True


@SpeculatorModel.register("dflash")
class DFlashDraftModel(BlockBackbone, DraftModel):
    """The DFlash draft. Shape letters as in :mod:`speculators.models.backbone`; N predicted tokens, V and D vocabularies."""

    config_class: Any = DFlashSpeculatorConfig
    config: DFlashSpeculatorConfig
    _no_split_modules: Any = ("BlockDecoderLayer",)

    def add_network(self, config: Any) -> None:
        self.add_backbone(
            config.transformer_layer_config,
            len(config.aux_hidden_state_layer_ids),
            sliding_window_non_causal=config.sliding_window_non_causal,
            window_reference=config.sliding_window_reference,
        )

    @property
    def layout(self) -> BlockLayout:
        return self.config.layout

    def embed_blocks(self, anchor_ids: Tensor, num_slots: int) -> Tensor:
        """Input embeddings ``[A, num_slots, H]`` of blocks whose anchors hold these verifier ids ``[A]``."""
        return self.embed_tokens(block_input_ids(anchor_ids, num_slots, self.config.mask_token_id))

    def draft_hidden(self, batch: PackedBatch, num_slots: int | None = None, attn_impl: AttentionImpl = "document") -> Tensor:
        """Post-norm states of every slot of the batch's blocks, ``[A, num_slots, H]``.

        :param batch: with ``features`` attached.
        :param num_slots: slots to run; the whole block when None. Slots see one another, so it changes the states.
        :raises ValueError: the batch has no features.
        """
        if batch.features is None:
            raise ValueError("the batch carries no features; attach the verifier's hidden states first")
        return self.run_blocks(
            self.embed_blocks(batch.anchor_ids, num_slots or self.config.block_size),
            self.context(batch.features),
            batch.position_ids,
            batch.anchors,
            batch.anchor_positions,
            batch.document_ids,
            attn_impl,
        )

    def drafter(self, *, markov: bool = True) -> BlockDrafter:  # type: ignore[override]
        """The decoder's view of this model.

        :param markov: whether the Markov head corrects the logits; off, tokens are drafted independently.
        """
        from speculators.models.block_drafter import BlockDrafter

        return BlockDrafter(self, markov=markov)


#: The name in upstream's config classes.
DFlashSpeculator = DFlashDraftModel
