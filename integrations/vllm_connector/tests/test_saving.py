from __future__ import annotations

import logging
import threading

import torch
from speculators_vllm_connector.saving import Save, Saver
from speculators_vllm_connector.states import StatesRecord

TOKENS, COUNT, HIDDEN, BLOCK = 6, 2, 4, 8
RECORD = StatesRecord("folder", (1, 2), 2, HIDDEN, "float32", "plain", None, "0.32.0")
BYTES = TOKENS * COUNT * HIDDEN * 4


class Recorder:
    """A transport that can be held up, or made to fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.open = threading.Event()
        self.open.set()
        self.error = error
        self.delivered: dict[str, dict[str, torch.Tensor]] = {}
        self.failed: dict[str, str] = {}

    def deliver(self, ticket, tensors, header):
        self.open.wait(5)
        if self.error is not None:
            raise self.error
        self.delivered[ticket] = dict(tensors)

    def fail(self, ticket, reason):
        self.failed[ticket] = reason


def saver(transport, max_bytes=1e9) -> tuple[Saver, torch.Tensor]:
    cache = torch.randn(10, COUNT, BLOCK, HIDDEN)
    return Saver(cache, BLOCK, RECORD, transport, 2, max_bytes, logging.getLogger("test")), cache


def save(number: int, block: int | None = None) -> Save:
    return Save(f"r{number}", f"t{number}", list(range(TOKENS)), [number + 1 if block is None else block])


def test_states_are_handed_over_and_blocks_are_free_at_once():
    transport = Recorder()
    kept, cache = saver(transport)
    kept.add([save(0), save(1)])
    assert kept.advance() == {"r0", "r1"}
    kept.close()
    assert torch.equal(transport.delivered["t1"]["hidden_states"], cache[2, :, :TOKENS].transpose(0, 1))
    assert transport.delivered["t1"]["token_ids"].tolist() == list(range(TOKENS))


def test_a_slow_writer_holds_blocks_back_instead_of_filling_memory():
    transport = Recorder()
    transport.open.clear()
    kept, _ = saver(transport, max_bytes=2.5 * BYTES)
    kept.add([save(number) for number in range(5)])
    assert kept.advance() == {"r0", "r1"}
    assert kept.advance() == set()
    assert kept.advance(patience=0.05) == set()
    transport.open.set()
    done: set[str] = set()
    for _ in range(100):
        done |= kept.advance(patience=0.05)
        if len(done) == 3:
            break
    assert done == {"r2", "r3", "r4"}
    kept.close()
    assert set(transport.delivered) == {f"t{number}" for number in range(5)}


def test_a_request_larger_than_the_bound_is_served_alone():
    transport = Recorder()
    kept, _ = saver(transport, max_bytes=1)
    kept.add([save(0)])
    assert kept.advance() == {"r0"}
    kept.close()
    assert set(transport.delivered) == {"t0"}


def test_a_failure_is_of_one_request():
    transport = Recorder(OSError(28, "No space left on device"))
    kept, _ = saver(transport)
    kept.add([save(0), save(1, block=0)])
    assert kept.advance() == {"r0", "r1"}
    kept.close()
    assert "No space left" in transport.failed["t0"]
    assert "no states for some" in transport.failed["t1"]


def test_what_waits_when_the_server_stops_is_told_so():
    transport = Recorder()
    kept, _ = saver(transport, max_bytes=1)
    transport.open.clear()
    kept.add([save(0), save(1)])
    kept.advance()
    transport.open.set()
    kept.close()
    assert set(transport.delivered) == {"t0"}
    assert transport.failed == {"t1": "the server stopped"}
