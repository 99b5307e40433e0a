"""``speculators generate-offline-data``: hidden states captured beforehand, for trainings that read them from the disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from speculators.data import RowDataset
    from speculators.pipelines.offline_states import CapturedSource
    from speculators.train.config import TrainConfig
    from speculators.verifiers.facts import VerifierFacts

__all__ = ["generate_offline_data"]

SOURCE = "Source"
STORE = "Store"
SHARE = "Ranks"
ERRORS = "Errors"

#: Of sizes: that a number of bytes is one.
MOST = 2.0**40

#: Where upstream's flag looks for a server.
ENDPOINT = "http://localhost:8000/v1"


def generate_offline_data(
    *,
    preprocessed_data: Annotated[Path, typer.Option(help="Folder of prepared rows.")] = Path("output"),
    output: Annotated[
        Path | None, typer.Option(help="Folder of the store.", show_default="hidden_states within --preprocessed-data")
    ] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Only the first rows.", show_default=False)] = None,
    seq_length: Annotated[
        int, typer.Option(min=2, help="Tokens of a row that are kept; the training's --total-seq-len.")
    ] = 8192,
    model: Annotated[
        str | None, typer.Option(help="Folder of the verifier.", rich_help_panel=SOURCE, show_default=False)
    ] = None,
    hidden_states: Annotated[
        str | None,
        typer.Option(
            help="Source of the states: transformers (--model in this process) or vllm (--endpoint).",
            rich_help_panel=SOURCE,
            show_default="vllm with --endpoint or without --model, else transformers",
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="Address of a vLLM server; several with commas.", rich_help_panel=SOURCE, show_default=ENDPOINT),
    ] = None,
    hidden_states_backend: Annotated[
        str, typer.Option(help="How the server hands states over: file, fp8 or mooncake.", rich_help_panel=SOURCE)
    ] = "file",
    hidden_states_path: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which the server leaves states for the backends file and fp8; launch-vllm's.",
            rich_help_panel=SOURCE,
            show_default=False,
        ),
    ] = None,
    target_layer_ids: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers to capture; id k is the stream after k layers.",
            rich_help_panel=SOURCE,
            show_default="2, n // 2 and n - 3 of n layers",
        ),
    ] = None,
    final_state: Annotated[
        str | None,
        typer.Option(
            help="Last state before (pre_norm) or after (post_norm) the verifier's final norm.",
            rich_help_panel=SOURCE,
            show_default="the source's own",
        ),
    ] = None,
    capture_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per verifier batch; the training's.", rich_help_panel=SOURCE)
    ] = 4096,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the verifier's folder.", rich_help_panel=SOURCE)
    ] = False,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Most batches asked of the source at once.", rich_help_panel=SOURCE)
    ] = 32,
    request_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds to wait for a request.", rich_help_panel=SOURCE)
    ] = 120,
    max_retries: Annotated[int, typer.Option(min=0, help="Tries of a failed request.", rich_help_panel=SOURCE)] = 3,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Stored as float32, bfloat16, float16, or fp8 with a scale per token.",
            rich_help_panel=STORE,
            show_default="as the source gives them",
        ),
    ] = None,
    max_gib: Annotated[
        float | None,
        typer.Option(min=0.0, max=MOST, help="Most GiB of states.", rich_help_panel=STORE, show_default="no limit"),
    ] = None,
    on_full: Annotated[
        str, typer.Option(help="At --max-gib, stop, or evict the oldest states that nobody reads.", rich_help_panel=STORE)
    ] = "stop",
    shard_mib: Annotated[float, typer.Option(min=0.001, max=MOST, help="Size of a file.", rich_help_panel=STORE)] = 256,
    validate_outputs: Annotated[
        bool,
        typer.Option(
            "--validate-outputs", help="Read back what is written, and all that was there before.", rich_help_panel=STORE
        ),
    ] = False,
    world_size: Annotated[int, typer.Option(min=1, help="Processes that share the work.", rich_help_panel=SHARE)] = 1,
    rank: Annotated[int, typer.Option(min=0, help="Number of this one, from 0.", rich_help_panel=SHARE)] = 0,
    fail_on_error: Annotated[
        bool, typer.Option("--fail-on-error", help="End at the first rows that fail.", rich_help_panel=ERRORS)
    ] = False,
    max_consecutive_errors: Annotated[
        int | None,
        typer.Option(min=1, help="End after so many failures in a row.", rich_help_panel=ERRORS, show_default="--concurrency"),
    ] = None,
) -> None:
    """Capture hidden states of prepared rows into a store on the disk, for `speculators train --hidden-states store`.

    The same command goes on behind what a stopped run has written; with --world-size, several processes, each with its own
    --rank, may fill one store at once.
    """
    from speculators.data import RowDataset
    from speculators.pipelines.offline_states import FillSettings, fill_store
    from speculators.train.config import TrainConfig

    source_name = hidden_states or ("vllm" if endpoint is not None or model is None else "transformers")
    _choice("--hidden-states", source_name, ("transformers", "vllm"))
    _choice("--on-full", on_full, ("stop", "evict"))
    _choice("--dtype", dtype, (None, "float32", "bfloat16", "float16", "fp8"))
    _choice("--final-state", final_state, (None, "pre_norm", "post_norm"))
    settings = FillSettings(
        dtype=dtype,  # type: ignore[arg-type]
        seq_length=seq_length,
        token_budget=capture_batch_tokens,
        max_samples=max_samples,
        max_bytes=None if max_gib is None else max(1, int(max_gib * 2**30)),
        on_full=on_full,  # type: ignore[arg-type]
        world_size=world_size,
        rank=rank,
        concurrency=concurrency,
        fail_on_error=fail_on_error,
        max_consecutive_errors=max_consecutive_errors or concurrency,
        validate_outputs=validate_outputs,
        shard_bytes=max(1, int(shard_mib * 2**20)),
    )
    given: dict[str, Any] = {
        "verifier_name_or_path": model or "",
        "trust_remote_code": trust_remote_code,
        "data_path": str(preprocessed_data),
        "hidden_states": source_name,
        "target_layer_ids": _layers(target_layer_ids),
        "final_state": final_state,
        "total_seq_len": seq_length,
        "capture_batch_tokens": capture_batch_tokens,
    }
    if source_name == "vllm":
        given |= {
            "hidden_states_backend": hidden_states_backend,
            "vllm_endpoint": endpoint or ENDPOINT,
            "request_timeout": request_timeout,
            "max_retries": max_retries,
        }
        if hidden_states_path is not None:
            given["hidden_states_path"] = str(hidden_states_path)
    config = TrainConfig.from_flat(given)
    with _plain_warnings():
        dataset = RowDataset.load(preprocessed_data)
        source = _open(config, dataset)
        try:
            report = fill_store(output or preprocessed_data / "hidden_states", dataset, source, settings)
        finally:
            source.close()
    for line in report.lines():
        typer.echo(line)


def _open(config: TrainConfig, dataset: RowDataset) -> CapturedSource:
    """The source that the settings name.

    :raises SpeculatorsError: when it cannot be opened, or the rows are not its verifier's.
    """
    from speculators.data.provenance import require_tokenizer
    from speculators.errors import ConfigError
    from speculators.models.draft_config import default_layer_ids
    from speculators.verifiers.facts import describe_verifier

    path, trust = config.verifier.verifier_name_or_path, config.verifier.trust_remote_code
    if not path:
        raise ConfigError("--model is missing: name the folder of the verifier; of one that a server runs its config is enough")
    facts = describe_verifier(path, trust)
    require_tokenizer(dataset.manifest, facts.tokenizer, facts.name, f"the rows in {dataset.path}")
    dataset.check_vocabulary(facts.vocab_size)
    layers = tuple(config.draft.target_layer_ids or default_layer_ids(facts.num_layers))
    if config.data.hidden_states == "vllm":
        return _open_vllm(config, layers, facts)
    from speculators.verifiers.loading import load_verifier
    from speculators.verifiers.transformers_source import TransformersSource

    verifier = load_verifier(path, trust_remote_code=trust)
    return TransformersSource(verifier, layers, config.data.final_state or "post_norm", config.data.capture_batch_tokens)


def _open_vllm(config: TrainConfig, layers: tuple[int, ...], facts: VerifierFacts) -> CapturedSource:
    from speculators.errors import ConfigError
    from speculators.train.sources import vllm_settings
    from speculators.verifiers.vllm import VllmSource

    if config.data.final_state == "post_norm":
        raise ConfigError("--final-state is post_norm, but vLLM gives the last state before the norm; leave it out")
    if config.data.hidden_states_backend == "mooncake":
        raise ConfigError("generate-offline-data reads the backends file and fp8; start the server with one of them")
    if config.backend.hidden_states_path is None:
        raise ConfigError(
            "--hidden-states-path is missing: name the folder in which the server leaves its states, as launch-vllm was told"
        )
    return VllmSource(vllm_settings(config, always=True), layers, facts)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Each warning as one line on standard error."""
    import warnings

    def show(message: Warning | str, *_: object) -> None:
        print(f"warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _choice(flag: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    from speculators.errors import ConfigError

    if value not in choices:
        raise ConfigError(f"{flag} is {value}; choose one of {', '.join(filter(None, choices))}")


def _layers(texts: list[str] | None) -> list[int] | None:
    from speculators.cli.arguments import parse_numbers

    return None if texts is None else parse_numbers(texts, "--target-layer-ids")
