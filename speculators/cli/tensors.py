"""``speculators tensors``: what a draft's checkpoint holds, or will hold, tensor by tensor."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["tensors"]


class _Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def tensors(
    *,
    source: Annotated[
        str,
        typer.Argument(help="Draft folder, hub id or config.json; or the YAML file of a training to come.", show_default=False),
    ],
    verifier_config: Annotated[
        str | None, typer.Option(help="Folder with the verifier's config.json, for a training; its own verifier by default.")
    ] = None,
    include_embeddings: Annotated[
        bool | None,
        typer.Option(
            help="Whether it carries the verifier's embeddings and head; as the draft or the training says by default."
        ),
    ] = None,
    dtype: Annotated[_Dtype, typer.Option(help="Type of the weights.")] = _Dtype.bfloat16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(help="Also write such a checkpoint, with fresh weights, into this new or empty folder."),
    ] = None,
) -> None:
    """List names, shapes, types and bytes of a draft's checkpoint, without making its weights."""
    import json
    from dataclasses import asdict

    import torch

    from speculators.errors import ConfigError
    from speculators.models import SpeculatorModel
    from speculators.train.shape import shape_of, write_fresh

    if write is not None and (write.is_file() or (write.is_dir() and any(write.iterdir()))):
        raise ConfigError(f"{write} is a file or holds something; name a new or empty folder with --write")
    shape = shape_of(source, verifier_config)
    carried = shape.include_embeddings if include_embeddings is None else include_embeddings
    torch_dtype = getattr(torch, dtype.value)
    entries = SpeculatorModel.without_weights(shape.config).checkpoint_listing(dtype=torch_dtype, include_embeddings=carried)
    if write is not None:
        write_fresh(shape.config, write, dtype=torch_dtype, include_embeddings=carried)
    total = sum(entry.nbytes for entry in entries)
    if as_json:
        typer.echo(json.dumps({"tensors": [asdict(entry) for entry in entries], "bytes": total}, indent=2))
        return
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        typer.echo(f"{entry.name:<{width}}  {entry.dtype:<8}  {list(entry.shape)!s:<16}  {entry.nbytes:>14,}")
    typer.echo(f"{len(entries)} tensors, {total:,} bytes without the file's header")
