"""Which loss is trained: terms and their coefficients, position weights, labels and the support of the verifier's p."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from speculators.errors import ConfigError
from speculators.losses.terms import TERMS

__all__ = ["LossConfig", "resolve_loss_config"]


def resolve_loss_config(spec: str | Mapping[str, float]) -> dict[str, float]:
    """Terms and coefficients of a loss given as a term's name, a JSON object or a mapping; coefficients are not normalised.

    ``"ce"`` -> ``{"ce": 1.0}``; ``'{"ce": 0.1, "tv": 0.9}'`` -> that.

    :raises ConfigError: for JSON that is no object, an unknown term, or a coefficient that is no finite number >= 0.
    """
    if isinstance(spec, str):
        text = spec.strip()
        if text in TERMS:
            return {text: 1.0}
        try:
            spec = json.loads(text)
        except json.JSONDecodeError:
            raise ConfigError(f"loss {text!r} is neither one of {', '.join(TERMS)} nor a JSON object of them") from None
    if not isinstance(spec, Mapping) or not spec:
        raise ConfigError(f'loss {spec!r} must map terms to coefficients, as in {{"ce": 0.1, "tv": 0.9}}; correct it')
    for name, coefficient in spec.items():
        if name not in TERMS:
            raise ConfigError(f"unknown loss term {name!r}; choose from {', '.join(TERMS)}")
        number = isinstance(coefficient, (int, float)) and not isinstance(coefficient, bool)
        if not number or not math.isfinite(coefficient) or coefficient < 0:
            raise ConfigError(f"the coefficient of loss term {name!r} is {coefficient!r}; give a finite number of at least 0")
    return {name: float(coefficient) for name, coefficient in spec.items()}


class LossConfig(BaseModel):
    """The loss of a block-drafting model.

    loss = sum over terms of coefficient * sum(w_d * count * term) / denominator, plus ``confidence_alpha`` times the
    confidence head's binary cross-entropy with the same weights. d = 0, 1, ... numbers a block's predicted tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Terms (see :data:`speculators.losses.terms.TERMS`) and their coefficients; a name or JSON string is accepted too.
    loss_fn: dict[str, float] = {"ce": 0.1, "tv": 0.9}
    #: Decay length of the weights exp(-d / gamma), in predicted tokens.
    gamma: float = Field(default=4.0, gt=0.0)
    #: Denominator: the sum of weight * count, or the number of counted predictions (upstream's scale).
    normalization: Literal["weight", "count"] = "weight"
    #: Label of ``ce``: the verifier's argmax over the draft vocabulary, or the data's token.
    ce_label: Literal["verifier", "data"] = "verifier"
    #: p: softmax over the draft vocabulary's rows, or the full-vocabulary softmax, not renormalised (see ``losses.terms``).
    target_support: Literal["draft", "full"] = "draft"
    #: Coefficient of the confidence head's term; 0 switches its training off.
    confidence_alpha: float = Field(default=1.0, ge=0.0)
    #: exp(-d / gamma), or D-PACE's weights from the draft's own probabilities (``ce`` only).
    per_position_weight: Literal["fixed-exp-decay", "dpace"] = "fixed-exp-decay"
    #: D-PACE's smoothing, 1 being no weighting at all.
    dpace_alpha: float = Field(default=0.5, gt=0.0, le=1.0)

    @field_validator("loss_fn", mode="before")
    @classmethod
    def _resolve(cls, spec: Any) -> dict[str, float]:
        return resolve_loss_config(spec)

    @model_validator(mode="after")
    def _dpace_weighs_ce(self) -> LossConfig:
        if self.per_position_weight == "dpace" and set(self.loss_fn) != {"ce"}:
            raise ConfigError("per-position weight dpace is defined for the loss ce alone; use --loss-fn ce or fixed-exp-decay")
        return self
