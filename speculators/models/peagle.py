"""P-EAGLE: EAGLE-3 whose later slots are drafted in parallel, from a mask token and one learned state.

Trained on a sample of its chains: few anchors keep their deep slots (``PackedBatch.depths``), since those cost as much as the
first ones and teach less (conditional drop, or COD, sampling).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from speculators.config import SpeculatorModelConfig
from speculators.errors import ConfigError
from speculators.models.base import SpeculatorModel
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

__all__ = ["PEagleDraftModel", "PEagleSpeculator", "PEagleSpeculatorConfig"]


@SpeculatorModelConfig.register("peagle")
class PEagleSpeculatorConfig(Eagle3SpeculatorConfig):
    """Config of a P-EAGLE draft; the keys are those of ``config.json``."""

    recurrent: ClassVar[bool] = False

    speculators_model_type: Literal["peagle"] = "peagle"  # type: ignore[assignment]
    architectures: list[str] | None = Field(default_factory=lambda: ["PEagleSpeculator"])
    embed_requires_grad: bool = True
    #: Verifier id embedded in all slots but the anchor's.
    mask_token_id: int | None = None

    def check(self) -> None:
        super().check()
        if self.mask_token_id is None:
            raise ConfigError("peagle: mask_token_id is missing; write the id of the token that stands in later slots")
        self.check_mask_token(self.mask_token_id)


@SpeculatorModel.register("peagle")
class PEagleDraftModel(Eagle3DraftModel):
    """The P-EAGLE draft."""

    config_class: Any = PEagleSpeculatorConfig
    config: PEagleSpeculatorConfig

    def add_network(self, config: Any) -> None:
        super().add_network(config)
        #: Stands for the verifier's states where there are none yet, ``[1, 1, M * H]``.
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, self.fc.in_features))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            nn.init.normal_(self.mask_hidden)

    def masked_slot(self) -> tuple[Tensor, Tensor]:
        hidden_size = self.config.transformer_layer_config.hidden_size
        state = self.combine(self.mask_hidden.view(-1, hidden_size))
        mask = torch.tensor(self.config.mask_token_id, device=state.device)
        return state, self.embed_tokens(mask)


#: The name in upstream's config classes.
PEagleSpeculator = PEagleDraftModel
