"""What every family's model shares: the registry, reading checkpoints, and the verifier's frozen parts.

A checkpoint folder holds ``config.json`` and ``model.safetensors``, with or without the verifier's frozen parts (see
:mod:`speculators.models.saving`). Reading takes either form, and shards and ``.bin`` files, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from speculators.config import SpeculatorModelConfig
from speculators.errors import ConfigError, SpeculatorsError, VerifierError, last_line
from speculators.models.checkpoint_files import WeightFiles
from speculators.models.saving import EMBEDDING, HEAD, WritableModel, floating_dtype
from speculators.models.verifier_weights import VerifierPart, read_verifier_weights
from speculators.models.vocabulary import d2t_from_t2d, t2d_from_d2t

if TYPE_CHECKING:
    from speculators.models.drafter import Drafter

__all__ = ["SpeculatorModel"]

#: Tensors that other writers leave in a file and that nothing here needs.
_IGNORED_PREFIXES = ("verifier_lm_head.", "verifier_norm.")

RegisteredModel = TypeVar("RegisteredModel", bound="type[SpeculatorModel]")


class SpeculatorModel(WritableModel):
    """Base of draft models. ``SpeculatorModel(config)`` has fresh weights, the verifier's parts included (as tests want);
    :meth:`from_verifier` starts a draft for training and :meth:`from_pretrained` reads a checkpoint.
    """

    config_class: Any = SpeculatorModelConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    #: Hugging Face evaluates annotations before the class exists, so this one cannot name it.
    registry: ClassVar[dict[str, Any]] = {}
    registry_auto_discovery: ClassVar[bool] = True

    #: Tensors that a file may lack; they then start at zero (some engines' heads have no bias).
    optional_tensors: ClassVar[frozenset[str]] = frozenset()

    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    layers: nn.ModuleList

    def __init__(self, config: SpeculatorModelConfig) -> None:
        if not config:
            raise ValueError("a speculator model needs a config")
        if not isinstance(config, SpeculatorModelConfig):
            raise TypeError(f"a speculator model needs a SpeculatorModelConfig, not {type(config).__name__}")
        config.tie_word_embeddings = False
        super().__init__(config)

    # ---- registry -------------------------------------------------------------------------------------------------

    @classmethod
    def register(cls, name: str) -> Callable[[RegisteredModel], RegisteredModel]:
        """Decorator that registers a family's model class under the ``speculators_model_type`` ``name``."""

        def add(subclass: RegisteredModel) -> RegisteredModel:
            taken = SpeculatorModel.registry.get(name)
            if taken is not None and taken.__qualname__ != subclass.__qualname__:
                raise ValueError(f"a model for {name!r} is already registered")
            SpeculatorModel.registry[name] = subclass
            return subclass

        return add

    @classmethod
    def registered_model_class_from_config(cls, config: SpeculatorModelConfig) -> type[SpeculatorModel]:
        """The model class of a config.

        :raises TypeError: not a speculator's config.
        :raises ConfigError: no model is registered for it.
        """
        if not isinstance(config, SpeculatorModelConfig):
            raise TypeError(f"expected a SpeculatorModelConfig, not {type(config).__name__}")
        SpeculatorModelConfig.registered_classes()
        for model_class in SpeculatorModel.registry.values():
            if type(config) is model_class.config_class:
                return model_class
        raise ConfigError(f"no draft model is registered for {type(config).__name__}")

    @property
    def target_layer_ids(self) -> list[int]:
        """Verifier layers whose states the draft reads, in order; id k is the residual stream after k layers."""
        raise NotImplementedError

    def drafter(self, **options: Any) -> Drafter:
        """The decoder's view of this model; options are the family's."""
        raise NotImplementedError

    # ---- fresh models ---------------------------------------------------------------------------------------------

    @classmethod
    def without_weights(cls, config: SpeculatorModelConfig) -> Self:
        """The model of a config on torch's meta device: shapes and sizes, at no cost in memory.

        :raises ConfigError: the config's values make no model.
        """
        model_class = cls if cls is not SpeculatorModel else cls.registered_model_class_from_config(config)
        try:
            with torch.device("meta"):
                return model_class(config)  # type: ignore[return-value]
        except SpeculatorsError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"no draft can be built from the config's transformer_layer_config ({last_line(error)}); correct its values"
            ) from error

    @classmethod
    def from_verifier(
        cls,
        config: SpeculatorModelConfig,
        *,
        t2d: Tensor | None = None,
        d2t: Tensor | None = None,
        verifier: str | os.PathLike[str] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """A draft to be trained: fresh weights from torch's global generator, frozen parts from the verifier.

        :param t2d: bool ``[V]``, ``d2t``: int ``[D]``; required together when the draft's vocabulary is reduced.
        :param verifier: folder or hub id; the config's own when None.
        :raises ConfigError: mappings are missing or do not fit.
        :raises VerifierError: the verifier cannot be read or does not fit.
        """
        model_class = cls if cls is not SpeculatorModel else cls.registered_model_class_from_config(config)
        model: Any = model_class(config)
        if model.reduced_vocabulary and t2d is None:
            raise ConfigError(
                f"draft_vocab_size {model.draft_vocab_size} is below the verifier's {model.verifier_vocab_size}, so a "
                "vocabulary mapping is needed; give t2d and d2t"
            )
        model.load_vocab_mappings(t2d, d2t)
        model = model.to(dtype)
        model.load_verifier_weights(verifier)
        return model

    def load_verifier_weights(
        self, verifier: str | os.PathLike[str] | None = None, names: tuple[str, ...] = (EMBEDDING, HEAD)
    ) -> None:
        """Copy ``embed_tokens`` and ``lm_head`` (its rows of the draft vocabulary) from the verifier.

        :raises VerifierError: no verifier is named, it cannot be read, or its shapes differ.
        """
        source = verifier if verifier is not None else self._verifier_name()
        if source is None:
            raise VerifierError(
                f"{' and '.join(names)} must come from the verifier, but the config names none; give its folder with verifier="
            )
        wanted: dict[str, VerifierPart] = {EMBEDDING: "embed_tokens", HEAD: "lm_head"}
        tensors = read_verifier_weights(source, [wanted[name] for name in names])
        for name in names:
            tensor = tensors[wanted[name]]
            owner: Any = self.embed_tokens if name == EMBEDDING else self.lm_head
            if tensor.shape != (self.verifier_vocab_size, owner.weight.shape[1]):
                raise VerifierError(
                    f"the verifier's {wanted[name]} is {list(tensor.shape)}, but the draft's config asks for "
                    f"{[self.verifier_vocab_size, owner.weight.shape[1]]}; use the verifier that the draft was made for"
                )
            if name == HEAD and self.t2d is not None:
                tensor = tensor[self.t2d.to(tensor.device)]
            device = owner.weight.device if not owner.weight.is_meta else self.device
            owner.weight = nn.Parameter(tensor.to(device=device, dtype=owner.weight.dtype, copy=True), requires_grad=False)
        self.embed_tokens.requires_grad_(self.trains_embeddings)

    def _verifier_name(self) -> str | None:
        speculators_config = self.config.speculators_config
        return speculators_config.verifier.name_or_path if speculators_config is not None else None

    # ---- reading --------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *,
        config: SpeculatorModelConfig | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        verifier: str | os.PathLike[str] | None = None,
        t2d: Tensor | None = None,
        d2t: Tensor | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        revision: str = "main",
    ) -> Self:
        """Read a checkpoint: a folder or a hub repository with ``config.json`` and weights, in one file or in shards.

        The verifier is read only for frozen parts that the file lacks.

        :param dtype: of all floating-point weights in memory, by torch's name too; ``auto`` for the one the config records.
        :param verifier: folder or hub id that takes the place of the config's.
        :param t2d: vocabulary tables, for a file that has none.
        :raises ConfigError: the config or the tensors are missing, superfluous or of another shape.
        :raises VerifierError: a part that only the verifier has cannot be read.
        """
        if pretrained_model_name_or_path is None:
            raise ValueError("from_pretrained needs a checkpoint folder; use from_verifier for a new draft")
        path = str(pretrained_model_name_or_path)
        where: dict[str, Any] = {
            "cache_dir": cache_dir,
            "force_download": force_download,
            "local_files_only": local_files_only,
            "token": token,
            "revision": revision,
        }
        if config is None:
            config = SpeculatorModelConfig.from_pretrained(path, **where)
        model_class = cls.registered_model_class_from_config(config)
        if not issubclass(model_class, cls):
            raise ConfigError(f"{path!r} holds a {model_class.__name__}, not a {cls.__name__}; load it with SpeculatorModel")
        # No memory is spent on weights that are about to be replaced.
        model: Any = model_class.without_weights(config)
        tensors = WeightFiles(path, where=where).read()
        wanted = floating_dtype(config.dtype if dtype == "auto" else dtype) or torch.float32
        model._load(path, tensors, dtype=wanted, verifier=verifier, t2d=t2d, d2t=d2t)
        return model.to(device).eval()

    def _load(
        self,
        path: str,
        tensors: dict[str, Tensor],
        *,
        dtype: torch.dtype,
        verifier: str | os.PathLike[str] | None,
        t2d: Tensor | None,
        d2t: Tensor | None,
    ) -> None:
        """Fill a model that was built on the meta device."""
        self._load_tables(path, tensors, t2d, d2t)
        expected = {name: value for name, value in self.state_dict().items() if name not in ("d2t", "t2d")}
        tensors = {name: value for name, value in tensors.items() if not name.startswith(_IGNORED_PREFIXES)}
        borrowed = tuple(name for name in (EMBEDDING, HEAD) if name in expected and name not in tensors)
        missing = sorted(set(expected) - set(tensors) - set(borrowed) - self.optional_tensors)
        unexpected = sorted(set(tensors) - set(expected))
        if missing or unexpected:
            raise ConfigError(
                f"the weights of {path!r} do not fit its config: missing {missing or 'nothing'}, "
                f"unexpected {unexpected or 'nothing'}; the file is incomplete or of another family"
            )
        loaded: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if tensor.shape != expected[name].shape:
                raise ConfigError(
                    f"{name} in {path!r} is {list(tensor.shape)}, but its config asks for {list(expected[name].shape)}"
                )
            value = tensor.to(dtype)
            if not tensor.is_floating_point() or not value.isfinite().all():
                kind = "NaN or infinite" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
                raise ConfigError(f"{name} in {path!r} holds {kind} values instead of weights; take another checkpoint")
            loaded[name] = value
        for name in self.optional_tensors & set(expected) - set(tensors):
            loaded[name] = torch.zeros(expected[name].shape, dtype=dtype)
        for name in borrowed:
            owner: Any = self.embed_tokens if name == EMBEDDING else self.lm_head
            owner.weight = nn.Parameter(torch.empty(expected[name].shape, dtype=dtype, device="cpu"), requires_grad=False)
        if borrowed:
            self.load_verifier_weights(verifier, borrowed)
        self.load_state_dict(loaded, strict=False, assign=True)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name != HEAD and (name != EMBEDDING or self.trains_embeddings))

    def _load_tables(self, path: str, tensors: dict[str, Tensor], t2d: Tensor | None, d2t: Tensor | None) -> None:
        stored_d2t, stored_t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
        if not self.reduced_vocabulary:
            return
        if stored_d2t is None and stored_t2d is None:
            if t2d is None or d2t is None:
                raise ConfigError(f"{path!r} has a reduced vocabulary but neither d2t nor t2d; give both as arguments")
            stored_d2t, stored_t2d = d2t, t2d
        elif stored_t2d is None and stored_d2t is not None:
            stored_t2d = t2d_from_d2t(stored_d2t, self.verifier_vocab_size)
        elif stored_d2t is None and stored_t2d is not None:
            stored_d2t = d2t_from_t2d(stored_t2d.bool())
        self.load_vocab_mappings(stored_t2d, stored_d2t)
