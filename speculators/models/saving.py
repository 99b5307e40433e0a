"""Writing checkpoints: which tensors a file holds, their listing without their values, the folder, and the hub.

The frozen ``embed_tokens`` and ``lm_head`` are copies of the verifier's, so by default they are left out where every reader
takes them from the verifier (a reduced ``lm_head`` is written: engines need it); ``include_embeddings=True`` writes them too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculators.config import SpeculatorModelConfig
from speculators.errors import ConfigError
from speculators.hub import PushOptions, check_push_options, push_folder
from speculators.models.checkpoint_files import DEFAULT_SHARD_SIZE, TensorEntry, write_weights
from speculators.models.vocabulary import DraftVocabularyMixin

__all__ = ["EMBEDDING", "HEAD", "WritableModel", "floating_dtype"]

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class WritableModel(DraftVocabularyMixin, PreTrainedModel):
    """A draft model as it is written; :class:`~speculators.models.base.SpeculatorModel` reads it."""

    config: Any

    #: Whether a file of this family always holds ``embed_tokens`` and ``lm_head``.
    always_complete: ClassVar[bool] = False

    @classmethod
    def registered_model_class_from_config(cls, config: SpeculatorModelConfig) -> type[WritableModel]:
        """The model class of a config."""
        raise NotImplementedError

    @property
    def trains_embeddings(self) -> bool:
        """Whether ``embed_tokens`` is trained, and so is the draft's own and always written."""
        return False

    def _written(self, include_embeddings: bool, state_dict: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What a file holds, as the model has it."""
        tensors = dict(self.state_dict())
        if state_dict is not None:
            tensors.update(state_dict)
        if not (include_embeddings or self.always_complete):
            if not self.trains_embeddings:
                tensors.pop(EMBEDDING, None)
            if not self.reduced_vocabulary:
                tensors.pop(HEAD, None)
        return tensors

    def checkpoint_tensors(
        self,
        *,
        dtype: torch.dtype | str | None = None,
        include_embeddings: bool = False,
        state_dict: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Tensors as the file holds them: on the CPU, contiguous, floats in ``dtype`` (their own when None).

        :param state_dict: what to write instead of the model's own state (as gathered from shards); the model fills in what it
            lacks.
        :raises ConfigError: ``dtype`` is no floating-point type.
        """
        wanted = floating_dtype(dtype)
        written = {}
        for name, tensor in self._written(include_embeddings, state_dict).items():
            value = tensor.detach()
            written[name] = value.to(device="cpu", dtype=_stored_dtype(value, wanted)).contiguous()
        return written

    def checkpoint_listing(
        self, *, dtype: torch.dtype | str | None = torch.bfloat16, include_embeddings: bool = False
    ) -> list[TensorEntry]:
        """Names, shapes, types and sizes of what :meth:`save_pretrained` would write with these options, by name.

        No weights are needed: :meth:`SpeculatorModel.without_weights` gives a model that has none.
        """
        tensors, wanted = self._written(include_embeddings), floating_dtype(dtype)
        entries = [
            TensorEntry.of(name, torch.empty(tensor.shape, dtype=_stored_dtype(tensor, wanted), device="meta"))
            for name, tensor in tensors.items()
        ]
        return sorted(entries, key=lambda entry: entry.name)

    def checkpoint_config(self, dtype: torch.dtype | str | None = None) -> SpeculatorModelConfig:
        """The config as written beside the weights: the class's name as architecture, the weights' dtype."""
        # The registered class: sharding replaces a model's own by a subclass.
        architecture = self.registered_model_class_from_config(self.config).__name__
        return self.config.copy(architectures=[architecture], dtype=floating_dtype(dtype) or self.dtype)

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        include_embeddings: bool = False,
        state_dict: Mapping[str, Tensor] | None = None,
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        **push: Unpack[PushOptions],
    ) -> None:
        """Write the checkpoint folder (created if absent). A reader never sees half a file: each is renamed into place.

        :param dtype: of the floating-point tensors, by torch's name too; None keeps the model's. Engines expect bfloat16.
        :param include_embeddings: also write ``embed_tokens``, and ``lm_head`` where the vocabulary is whole.
        :param max_shard_size: bytes or text such as ``5GB``; larger checkpoints become shards with an index.
        :param is_main_process: False writes nothing, so that every process may call it.
        :param push_to_hub: upload the checkpoint, too; ``push`` says where, ``repo_id`` is the folder's name when left out.
        :raises ConfigError: an option is wrong.
        :raises OSError: a file cannot be written; those that were there stay.
        """
        check_push_options(push, push_to_hub)
        if not is_main_process:
            return
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = self.checkpoint_tensors(dtype=dtype, include_embeddings=include_embeddings, state_dict=state_dict)
        write_weights(folder, tensors, max_shard_size)
        self.checkpoint_config(dtype).save_pretrained(folder)
        if push_to_hub:
            push.setdefault("repo_id", folder.resolve().name)
            self.push_to_hub(
                dtype=dtype,
                include_embeddings=include_embeddings,
                state_dict=state_dict,
                max_shard_size=max_shard_size,
                **push,
            )

    def push_to_hub(  # type: ignore[override]
        self,
        repo_id: str,
        *,
        dtype: torch.dtype | str | None = None,
        include_embeddings: bool = False,
        state_dict: Mapping[str, Tensor] | None = None,
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        tags: Sequence[str] | None = None,
    ) -> str:
        """Upload the checkpoint to a hub repository, created if absent, in one commit.

        :param repo_id: ``name`` in your own namespace, or ``owner/name``.
        :param dtype: and the three after it: see :meth:`save_pretrained`.
        :param private: of a new repository.
        :param token: True or None takes the one of ``hf auth login``.
        :param revision: branch, created if absent.
        :param tags: added to the model card's.
        :returns: the commit's address.
        :raises SpeculatorsError: the hub cannot be reached or refuses.
        """

        def write(folder: Path) -> None:
            self.save_pretrained(
                folder,
                dtype=dtype,
                include_embeddings=include_embeddings,
                state_dict=state_dict,
                max_shard_size=max_shard_size,
            )

        return push_folder(
            write,
            "Upload draft",
            self.config.verifier_hub_id,
            repo_id=repo_id,
            commit_message=commit_message,
            commit_description=commit_description,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            tags=tags,
        )


def floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The floating-point type of this name (``bfloat16``), or itself; None stays None.

    :raises ConfigError: there is none of that name.
    """
    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype {dtype!r} is no floating-point type of torch; use for example bfloat16 or float32")
    return found


def _stored_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
