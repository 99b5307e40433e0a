"""``speculators stitch-mtp``: a trained MTP layer back into its verifier, which engines then serve as one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["stitch_mtp_command"]


def stitch_mtp_command(
    *,
    finetuned_checkpoint: Annotated[str, typer.Argument(help="Folder or hub id of the trained MTP draft.", show_default=False)],
    verifier_path: Annotated[str, typer.Argument(help="Folder or hub id of its verifier.", show_default=False)],
    output_path: Annotated[
        Path | None, typer.Option(help="New or empty folder; <verifier>-stitched here by default.", show_default=False)
    ] = None,
) -> None:
    """Write a copy of a verifier with the trained MTP layer in it.

    The verifier's files are copied and the layer's bytes replaced, so its memory is the layer's and every other byte stays.
    """
    from speculators.convert.stitch import stitch_mtp

    typer.echo(f"stitched into {stitch_mtp(finetuned_checkpoint, verifier_path, output_path)}")
