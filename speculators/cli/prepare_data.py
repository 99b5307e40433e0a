"""``speculators prepare-data``: conversations to training rows, with the tokenizer's own chat template and no server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from speculators.data.prepare import PrepareReport
    from speculators.data.prepare_config import PrepareConfig
    from speculators.sampling import SamplingParams

__all__ = ["main", "prepare_data_command"]

ROWS = "Rows and masks"
GENERATION = "Generation (with --generate)"


def prepare_data_command(
    *,
    model: Annotated[str, typer.Option(help="Folder of the verifier, whose tokenizer renders the rows.", show_default=False)],
    data: Annotated[
        list[str],
        typer.Option(
            help="JSON, JSON Lines (also gzip, zstd) or parquet file, folder, or hf:ID[:SUBSET[:SPLIT]]; repeatable.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the data set and what stands beside it.")] = Path("output"),
    seq_length: Annotated[int, typer.Option(help="Longest row in tokens; longer ones are cut.")] = 8192,
    max_samples: Annotated[int | None, typer.Option(help="Most rows to make.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of conversations, and of sampling.")] = 0,
    minimum_valid_tokens: Annotated[int, typer.Option(help="Fewest supervised tokens of a row.")] = 1,
    num_preprocessing_workers: Annotated[
        int | None, typer.Option(help="Processes that render; 0 for none but this one. One a core by default.")
    ] = None,
    token_freq_path: Annotated[
        Path | None, typer.Option(help="File for the counts of supervised tokens; OUTPUT/token_freq.pt by default.")
    ] = None,
    skip_token_freq: Annotated[
        bool, typer.Option("--skip-token-freq/--no-skip-token-freq", help="Leave the counts of supervised tokens out.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the data set in --output.")] = False,
    allow_empty_output: Annotated[bool, typer.Option("--allow-empty-output", help="No row left is no error.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the verifier's folder.")] = False,
    render_endpoint: Annotated[
        str | None,
        typer.Option(help="URL of a server that renders, without /v1.", show_default=False, rich_help_panel=ROWS),
    ] = None,
    rows: Annotated[
        str,
        typer.Option(help="What a row is of: conversation, turn, or auto, by the template's history.", rich_help_panel=ROWS),
    ] = "auto",
    last_turn_only: Annotated[
        bool, typer.Option("--last-turn-only", help="Supervise the last assistant turn alone.", rich_help_panel=ROWS)
    ] = False,
    generation_tags: Annotated[
        str, typer.Option(help="Whether a template's generation tags must agree: check or ignore.", rich_help_panel=ROWS)
    ] = "check",
    role_order: Annotated[
        str,
        typer.Option(
            help="Roles out of order: template (it decides), merge (join neighbours), strict (leave out).", rich_help_panel=ROWS
        ),
    ] = "template",
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Keep conversations that are there twice.", rich_help_panel=ROWS)
    ] = False,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            help='JSON of further arguments of the chat template, such as {"enable_thinking": false}.',
            show_default=False,
            rich_help_panel=ROWS,
        ),
    ] = None,
    generate: Annotated[
        bool,
        typer.Option("--generate", help="Let the verifier answer every assistant turn itself.", rich_help_panel=GENERATION),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.", rich_help_panel=GENERATION)] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.", rich_help_panel=GENERATION)] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 switches the filter off.", rich_help_panel=GENERATION)] = 0,
    top_p: Annotated[float, typer.Option(help="1 switches the filter off.", rich_help_panel=GENERATION)] = 1.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered at once.", rich_help_panel=GENERATION)] = 64,
) -> None:
    """Render conversations into training rows with a loss mask, and account for every input record."""
    from pydantic import ValidationError

    from speculators.data.prepare import prepare_data
    from speculators.data.prepare_config import PrepareConfig
    from speculators.data.tokenizers import load_tokenizer
    from speculators.errors import ConfigError
    from speculators.sampling import SamplingParams

    given: dict[str, Any] = {
        "data": data,
        "output": output,
        "seq_length": seq_length,
        "max_samples": max_samples,
        "seed": seed,
        "minimum_valid_tokens": minimum_valid_tokens,
        "num_preprocessing_workers": num_preprocessing_workers,
        "token_freq_path": token_freq_path,
        "skip_token_freq": skip_token_freq,
        "overwrite": overwrite,
        "allow_empty_output": allow_empty_output,
        "render_endpoint": render_endpoint,
        "rows": rows,
        "last_turn_only": last_turn_only,
        "generation_tags": generation_tags,
        "role_order": role_order,
        "keep_duplicates": keep_duplicates,
        "chat_template_kwargs": _json_object(chat_template_kwargs),
        "verifier": model,
    }
    try:
        config = PrepareConfig(**given)
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    except ValidationError as error:
        first = error.errors()[0]
        flag = str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"--{flag} is {first['input']!r}: {first['msg'].lower()}; correct it") from None

    if generate:
        _check_unused(config)
        report = _generate(config, sampling, max_new_tokens, batch_size, trust_remote_code)
    else:
        report = prepare_data(config, load_tokenizer(model, trust_remote_code), progress=True)
    _say(report, output)


def _json_object(text: str | None) -> dict[str, Any]:
    from speculators.errors import ConfigError

    try:
        given = json.loads(text) if text is not None else {}
        json.dumps(given, ensure_ascii=False).encode()  # half a pair of surrogates is no text
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f'--chat-template-kwargs {text} is no JSON object; give one such as {{"enable_thinking": false}}')
    return given


def _check_unused(config: PrepareConfig) -> None:
    """:raises ConfigError: for a setting of rendering, where answers keep the ids they are generated with."""
    from speculators.errors import ConfigError

    fields = type(config).model_fields
    for name in ("render_endpoint", "rows", "last_turn_only", "generation_tags", "role_order", "chat_template_kwargs"):
        if getattr(config, name) != fields[name].get_default():
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} has no effect on answers that --generate makes; leave one of the two out")


def _generate(
    config: PrepareConfig, sampling: SamplingParams, max_new_tokens: int, batch_size: int, trust_remote_code: bool
) -> PrepareReport:
    from speculators.data.tokenizers import load_tokenizer
    from speculators.pipelines.answered_data import prepare_answers
    from speculators.pipelines.regenerate_settings import RegenerateSettings
    from speculators.verifiers.loading import load_verifier
    from speculators.verifiers.local_answers import LocalEngine

    loaded = load_tokenizer(config.verifier, trust_remote_code)
    verifier = load_verifier(config.verifier, trust_remote_code=trust_remote_code)
    if verifier.context_length is not None and verifier.context_length < config.seq_length:
        config = config.model_copy(update={"seq_length": verifier.context_length})
    longest = min(max_new_tokens, config.seq_length - 1)
    engine = LocalEngine(verifier, batch_size)
    settings = RegenerateSettings(max_tokens=longest, sampling=sampling, seed=config.seed)
    try:
        answered, report = prepare_answers(config, loaded, engine, settings, progress=True)
    finally:
        engine.close()
    for line in answered.lines():
        typer.echo(line)
    return report


def _say(report: PrepareReport, output: Path) -> None:
    from rich.console import Console

    if report.reused:
        typer.echo(f"{output} already holds these rows; nothing to do")
    if report.whole:
        typer.echo("this tokenizer encodes a text otherwise than its pieces, so every text was encoded whole; that is slower")
    typer.echo(report.summary())
    Console().print(report.account.table())
    for remark in report.account.remarks():
        typer.echo(remark)


def main(arguments: list[str]) -> None:
    """Run the command on its own arguments; leaves by SystemExit, as command lines do."""
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    command.command()(prepare_data_command)
    command(args=arguments, prog_name="speculators prepare-data")
