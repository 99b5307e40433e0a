"""Every model type of the installed transformers, as small models on the meta device, to check what is known about it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, logging
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from speculators.models.verifier_weights import text_config

VOCAB = 64

CAUSAL = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
COMPOSITE = sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(CAUSAL))

#: What default configs lack to build a model.
_MENDED: dict[str, Callable[[Any], None]] = {
    "aya_vision": lambda config: setattr(config.vision_config, "num_attention_heads", 16),
    "dots1": lambda config: vars(config).update(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "hunyuan_v1_dense": lambda config: setattr(config, "head_dim", 128),
    "hunyuan_v1_moe": lambda config: setattr(config, "head_dim", 128),
    "hunyuan_vl": lambda config: setattr(config.text_config, "head_dim", 128),
    "lfm2_moe": lambda config: setattr(config, "layer_types", ["full_attention"] * config.num_hidden_layers),
    "ministral": lambda config: setattr(config, "head_dim", 128),
    "nemotron": lambda config: setattr(config, "num_key_value_heads", config.num_attention_heads),
}

_LENGTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")
#: Numbers that cannot be just any number.
_KEPT = ("drop", "prob", "theta", "eps", "ratio", "factor", "initializer", "std")


def build(model_type: str, *, unusual: bool) -> tuple[PretrainedConfig, Any]:
    """A config of two layers and its model without weights.

    :param unusual: give every number that might scale something a value that is nobody's default, where the type allows it.
    """
    auto: Any = AutoModelForCausalLM if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText
    changes = ([_unusual] if unusual else []) + [_shrunk, lambda config: None]
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for change in changes:
                try:
                    config = CONFIG_MAPPING[model_type]()
                    _MENDED.get(model_type, lambda _: None)(config)
                    change(config)
                    with torch.device("meta"):
                        return config, auto.from_config(config)
                except Exception as caught:  # whatever a config refuses
                    error = caught
    finally:
        logging.set_verbosity(verbosity)
    raise error


def _unusual(config: Any) -> None:
    text = text_config(config)
    for name, value in list(vars(text).items()):
        if isinstance(value, float) and not name.startswith("_") and not any(part in name for part in _KEPT):
            setattr(text, name, 0.5 * value + 0.3)
        elif value is None and "cap" in name:
            setattr(text, name, 5.0)
    _shrunk(config)


def _shrunk(config: Any) -> None:
    parts = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    for part in (config, *parts):
        for name in _LENGTHS:
            if isinstance(vars(part).get(name), int):
                setattr(part, name, 2)
    for part in {id(part): part for part in (config, text_config(config))}.values():
        if isinstance(getattr(part, "vocab_size", None), int):
            part.vocab_size = VOCAB
        if isinstance(getattr(part, "pad_token_id", None), int):
            part.pad_token_id = 0


class _Output(dict):
    """A base model's output with final states and nothing else."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__(last_hidden_state=states)
        self.states = states

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.states if name == "last_hidden_state" else None

    def __getitem__(self, key: Any) -> Any:
        return self.states if key in (0, "last_hidden_state") else (None if isinstance(key, str) else ())


class _Base(nn.Module):
    """In the place of a base model: gives ``states``, and its attributes otherwise."""

    def __init__(self, states: torch.Tensor, replaced: nn.Module) -> None:
        super().__init__()
        self.states = states
        object.__setattr__(self, "replaced", replaced)

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self.states)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "replaced"), name)


def name_of(model: nn.Module, part: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)


def logits_of(model: Any, base: nn.Module, rows: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """What ``model`` makes of final states ``[1, T, H]`` with the output rows ``[V, H]``: everything behind its base model."""

    def put(name: str, module: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module)

    head = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
    head.weight.data = rows.clone()
    put(name_of(model, model.get_output_embeddings()), head)
    outermost = name_of(model, base).split(".")[0]
    put(outermost, _Base(states, getattr(model, outermost)))
    with torch.no_grad():
        output = model(input_ids=torch.arange(states.shape[1])[None] + 1, use_cache=False)
    return output.logits if hasattr(output, "logits") else output[0]
