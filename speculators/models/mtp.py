"""MTP (multi-token prediction): one decoder layer that reads the verifier's last state, recursively.

    input    input_proj([RMSNorm(embed(x_t)) ; RMSNorm(state)])        state: the verifier's last one, then the draft's own
    layer    a decoder layer of the verifier's kind with full attention
    output   RMSNorm of it: read by the output head, and the next step's state

The layer is the one that Qwen3-Next and Qwen3.5 come with (``mtp.*`` in their files), or a Qwen3 layer. Its config is the
verifier's own, ``num_hidden_layers`` included. For the network and its training see :mod:`speculators.models.chain`. Papers:
arXiv 2412.19437 (DeepSeek-V3), 2509.18362 (FastMTP, the recursive use of one layer).
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig

from speculators.config import SpeculatorModelConfig
from speculators.errors import ConfigError
from speculators.layout import final_layer_id
from speculators.models.base import SpeculatorModel
from speculators.models.chain import ChainConfig, ChainModel
from speculators.models.draft_config import build_draft_config
from speculators.models.layers import Attend, GatedMLP, RotaryEmbedding, Rotation, attention_of, norm_of
from speculators.models.verifier_weights import text_config

__all__ = ["DECODER_KINDS", "MTPDecoderLayer", "MTPDraftModel", "MTPSpeculator", "MTPSpeculatorConfig", "build_mtp_decoder"]

#: Model types of decoder configs whose layers an MTP draft may have.
DECODER_KINDS = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@SpeculatorModelConfig.register("mtp")
class MTPSpeculatorConfig(ChainConfig):
    """Config of an MTP draft; the keys are those of ``config.json``."""

    #: Upstream trains on states before the norm and has no key for it.
    meaning_of_absent: ClassVar[dict[str, Any]] = {"hidden_state_input": "pre_norm"}

    speculators_model_type: Literal["mtp"] = "mtp"
    architectures: list[str] | None = Field(default_factory=lambda: ["MTPDraftModel"])

    #: Layers of the draft; engines read it. Only 1 exists.
    num_nextn_predict_layers: int = 1

    # A key of this library only.
    #: Whether the first step reads the verifier's last state before or after its final norm; vLLM feeds it after.
    hidden_state_input: Literal["pre_norm", "post_norm"] = "post_norm"

    def check(self) -> None:
        super().check()
        if self.num_nextn_predict_layers != 1:
            raise ConfigError(f"mtp: num_nextn_predict_layers is {self.num_nextn_predict_layers}, but only 1 is supported")
        kind = self.transformer_layer_config.model_type
        if kind not in DECODER_KINDS:
            raise ConfigError(f"mtp: no MTP layer of kind {kind!r}; the kinds are {', '.join(DECODER_KINDS)}")
        reduced = (self.model_extra or {}).get("draft_vocab_size")
        if reduced not in (None, self.draft_vocabulary):
            raise ConfigError(f"mtp: draft_vocab_size {reduced}, but MTP drafts the verifier's whole vocabulary; drop the key")

    @property
    def layer_ids(self) -> list[int]:
        layers = self.transformer_layer_config.num_hidden_layers
        return [final_layer_id(layers, after_norm=self.hidden_state_input == "post_norm")]

    def check_layers(self, num_verifier_layers: int | None = None) -> None:
        own = self.transformer_layer_config.num_hidden_layers
        if num_verifier_layers is not None and own != num_verifier_layers:
            raise ConfigError(
                f"mtp: transformer_layer_config has num_hidden_layers {own}, but the verifier has {num_verifier_layers}; "
                "use the verifier's config"
            )

    @property
    def draft_vocabulary(self) -> int:
        return int(self.transformer_layer_config.vocab_size)

    @property
    def num_speculative_steps(self) -> int:
        """N, steps that are trained."""
        return self.layout.steps


def build_mtp_decoder(verifier_config: PretrainedConfig) -> PretrainedConfig:
    """Decoder config of an MTP draft: the verifier's own where its kind has MTP layers, else a Qwen3 layer of its shape.

    :param verifier_config: of a composite one, the language model's part counts.
    """
    text = text_config(verifier_config)
    if text.model_type not in DECODER_KINDS:
        return build_draft_config(text, num_layers=text.num_hidden_layers, draft_arch="qwen3", sliding_window=0)
    decoder = copy.deepcopy(text)
    decoder.tie_word_embeddings = False
    return decoder


class MTPDecoderLayer(nn.Module):
    """The one layer, from embedding and state to the normed output; names are the checkpoint's."""

    def __init__(self, decoder: PretrainedConfig) -> None:
        super().__init__()
        self.hidden_layernorm = norm_of(decoder)
        self.token_layernorm = norm_of(decoder)
        self.input_proj = nn.Linear(2 * decoder.hidden_size, decoder.hidden_size, bias=False)
        self.input_layernorm = norm_of(decoder)
        self.self_attn = attention_of(decoder)
        self.post_attention_layernorm = norm_of(decoder)
        self.mlp = _feed_forward(decoder)
        self.final_layernorm = norm_of(decoder)

    def forward(self, states: Tensor, embeds: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """``[..., H]`` of states and embeddings ``[..., H]``."""
        hidden = self.input_proj(torch.cat([self.token_layernorm(embeds), self.hidden_layernorm(states)], dim=-1))
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attend)
        normed = self.post_attention_layernorm(hidden)
        # A block of experts takes [B, T, H].
        fed = self.mlp(normed.reshape(1, -1, normed.shape[-1])).view_as(normed)
        return self.final_layernorm(hidden + fed)


def _feed_forward(decoder: PretrainedConfig) -> nn.Module:
    """The MLP of the verifier's last layer with full attention, which is what an MTP layer has."""
    # Experts one after another: the implementation for every dtype and device. On a copy, as it is no part of a checkpoint.
    decoder = copy.copy(decoder)
    decoder._experts_implementation = "eager"
    if decoder.model_type == "qwen3_5_moe_text":
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

        return Qwen3_5MoeSparseMoeBlock(decoder)
    if decoder.model_type == "qwen3_next" and _is_sparse(decoder):
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

        return Qwen3NextSparseMoeBlock(decoder)
    return GatedMLP(decoder)


def _is_sparse(decoder: PretrainedConfig) -> bool:
    """Whether the last layer with full attention has experts.

    :raises ConfigError: there is no such layer.
    """
    full = [index for index, kind in enumerate(decoder.layer_types) if kind == "full_attention"]
    if not full:
        raise ConfigError("mtp: the verifier's layer_types name no full_attention layer, which an MTP layer is made like")
    among = full[-1] not in (decoder.mlp_only_layers or ())
    return among and decoder.num_experts > 0 and (full[-1] + 1) % decoder.decoder_sparse_step == 0


@SpeculatorModel.register("mtp")
class MTPDraftModel(ChainModel):
    """The MTP draft."""

    config_class: Any = MTPSpeculatorConfig
    config: MTPSpeculatorConfig
    _no_split_modules: Any = ("MTPDecoderLayer",)

    def add_network(self, config: Any) -> None:
        decoder = config.transformer_layer_config
        self.mtp_layers = nn.ModuleList([MTPDecoderLayer(decoder)])
        self.rotary = RotaryEmbedding(decoder)
        self.windows = self.pair_windows = (None,)

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        return self.mtp_layers

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if not isinstance(module, (nn.Linear, nn.Embedding, nn.RMSNorm)):
            # Experts and their router hold parameters of their own.
            std = self.config.transformer_layer_config.initializer_range
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, std=std)

    def combine(self, features: Tensor) -> Tensor:
        (state,) = features.unbind(dim=-2)
        return state

    def final_norm(self, hidden: Tensor) -> Tensor:
        """As it is: the layer ends with its final norm."""
        return hidden


#: The name in the manner of upstream's other families.
MTPSpeculator = MTPDraftModel
