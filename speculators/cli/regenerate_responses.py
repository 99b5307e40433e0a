"""``speculators regenerate-responses``: conversations answered again by the verifier, as rows to train on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from speculators.data.tokenizers import LoadedTokenizer
    from speculators.verifiers.answering import AnswerEngine

__all__ = ["regenerate_responses"]

SAMPLING = "Sampling"
LOCAL = "In process"


def regenerate_responses(
    *,
    dataset: Annotated[str, typer.Option(help="File or folder of conversations.")],
    verifier: Annotated[
        str | None, typer.Option(help="Folder of the verifier, to answer in this process.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most conversations to answer.", show_default=False)] = None,
    outfile: Annotated[
        Path | None, typer.Option(help="JSON Lines file of rows; by default DATASET_MODEL.jsonl.", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on behind the rows of --outfile even if they were made with other settings.")
    ] = False,
    language_filter: Annotated[
        str | None, typer.Option(help="Only records whose `language` is this.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.", rich_help_panel=SAMPLING)] = 8192,
    on_length: Annotated[
        str, typer.Option(help="What becomes of answers that the limit cuts: keep or drop.", rich_help_panel=SAMPLING)
    ] = "keep",
    sampling_params: Annotated[
        str | None,
        typer.Option(help='JSON such as {"top_p": 0.95}; greedy by default.', rich_help_panel=SAMPLING, show_default=False),
    ] = None,
    temperature: Annotated[
        str | None,
        typer.Option(
            help='One value, or JSON with weights: {"0.0": 0.5, "0.7": 0.5}.', rich_help_panel=SAMPLING, show_default=False
        ),
    ] = None,
    reasoning_effort: Annotated[
        str | None,
        typer.Option(
            help='For the chat template: one value, or JSON with weights: {"low": 0.3, "high": 0.7}.',
            rich_help_panel=SAMPLING,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all draws.", rich_help_panel=SAMPLING)] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations answered at once.", rich_help_panel=LOCAL)] = 64,
    device: Annotated[
        str | None, typer.Option(help="Where the verifier runs, such as cuda:1.", rich_help_panel=LOCAL, show_default=False)
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the verifier's folder.")] = False,
) -> None:
    """Let the verifier answer every assistant turn of conversations again, and write its answers as rows to train on.

    The same command goes on behind the rows of a run that was stopped.
    """
    from speculators.errors import ConfigError
    from speculators.pipelines.regenerate import regenerate
    from speculators.pipelines.regenerate_inputs import open_records
    from speculators.pipelines.regenerate_settings import RegenerateSettings, parse_distribution, parse_sampling

    if on_length not in ("keep", "drop"):
        raise ConfigError(f"--on-length is {on_length}; give keep or drop")
    if verifier is None:
        raise ConfigError("nobody is there to answer; give --verifier, the folder of a model")
    sampling, further = parse_sampling(sampling_params)
    if temperature is not None and "temperature" in sampling.model_fields_set:
        raise ConfigError("--sampling-params and --temperature both give a temperature; leave one out")
    settings = RegenerateSettings(
        max_tokens=max_tokens,
        sampling=sampling,
        further=further,
        temperature=None if temperature is None else parse_distribution(temperature, "--temperature", _temperature),
        reasoning_effort=None
        if reasoning_effort is None
        else parse_distribution(reasoning_effort, "--reasoning-effort", _nonempty),
        seed=seed,
        drop_cut=on_length == "drop",
        language=language_filter,
        limit=limit,
    )
    records = open_records(dataset)
    engine, tokenizer = _local(verifier, batch_size, device, trust_remote_code)
    place = outfile or Path(f"{_name(dataset)}_{_name(verifier)}.jsonl")
    try:
        report = regenerate(
            records,
            engine,
            tokenizer.tokenizer,
            place,
            settings,
            eos_ids=tokenizer.eos_ids,
            hashes={"tokenizer": tokenizer.hash, "template": tokenizer.template_hash},
            resume=resume,
        )
    finally:
        engine.close()
    typer.echo(f"{place}:")
    for line in report.lines():
        typer.echo(line)


def _local(verifier: str, batch_size: int, device: str | None, trust_remote_code: bool) -> tuple[AnswerEngine, LoadedTokenizer]:
    from speculators.data.tokenizers import load_tokenizer
    from speculators.verifiers.loading import load_verifier
    from speculators.verifiers.local_answers import LocalEngine

    loaded = load_verifier(verifier, device=device, trust_remote_code=trust_remote_code)
    return LocalEngine(loaded, batch_size), load_tokenizer(verifier, trust_remote_code)


def _temperature(text: str) -> float:
    from speculators.sampling import SamplingParams

    return SamplingParams(temperature=float(text)).temperature


def _nonempty(text: str) -> str:
    if not text.strip():
        raise ValueError("an empty value")
    return text


def _name(place: str) -> str:
    """The last part of a path or hub id, as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", Path(place.rstrip("/").split("/")[-1]).stem) or "answers"
