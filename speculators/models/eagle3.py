"""EAGLE-3: a chain drafted token by token from the verifier's states, then from the draft's own.

The decoder is Llama-style, Qwen3-style, or of multi-head latent attention (``model_type`` ``deepseek_v3``) as the drafts of
DeepSeek-V3 and Kimi-K2 are; its first layer reads [embedding ; state]. See :mod:`speculators.models.chain` for the network and
its training-time test. Paper: arXiv 2503.01840.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from speculators.config import SpeculatorModelConfig
from speculators.errors import ConfigError
from speculators.models.base import SpeculatorModel
from speculators.models.chain import ChainConfig, ChainDecoderLayer, ChainModel
from speculators.models.draft_config import check_layer_ids, default_layer_ids
from speculators.models.layers import RMSNorm
from speculators.models.verifier_weights import read_verifier_config, text_config

__all__ = ["Eagle3DraftModel", "Eagle3Speculator", "Eagle3SpeculatorConfig"]


@SpeculatorModelConfig.register("eagle3")
class Eagle3SpeculatorConfig(ChainConfig):
    """Config of an EAGLE-3 draft; the keys are those of ``config.json``."""

    speculators_model_type: Literal["eagle3"] = "eagle3"
    architectures: list[str] | None = Field(default_factory=lambda: ["Eagle3Speculator"])

    draft_vocab_size: int = Field(default=32000, ge=1)
    target_hidden_size: int | None = None
    #: Whether the first layer's residual is the normed state.
    norm_before_residual: bool = False
    #: One RMSNorm over the concatenated states before ``fc``.
    norm_before_fc: bool = False
    #: One RMSNorm per captured layer before ``fc`` instead ("EAGLE-3.1").
    fc_norm: bool = False
    #: Whether the next step reads the state after the final norm instead of before it.
    norm_output: bool = False
    #: Whether the embeddings are trained; they are then the draft's own and shipped with it.
    embed_requires_grad: bool = False
    #: Captured verifier layers in the order of concatenation; k is the residual stream after k layers. None is what upstream
    #: and vLLM take it for: layers 2, n // 2 and n - 3 of the verifier.
    eagle_aux_hidden_state_layer_ids: list[int] | None = None

    def check(self) -> None:
        super().check()
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError(f"{self.speculators_model_type}: norm_before_fc and fc_norm exclude each other; switch one off")
        if self.eagle_aux_hidden_state_layer_ids is not None:
            check_layer_ids(self.eagle_aux_hidden_state_layer_ids)

    @property
    def layer_ids(self) -> list[int]:
        """:raises ConfigError: the config names neither layers nor a verifier to take the default of."""
        if self.eagle_aux_hidden_state_layer_ids is not None:
            return self.eagle_aux_hidden_state_layer_ids
        name = self.speculators_config.verifier.name_or_path if self.speculators_config is not None else None
        if name is None:
            raise ConfigError(
                f"{self.speculators_model_type}: eagle_aux_hidden_state_layer_ids is null and no verifier is named; write the "
                "captured layers into config.json"
            )
        return default_layer_ids(text_config(read_verifier_config(name)).num_hidden_layers)

    @property
    def num_features(self) -> int:
        """M; three where the config leaves the layers open."""
        ids = self.eagle_aux_hidden_state_layer_ids
        return len(ids) if ids is not None else 3


@SpeculatorModel.register("eagle3")
class Eagle3DraftModel(ChainModel):
    """The EAGLE-3 draft."""

    config_class: Any = Eagle3SpeculatorConfig
    config: Eagle3SpeculatorConfig
    #: Upstream 0.9.0 writes both, and its reader leaves uninitialised memory where a file lacks them.
    always_complete = True
    _no_split_modules: Any = ("ChainDecoderLayer",)

    def add_network(self, config: Any) -> None:
        decoder, num_features = config.transformer_layer_config, config.num_features
        hidden, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.fc = nn.Linear(num_features * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(
            ChainDecoderLayer(decoder, index == 0, config.norm_before_residual) for index in range(decoder.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, eps=eps)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num_features * hidden, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(hidden, eps=eps) for _ in range(num_features))
        self.add_rotary(decoder)

    @property
    def trains_embeddings(self) -> bool:
        return self.config.embed_requires_grad

    def combine(self, features: Tensor) -> Tensor:
        if self.config.fc_norm:
            parts = zip(self.fc_norm, features.unbind(dim=-2), strict=True)
            features = torch.stack([norm(part) for norm, part in parts], dim=-2)
        rows = features.flatten(-2)
        return self.fc(self.input_norm(rows) if self.config.norm_before_fc else rows)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def handed_on(self, hidden: Tensor, normed: Tensor) -> Tensor:
        return normed if self.config.norm_output else hidden


#: The name in upstream's config classes.
Eagle3Speculator = Eagle3DraftModel
