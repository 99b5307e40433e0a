"""``HiddenStatesConnector``: vLLM's interface to everything else here.

vLLM makes one in the scheduler's process, which names the states of every request, and one in every worker, of which the one
that holds the hidden-states layer on tensor-parallel rank 0 hands them over. :class:`StepMetadata` goes between once a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from speculators_vllm_connector.files import FileTransport
from speculators_vllm_connector.groups import LAYER_NAME, hidden_states_group
from speculators_vllm_connector.saving import Save, Saver
from speculators_vllm_connector.settings import ConnectorSettings
from speculators_vllm_connector.states import StatesRecord, tensor_shapes, verifier_hash
from speculators_vllm_connector.transport import Transport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["HiddenStatesConnector", "StepMetadata"]

logger = init_logger(f"vllm.{__name__}")

#: Ends of a request that leave no states: nobody will fetch them, or they are not whole.
_WITHOUT_STATES = {"FINISHED_ABORTED", "FINISHED_IGNORED", "FINISHED_ERROR"}

#: Seconds that a step without work waits for the writers, instead of spinning.
_IDLE_SECONDS = 0.01


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler tells the worker in one step."""

    begun: list[str] = field(default_factory=list)  #: tickets of requests that begin
    saves: list[Save] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  #: tickets of requests that were aborted
    idle: bool = False  #: no request runs in this step


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands the states that vLLM's method ``extract_hidden_states`` caches to the client that asked.

    :raises ValueError: when the server is not set up to extract states, or the settings make no sense.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings, backend = ConnectorSettings.from_config(transfer.kv_connector_extra_config)
        self._record = _record(vllm_config, self._settings)
        self._group, self._block_size = hidden_states_group(kv_cache_config)
        self._transport = _transport(self._settings, backend, str(transfer.engine_id), self._record.header())
        self._config = vllm_config
        # Of the scheduler's process.
        self._tickets: dict[str, str] = {}  # request id -> ticket, from its first step to its end
        self._next = StepMetadata()
        # Of the worker that writes.
        self._saver: Saver | None = None

    # In the scheduler's process.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False  # nothing is ever loaded

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        step, self._next = self._next, StepMetadata()
        for request in scheduler_output.scheduled_new_reqs:
            if request.req_id in self._tickets:  # some model runners show a preempted request as new when it goes on
                continue
            self._tickets[request.req_id] = self._transport.ticket(request.req_id)
            step.begun.append(self._tickets[request.req_id])
        step.idle = scheduler_output.total_num_scheduled_tokens == 0
        return step

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        ticket = self._tickets.pop(request.request_id, None)
        if ticket is None:  # aborted before it ever ran
            return False, None
        tokens = None if request.status.name in _WITHOUT_STATES else _tokens(request)
        if not tokens:
            self._next.dropped.append(ticket)
            return False, None
        self._next.saves.append(Save(request.request_id, ticket, tokens, list(block_ids)))
        return True, self._transport.announcement(ticket, tensor_shapes(self._record, len(tokens)))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[self._group] if self._group < len(block_ids) else [])

    def get_finished_count(self) -> int | None:
        """One worker writes, so one report ends a request; by default vLLM would wait for all."""
        return 1

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout vLLM's own connector asks for, whatever this version calls it: a token's states lie together."""
        try:
            from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
                ExampleHiddenStatesConnector,
            )
        except ImportError:
            return None
        return ExampleHiddenStatesConnector.get_required_kvcache_layout(vllm_config)

    # In the workers.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = [name for name in kv_caches if LAYER_NAME in name]
        if len(layers) > 1:
            raise ValueError(f"vLLM has {len(layers)} hidden-states layers, where this connector knows what to do with one")
        if not layers or get_tensor_model_parallel_rank() != 0:
            return
        cache = kv_caches[layers[0]]
        block_size = self._block_size or self._config.cache_config.block_size
        self._transport.open()
        pending = self._settings.max_pending_gib * 2**30
        self._saver = Saver(
            cache, block_size, self._record, self._transport, self._settings.num_writer_threads, pending, logger
        )
        logger.info("hidden states of layers %s by the %s backend", list(self._record.layer_ids), self._settings.backend)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # the layer has cached the states; they are taken when the request ends

    def wait_for_save(self) -> None:
        """Announce requests that begin; their answers cannot have left yet, so no client comes too early."""
        step = self._step()
        if self._saver is None or step is None:
            return
        begun, step.begun = step.begun, []
        for ticket in begun:
            try:
                self._transport.expect(ticket)
            except Exception as error:  # no descriptor or no inode left: the client finds nothing; the server lives on
                logger.error("the client of %s may not find its hidden states: %s", ticket, error)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._saver is None:
            return None, None
        step = self._step() or StepMetadata()
        self._saver.add(step.saves)
        for ticket in step.dropped:
            self._transport.forget(ticket)
        return self._saver.advance(_IDLE_SECONDS if step.idle else 0.0) or None, None

    def shutdown(self) -> None:
        if self._saver is not None:
            self._saver.close()
            self._saver = None
            self._transport.close()

    def _step(self) -> StepMetadata | None:
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        return metadata if isinstance(metadata, StepMetadata) else None


def _tokens(request: Request) -> list[int]:
    """Tokens whose states the client gets: the prompt's; with ``include_output_tokens`` also the answer's but the last, which
    was never an input."""
    if (request.kv_transfer_params or {}).get("include_output_tokens", False):
        return list(request.all_token_ids)[:-1]
    return list(request.prompt_token_ids or [])  # None where the prompt came as embeddings


def _record(vllm_config: VllmConfig, settings: ConnectorSettings) -> StatesRecord:
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    draft = getattr(speculative, "draft_model_config", None)
    ids = getattr(getattr(draft, "hf_config", None), "eagle_aux_hidden_state_layer_ids", None)
    if not ids or getattr(speculative, "method", None) != "extract_hidden_states":
        raise ValueError(
            'this connector needs the speculative method extract_hidden_states: --speculative-config \'{"method": '
            '"extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": {"hf_config": '
            '{"eagle_aux_hidden_state_layer_ids": [...]}}}\''
        )
    return StatesRecord(
        model=str(model.model),
        layer_ids=tuple(sorted(ids)),  # the model collects them in the order of its layers
        num_layers=int(model.get_total_num_hidden_layers()),
        hidden_size=int(model.get_hidden_size()),
        dtype=str(model.dtype).removeprefix("torch."),
        encoding="fp8_e4m3" if settings.backend == "fp8" else "plain",
        verifier_hash=verifier_hash(str(model.model)),
        vllm_version=vllm.__version__,
    )


def _transport(settings: ConnectorSettings, backend: dict[str, Any], engine: str, header: dict[str, str]) -> Transport:
    if settings.backend == "mooncake":
        from speculators_vllm_connector.mooncake import MooncakeTransport

        return MooncakeTransport(backend, engine, header)
    if backend:
        raise ValueError(f"{', '.join(sorted(backend))} is for the mooncake backend; leave it out")
    return FileTransport(settings.shared_storage_path, engine, settings.retention_seconds, settings.use_synchronization_lock)
