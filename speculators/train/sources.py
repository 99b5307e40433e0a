"""The source of hidden states that the settings name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from speculators.data import CutRows, RowDataset
from speculators.errors import ConfigError
from speculators.train.config.model import TrainConfig
from speculators.train.drafts import wanted_final_state
from speculators.verifiers.facts import VerifierFacts
from speculators.verifiers.loading import Verifier
from speculators.verifiers.source import CachedSource, HiddenStateSource
from speculators.verifiers.store import StoreSource
from speculators.verifiers.transformers_source import TransformersSource
from speculators.verifiers.vllm import VllmSettings, VllmSource

__all__ = ["SourceOpener", "states_folder", "vllm_settings"]

GIB = 1024**3


def states_folder(config: TrainConfig) -> Path:
    """``--hidden-states-path``, or ``hidden_states`` beside the rows."""
    given = config.backend.hidden_states_path
    return Path(given) if given is not None else Path(config.data.data_path) / "hidden_states"


def vllm_settings(config: TrainConfig, *, always: bool = False) -> VllmSettings:
    """What the client of vLLM's servers is told.

    :param always: ask the servers whatever ``--on-missing`` says, as when states are made for a store.
    """
    generation = config.generation
    return VllmSettings(
        endpoint=generation.vllm_endpoint,
        backend=config.data.hidden_states_backend,
        folder=states_folder(config),
        on_missing="generate" if always else generation.on_missing,
        on_generate="delete" if always else generation.on_generate,
        request_timeout=generation.request_timeout,
        max_retries=generation.max_retries,
        validation_retries=generation.generation_validation_retries,
        max_consecutive_failures=generation.max_consecutive_generation_failures,
    )


@dataclass(frozen=True, slots=True)
class SourceOpener:
    """Opens sources for one training.

    :param layer_ids: that the draft reads.
    :param load: gives the verifier with its weights; called when states are computed in this process only.
    """

    config: TrainConfig
    dataset: RowDataset
    cut: CutRows
    facts: VerifierFacts | Verifier
    layer_ids: tuple[int, ...]
    load: Callable[[], Verifier]

    def open(self) -> HiddenStateSource:
        """The source of ``--hidden-states``, its states kept in memory where they fit.

        :raises SpeculatorsError: when it cannot be opened, with what to do.
        """
        if self.config.data.hidden_states == "store":  # mapped memory already
            return self._store()
        return CachedSource(
            self._live(),
            self.cut,
            max_bytes=int(self.config.data.states_cache_gib * GIB),
            token_budget=self.config.data.capture_batch_tokens,
        )

    def _store(self) -> StoreSource:
        maker = self.config.backend.store_source

        def make() -> HiddenStateSource:
            record = source.store.record  # of the same kind, from passes of the same size: the bits are then the same
            if maker == "vllm":
                return VllmSource(vllm_settings(self.config, always=True), self.layer_ids, self.facts)
            return TransformersSource(self.load(), self.layer_ids, record.states.final_state, record.token_budget)

        fallback = None if maker == "none" else make
        source = StoreSource(states_folder(self.config), self.dataset, fallback, self.config.generation.on_missing)
        return source

    def _live(self) -> HiddenStateSource:
        """A source that runs the verifier."""
        data, wanted = self.config.data, wanted_final_state(self.config)
        if data.hidden_states == "transformers":
            return TransformersSource(self.load(), self.layer_ids, wanted or "post_norm", data.capture_batch_tokens)
        if wanted == "post_norm":
            raise ConfigError("vLLM gives the verifier's last state before its final norm; drop --final-state post_norm")
        return VllmSource(vllm_settings(self.config), self.layer_ids, self.facts)
