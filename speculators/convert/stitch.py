"""Putting a trained MTP layer back into its verifier: a copy of the verifier's folder in which the bytes of ``mtp.*`` differ.

The files are copied one by one and patched where each tensor's bytes lie; nothing but the MTP layer is ever in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from speculators.convert.mtp_names import MTP_PREFIX, verifier_tensors
from speculators.convert.output import check_output, staged
from speculators.errors import ConfigError, VerifierError
from speculators.files import writing
from speculators.models.checkpoint_files import TensorEntry, WeightFiles

__all__ = ["stitch_mtp"]

#: Parts of a draft's file that are the verifier's own.
_FROZEN = ("embed_tokens.", "lm_head.")


def stitch_mtp(
    finetuned: str | os.PathLike[str],
    verifier: str | os.PathLike[str],
    output_path: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a verifier whose MTP layer is a draft's.

    :param finetuned: an MTP draft in the speculators form, folder or hub id.
    :param verifier: folder or hub id of the verifier that it came from, with safetensors weights.
    :param output_path: new or empty folder; ``<verifier>-stitched`` in the working directory when None.
    :returns: the folder.
    :raises ConfigError: the draft has other tensors than the verifier's MTP layer, or the output holds something.
    :raises VerifierError: the verifier has no MTP layer, or its weights cannot be patched.
    """
    folder = Path(output_path) if output_path is not None else Path.cwd() / f"{Path(verifier).name}-stitched"
    check_output(folder, overwrite=False)
    source = _local(verifier)
    weights = WeightFiles(source, owner="verifier", error=VerifierError)
    entries = {entry.name: entry for entry in weights.entries() if entry.name.startswith(MTP_PREFIX)}
    if not entries:
        raise VerifierError(f"the verifier {str(verifier)!r} has no tensor under {MTP_PREFIX}; give one with an MTP layer")
    pickled = [name for name in entries if not weights.index[name].endswith(".safetensors")]
    if pickled:
        raise VerifierError(f"the verifier's {pickled[0]} lies in a pickled file; save the verifier as safetensors first")
    tensors = _trained(finetuned, entries)
    by_file: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        by_file.setdefault(weights.index[name], {})[name] = tensor
    with staged(folder, overwrite=False) as staging, writing(folder):
        _copy(source, staging)
        for filename, inside in by_file.items():
            _patch(staging / filename, inside)
    return folder


def _local(verifier: str | os.PathLike[str]) -> Path:
    """The verifier's folder on this machine."""
    if os.path.isdir(verifier):
        return Path(verifier)
    try:
        return Path(snapshot_download(str(verifier)))
    except (OSError, ValueError) as error:
        raise VerifierError(f"there is no verifier at {str(verifier)!r}; give its folder or hub id") from error


def _trained(finetuned: str | os.PathLike[str], entries: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
    """The draft's tensors under the verifier's names and in its dtypes: exactly those of its MTP layer."""
    found = WeightFiles(finetuned).read()
    tensors = verifier_tensors({name: tensor for name, tensor in found.items() if not name.startswith(_FROZEN)}, entries)
    missing, foreign = sorted(set(entries) - set(tensors)), sorted(set(tensors) - set(entries))
    if missing or foreign:
        raise ConfigError(
            f"the draft {str(finetuned)!r} does not fit the verifier's MTP layer: missing {missing or 'nothing'}, unexpected "
            f"{foreign or 'nothing'}; give the verifier that the draft came from"
        )
    for name, tensor in tensors.items():
        entry = entries[name]
        if tuple(tensor.shape) != entry.shape:
            raise ConfigError(
                f"{name} is {list(tensor.shape)} in the draft and {list(entry.shape)} in the verifier; give the verifier that "
                "the draft came from"
            )
        dtype = getattr(torch, entry.dtype, None)
        if dtype is None or not dtype.is_floating_point or dtype.itemsize < 2:
            raise VerifierError(f"the verifier's {name} is quantised ({entry.dtype}); stitch into an unquantised copy")
        tensors[name] = tensor.to(dtype)
    return tensors


def _copy(source: Path, target: Path) -> None:
    """Everything in a folder, links followed, hidden files left out; writable, whatever the source is."""
    for path in sorted(source.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(path, target / path.name)


def _patch(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite tensors of a safetensors file with others of the same dtype and shape."""
    with open(path, "r+b") as file:
        header, start = _header(file)
        for name, tensor in tensors.items():
            first, last = header[name]["data_offsets"]
            data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            if len(data) != last - first:
                raise VerifierError(f"{path} keeps {name} in {last - first} bytes, not {len(data)}; fetch the file again")
            file.seek(start + first)
            file.write(data)


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """A safetensors file's header, and where its data begins."""
    size = int.from_bytes(file.read(8), "little")
    return json.loads(file.read(size)), 8 + size
