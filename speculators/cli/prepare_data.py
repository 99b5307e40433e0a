"""``speculators prepare-data``: conversations to training rows, with the tokenizer's own chat template and no server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["main", "prepare_data_command"]

GENERATION = "Generation (with --generate)"


def prepare_data_command(
    *,
    model: Annotated[str, typer.Option(help="Folder of the verifier, whose tokenizer renders the rows.", show_default=False)],
    data: Annotated[
        list[Path], typer.Option(help="JSON or JSON Lines file of conversations, or a folder; repeatable.", show_default=False)
    ],
    output: Annotated[Path, typer.Option(help="Folder for the data set and token_freq.pt.")] = Path("output"),
    seq_length: Annotated[int, typer.Option(help="Longest row in tokens; longer ones are cut.")] = 8192,
    max_samples: Annotated[int | None, typer.Option(help="Most rows to make.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order in which records are taken, and of sampling.")] = 0,
    minimum_valid_tokens: Annotated[int, typer.Option(help="Fewest supervised tokens of a row.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the data set in --output.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the verifier's folder.")] = False,
    generate: Annotated[
        bool,
        typer.Option("--generate", help="Let the verifier answer each last user turn itself.", rich_help_panel=GENERATION),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.", rich_help_panel=GENERATION)] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.", rich_help_panel=GENERATION)] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 switches the filter off.", rich_help_panel=GENERATION)] = 0,
    top_p: Annotated[float, typer.Option(help="1 switches the filter off.", rich_help_panel=GENERATION)] = 1.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered at once.", rich_help_panel=GENERATION)] = 64,
) -> None:
    """Render conversations into training rows with a loss mask, and account for every input record."""
    from pydantic import ValidationError

    from speculators.data.prepare import PrepareConfig, prepare_data
    from speculators.data.rows import AnswerRecord
    from speculators.data.tokenizers import load_tokenizer
    from speculators.errors import ConfigError
    from speculators.sampling import SamplingParams

    try:
        config = PrepareConfig(
            data=data,
            output=output,
            seq_length=seq_length,
            max_samples=max_samples,
            seed=seed,
            minimum_valid_tokens=minimum_valid_tokens,
            overwrite=overwrite,
            verifier=model,
        )
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    except ValidationError as error:
        first = error.errors()[0]
        flag = str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"--{flag} is {first['input']!r}: {first['msg'].lower()}; correct it") from None

    if not generate:
        loaded = load_tokenizer(model, trust_remote_code)
        for warning in loaded.warnings:
            typer.echo(f"warning: {warning}", err=True)
        report = prepare_data(config, loaded.tokenizer, eos_ids=loaded.eos_ids)
    else:
        from speculators.verifiers.generation import generate_answers
        from speculators.verifiers.loading import load_verifier

        verifier = load_verifier(model, trust_remote_code=trust_remote_code)
        if verifier.context_length is not None and verifier.context_length < seq_length:
            seq_length = verifier.context_length  # a longer prompt is accounted for instead of stopping the generation
            config = config.model_copy(update={"seq_length": seq_length})
        longest = min(max_new_tokens, seq_length - 1)

        def answer(prompts: list[list[int]], numbers: list[int]) -> Iterable[tuple[int, Sequence[int]]]:
            how: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "row_ids": numbers, "progress": True}
            return generate_answers(verifier, prompts, longest, sampling, **how)

        record = AnswerRecord(on_policy=True, max_new_tokens=longest, **sampling.model_dump())
        report = prepare_data(
            config, verifier.tokenizer, answer=answer, answers=record, eos_ids=verifier.eos_ids, settings=verifier.hash
        )
    if report.reused:
        typer.echo(f"{output} already holds these rows; nothing to do")
    for line in report.lines():
        typer.echo(line)


def main(arguments: list[str]) -> None:
    """Run the command on its own arguments; leaves by SystemExit, as command lines do."""
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    command.command()(prepare_data_command)
    command(args=arguments, prog_name="speculators prepare-data")
