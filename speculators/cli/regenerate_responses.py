"""``speculators regenerate-responses``: conversations answered again by the verifier, as rows to train on."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from speculators.data.tokenizers import LoadedTokenizer
    from speculators.verifiers.answering import AnswerEngine

__all__ = ["regenerate_responses"]

SAMPLING = "Sampling"
LOCAL = "In process"
RAY = "On a Ray cluster"
SERVER = "By a server"


def regenerate_responses(
    *,
    endpoint: Annotated[
        str | None,
        typer.Option(help="OpenAI-compatible server to answer, such as http://127.0.0.1:8000/v1.", show_default=False),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(help="Folder of the verifier, to answer in this process or on a Ray cluster instead.", show_default=False),
    ] = None,
    dataset: Annotated[
        str, typer.Option(help="File or folder of conversations, hf:ID[:SUBSET[:SPLIT]], or a preset such as sharegpt.")
    ] = "ultrachat",
    split: Annotated[str | None, typer.Option(help="Of a data set on a hub.", show_default=False)] = None,
    subset: Annotated[str | None, typer.Option(help="Of a data set on a hub.", show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most conversations to answer.", show_default=False)] = None,
    language_filter: Annotated[
        str | None, typer.Option(help="Only records whose `language` is this.", show_default=False)
    ] = None,
    outfile: Annotated[
        Path | None, typer.Option(help="JSON Lines file of rows; by default DATASET_MODEL.jsonl.", show_default=False)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on behind the rows of --outfile even if other settings or data made them."),
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, max=65536, help="Answers under way at once; on Ray, on each actor.")] = 64,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the verifier's folder.")] = False,
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
    device: Annotated[
        str | None, typer.Option(help="Where the verifier runs, such as cuda:1.", rich_help_panel=LOCAL, show_default=False)
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Answer on actors of a Ray cluster: auto for this machine's, host:port, or local to start Ray here.",
            rich_help_panel=RAY,
            show_default=False,
        ),
    ] = None,
    ray_rollout_workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Actors; as many as the cluster has room for if left out.", rich_help_panel=RAY, show_default=False
        ),
    ] = None,
    ray_rollout_cpus: Annotated[
        float | None, typer.Option(min=0.0, help="Processors of each actor; 1.", rich_help_panel=RAY, show_default=False)
    ] = None,
    ray_rollout_gpus: Annotated[
        float | None, typer.Option(min=0.0, help="GPUs of each actor; 0.", rich_help_panel=RAY, show_default=False)
    ] = None,
    ray_rollout_resources: Annotated[
        str | None,
        typer.Option(
            help='Further resources of each actor, as JSON: {"verifier": 1}.', rich_help_panel=RAY, show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The server's name of the model; its only one if left out.", rich_help_panel=SERVER, show_default=False
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder of the model's tokenizer, if the server does not name it.", rich_help_panel=SERVER, show_default=False
        ),
    ] = None,
    max_retries: Annotated[
        int | None, typer.Option(min=0, help="Further tries of a request; 3.", rich_help_panel=SERVER, show_default=False)
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(min=1.0, help="Seconds that an answer may take; 1800.", rich_help_panel=SERVER, show_default=False),
    ] = None,
    allow_retokenized: Annotated[
        bool,
        typer.Option(
            "--allow-retokenized", help="Take text from a server without token ids, and tokenise it.", rich_help_panel=SERVER
        ),
    ] = False,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="Environment variable that holds the server's key.", rich_help_panel=SERVER, show_default=False),
    ] = None,
) -> None:
    """Let the verifier answer every assistant turn of conversations again, and write its answers as rows to train on.

    The same command goes on behind the rows of a run that was stopped.
    """
    from speculators.errors import ConfigError, DataError
    from speculators.pipelines.answer_files import errors_file
    from speculators.pipelines.regenerate import regenerate
    from speculators.pipelines.regenerate_inputs import open_records
    from speculators.pipelines.regenerate_settings import (
        RegenerateSettings,
        effort_of,
        parse_distribution,
        parse_sampling,
        temperature_of,
    )

    if on_length not in ("keep", "drop"):
        raise ConfigError(f"--on-length is {on_length}; give keep or drop")
    if (endpoint is None) == (verifier is None):
        raise ConfigError(
            "give either --endpoint, the address of a server such as http://127.0.0.1:8000/v1, or --verifier, the folder of a "
            "model to answer in this process or, with --ray-address, on a Ray cluster"
        )
    sampling, further = parse_sampling(sampling_params)
    if temperature is not None and "temperature" in sampling.model_fields_set:
        raise ConfigError("--sampling-params and --temperature both give a temperature; leave one out")
    settings = RegenerateSettings(
        max_tokens=max_tokens,
        sampling=sampling,
        further=further,
        temperature=parse_distribution(temperature, "--temperature", temperature_of),
        reasoning_effort=parse_distribution(reasoning_effort, "--reasoning-effort", effort_of),
        seed=seed,
        drop_cut=on_length == "drop",
        language=language_filter,
        limit=limit,
    )
    rollout = {
        "--ray-rollout-workers": ray_rollout_workers,
        "--ray-rollout-cpus": ray_rollout_cpus,
        "--ray-rollout-gpus": ray_rollout_gpus,
        "--ray-rollout-resources": ray_rollout_resources,
    }
    if ray_address is None:
        _refuse_given(rollout, "answers on a Ray cluster (--ray-address)", "give that, or leave it out")
    records = open_records(dataset, split, subset)
    engine: AnswerEngine
    if verifier is not None:
        given = {
            "--model": model,
            "--tokenizer": tokenizer,
            "--max-retries": max_retries,
            "--request-timeout": request_timeout,
            "--allow-retokenized": allow_retokenized or None,
            "--api-key-env": api_key_env,
        }
        _refuse_given(given, "a server (--endpoint)")
        if further:
            raise ConfigError(
                f"--sampling-params names {', '.join(sorted(further))}, which only servers know; a verifier's folder takes "
                "temperature, top_k and top_p"
            )
        if ray_address is None:
            engine, loaded = _local(verifier, concurrency, device, trust_remote_code)
        else:
            _refuse_given({"--device": device}, "an in-process verifier (--verifier alone)")
            engine, loaded = _on_ray(verifier, concurrency, ray_address, rollout, trust_remote_code)
    else:
        _refuse_given({"--device": device}, "an in-process verifier (--verifier)")
        _refuse_given({"--ray-address": ray_address}, "a verifier's folder (--verifier)")
        server = _Server(str(endpoint), model, concurrency, max_retries, request_timeout, allow_retokenized, api_key_env)
        engine, loaded = _remote(server, tokenizer, trust_remote_code)
    place = outfile or Path(f"{_name(dataset)}_{_name(loaded.name)}.jsonl")
    try:
        report = regenerate(
            records,
            engine,
            loaded.tokenizer,
            place,
            settings,
            eos_ids=loaded.eos_ids,
            hashes={"tokenizer": loaded.hash, "template": loaded.template_hash},
            resume=resume,
        )
    finally:
        engine.close()
    typer.echo(f"{place}:")
    for line in report.lines():
        typer.echo(line)
    if not report.rows:
        raise DataError(f"no answer was written; {errors_file(place)} says of every record why")


def _refuse_given(flags: Mapping[str, Any], owner: str, advice: str = "leave it out") -> None:
    from speculators.errors import ConfigError

    for flag, value in flags.items():
        if value is not None:
            raise ConfigError(f"{flag} is for {owner}; {advice}")


def _local(verifier: str, batch_size: int, device: str | None, trust_remote_code: bool) -> tuple[AnswerEngine, LoadedTokenizer]:
    from speculators.data.tokenizers import load_tokenizer
    from speculators.verifiers.loading import load_verifier
    from speculators.verifiers.local_answers import LocalEngine

    loaded = load_verifier(verifier, device=device, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(verifier, trust_remote_code)
    return LocalEngine(loaded, batch_size, tokenizer.eos_ids or None), tokenizer


def _on_ray(
    verifier: str, batch_size: int, address: str, given: Mapping[str, Any], trust_remote_code: bool
) -> tuple[AnswerEngine, LoadedTokenizer]:
    from speculators.data.tokenizers import load_tokenizer
    from speculators.verifiers.rollout import RayAnswerEngine, RolloutSettings

    defaults, resources = RolloutSettings(), given["--ray-rollout-resources"]
    cpus, gpus = given["--ray-rollout-cpus"], given["--ray-rollout-gpus"]
    settings = RolloutSettings(
        workers=given["--ray-rollout-workers"],
        cpus=defaults.cpus if cpus is None else cpus,
        gpus=defaults.gpus if gpus is None else gpus,
        resources={} if resources is None else _amounts(resources),
    )
    tokenizer = load_tokenizer(verifier, trust_remote_code)
    engine = RayAnswerEngine(
        verifier,
        batch_size,
        tokenizer.eos_ids or None,
        address=None if address == "local" else address,
        settings=settings,
        trust_remote_code=trust_remote_code,
    )
    return engine, tokenizer


def _amounts(text: str) -> dict[str, float]:
    """Resources from JSON."""
    from pydantic import TypeAdapter, ValidationError

    from speculators.errors import ConfigError

    try:
        return TypeAdapter(dict[str, float]).validate_json(text)
    except ValidationError:
        raise ConfigError(
            f'--ray-rollout-resources {text} is no JSON object of amounts; give one such as {{"verifier": 1}}'
        ) from None


class _Server(NamedTuple):
    endpoint: str
    model: str | None
    concurrency: int
    max_retries: int | None
    request_timeout: float | None
    allow_retokenized: bool
    api_key_env: str | None


def _remote(server: _Server, tokenizer: str | None, trust_remote_code: bool) -> tuple[AnswerEngine, LoadedTokenizer]:
    from speculators.data.tokenizers import load_tokenizer
    from speculators.errors import ConfigError, VerifierError
    from speculators.models.verifier_weights import read_verifier_config, text_config
    from speculators.verifiers.server_answers import MAX_RETRIES, REQUEST_SECONDS, ServerEngine

    key = None
    if server.api_key_env is not None:
        key = os.environ.get(server.api_key_env)
        if not key:
            raise ConfigError(f"the environment variable {server.api_key_env} of --api-key-env is not set; set it to the key")
    engine = ServerEngine(
        server.endpoint,
        server.model,
        concurrency=server.concurrency,
        max_retries=MAX_RETRIES if server.max_retries is None else server.max_retries,
        timeout=server.request_timeout or REQUEST_SECONDS,
        allow_retokenized=server.allow_retokenized,
        api_key=key,
    )
    try:
        loaded = load_tokenizer(tokenizer or engine.root, trust_remote_code)
    except VerifierError as error:
        engine.close()
        if tokenizer is not None:
            raise
        raise VerifierError(f"the server's model is {engine.root}, and {error}; name its folder with --tokenizer") from error
    engine.eos_ids = loaded.eos_ids
    with suppress(VerifierError, AttributeError):  # of a folder with a tokenizer alone
        engine.vocab_size = int(text_config(read_verifier_config(tokenizer or engine.root, trust_remote_code)).vocab_size)
    return engine, loaded


def _name(place: str) -> str:
    """The last part of a path or hub id, as part of a file's name."""
    last = re.sub(r"\.(jsonl?|ndjson|parquet)(\.\w+)?$", "", place.rstrip("/").split("/")[-1])
    return re.sub(r"[^\w.-]+", "-", last).strip("-") or "answers"
