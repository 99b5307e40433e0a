"""Optimisers: which weights Muon takes, which AdamW, and their states as plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speculators.errors import SpeculatorsError
from speculators.train.config.derived import derive
from speculators.train.config.model import TrainConfig
from speculators.train.muon import Float32Muon, WholeMuon
from speculators.train.sharding import is_sharded, placed

__all__ = ["Optimizers", "build_optimizers", "split_parameters"]

#: Parts of names of 2-D weights that are tables, not maps between activations; Muon would make their rows alike.
TABLES = ("embed_tokens", "lm_head", "markov_w1", "markov_w2", "codebook")

Named = dict[str, nn.Parameter]


def split_parameters(model: nn.Module) -> tuple[Named, Named]:
    """Trainable parameters for Muon and for AdamW, by name.

    Muon takes 2-D weights with both sides above 1 (a [1, N] weight has no other orthogonalisation than its norm), except
    :data:`TABLES`.
    """
    muon: Named = {}
    adamw: Named = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        matrix = parameter.ndim == 2 and min(parameter.shape) > 1 and not any(table in name for table in TABLES)
        (muon if matrix else adamw)[name] = parameter
    return muon, adamw


class Optimizers:
    """One or two optimisers stepped as one, their learning rates scaled by one factor, their states by parameter name."""

    def __init__(self, parts: Mapping[str, tuple[torch.optim.Optimizer, Named]]) -> None:
        """:param parts: "Muon" / "AdamW" -> the optimiser and its parameters in its order."""
        self._parts = {label: (optimizer, list(named)) for label, (optimizer, named) in parts.items()}
        self._base_lr = {label: float(optimizer.param_groups[0]["lr"]) for label, (optimizer, _) in self._parts.items()}

    def set_factor(self, factor: float) -> dict[str, float]:
        """Scale the learning rates by ``factor`` and return them by optimiser."""
        rates = {label: base * factor for label, base in self._base_lr.items()}
        for label, (optimizer, _) in self._parts.items():
            for group in optimizer.param_groups:
                group["lr"] = rates[label]
        return rates

    def step(self) -> None:
        for optimizer, _ in self._parts.values():
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer, _ in self._parts.values():
            optimizer.zero_grad(set_to_none=True)

    def forget(self) -> None:
        """Drop all states, as if no step had been taken."""
        for optimizer, _ in self._parts.values():
            optimizer.state.clear()

    def state_tensors(self) -> dict[str, Tensor]:
        """Every state as "<optimiser>/<parameter>/<key>" -> tensor, in full precision; sharded as its parameter is."""
        out: dict[str, Tensor] = {}
        for label, (optimizer, names) in self._parts.items():
            for name, parameter in zip(names, optimizer.param_groups[0]["params"]):
                for key, value in optimizer.state.get(parameter, {}).items():
                    out[f"{label}/{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return out

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`state_tensors` gave, as whole tensors.

        :raises SpeculatorsError: when the states are of other parameters or shapes.
        """
        left = set(tensors)
        for label, (optimizer, names) in self._parts.items():
            for name, parameter in zip(names, optimizer.param_groups[0]["params"]):
                prefix = f"{label}/{name}/"
                state: dict[str, Any] = {}
                for key in [key for key in left if key.startswith(prefix)]:
                    saved = tensors[key]
                    if saved.ndim > 0 and saved.shape != parameter.shape:
                        raise SpeculatorsError(
                            f"the optimiser state of {name} has another shape; the run folder is of another draft"
                        )
                    state[key.removeprefix(prefix)] = placed(saved, parameter)
                    left.discard(key)
                if state:
                    optimizer.state[parameter] = state
        if left:
            raise SpeculatorsError(
                f"the optimiser state holds {sorted(left)[0]}, which this draft has not; start another run folder"
            )


def build_optimizers(model: nn.Module, config: TrainConfig, *, bf16: bool) -> Optimizers:
    """Optimisers of ``model``'s trainable parameters by ``config``; the parameters may be sharded.

    :param bf16: Muon orthogonalises in bfloat16, as torch's does; else in float32.
    """
    settings = config.optimizer
    muon, adamw = split_parameters(model)
    if settings.optimizer == "adamw":
        muon, adamw = {}, {name: value for name, value in model.named_parameters() if value.requires_grad}
    parts: dict[str, tuple[torch.optim.Optimizer, Named]] = {}
    if muon:
        bf16_kind = WholeMuon if any(is_sharded(parameter) for parameter in muon.values()) else torch.optim.Muon
        kind = bf16_kind if bf16 else Float32Muon
        parts["Muon"] = (
            kind(
                list(muon.values()),
                lr=derive(config).muon_lr,
                momentum=settings.muon_momentum,
                weight_decay=settings.muon_weight_decay,
                ns_steps=settings.muon_ns_steps,
                adjust_lr_fn=settings.muon_adjust_lr_fn,
            ),
            muon,
        )
    if adamw:
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in adamw.values())
        optimizer = torch.optim.AdamW(
            list(adamw.values()), lr=settings.lr, weight_decay=settings.weight_decay, fused=fused or None
        )
        parts["AdamW"] = (optimizer, adamw)
    if not parts:
        raise SpeculatorsError("the draft has no trainable parameter")
    return Optimizers(parts)
