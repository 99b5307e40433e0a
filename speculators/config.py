"""The checkpoint's config: what ``config.json`` of a speculator says, on disk and in memory.

The format is that of vLLM's Speculators library, so that serving engines read it unchanged. One rule is ours: every
key is written explicitly, because engines fall back to defaults that differ from the library's and from one another.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, Unpack

import torch
import transformers
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError, model_validator
from transformers import PretrainedConfig

from speculators.errors import ConfigError, last_line
from speculators.files import write_text_atomically
from speculators.hub import PushOptions, check_push_options, push_folder
from speculators.proposals import TokenProposalConfig

__all__ = ["SpeculatorModelConfig", "SpeculatorsConfig", "UnsupportedCheckpointError", "VerifierConfig", "reload_schemas"]

#: Default of ``VerifierConfig.from_config``: take the name from the verifier's config.
UNSET = "UNSET"

#: Keys of Hugging Face's base config that are runtime state or belong to other kinds of model; never written.
_UNWRITTEN = frozenset(
    {
        "auto_map",
        "base_config_key",
        "chunk_size_feed_forward",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
    }
)

RegisteredConfig = TypeVar("RegisteredConfig", bound="type[SpeculatorModelConfig]")


class UnsupportedCheckpointError(ConfigError, NotImplementedError):
    """A checkpoint that is not in the speculators format."""


def installed_version() -> str:
    """Version of this library, as written to ``speculators_version``."""
    try:
        return version("speculators")
    except PackageNotFoundError:
        return "unknown"


def one_sentence(error: ValidationError) -> str:
    """The first fault that pydantic found, as one sentence."""
    fault = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in fault["loc"])
    return f"{place}: {fault['msg']}" if place else str(fault["msg"])


class VerifierConfig(BaseModel):
    """The verifier that a draft was trained for.

    :param name_or_path: folder or hub id; None if it is not recorded.
    :param architectures: the verifier's model classes, as its own config names them.
    """

    name_or_path: str | None
    architectures: list[str]

    @classmethod
    def from_config(cls, config: PretrainedConfig, name_or_path: str | None = UNSET) -> VerifierConfig:
        """From a loaded config; ``name_or_path`` overrides the config's own, None included."""
        if name_or_path == UNSET:
            name_or_path = getattr(config, "name_or_path", None) or getattr(config, "_name_or_path", None) or None
        return cls(name_or_path=name_or_path, architectures=config.to_dict().get("architectures") or [])

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **kwargs: Any) -> VerifierConfig:
        """From the verifier's ``config.json`` as written, so that composite configs keep their real architectures.

        :param kwargs: where to look, as of ``PretrainedConfig.get_config_dict`` (``revision``, ``token``, ...).
        """
        values, _ = PretrainedConfig.get_config_dict(name_or_path, **kwargs)
        return cls(name_or_path=str(name_or_path), architectures=values.get("architectures") or [])


class SpeculatorsConfig(BaseModel):
    """How the draft is used: its algorithm, its proposal methods and its verifier."""

    algorithm: str
    proposal_methods: list[Annotated[SerializeAsAny[TokenProposalConfig], BeforeValidator(TokenProposalConfig.from_value)]]
    default_proposal_method: str
    verifier: VerifierConfig

    @model_validator(mode="after")
    def _default_is_listed(self) -> SpeculatorsConfig:
        types = [method.proposal_type for method in self.proposal_methods]
        if self.default_proposal_method not in types:
            raise ValueError(
                f"default_proposal_method {self.default_proposal_method!r} must match the proposal_type of one of the "
                f"proposal_methods {types}"
            )
        return self

    @classmethod
    def reload_schema(cls) -> None:
        """Rebuild the pydantic schema."""
        cls.model_rebuild(force=True)


class SpeculatorModelConfig(BaseModel, PretrainedConfig):
    """Config of a speculator: a pydantic model (validated fields) and a Hugging Face config at once.

    Families derive from it and register under their ``speculators_model_type``, by which :meth:`from_dict` and
    :meth:`from_pretrained` pick the class. Unknown keys are kept.
    """

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True, protected_namespaces=())

    model_type: ClassVar[str] = "speculator_model"
    auto_package: ClassVar[str] = "speculators.models"
    registry_auto_discovery: ClassVar[bool] = True
    schema_discriminator: ClassVar[str] = "speculators_model_type"
    registry: ClassVar[dict[str, type[SpeculatorModelConfig]]] = {}
    #: What a key of ours means in a file that lacks it, where other writers mean something else than our default.
    meaning_of_absent: ClassVar[dict[str, Any]] = {}
    #: Keys that a checkpoint must have, since readers and writers of the past disagree about what their absence means.
    must_be_written: ClassVar[frozenset[str]] = frozenset()

    architectures: list[str] | None = None
    dtype: Any = None
    tie_word_embeddings: bool = False
    transformers_version: str | None = None
    speculators_model_type: str = ""
    speculators_version: str = Field(default_factory=installed_version)
    speculators_config: SpeculatorsConfig | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Hugging Face would turn every subclass into a dataclass; here pydantic makes the fields.
        pass

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        # Hugging Face's annotations name torch, which the subclass's module need not import.
        if not cls.__pydantic_complete__:
            cls.model_rebuild(_types_namespace={"torch": torch})

    def __init__(self, **values: Any) -> None:
        values["transformers_version"] = transformers.__version__
        values.pop("model_type", None)
        if "torch_dtype" in values:
            values["dtype"] = values.pop("torch_dtype") or values.get("dtype")
        try:
            BaseModel.__init__(self, **{key: value for key, value in values.items() if not key.startswith("_")})
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {one_sentence(error)}") from error
        base_fields = getattr(PretrainedConfig, "__dataclass_fields__", {})
        own = set(type(self).model_fields) - set(base_fields)
        try:
            PretrainedConfig.__init__(
                self,
                **{key: getattr(self, key) for key in base_fields if key in type(self).model_fields},
                **{key: value for key, value in values.items() if key not in own and key not in base_fields},
            )
        except (AttributeError, TypeError) as error:  # such as a dtype that torch lacks
            raise ConfigError(f"{type(self).__name__}: {last_line(error)}; correct config.json") from error
        self.check()

    def check(self) -> None:
        """Refuse values that contradict one another; families extend it.

        :raises ConfigError: with one sentence.
        """

    # Both parents define these; pydantic's are the deprecated spellings.
    def validate(self) -> None:  # type: ignore[override]
        """Nothing left to do: every field was validated when it was set at construction."""

    def copy(self, **changes: Any) -> Any:
        """A deep copy with some fields changed; the changes are not validated."""
        return self.model_copy(update=changes, deep=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpeculatorModelConfig) and type(self) is type(other) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.to_json_string()}"

    __str__ = __repr__

    # ---- registry -------------------------------------------------------------------------------------------------

    @classmethod
    def register(cls, name: str) -> Callable[[RegisteredConfig], RegisteredConfig]:
        """Decorator that registers a family's config class under ``name``.

        :raises ValueError: ``name`` is already taken by another class.
        """

        def add(subclass: RegisteredConfig) -> RegisteredConfig:
            taken = SpeculatorModelConfig.registry.get(name)
            if taken is not None and taken.__qualname__ != subclass.__qualname__:
                raise ValueError(f"the speculators_model_type {name!r} is already registered")
            SpeculatorModelConfig.registry[name] = subclass
            return subclass

        return add

    @classmethod
    def registered_classes(cls) -> tuple[type[SpeculatorModelConfig], ...]:
        """All families' config classes."""
        cls._discover()
        return tuple(SpeculatorModelConfig.registry.values())

    @classmethod
    def reload_schema(cls) -> None:
        """Import the families' modules, so that all are registered, and rebuild the pydantic schema."""
        cls._discover()
        cls.model_rebuild(force=True)

    @classmethod
    def _discover(cls) -> None:
        if cls.registry_auto_discovery:
            package = importlib.import_module(cls.auto_package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{cls.auto_package}.{module.name}")

    # ---- reading --------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        cache_dir: str | os.PathLike[str] | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        revision: str = "main",
        **kwargs: Any,
    ) -> Any:
        """Read ``config.json`` of a checkpoint folder or hub repository.

        :param kwargs: values that override the file's.
        :raises UnsupportedCheckpointError: the config names no ``speculators_model_type``.
        :raises ConfigError: the file is missing, unreadable or contradictory.
        """
        folder = Path(pretrained_model_name_or_path)
        try:
            if folder.is_dir() and not (folder / "config.json").is_file():
                raise FileNotFoundError(folder / "config.json")
            values, kwargs = cls.get_config_dict(
                pretrained_model_name_or_path,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
                revision=revision,
                **kwargs,
            )
        except (OSError, TypeError, AttributeError, ValueError, RecursionError) as error:  # JSON that is no object, or none
            raise ConfigError(
                f"no readable config.json at {str(pretrained_model_name_or_path)!r}; give the folder of a speculator checkpoint"
            ) from error
        for name in ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder"):
            kwargs.pop(name, None)
        if not isinstance(values, dict) or not values.get(cls.schema_discriminator):
            raise UnsupportedCheckpointError(
                f"{str(pretrained_model_name_or_path)!r} is not a speculator checkpoint: Loading a non-speculator model config "
                "is not supported yet; convert it first: speculators convert CHECKPOINT --verifier VERIFIER"
            )
        name = values[cls.schema_discriminator]
        if isinstance(name, str) and name not in cls.registry:
            cls._discover()
        found = cls.registry.get(name) if isinstance(name, str) else None
        needed = found.must_be_written if found is not None else frozenset()
        for key in sorted(needed - {*values, *kwargs}):
            raise ConfigError(
                f"config.json at {str(pretrained_model_name_or_path)!r} does not say {key}, which trees and engines take for "
                "different things; write it there, or let `speculators convert` read the checkpoint"
            )
        return cls.from_dict(values, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config of the registered class that ``speculators_model_type`` names.

        :param kwargs: values that override ``config_dict``.
        :raises ConfigError: the type is missing or unknown, or a value is wrong (it is a ``ValueError`` too).
        """
        kwargs.pop("return_unused_kwargs", None)
        values = {**config_dict, **kwargs}
        name = values.get(cls.schema_discriminator)
        if not name:
            raise ConfigError(f"the config has no {cls.schema_discriminator!r}; it is not a speculator's config")
        if isinstance(name, str) and name not in cls.registry:
            cls._discover()
        if not isinstance(name, str) or name not in cls.registry:
            known = ", ".join(sorted(cls.registry))
            raise ConfigError(f"unknown {cls.schema_discriminator} {name!r}; this version reads: {known}")
        found = cls.registry[name]
        return found(**(found.meaning_of_absent | values))

    # ---- writing --------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Every key of the file, defaults included, as plain JSON values."""
        values = self.model_dump(mode="python")
        values = {key: value for key, value in values.items() if key not in _UNWRITTEN and not key.startswith("_")}
        if isinstance(values.get("dtype"), torch.dtype):
            values["dtype"] = str(values["dtype"]).removeprefix("torch.")
        return values

    def to_diff_dict(self) -> dict[str, Any]:
        """The same as :meth:`to_dict`: a key left out would be guessed, differently, by each reader."""
        return self.to_dict()

    def to_json_string(self, use_diff: bool = True) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **push: Unpack[PushOptions]
    ) -> None:
        """Write ``config.json`` into a folder (created if absent).

        :param push_to_hub: upload it, too; ``push`` says where, ``repo_id`` is the folder's name when left out.
        :raises ConfigError: an option is wrong.
        """
        check_push_options(push, push_to_hub)
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(folder / "config.json", self.to_json_string())
        if push_to_hub:
            push.setdefault("repo_id", folder.resolve().name)
            self.push_to_hub(**push)

    def push_to_hub(  # type: ignore[override]
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        tags: Sequence[str] | None = None,
    ) -> str:
        """Upload ``config.json`` alone to a hub repository, created if absent, in one commit.

        :param repo_id: ``name`` in your own namespace, or ``owner/name``; the others as for a model.
        :returns: the commit's address.
        :raises SpeculatorsError: the hub cannot be reached or refuses.
        """
        return push_folder(
            self.save_pretrained,
            "Upload draft config",
            self.verifier_hub_id,
            repo_id=repo_id,
            commit_message=commit_message,
            commit_description=commit_description,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            tags=tags,
        )

    @property
    def verifier_hub_id(self) -> str | None:
        """The verifier's hub id, ``owner/name``; None when it is not recorded or is a folder."""
        name = self.speculators_config.verifier.name_or_path if self.speculators_config is not None else None
        return name if name is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name) else None


def reload_schemas() -> None:
    """Import every family and rebuild all schemas; for code that registers classes of its own."""
    TokenProposalConfig.reload_schema()
    SpeculatorsConfig.reload_schema()
    SpeculatorModelConfig.reload_schema()
