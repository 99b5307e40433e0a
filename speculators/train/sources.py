"""The source of hidden states that the settings name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from speculators.data import CutRows, RowDataset
from speculators.errors import ConfigError
from speculators.train.config.model import TrainConfig
from speculators.train.drafts import wanted_final_state
from speculators.train.feeder import GIB
from speculators.verifiers.facts import VerifierFacts
from speculators.verifiers.loading import Verifier
from speculators.verifiers.source import CachedSource, HiddenStateSource
from speculators.verifiers.store import StoreSource
from speculators.verifiers.transformers_source import TransformersSource
from speculators.verifiers.vllm import VllmSettings, VllmSource
from speculators.verifiers.vllm.settings import MooncakeSettings

__all__ = ["SourceOpener", "states_folder", "vllm_settings"]


def states_folder(config: TrainConfig) -> Path:
    """``--hidden-states-path``, or ``hidden_states`` beside the rows."""
    given = config.backend.hidden_states_path
    return Path(given) if given is not None else Path(config.data.data_path) / "hidden_states"


def vllm_settings(config: TrainConfig, *, always: bool = False) -> VllmSettings:
    """What the client of vLLM's servers is told.

    :param always: ask the servers whatever ``--on-missing`` says, as when states are made for a store.
    """
    generation, backend = config.generation, config.backend
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
        mooncake=MooncakeSettings(
            master=backend.mooncake_master,
            metadata_server=backend.mooncake_metadata_server,
            protocol=backend.mooncake_protocol,
            device=backend.mooncake_device,
            global_segment_gib=backend.mooncake_global_segment_gib,
            local_buffer_gib=backend.mooncake_local_buffer_gib,
        ),
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
        if data.hidden_states == "ray":
            return self._ray(wanted or "post_norm")
        if data.hidden_states == "transformers":
            return TransformersSource(self.load(), self.layer_ids, wanted or "post_norm", data.capture_batch_tokens)
        if wanted == "post_norm":
            raise ConfigError("vLLM gives the verifier's last state before its final norm; drop --final-state post_norm")
        return VllmSource(vllm_settings(self.config), self.layer_ids, self.facts)

    def _ray(self, final_state: Literal["pre_norm", "post_norm"]) -> HiddenStateSource:
        from speculators.verifiers.rollout import RaySource, RolloutSettings

        ray, verifier = self.config.ray, self.config.verifier
        settings = RolloutSettings(
            workers=ray.ray_rollout_workers,
            cpus=ray.ray_rollout_cpus,
            gpus=ray.ray_rollout_gpus,
            resources=ray.ray_rollout_resources,
            transfer_dtype=ray.ray_transfer_dtype,
            max_restarts=ray.ray_max_restarts,
            request_timeout=self.config.generation.request_timeout,
        )
        return RaySource(
            verifier.verifier_name_or_path,
            self.layer_ids,
            final_state,
            self.config.data.capture_batch_tokens,
            address=ray.ray_address,
            settings=settings,
            trust_remote_code=verifier.trust_remote_code,
        )
