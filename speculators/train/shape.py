"""A draft's shape without its weights: what ``speculators tensors`` lists, and writes with fresh weights when asked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speculators.config import SpeculatorModelConfig
from speculators.errors import ConfigError, VerifierError
from speculators.models import SpeculatorModel
from speculators.models.checkpoint_files import WeightFiles, has_weights
from speculators.models.verifier_weights import read_verifier_config
from speculators.train.config.model import TrainConfig
from speculators.train.drafts import planned_config

__all__ = ["Shape", "shape_of", "write_fresh"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A draft's config, and whether its checkpoints carry the verifier's embeddings and head."""

    config: Any
    include_embeddings: bool


def shape_of(source: str, verifier_config: str | None = None) -> Shape:
    """The draft that ``source`` describes.

    :param source: a draft's folder or hub id, its ``config.json``, or the YAML file of a training that would make the draft.
    :param verifier_config: for a training: where the verifier's config is read; the training's own verifier when None.
    :raises ConfigError: there is nothing to read, or it contradicts itself.
    :raises VerifierError: the verifier's config cannot be read.
    """
    if not source.endswith((".yaml", ".yml")):
        path = Path(source)
        folder = path.parent if path.name == "config.json" else path
        config = SpeculatorModelConfig.from_pretrained(folder if folder.is_dir() else source)
        carried = has_weights(folder) and "embed_tokens.weight" in WeightFiles(folder).index
        return Shape(config, carried)
    settings = TrainConfig.from_sources(config_path=source)
    if settings.draft.from_pretrained:
        raise ConfigError(f"{source} goes on from the draft {settings.draft.from_pretrained}; list that one")
    verifier = settings.verifier
    place = verifier_config or verifier.verifier_name_or_path
    if not place:
        raise ConfigError(f"{source} names no verifier; give the folder of one with --verifier-config")
    try:
        verifier_values = read_verifier_config(place, verifier.trust_remote_code)
    except VerifierError as error:
        if verifier_config:
            raise
        raise VerifierError(f"{error}, with --verifier-config; its config.json is enough") from error
    config = planned_config(settings, verifier_values)
    return Shape(config, settings.trainer.checkpoint_embeddings)


def write_fresh(
    config: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.bfloat16,
    include_embeddings: bool = False,
    max_shard_size: int | str = "50GB",
    seed: int = 0,
) -> None:
    """Write a checkpoint of this shape with fresh weights, to try storage and engines at full size.

    The model is built in ``dtype``, so that it needs as much memory as its file.

    :param config: a draft's config; a reduced vocabulary keeps the first ids.
    """
    model_class = SpeculatorModel.registered_model_class_from_config(config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = model_class(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder, dtype=dtype, include_embeddings=include_embeddings, max_shard_size=max_shard_size)
