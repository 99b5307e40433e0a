"""``speculators doctor``: what is wrong or dangerous in a checkpoint, and how to mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["doctor"]


def doctor(
    *,
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the draft's checkpoint.", show_default=False)],
    verifier: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of the verifier: compare with it, and try the draft on text.", show_default=False),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL of prompts to try the draft on, repeatable; examples/prompts by default.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts to let the verifier answer.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; the accelerator if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON; their ids are stable.")] = False,
) -> None:
    """Examine a checkpoint: config, tensors, vocabulary, layers, and what engines would make of it.

    With --verifier the draft is also tried on greedy answers, as its config says and under each likely wrong reading; a
    wrong one that accepts clearly more is an error. Exits with 1 if there is an error, with 2 if the folder cannot be read.
    """
    import json

    from rich.console import Console

    from speculators.checks import ReadingSettings, examine
    from speculators.checks.report import rich_report

    settings = ReadingSettings(prompts=limit, max_new_tokens=max_new_tokens, device=device)
    with Console(stderr=True).status("") as status:
        diagnosis = examine(checkpoint, verifier, data=data or [], settings=settings, progress=status.update)
    if as_json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    else:
        Console().print(rich_report(diagnosis))
    raise typer.Exit(diagnosis.exit_code)
