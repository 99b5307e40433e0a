"""From a command line and a YAML file to a :class:`TrainConfig`: the parser made from the settings, and the merge."""

from __future__ import annotations

import argparse
import json
import sys
import types
import typing
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from speculators.errors import ConfigError
from speculators.train.config.families import FAMILY_GROUPS
from speculators.train.config.fields import setting_info
from speculators.train.config.model import Provenance, TrainConfig

__all__ = ["build_parser", "flags_of", "from_sources", "resolve"]

#: Sibling stages of a pipeline file, next to ``train:``; ignored even in a bare file.
SIBLING_STAGES = ("prepare_data", "launch_vllm", "generate_offline_data", "regenerate_responses", "stitch_mtp", "evaluate")


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one :class:`ConfigError`."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class _OnOff(argparse.Action):
    """A bool with a flag for either value: the first sets it, the second clears it."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, option_string == self.option_strings[0])


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _off_flag(name: str) -> str:
    """The flag that sets a bool to false; that of ``no_x`` is ``--x``."""
    return flag_name(name.removeprefix("no_")) if name.startswith("no_") else "--no-" + name.replace("_", "-")


def _plain_types(annotation: Any) -> list[Any]:
    """Members of a union without None."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return [member for member in typing.get_args(annotation) if member is not type(None)]
    return [annotation]


def _metavar(annotation: Any, name: str) -> str:
    first = _plain_types(annotation)[0]
    if typing.get_origin(first) is Literal:
        return "{" + ",".join(str(value) for value in typing.get_args(first)) + "}"
    if first in (int, float):
        return "N" if first is int else "X"
    if typing.get_origin(first) is list:
        return "N"
    return "PATH" if name.endswith(("_path", "_config", "_pretrained", "_dir")) else "TEXT"


def _add_flag(parser: Any, name: str, field: FieldInfo) -> None:
    default = field.get_default(call_default_factory=True)
    shown = "" if default in (None, "", [], {}) else f" (default: {default})"
    text = f"{field.description or ''}{shown}".replace("%", "%%")
    kinds = _plain_types(field.annotation)
    if kinds == [bool]:
        flags = [flag_name(name), _off_flag(name)]
        parser.add_argument(*flags, dest=name, action=_OnOff, default=argparse.SUPPRESS, help=text)
        return
    extra = {"nargs": "*"} if typing.get_origin(kinds[0]) is list else {}
    parser.add_argument(
        flag_name(name), dest=name, default=argparse.SUPPRESS, metavar=_metavar(field.annotation, name), help=text, **extra
    )


def build_parser(prog: str = "speculators train") -> argparse.ArgumentParser:
    """The command line of ``speculators train``, one section per group."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} --verifier-name-or-path PATH [--config FILE] [settings]",
        description="Train a speculative-decoding draft for a frozen verifier.",
        epilog="A setting on or off: --x or --no-x. Precedence: flag, then --config, then default.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="PATH", default=None, help="YAML file with a train: mapping, or a bare mapping.")
    parser.add_argument("--dump-config", action="store_true", help="Print the resolved settings as YAML and exit.")
    sections: dict[str | None, Any] = {None: parser.add_argument_group("run")}
    for group, group_class in TrainConfig.groups().items():
        sections[group] = parser.add_argument_group(group, (group_class.__doc__ or "").strip().splitlines()[0])
    for section, name, field in TrainConfig.settings():
        _add_flag(sections[section], name, field)
    return parser


def resolve(argv: Sequence[str] | None = None) -> TrainConfig:
    """See :meth:`TrainConfig.resolve`. ``--dump-config`` prints and exits with 0."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        given = vars(build_parser().parse_args(arguments))
        config_path, dump = given.pop("config"), given.pop("dump_config")
        backend = {name: given.pop(name) for name in list(given) if TrainConfig.group_of(name) == "backend"}
        config = from_sources(given, config_path, arguments, backend)
        if dump:
            from speculators.train.config.derived import describe_derived

            sys.stdout.write(config.dump_yaml() + describe_derived(config))
            raise SystemExit(0)
        require_verifier(config)
    except ConfigError as error:
        sys.stderr.write(f"speculators train: error: {error}\n")
        raise SystemExit(error.exit_code) from None
    return config


def require_verifier(config: TrainConfig) -> None:
    """The one setting without a usable default."""
    if not config.verifier.verifier_name_or_path:
        raise ConfigError("missing required value: set --verifier-name-or-path or provide it in --config")


def from_sources(
    cli: Mapping[str, Any] | None = None,
    config_path: str | Path | None = None,
    argv: Sequence[str] = (),
    backend_cli: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """See :meth:`TrainConfig.from_sources`."""
    from_file = _read_yaml(Path(config_path)) if config_path is not None else {}
    from_file = {name: _parse_json(name, value) for name, value in from_file.items()}
    from_flags = {name: _parse_json(name, value) for name, value in {**(cli or {}), **(backend_cli or {})}.items()}
    unknown = [name for name in from_flags if not _is_setting(name)]
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}: see speculators train --help for the names")
    values: dict[str, Any] = {**from_file, **from_flags}
    provenance: dict[str, Provenance] = {name: "flag" if name in from_flags else "yaml" for name in values}
    nested: dict[str, Any] = {}
    for name, value in values.items():
        group = TrainConfig.group_of(name)
        (nested.setdefault(group, {}) if group else nested)[name] = value
    try:
        config = TrainConfig.model_validate(nested)
    except ValidationError as error:
        raise ConfigError(_first_problem(error, provenance, config_path)) from None
    config._provenance.update(provenance)
    config._argv = tuple(argv)
    from speculators.train.config.derived import check_consistency

    _warn_of_other_families(config)
    check_consistency(config)
    return config


def _is_setting(name: str) -> bool:
    try:
        TrainConfig.group_of(name)
    except KeyError:
        return False
    return True


def _parse_json(name: str, value: Any) -> Any:
    """The JSON object of a setting that takes one (loss weights); other values may begin with a brace, as ``{time}`` does."""
    if isinstance(value, str) and value.lstrip().startswith("{") and _takes_object(name):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f'{value!r} is not valid JSON ({error.msg}); write it as \'{{"ce": 0.1, "tv": 0.9}}\'') from None
    return value


def _takes_object(name: str) -> bool:
    annotations = [field.annotation for _, setting, field in TrainConfig.settings() if setting == name]
    return any(typing.get_origin(kind) is dict for annotation in annotations for kind in _plain_types(annotation))


def _read_yaml(path: Path) -> dict[str, Any]:
    """Flat values of a file. Unknown keys, and keys in another group than theirs, warn and are left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--config '{path}' could not be read: {reason}") from None
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        place = f" (line {where.line + 1})" if where is not None else ""
        raise ConfigError(f"--config '{path}' is not valid YAML{place}") from None
    mapping = {} if loaded is None else loaded
    if isinstance(mapping, dict) and "train" in mapping:
        mapping = {} if mapping["train"] is None else mapping["train"]
    if not isinstance(mapping, dict):
        raise ConfigError(f"--config '{path}' must contain a top-level mapping")
    groups = TrainConfig.groups()
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if key in groups:
            if value is None:
                continue
            if not isinstance(value, dict):
                raise ConfigError(f"--config '{path}': '{key}' must be a mapping of settings, not {value!r}")
            for name, inner in value.items():
                if name in groups[key].model_fields:
                    flat[name] = inner
                else:
                    warnings.warn(
                        f"--config '{path}': '{key}' has no setting {name!r}{_hint(name)}; ignored", UserWarning, stacklevel=4
                    )
        elif _is_setting(str(key)) and TrainConfig.group_of(str(key)) is None:
            flat[key] = value
        elif key not in SIBLING_STAGES:
            warnings.warn(f"--config '{path}': unknown key {key!r}{_hint(key)}; ignored", UserWarning, stacklevel=4)
    return flat


def _hint(name: Any) -> str:
    if not isinstance(name, str) or not _is_setting(name):
        return ""
    return f" (it belongs to '{TrainConfig.group_of(name) or 'the top level'}')"


def _first_problem(error: ValidationError, provenance: Mapping[str, Provenance], config_path: str | Path | None) -> str:
    """One line for the first of pydantic's errors."""
    problem = error.errors()[0]
    path = [str(part) for part in problem["loc"]]
    # Behind the group's name, which may be a setting's, too ("optimizer").
    name = next((part for part in path[1:] or path if _is_setting(part)), path[-1])
    message = problem["msg"]
    where = flag_name(name)
    if provenance.get(name) == "yaml":
        group = TrainConfig.group_of(name)
        where = f"--config '{config_path}': {group + '.' if group else ''}{name}"
    return f"{where}: {message[:1].lower()}{message[1:]}, not {problem['input']!r}"


def _warn_of_other_families(config: TrainConfig) -> None:
    """Warn of settings that the chosen family, or the chosen source of hidden states, does not use."""
    family = config.speculator_type
    unused_groups: list[str] = []
    used: set[str] = {config.data.hidden_states}
    if config.data.hidden_states == "store":
        used.add(config.backend.store_source)
    for group, name, field in TrainConfig.settings():
        if not config.given(name):
            continue
        if group in FAMILY_GROUPS and family not in FAMILY_GROUPS[group]:
            if group not in unused_groups:
                unused_groups.append(group)
            continue
        info = setting_info(field)
        if info.families is not None and family not in info.families:
            _warn(f"speculator type '{family}' does not use {flag_name(name)} (it is for {', '.join(info.families)}); ignored")
        if info.sources is not None and not used.intersection(info.sources):
            _warn(f"{flag_name(name)} has no effect with --hidden-states {config.data.hidden_states}; ignored")
    for group in unused_groups:
        _warn(f"speculator type '{family}' does not use the '{group}' algorithm group; its settings are ignored")


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=5)


def flags_of(config: TrainConfig) -> list[str]:
    """A command line for a config that came from none: its non-default values as flags."""
    arguments: list[str] = []
    for group, name, field in TrainConfig.settings():
        value = getattr(getattr(config, group) if group else config, name)
        if value == field.get_default(call_default_factory=True):
            continue
        if isinstance(value, bool):
            arguments.append(flag_name(name) if value else _off_flag(name))
        elif isinstance(value, list):
            arguments += [flag_name(name), *map(str, value)]
        else:
            arguments += [flag_name(name), json.dumps(value) if isinstance(value, dict) else str(value)]
    return arguments
