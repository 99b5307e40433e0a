"""DFlash: a whole block of tokens drafted in one parallel pass over the verifier's features.

A block is ``[anchor token, mask, ..., mask]``; see :mod:`speculators.layout` for what each slot predicts and
:mod:`speculators.models.backbone` for the network. The embedding and the output head are the verifier's, frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, cast

import torch
from pydantic import BeforeValidator, Field, PlainSerializer
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig, Qwen3Config

from speculators.batch import PackedBatch
from speculators.config import SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
from speculators.errors import ConfigError
from speculators.layout import BlockLayout, WindowReference, block_input_ids
from speculators.losses import BlockLossOutput, LossConfig, TeacherHead, block_loss, gather_block_targets
from speculators.models.attention import AttentionImpl
from speculators.models.backbone import BlockBackbone
from speculators.models.base import SpeculatorModel
from speculators.models.draft_config import check_layer_ids
from speculators.models.heads import DraftHeads
from speculators.proposals import GreedyTokenProposalConfig

if TYPE_CHECKING:
    from speculators.models.block_drafter import BlockDrafter

Result = TypeVar("Result")

__all__ = ["DFlashDraftModel", "DFlashSpeculator", "DFlashSpeculatorConfig"]


def _decoder_config(value: Any) -> Any:
    """A decoder config from its dictionary, by ``model_type``."""
    if not isinstance(value, Mapping):
        return value
    values = dict(value)
    model_type = values.pop("model_type", "qwen3")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers knows no model_type {model_type!r}")
    return CONFIG_MAPPING[model_type](**values)


def _decoder_dict(config: PretrainedConfig) -> dict[str, Any]:
    values = config.to_diff_dict()
    values.pop("transformers_version", None)
    values["model_type"] = config.model_type
    return values


#: Config of the draft's decoder layers; a dictionary in the file.
DecoderConfig = Annotated[PretrainedConfig, BeforeValidator(_decoder_config), PlainSerializer(_decoder_dict)]


@SpeculatorModelConfig.register("dflash")
class DFlashSpeculatorConfig(SpeculatorModelConfig):
    """Config of a DFlash draft; the keys are those of ``config.json``."""

    speculators_model_type: Literal["dflash"] = "dflash"
    architectures: list[str] | None = Field(default_factory=lambda: ["DFlashSpeculator"])

    #: The draft's decoder; its ``vocab_size`` and ``hidden_size`` are the verifier's.
    transformer_layer_config: DecoderConfig = Field(default_factory=Qwen3Config)
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

    # Keys of this library only; other readers ignore them.
    #: What a sliding window is measured from.
    sliding_window_reference: WindowReference = "anchor"
    #: Whether the verifier's final states in training were taken before or after its final norm.
    final_state: Literal["pre_norm", "post_norm"] = "post_norm"
    #: How the training answers were made (as the data's manifest says), for the teacher-forced prediction; None: unknown.
    training_answers: dict[str, Any] | None = None

    def check(self) -> None:
        decoder = self.transformer_layer_config
        family = self.speculators_model_type
        first_legal = 1 if self.sample_from_anchor else 2
        if self.block_size < first_legal:
            raise ConfigError(
                f"{family}: block_size {self.block_size} predicts no token in this layout; use at least {first_legal}"
            )
        if not 0 <= self.mask_token_id < decoder.vocab_size:
            raise ConfigError(
                f"{family}: mask_token_id {self.mask_token_id} is outside the verifier's embedding of {decoder.vocab_size} "
                "rows; choose a reserved id of the verifier's tokenizer"
            )
        if self.draft_vocab_size > decoder.vocab_size:
            raise ConfigError(
                f"{family}: draft_vocab_size {self.draft_vocab_size} exceeds the verifier's vocabulary of {decoder.vocab_size}"
            )
        check_layer_ids(self.aux_hidden_state_layer_ids)

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.block_size, self.sample_from_anchor)

    @classmethod
    def build(
        cls, decoder: PretrainedConfig, verifier: VerifierConfig, *, num_verifier_layers: int | None = None, **values: Any
    ) -> Self:
        """Config of a new draft with everything that follows from its settings filled in.

        :param decoder: as from :func:`~speculators.models.draft_config.build_draft_config`.
        :param num_verifier_layers: bounds the layer ids, if given.
        :param values: the family's fields.
        :raises ConfigError: values contradict one another.
        """
        values.setdefault("draft_vocab_size", decoder.vocab_size)
        config = cls(transformer_layer_config=decoder, **values)
        check_layer_ids(config.aux_hidden_state_layer_ids, num_verifier_layers)
        proposal = GreedyTokenProposalConfig(speculative_tokens=config.layout.max_draft_tokens)
        config.speculators_config = SpeculatorsConfig(
            algorithm=config.speculators_model_type,
            proposal_methods=[proposal],
            default_proposal_method=proposal.proposal_type,
            verifier=verifier,
        )
        config._fill_engine_keys()
        return config

    def _fill_engine_keys(self) -> None:
        # vLLM applies this key to full layers too, which are bidirectional here: with no sliding layer only `true` serves what
        # was trained.
        if "sliding_attention" not in (self.transformer_layer_config.layer_types or []):
            self.sliding_window_non_causal = True


@SpeculatorModel.register("dflash")
class DFlashDraftModel(BlockBackbone, SpeculatorModel):
    """The DFlash draft. Shape letters as in :mod:`speculators.models.backbone`; N predicted tokens, V and D vocabularies."""

    config_class: Any = DFlashSpeculatorConfig
    config: DFlashSpeculatorConfig
    _no_split_modules: Any = ("BlockDecoderLayer",)

    def __init__(self, config: DFlashSpeculatorConfig) -> None:
        super().__init__(config)
        decoder = config.transformer_layer_config
        self.add_vocabulary(decoder.vocab_size, config.draft_vocab_size)
        self.embed_tokens = nn.Embedding(decoder.vocab_size, decoder.hidden_size)
        self.add_backbone(
            decoder,
            len(config.aux_hidden_state_layer_ids),
            sliding_window_non_causal=config.sliding_window_non_causal,
            window_reference=config.sliding_window_reference,
        )
        self.lm_head = nn.Linear(decoder.hidden_size, config.draft_vocab_size, bias=False)
        self.add_heads(config)
        self.embed_tokens.requires_grad_(False)
        self.lm_head.requires_grad_(False)
        self.post_init()

    def add_heads(self, config: Any) -> None:
        """Create the family's own heads; DFlash has none."""

    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.transformer_layer_config.initializer_range
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)

    @property
    def layout(self) -> BlockLayout:
        return self.config.layout

    @property
    def target_layer_ids(self) -> list[int]:
        return list(self.config.aux_hidden_state_layer_ids)

    @property
    def heads(self) -> DraftHeads:
        """The output heads, as the loss and the drafter call them."""
        return DraftHeads(self.lm_head)

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

    def predicting(self, hidden: Tensor) -> Tensor:
        """States ``[A, N, H]`` of the slots that predict a token, by depth, of all slots' ``[A, K, H]``."""
        return hidden[:, self.layout.first_predicting_slot :]

    def forward(
        self,
        batch: PackedBatch,
        *,
        teacher: TeacherHead,
        loss_config: LossConfig,
        denominators: Mapping[str, float],
        impl: str = "reference",
        attn_impl: AttentionImpl = "document",
        metrics: bool = True,
    ) -> BlockLossOutput:
        """Loss and metric sums of one packed row.

        :param teacher: the verifier's output head, with ``normalize`` if the config's ``final_state`` is ``pre_norm``.
        :param denominators: of the whole optimiser step, as from :func:`speculators.losses.loss_denominators`.
        :param impl: loss implementation; ``attn_impl``: attention implementation.
        """
        slots = None if batch.num_depths is None else self.layout.query_slots(batch.num_depths)
        hidden = self.predicting(self.draft_hidden(batch, slots, attn_impl))
        states = batch.final_states
        if states is not None and self.config.final_state == "pre_norm":
            states = cast(Any, teacher).normalize(states)
        targets = gather_block_targets(batch, hidden.shape[1], self.verifier_to_draft, states)
        return block_loss(
            hidden, self.heads, teacher, targets, loss_config, denominators, impl=cast(Any, impl), metrics=metrics
        )

    def with_weights(self, work: Callable[[], Result]) -> Result:
        """``work()``, which may call any part of this model: sharded, the model gathers its weights around it as around
        :meth:`forward`."""
        return work()

    def drafter(self, *, markov: bool = True) -> BlockDrafter:  # type: ignore[override]
        """The decoder's view of this model.

        :param markov: whether the Markov head corrects the logits; off, tokens are drafted independently.
        """
        from speculators.models.block_drafter import BlockDrafter

        return BlockDrafter(self, markov=markov)

    @torch.no_grad()
    def parameter_counts(self) -> dict[str, int]:
        """Numbers of ``trainable`` and ``frozen`` parameters."""
        trainable = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        frozen = sum(parameter.numel() for parameter in self.parameters() if not parameter.requires_grad)
        return {"trainable": trainable, "frozen": frozen}


#: The name in upstream's config classes.
DFlashSpeculator = DFlashDraftModel
