"""Writing a converted draft so that nothing half-done or wrong is ever at its place: staged beside, loaded, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculators.convert.adapter import Conversion, float_dtype
from speculators.errors import ConfigError
from speculators.files import locked_place, sweep_temporaries, temporary_beside, write_text_atomically, writing
from speculators.models.base import SpeculatorModel
from speculators.models.checkpoint_files import write_weights
from speculators.models.verifier_weights import VerifierPart, read_verifier_weights
from speculators.sampling import SamplingParams

__all__ = [
    "check_device",
    "check_output",
    "draft_a_block",
    "drop_equal_embeddings",
    "load_written",
    "staged",
    "write_native",
    "write_speculators",
]

_OURS = frozenset({"config.json", "model.safetensors"})


def check_output(folder: Path, overwrite: bool) -> None:
    """Refuse a place that holds something.

    :param overwrite: accept a folder with nothing but a checkpoint of two files, which is then replaced.
    :raises ConfigError: before anything is read or written.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder for the converted draft with --output-path")
    held = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    foreign = [name for name in held if name not in _OURS]
    if foreign:
        raise ConfigError(f"{folder} holds something else ({foreign[0]}); name an empty folder with --output-path")
    if held and not overwrite:
        raise ConfigError(f"{folder} already holds a checkpoint; name another folder or replace it with --overwrite")


def check_device(name: str) -> None:
    """Refuse a device that cannot compute here.

    :raises ConfigError: then.
    """
    try:
        usable = torch.empty(1, device=name).device.type != "meta"
    except (AssertionError, RuntimeError):  # unknown, not built in, or not there
        usable = False
    if not usable:
        raise ConfigError(f"--validate-device {name} is no device that can compute here; give cpu, cuda:0 or the like")


@contextmanager
def staged(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside ``folder`` to fill; its files are moved there if the body succeeds, and gone if not.

    :param overwrite: see :func:`check_output`, which is asked again once other writers are kept out.
    :raises SpeculatorsError: another process is writing into ``folder``.
    """
    folder = folder.resolve()
    staging = temporary_beside(folder)
    with locked_place(folder, "--output-path"):
        check_output(folder, overwrite)
        with writing(folder):
            sweep_temporaries(folder.parent, of=folder)
            staging.mkdir()
        try:
            yield staging
            with writing(folder):
                folder.mkdir(exist_ok=True)
                # The weights first: whoever looks for a checkpoint looks for its config.
                for path in sorted(staging.iterdir(), reverse=True):
                    os.replace(path, folder / path.name)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def write_speculators(folder: Path, conversion: Conversion) -> None:
    """``config.json`` and ``model.safetensors``, every tensor in its own dtype."""
    config = conversion.config
    model_class = SpeculatorModel.registered_model_class_from_config(config)
    _write_tensors(folder, conversion.tensors)
    dtype = float_dtype(conversion.tensors)
    config.copy(architectures=[model_class.__name__], dtype=dtype).save_pretrained(folder)


def write_native(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The same for a flat config."""
    _write_tensors(folder, tensors)
    config = config | {"dtype": str(float_dtype(tensors)).removeprefix("torch.")}
    with writing(folder):
        write_text_atomically(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    with writing(folder):
        write_weights(folder, {name: tensor.contiguous() for name, tensor in tensors.items()})


def drop_equal_embeddings(conversion: Conversion, verifier: str) -> None:
    """Leave out ``embed_tokens``, and ``lm_head`` where the vocabulary is whole, which the verifier has too.

    :raises ConfigError: the draft's differ from the verifier's, so they must be kept.
    """
    decoder = conversion.config.transformer_layer_config
    parts: dict[str, VerifierPart] = {"embed_tokens.weight": "embed_tokens"}
    if getattr(conversion.config, "draft_vocab_size", decoder.vocab_size) == decoder.vocab_size:
        parts["lm_head.weight"] = "lm_head"
    for name, part in parts.items():
        if name not in conversion.tensors:
            continue
        theirs = read_verifier_weights(verifier, [part])[part]
        ours = conversion.tensors[name]
        if ours.shape != theirs.shape or not torch.equal(ours, theirs.to(ours.dtype)):
            raise ConfigError(
                f"the draft's {name} differs from the verifier's, so it was trained; keep it (drop_embeddings: false)"
            )
        del conversion.tensors[name]
        conversion.notes.remark(f"{name} equals the verifier's and was left out")


def load_written(folder: Path, verifier: str, dtype: torch.dtype, device: str = "cpu") -> SpeculatorModel:
    """What was written, by the strict loader; in the file's own dtype, so that a large draft needs no more memory than that."""
    return SpeculatorModel.from_pretrained(folder, verifier=verifier, dtype=dtype, device=device)


@torch.no_grad()
def draft_a_block(folder: Path, verifier: str, dtype: torch.dtype, device: str) -> list[int]:
    """Load a checkpoint and draft once after random context: the tokens drafted, as verifier ids.

    :raises ConfigError: the draft does not load, or its states are not finite.
    """
    model: Any = load_written(folder, verifier, dtype, device)
    drafter = model.drafter()
    generator = torch.Generator().manual_seed(0)
    decoder = model.config.transformer_layer_config
    width = getattr(model.config, "target_hidden_size", None) or decoder.hidden_size
    length = 8
    ids = torch.randint(0, decoder.vocab_size, (length,), generator=generator)
    features = torch.randn(length, len(drafter.layer_ids), width, generator=generator).to(dtype)
    count = min(model.config.speculative_tokens or drafter.max_draft_tokens, drafter.max_draft_tokens)
    drafter.start(1)
    drafter.extend([ids.to(device)], [features.to(device)])
    draft = drafter.propose([0], count, SamplingParams(temperature=1.0), torch.Generator(device).manual_seed(0))[0]
    if draft.probabilities is None or not bool(torch.isfinite(draft.probabilities).all()):
        raise ConfigError(f"the draft in {folder} computes values that are not finite; its weights are damaged")
    return [int(token) for token in draft.tokens]
