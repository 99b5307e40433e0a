"""The command line of a vLLM server that hands over hidden states.

Layer ids here are those of this library and of vLLM's ``extract_hidden_states``: id k is the residual stream after k decoder
layers, and of a verifier with n layers id n is the state before its final norm.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from speculators.errors import ConfigError
from speculators.vllm_server.versions import VllmInstallation, library_path, workarounds_for

__all__ = [
    "Backend",
    "ServerSettings",
    "build_command",
    "captured_layer_ids",
    "connector_folder",
    "draft_layer_ids",
    "server_environment",
]

Backend = Literal["file", "fp8", "mooncake"]

#: Flags of ``vllm serve`` that this library decides, and the flags of ours that decide them.
_OWN = {
    "--model": "MODEL",
    "--host": "--host",
    "--port": "--port",
    "--speculative-config": "--target-layer-ids",
    "--kv-transfer-config": "--hidden-states-backend",
    "--trust-remote-code": "--trust-remote-code",
}


@dataclass(frozen=True)
class ServerSettings:
    """What a server is to serve.

    :param layer_ids: to capture, ascending, the last layer included if it is wanted; see :func:`captured_layer_ids`.
    :param model_type: of the verifier's config; decides about workarounds.
    :param hidden_states_path: folder that server and trainer share; needed by the backends ``file`` and ``fp8``.
    :param own_connector: this project's connector; vLLM's own one otherwise, which knows the backend ``file`` alone.
    :param connector_settings: further keys of ``kv_connector_extra_config``, such as ``retention_seconds`` or ``mooncake_*``.
    :param vllm_args: further arguments of ``vllm serve``.
    """

    model: str
    layer_ids: tuple[int, ...]
    model_type: str = ""
    backend: Backend = "file"
    hidden_states_path: Path | None = None
    own_connector: bool = True
    connector_settings: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    vllm_args: tuple[str, ...] = ()


def captured_layer_ids(target: Sequence[int], num_layers: int, include_last_layer: bool = True) -> tuple[int, ...]:
    """Layers that a server captures for a draft which reads ``target``: these and the last, which training needs too.

    Ascending, which is the order in which vLLM hands them over, whatever the order they are asked for in.

    :param num_layers: of the verifier.
    :raises ConfigError: for ids that are no layers of the verifier.
    """
    from speculators.models.draft_config import check_layer_ids

    check_layer_ids(target, num_layers)
    return tuple(sorted({*target, num_layers} if include_last_layer else set(target)))


def draft_layer_ids(config: Mapping[str, Any]) -> list[int]:
    """The layers that a checkpoint's draft reads, by this library's ids.

    Native checkpoints of DSpark and DFlash (``target_layer_ids``) count outputs of layers from 0: their id i is i + 1 here.

    :param config: the content of a ``config.json``.
    :raises ConfigError: when it names no layers.
    """
    own = config.get("aux_hidden_state_layer_ids")
    nested = config.get("dflash_config")
    native = config.get("target_layer_ids") or (nested.get("target_layer_ids") if isinstance(nested, Mapping) else None)
    ids, shift = (own, 0) if own else (native, 1)
    if not isinstance(ids, list) or not ids or not all(isinstance(item, int) for item in ids):
        raise ConfigError("the draft's config names no layers of the verifier; give them as --target-layer-ids")
    return [item + shift for item in ids]


def build_command(vllm: VllmInstallation, settings: ServerSettings, *, port: int, host: str = "127.0.0.1") -> list[str]:
    """The arguments that start a server; to be run with :func:`server_environment`.

    :raises ConfigError: for settings that contradict each other.
    """
    given = _checked(settings)
    if vllm.has_command:
        command = [str(vllm.python), "-m", "vllm.entrypoints.cli.main", "serve", settings.model]
    else:  # the command line asks for the metadata of a distribution of the name vllm
        command = [str(vllm.python), "-m", "vllm.entrypoints.openai.api_server", "--model", settings.model]
    command += ["--host", host, "--port", str(port)]
    command += ["--speculative-config", _json(_speculative_config(settings.layer_ids))]
    command += ["--kv-transfer-config", _json(_transfer_config(settings))]
    if settings.trust_remote_code:
        command.append("--trust-remote-code")
    return [*command, *workarounds_for(vllm, settings.model_type, given), *given]


def server_environment(
    vllm: VllmInstallation, settings: ServerSettings, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment variables of a server: those of ``base`` (this process's by default) without what belongs to our interpreter.

    Where the connector is not installed beside vLLM, its folder is put on the server's path.
    """
    base = os.environ if base is None else base
    variables = {key: value for key, value in base.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    variables |= library_path(vllm, base)
    variables["PYTHONSAFEPATH"] = "1"  # a folder named like a module of vLLM's, where this runs, would be taken for it
    variables.setdefault("VLLM_NO_USAGE_STATS", "1")
    if settings.own_connector and not vllm.has_connector:
        variables["PYTHONPATH"] = str(connector_folder())
    return variables


def connector_folder() -> Path:
    """The folder to import ``speculators_vllm_connector`` from: of the repository, or what the installed library carries.

    :raises ConfigError: when it is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "integrations" / "vllm_connector" / "src", package / "vllm_server" / "modules"):
        if (folder / "speculators_vllm_connector" / "connector.py").is_file():
            return folder
    raise ConfigError(
        "the vLLM connector is not beside this library; install speculators-vllm-connector into vLLM's environment, or use "
        "vLLM's own with --connector stock"
    )


def _checked(settings: ServerSettings) -> list[str]:
    """The user's own arguments, which must not contradict ours."""
    given = list(settings.vllm_args)
    for argument in given:
        flag = argument.split("=")[0].replace("_", "-")
        if flag in _OWN:
            raise ConfigError(f"{flag} behind -- would contradict what this library decides; give {_OWN[flag]} before the --")
    if not settings.layer_ids:
        raise ConfigError("there are no layers to capture; give --target-layer-ids, or leave --include-last-layer on")
    if settings.backend != "mooncake" and settings.hidden_states_path is None:
        raise ConfigError(f"the backend {settings.backend} needs a folder; give --hidden-states-path")
    if not settings.own_connector and (settings.backend != "file" or settings.connector_settings):
        raise ConfigError("vLLM's own connector knows the backend file alone, without further settings; use --connector own")
    return given


def _speculative_config(layer_ids: Sequence[int]) -> dict[str, Any]:
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }


def _transfer_config(settings: ServerSettings) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if settings.hidden_states_path is not None:
        extra["shared_storage_path"] = str(settings.hidden_states_path.absolute())
    if not settings.own_connector:
        return {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": extra,
        }
    return {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "speculators_vllm_connector.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra | {"backend": settings.backend} | dict(settings.connector_settings),
    }


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
