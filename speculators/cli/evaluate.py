"""``speculators evaluate``: real acceptance and wall clock of a draft, against plain decoding in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["evaluate"]


def evaluate(
    *,
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the draft's checkpoint.", show_default=False)],
    data: Annotated[
        list[Path],
        typer.Option(
            help='JSONL of prompts: {"turns": [..]} (first turn), {"prompt": ..} or messages; repeatable.',
            show_default=False,
        ),
    ],
    verifier: Annotated[
        str | None, typer.Option(help="Folder of the verifier; the one named in the checkpoint by default.")
    ] = None,
    num_speculative_tokens: Annotated[
        list[str] | None, typer.Option(help="Tokens drafted per round, one or more: 3 7.", show_default="3 7")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 switches the filter off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 switches the filter off.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of sampling.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts to take from each file.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved timings, of which the median is reported.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Folder for results.json.")] = None,
    draft_full_block: Annotated[
        bool, typer.Option("--draft-full-block", help="Run the whole block and cut it, instead of the slots engines run.")
    ] = False,
    no_markov: Annotated[
        bool, typer.Option("--no-markov", help="Also run the draft with its Markov head switched off.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, float64, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; the accelerator if there is one.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the verifier's folder.")] = False,
) -> None:
    """Decode prompts plainly and with the draft, and print what it gains.

    The table has tokens per second, speedup and acceptance length per benchmark file and number of speculative tokens,
    and checks that greedy output equals plain decoding's. With --output it is also written as results.json.
    """
    from rich.console import Console

    from speculators.cli.arguments import parse_counts
    from speculators.evaluation.command import EvaluationRequest, check_writable, evaluate_checkpoint
    from speculators.evaluation.results import write_results
    from speculators.evaluation.tables import rich_tables
    from speculators.files import writing

    request = EvaluationRequest.checked(
        checkpoint=checkpoint,
        verifier=verifier,
        data=data,
        num_speculative_tokens=parse_counts(num_speculative_tokens or ["3", "7"], "--num-speculative-tokens"),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        limit=limit,
        repeats=repeats,
        draft_full_block=draft_full_block,
        without_markov=no_markov,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    if output is not None:
        check_writable(output)
    results = evaluate_checkpoint(request, progress_console=Console(stderr=True))
    Console().print(rich_tables(results))  # first, so that a disk that fills up meanwhile costs the file only
    if output is not None:
        with writing(output):
            write_results(results, output)
