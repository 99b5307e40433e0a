"""``speculators launch-vllm``: vLLM servers that hand over hidden states, watched until they are told to stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from speculators.vllm_server.command import Backend

__all__ = ["launch_vllm"]

STATES = "Hidden states"
SERVERS = "Servers"
MOONCAKE = "Mooncake"


def launch_vllm(
    *,
    model: Annotated[str, typer.Argument(help="The verifier: a folder or hub id.", show_default=False)],
    vllm_args: Annotated[
        list[str] | None, typer.Argument(help="Behind --: further arguments of `vllm serve`.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and start nothing.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the model's folder.")] = False,
    target_layer_ids: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers that the draft reads; id k is after k layers [early, middle, late].",
            rich_help_panel=STATES,
            show_default=False,
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            help="A draft's checkpoint, to capture the layers it reads; ids of native checkpoints are converted.",
            rich_help_panel=STATES,
            show_default=False,
        ),
    ] = None,
    include_last_layer: Annotated[
        bool, typer.Option(help="Capture the last layer too, which training needs.", rich_help_panel=STATES)
    ] = True,
    hidden_states_backend: Annotated[
        str, typer.Option(help="How states are handed over: file, fp8 or mooncake.", rich_help_panel=STATES)
    ] = "file",
    hidden_states_path: Annotated[
        Path | None,
        typer.Option(
            help="Folder that servers and trainer share [a temporary one].", rich_help_panel=STATES, show_default=False
        ),
    ] = None,
    retention_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="States that nobody fetches go after this time; 0 keeps them while the server runs [1800].",
            rich_help_panel=STATES,
            show_default=False,
        ),
    ] = None,
    connector: Annotated[
        str,
        typer.Option(help="own, or stock: vLLM's own connector, for the file backend on GPUs.", rich_help_panel=STATES),
    ] = "own",
    replicas: Annotated[int, typer.Option(min=1, max=64, help="Servers, each on its own port.", rich_help_panel=SERVERS)] = 1,
    python: Annotated[
        Path | None,
        typer.Option(
            help="Interpreter of the environment that has vLLM [this one].", rich_help_panel=SERVERS, show_default=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=SERVERS)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the first server.", rich_help_panel=SERVERS)] = 8000,
    log_dir: Annotated[Path, typer.Option(help="Folder of the servers' logs.", rich_help_panel=SERVERS)] = Path("vllm-logs"),
    start_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds to a server's first answer.", rich_help_panel=SERVERS)
    ] = 3600.0,
    mooncake_master: Annotated[
        str | None, typer.Option(help="Address of the master.", rich_help_panel=MOONCAKE, show_default=False)
    ] = None,
    mooncake_metadata_server: Annotated[
        str | None, typer.Option(help="Metadata server.", rich_help_panel=MOONCAKE, show_default=False)
    ] = None,
    mooncake_protocol: Annotated[
        str | None, typer.Option(help="tcp or rdma.", rich_help_panel=MOONCAKE, show_default=False)
    ] = None,
    mooncake_device: Annotated[
        str | None, typer.Option(help="Network device of rdma.", rich_help_panel=MOONCAKE, show_default=False)
    ] = None,
    mooncake_global_segment_gib: Annotated[
        float | None, typer.Option(min=0.0, help="Shared segment in GiB.", rich_help_panel=MOONCAKE, show_default=False)
    ] = None,
    mooncake_local_buffer_gib: Annotated[
        float | None, typer.Option(min=0.0, help="Local buffer in GiB.", rich_help_panel=MOONCAKE, show_default=False)
    ] = None,
    mooncake_writer_threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that hand over [4].", rich_help_panel=MOONCAKE, show_default=False)
    ] = None,
) -> None:
    """Start vLLM servers that hand over the hidden states of MODEL, and keep them alive until Ctrl-C.

    Prints, when they are ready, the command that trains against them. Arguments of `vllm serve` stand behind --:

    speculators launch-vllm MODEL --replicas 2 -- --tensor-parallel-size 4 --max-model-len 20000
    """
    from speculators.errors import ConfigError
    from speculators.pipelines.states_servers import StatesServers
    from speculators.vllm_server.command import ServerSettings
    from speculators.vllm_server.versions import find_vllm

    if connector not in ("own", "stock"):
        raise ConfigError(f"--connector is {connector}; give own or stock")
    if port + replicas > 65536:
        raise ConfigError(f"{replicas} servers from port {port} on need ports above 65535; choose a smaller --port")
    backend = _backend(hidden_states_backend)
    extra: dict[str, Any] = {
        "mooncake_master": mooncake_master,
        "mooncake_metadata_server": mooncake_metadata_server,
        "mooncake_protocol": mooncake_protocol,
        "mooncake_device": mooncake_device,
        "mooncake_global_segment_gib": mooncake_global_segment_gib,
        "mooncake_local_buffer_gib": mooncake_local_buffer_gib,
        "mooncake_writer_threads": mooncake_writer_threads,
    }
    extra = {key: value for key, value in extra.items() if value is not None}
    if extra and backend != "mooncake":
        raise ConfigError(f"--{next(iter(extra)).replace('_', '-')} is for --hidden-states-backend mooncake; leave it out")
    if "mooncake_writer_threads" in extra:
        extra["num_writer_threads"] = extra.pop("mooncake_writer_threads")
    if retention_seconds is not None:
        extra["retention_seconds"] = retention_seconds
    layer_ids, target, model_type = _layers(model, target_layer_ids, draft, include_last_layer, trust_remote_code)
    servers = StatesServers(
        find_vllm(python),
        ServerSettings(
            model,
            layer_ids,
            model_type=model_type,
            backend=backend,
            hidden_states_path=hidden_states_path,
            own_connector=connector == "own",
            connector_settings=extra,
            trust_remote_code=trust_remote_code,
            vllm_args=tuple(vllm_args or ()),
        ),
        target,
        replicas=replicas,
        host=host,
        port=port,
        log_dir=log_dir,
        start_seconds=start_timeout,
    )
    if dry_run:
        for line in servers.commands():
            print(line)
    else:
        raise typer.Exit(servers.run(lambda line: print(line, flush=True)))


def _backend(name: str) -> Backend:
    from speculators.errors import ConfigError

    backends: dict[str, Backend] = {"file": "file", "fp8": "fp8", "mooncake": "mooncake"}
    if name not in backends:
        raise ConfigError(f"--hidden-states-backend is {name}; give file, fp8 or mooncake")
    return backends[name]


def _layers(
    model: str, target: list[str] | None, draft: Path | None, include_last_layer: bool, trust_remote_code: bool
) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Layers to capture, the layers that a draft is to read, and the verifier's model type."""
    from speculators.cli.arguments import parse_numbers
    from speculators.errors import ConfigError
    from speculators.models.draft_config import default_layer_ids
    from speculators.models.verifier_weights import read_verifier_config, text_config
    from speculators.vllm_server.command import captured_layer_ids, draft_layer_ids

    config = read_verifier_config(model, trust_remote_code)
    num_layers = int(text_config(config).num_hidden_layers)
    if target is not None and draft is not None:
        raise ConfigError("--target-layer-ids and --draft both name layers; leave one out")
    if target is not None:
        ids = parse_numbers(target, "--target-layer-ids")
    elif draft is not None:
        ids = draft_layer_ids(_read_config(draft))
    else:
        ids = default_layer_ids(num_layers)
    return captured_layer_ids(ids, num_layers, include_last_layer), tuple(ids), str(config.model_type)


def _read_config(draft: Path) -> dict[str, Any]:
    from speculators.errors import ConfigError
    from speculators.files import read_json

    try:
        config = read_json(draft / "config.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{draft} has no readable config.json; give the folder of a draft's checkpoint") from error
    if not isinstance(config, dict):
        raise ConfigError(f"the config.json of {draft} is no table of settings; give the folder of a draft's checkpoint")
    return config
