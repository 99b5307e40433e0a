"""Converting drafts: foreign forms into this library's, and this library's into those that engines serve natively."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from speculators.config import UnsupportedCheckpointError
from speculators.convert.adapter import Adapter, Conversion, float_dtype
from speculators.convert.formats import ADAPTERS, adapter_for, native_writer
from speculators.convert.notes import ConversionNotes
from speculators.convert.options import ConversionOptions
from speculators.convert.output import (
    check_device,
    check_output,
    draft_a_block,
    drop_equal_embeddings,
    load_written,
    staged,
    write_native,
    write_speculators,
)
from speculators.convert.source import ForeignCheckpoint
from speculators.convert.verifier import VerifierFacts
from speculators.errors import ConfigError, SpeculatorsError, last_line

__all__ = ["ALGORITHMS", "TARGETS", "ConversionReport", "convert_model", "maybe_convert_external_checkpoint"]

#: Families that a checkpoint can become.
ALGORITHMS = ("eagle3", "mtp", "dflash", "dspark")
#: Forms that can be written.
TARGETS = ("speculators", "vllm-native")

#: Options of every format.
_COMMON_OPTIONS = frozenset({"drop_embeddings", "speculative_tokens", "cache_dir"})


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What was converted.

    :param format: the adapter's name.
    :param algorithm: family of the draft.
    :param drafted: tokens that the written draft drafted in the check, as verifier ids; None without a check.
    """

    output: Path
    format: str
    algorithm: str
    notes: ConversionNotes
    drafted: list[int] | None = None

    def lines(self) -> list[str]:
        """For people: one line each."""
        lines = [f"read {self.format} as {self.algorithm}", *self.notes.lines()]
        if self.drafted is not None:
            lines.append(f"drafted on random input: {self.drafted}")
        return [*lines, f"converted to {self.output}"]


def convert_model(
    model: str | os.PathLike[str],
    verifier: str | os.PathLike[str] | None = None,
    algorithm: str | None = None,
    output_path: str | os.PathLike[str] = "converted",
    validate_device: str | None = None,
    *,
    to: str = "speculators",
    format: str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> ConversionReport:
    """Convert a checkpoint and load what was written.

    :param model: folder or hub id of the draft; of a verifier with MTP layers for ``algorithm="mtp"``.
    :param verifier: folder or hub id; None takes the one that a speculators checkpoint names.
    :param algorithm: ``eagle3``, ``mtp``, ``dflash`` or ``dspark``; None takes what the file is.
    :param output_path: new or empty folder.
    :param validate_device: draft a block there with the result.
    :param to: ``speculators``, or ``vllm-native`` for the flat form that vLLM reads.
    :param format: name of the adapter; None recognises it.
    :param overwrite: replace a checkpoint at ``output_path``.
    :param options: fields of :class:`~speculators.convert.options.ConversionOptions`.
    :raises ConfigError: the checkpoint, or what was asked for, cannot be converted (it is a ``ValueError`` too).
    :raises VerifierError: the verifier cannot be read or is another one than the draft's.
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ConfigError(f"Unsupported algorithm: {algorithm}; choose one of {', '.join(ALGORITHMS)}")
    if to not in TARGETS:
        raise ConfigError(f"cannot convert to {to!r}; choose one of {', '.join(TARGETS)}")
    checked = ConversionOptions.checked(options)
    folder = Path(output_path)
    check_output(folder, overwrite)
    if validate_device is not None:
        check_device(validate_device)
    source = ForeignCheckpoint(model, checked.cache_dir)
    adapter = adapter_for(source, format, algorithm)
    _refuse_unused(checked, adapter)
    verifier = _verifier_name(source, verifier, adapter)
    facts = VerifierFacts.read(verifier, checked.cache_dir)
    try:
        conversion = adapter.read(source, facts, algorithm, checked)
    except SpeculatorsError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # values of a wrong type
        raise ConfigError(
            f"the config of {source.name!r} cannot be read as {adapter.title} ({last_line(error)}); correct it, or name the "
            "right form with --format"
        ) from error
    if checked.drop_embeddings:
        drop_equal_embeddings(conversion, verifier)
    if checked.speculative_tokens is not None:
        conversion.config.speculators_config.proposal_methods[0].speculative_tokens = checked.speculative_tokens
    drafted = _write(folder, conversion, to, verifier, validate_device, overwrite)
    return ConversionReport(folder, adapter.name, conversion.config.speculators_model_type, conversion.notes, drafted)


def _verifier_name(source: ForeignCheckpoint, verifier: str | os.PathLike[str] | None, adapter: Adapter) -> str:
    if verifier is not None:
        return str(verifier)
    named = adapter.default_verifier(source)
    if named is None:
        raise ConfigError(f"{source.name!r} ({adapter.title}) names no verifier; give its folder or hub id with --verifier")
    return named


def _refuse_unused(options: ConversionOptions, adapter: Adapter) -> None:
    unused = sorted(set(options.given()) - adapter.options - _COMMON_OPTIONS)
    if unused:
        used = ", ".join(sorted(adapter.options | _COMMON_OPTIONS))
        raise ConfigError(f"the option {unused[0]!r} means nothing to {adapter.title}; it knows {used}")


def _write(
    folder: Path, conversion: Conversion, to: str, verifier: str, device: str | None, overwrite: bool
) -> list[int] | None:
    """Write, load what was written, and draft with it if a device is given."""
    with staged(folder, overwrite) as staging:
        # The speculators form is what this library can load, so it is the proof even of a draft that is exported.
        write_speculators(staging, conversion)
        drafted, dtype = None, float_dtype(conversion.tensors)
        if device is not None:
            drafted = draft_a_block(staging, verifier, dtype, device)
        else:
            load_written(staging, verifier, dtype)
        if to == "vllm-native":
            config, tensors = native_writer(conversion)(conversion)
            write_native(staging, config, tensors)
    return drafted


def maybe_convert_external_checkpoint(
    model: str | os.PathLike[str],
    verifier: str | os.PathLike[str] | None = None,
    cache_dir: str | None = None,
    output_path: str | os.PathLike[str] | None = None,
    config_dict: Mapping[str, Any] | None = None,
) -> str:
    """Path of a speculators checkpoint: ``model`` itself if it is one, else a converted copy.

    :param output_path: where the copy goes; a new temporary folder when None.
    :param config_dict: the config of ``model``, if already at hand.
    :raises UnsupportedCheckpointError: the format is not recognised (it is a ``NotImplementedError`` too).
    :raises ConfigError: a verifier is needed and not given, or the checkpoint cannot be converted.
    """
    if config_dict is None:
        config_dict, _ = PretrainedConfig.get_config_dict(model, cache_dir=cache_dir)
    if "speculators_model_type" in config_dict:
        return str(model)
    source = ForeignCheckpoint(model, cache_dir)
    if not any(adapter.recognises(source) for adapter in ADAPTERS):
        titles = ", ".join(adapter.title for adapter in ADAPTERS)
        raise UnsupportedCheckpointError(f"cannot convert {str(model)!r}: it is none of {titles}; give a draft's folder")
    if verifier is None:
        raise ConfigError(f"{str(model)!r} must be converted, which needs its verifier; give it with verifier=")
    output = output_path or os.path.join(tempfile.mkdtemp(prefix="speculators-"), "converted")
    convert_model(model, verifier, output_path=output, cache_dir=cache_dir)
    return str(output)
