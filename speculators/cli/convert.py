"""``speculators convert``: a draft of another project into this library's form, or this library's into one that vLLM reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["convert"]


def convert(
    *,
    model: Annotated[str, typer.Argument(help="Folder or hub id of the checkpoint to convert.", show_default=False)],
    verifier: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of the draft's verifier; the one named in a speculators checkpoint by default."),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="eagle3, mtp, dflash or dspark; what the file is by default.", show_default=False)
    ] = None,
    output_path: Annotated[Path, typer.Option(help="New or empty folder for the converted draft.")] = Path("converted"),
    to: Annotated[str, typer.Option(help="speculators, or vllm-native for the flat form that vLLM reads.")] = "speculators",
    format_name: Annotated[
        str | None, typer.Option("--format", help="Format of the checkpoint; recognised by default.", show_default=False)
    ] = None,
    validate_device: Annotated[
        str | None, typer.Option(help="Draft a block on this device with the result: cpu, cuda:0, ...", show_default=False)
    ] = None,
    algorithm_kwargs: Annotated[
        str | None,
        typer.Option(help="More about the draft, as a JSON object; docs/converters.md lists the keys.", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint in --output-path.")] = False,
) -> None:
    """Convert a draft, and print what its file does not say and was assumed.

    Reads drafts of DeepSpec, z-lab, EAGLE and SpecForge, vLLM's native forms, and speculators checkpoints of any version. What
    was written is loaded again before it appears at --output-path.
    """
    import json

    from speculators.convert import convert_model
    from speculators.errors import ConfigError

    try:
        options = json.loads(algorithm_kwargs) if algorithm_kwargs else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--algorithm-kwargs is no JSON ({error}); give an object such as '{{\"mask_token_id\": 5}}'"
        ) from error
    if not isinstance(options, dict):
        raise ConfigError("--algorithm-kwargs must be a JSON object such as '{\"mask_token_id\": 5}'")
    report = convert_model(
        model, verifier, algorithm, output_path, validate_device, to=to, format=format_name, overwrite=overwrite, **options
    )
    for line in report.lines():
        typer.echo(line)
