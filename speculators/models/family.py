"""What all families share: the draft's config with its decoder, and a model that turns a packed row into a loss.

A family says which layers it has, how it turns verifier states into states of its predicting slots, and which heads read
these. Loss, vocabulary, validation, replay and decoding then work on any of them, because every prediction is named by its
anchor and its depth (:mod:`speculators.layout`), whatever the network that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import BeforeValidator, Field, PlainSerializer
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig, Qwen3Config

from speculators.batch import PackedBatch
from speculators.config import SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
from speculators.errors import ConfigError, last_line
from speculators.layout import DraftLayout, WindowReference
from speculators.losses import BlockLossOutput, LossConfig, TeacherHead, block_loss, gather_block_targets
from speculators.models.attention import AttentionImpl
from speculators.models.base import SpeculatorModel
from speculators.models.draft_config import check_layer_ids
from speculators.models.heads import DraftHeads
from speculators.proposals import GreedyTokenProposalConfig

__all__ = ["MAX_LAYERS", "DecoderConfig", "DraftModel", "DraftModelConfig", "check_decoder_values"]

#: More layers than any model has; a larger number in a config is a mistake, for which memory would run out.
MAX_LAYERS = 1024

Result = TypeVar("Result")


def check_decoder_values(values: Mapping[str, Any]) -> None:
    """Refuse values that transformers takes as they are, and that would hang it or fail much later.

    :raises ValueError: with one sentence.
    """
    layers, window = values.get("num_hidden_layers"), values.get("sliding_window")
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers {layers} is no number of layers of a draft")
    if window is not None and not (isinstance(window, int) and window >= 0):
        raise ValueError(f"sliding_window {window!r} is no number of tokens")


def _decoder_config(value: Any) -> Any:
    """A decoder config from its dictionary, by ``model_type``."""
    if not isinstance(value, Mapping):
        return value
    values = dict(value)
    model_type = values.pop("model_type", "qwen3")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers knows no model_type {model_type!r}")
    check_decoder_values(values)
    try:
        return CONFIG_MAPPING[model_type](**values)
    except (ArithmeticError, AttributeError, LookupError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"it makes no {model_type} decoder ({last_line(error)})") from error


def _decoder_dict(config: PretrainedConfig) -> dict[str, Any]:
    values = config.to_diff_dict()
    values.pop("transformers_version", None)
    values["model_type"] = config.model_type
    return values


#: Config of the draft's decoder layers; a dictionary in the file.
DecoderConfig = Annotated[PretrainedConfig, BeforeValidator(_decoder_config), PlainSerializer(_decoder_dict)]


class DraftModelConfig(SpeculatorModelConfig):
    """Keys that every family's ``config.json`` has, and what the library asks of a family's config."""

    #: The draft's decoder; its ``vocab_size`` and ``hidden_size`` are the verifier's.
    transformer_layer_config: DecoderConfig = Field(default_factory=Qwen3Config)

    # Keys of this library only; other readers ignore them.
    #: What a sliding window is measured from.
    sliding_window_reference: WindowReference = "anchor"
    #: Whether the verifier's final states in training were taken before or after its final norm.
    final_state: Literal["pre_norm", "post_norm"] = "post_norm"
    #: How the training answers were made (as the data's manifest says), for the teacher-forced prediction; None: unknown.
    training_answers: dict[str, Any] | None = None

    @property
    def layout(self) -> DraftLayout:
        """How slots map to predicted tokens."""
        raise NotImplementedError

    @property
    def layer_ids(self) -> list[int]:
        """Captured verifier layers in the order of concatenation; k is the residual stream after k layers."""
        raise NotImplementedError

    @property
    def draft_vocabulary(self) -> int:
        """D, size of the draft's vocabulary."""
        return int(cast(Any, self).draft_vocab_size)

    @property
    def speculative_tokens(self) -> int | None:
        """Tokens to draft as the default proposal method says; None without one."""
        methods = self.speculators_config.proposal_methods if self.speculators_config is not None else []
        found = [method for method in methods if isinstance(method, GreedyTokenProposalConfig)]
        return found[0].speculative_tokens if found else None

    def check(self) -> None:
        vocab_size, family = self.transformer_layer_config.vocab_size, self.speculators_model_type
        if self.draft_vocabulary > vocab_size:
            raise ConfigError(
                f"{family}: draft_vocab_size {self.draft_vocabulary} exceeds the verifier's vocabulary of {vocab_size}"
            )

    def check_mask_token(self, mask_token_id: int) -> None:
        """:raises ConfigError: the verifier's embedding has no such row."""
        rows = self.transformer_layer_config.vocab_size
        if not 0 <= mask_token_id < rows:
            raise ConfigError(
                f"{self.speculators_model_type}: mask_token_id {mask_token_id} is outside the verifier's embedding of {rows} "
                "rows; choose a reserved id of the verifier's tokenizer"
            )

    @classmethod
    def build(
        cls, decoder: PretrainedConfig, verifier: VerifierConfig, *, num_verifier_layers: int | None = None, **values: Any
    ) -> Self:
        """Config of a new draft with everything that follows from its settings filled in.

        :param decoder: as from :func:`~speculators.models.draft_config.build_draft_config`.
        :param num_verifier_layers: bounds the layer ids, if given.
        :param values: the family's fields; ``speculative_tokens`` for a chain's number of steps.
        :raises ConfigError: values contradict one another.
        """
        tokens = values.pop("speculative_tokens", None)
        if "draft_vocab_size" in cls.model_fields:
            values.setdefault("draft_vocab_size", decoder.vocab_size)
        config = cls(transformer_layer_config=decoder, **values)
        config.check_layers(num_verifier_layers)
        proposal = GreedyTokenProposalConfig(speculative_tokens=tokens or config.layout.max_draft_tokens)
        config.speculators_config = SpeculatorsConfig(
            algorithm=config.speculators_model_type,
            proposal_methods=[proposal],
            default_proposal_method=proposal.proposal_type,
            verifier=verifier,
        )
        config._fill_engine_keys()
        return config

    def check_layers(self, num_verifier_layers: int | None = None) -> None:
        """:raises ConfigError: the captured layers are not a verifier's with so many layers."""
        check_layer_ids(self.layer_ids, num_verifier_layers)

    def _fill_engine_keys(self) -> None:
        """Set what an engine would read differently from what is trained."""


class DraftModel(SpeculatorModel):
    """A draft of any family. Shape letters: T tokens, A anchors, K slots, N predicted tokens, H hidden size."""

    config_class: Any = DraftModelConfig
    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        decoder = config.transformer_layer_config
        self.add_vocabulary(decoder.vocab_size, config.draft_vocabulary)
        self.embed_tokens = nn.Embedding(decoder.vocab_size, decoder.hidden_size)
        self.add_network(config)
        self.lm_head = nn.Linear(decoder.hidden_size, config.draft_vocabulary, bias=False)
        self.add_heads(config)
        self.embed_tokens.requires_grad_(self.trains_embeddings)
        self.lm_head.requires_grad_(False)
        self.post_init()

    def add_network(self, config: Any) -> None:
        """Create everything between embedding and output head."""
        raise NotImplementedError

    def add_heads(self, config: Any) -> None:
        """Create heads beside the output head; most families have none."""

    def draft_hidden(self, batch: PackedBatch, num_slots: int | None = None, attn_impl: AttentionImpl = "document") -> Tensor:
        """Post-norm states of every slot of the batch's anchors, ``[A, num_slots, H]``.

        :param batch: with ``features`` attached.
        :param num_slots: slots to run; as many as are trained when None.
        :raises ValueError: the batch has no features.
        """
        raise NotImplementedError

    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.transformer_layer_config.initializer_range
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.RMSNorm):
            module.reset_parameters()

    @property
    def layout(self) -> DraftLayout:
        return cast(DraftLayout, self.config.layout)

    @property
    def target_layer_ids(self) -> list[int]:
        return list(self.config.layer_ids)

    @property
    def heads(self) -> DraftHeads:
        """The output heads, as the loss and the drafter call them."""
        return DraftHeads(self.lm_head)

    def heads_of(self, hidden: Tensor, anchor_ids: Tensor) -> DraftHeads:
        """The output heads for anchors ``[A]`` (verifier ids) with these states of all their slots ``[A, K, H]``."""
        return self.heads.after(hidden, anchor_ids, self.layout.first_predicting_slot)

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
        slot_states = self.draft_hidden(batch, slots, attn_impl)
        hidden, heads = self.predicting(slot_states), self.heads_of(slot_states, batch.anchor_ids)
        states = batch.final_states
        if states is not None and self.config.final_state == "pre_norm":
            states = cast(Any, teacher).normalize(states)
        targets = gather_block_targets(batch, hidden.shape[1], self.verifier_to_draft, states)
        return block_loss(hidden, heads, teacher, targets, loss_config, denominators, impl=cast(Any, impl), metrics=metrics)

    def with_weights(self, work: Callable[[], Result]) -> Result:
        """``work()``, which may call any part of this model: sharded, the model gathers its weights around it as around
        :meth:`forward`."""
        return work()

    @torch.no_grad()
    def parameter_counts(self) -> dict[str, int]:
        """Numbers of ``trainable`` and ``frozen`` parameters."""
        trainable = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        frozen = sum(parameter.numel() for parameter in self.parameters() if not parameter.requires_grad)
        return {"trainable": trainable, "frozen": frozen}
