"""``speculators quickstart``: the whole way on one machine, from a packaged model to measured acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["quickstart"]


def quickstart(
    *,
    output: Annotated[Path, typer.Option(help="Run folder; a second run goes on where the first stopped.")] = Path(
        "quickstart"
    ),
    minutes: Annotated[float, typer.Option(min=1.0, max=100_000.0, help="Time to spend, on the whole.")] = 15.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the split, the draft's start and the order of training.")
    ] = 0,
    prompts: Annotated[
        Path | None, typer.Option(help="Folder of JSONL prompt files; examples/prompts by default.", show_default=False)
    ] = None,
    verifier: Annotated[
        Path | None, typer.Option(help="Folder of another verifier than the packaged one.", show_default=False)
    ] = None,
) -> None:
    """Train a DSpark draft for a small real model and show what it gains.

    Takes SmolLM2-135M-Instruct from an installed package, lets it answer prompts, trains a draft on the answers and
    decodes held-out prompts with and without it. No GPU, model hub or server is needed.
    """
    from speculators.pipelines.quickstart import QuickstartSettings, run_quickstart

    run_quickstart(QuickstartSettings(minutes=minutes, seed=seed, prompts=prompts, verifier=verifier), output)
