"""States asked for ahead: order, bounds, failures, threads, and what the meter says."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators.data.rows import Row
from speculators.errors import DataError
from speculators.verifiers import HiddenStates, StatesDescription, TransformersSource, load_verifier
from speculators.verifiers.flow import FlowMeter, status_of
from speculators.verifiers.prefetching import fetch_in_turn, prefetch
from tests.tiny import random_rows, tiny_verifier

HIDDEN = 2
DESCRIPTION = StatesDescription((1,), "post_norm", "float32", HIDDEN, "none", "0")
TOKEN = DESCRIPTION.bytes_per_token


class FakeSource:
    """Zeros, after a delay; notes who asked, and what was asked for and not yet handed out."""

    description = DESCRIPTION

    def __init__(self, delays: Sequence[float] = (), fails_at: int | None = None) -> None:
        self.delays, self.fails_at = delays, fails_at
        self.lock = threading.Lock()
        self.under_way = self.most_under_way = 0
        self.asked: list[int] = []
        self.outstanding = self.most_outstanding = self.most_requests = 0
        self.requests = 0

    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        with self.lock:
            number = len(self.asked)
            self.asked.append(rows[0].row_id)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            self.outstanding += sum(map(len, rows)) * TOKEN
            self.requests += 1
            self.most_outstanding = max(self.most_outstanding, self.outstanding)
            self.most_requests = max(self.most_requests, self.requests)
        time.sleep(self.delays[number % len(self.delays)] if self.delays else 0)
        with self.lock:
            self.under_way -= 1
        if self.fails_at in [row.row_id for row in rows]:
            raise DataError("this row is broken")
        return [
            HiddenStates(row.row_id, torch.zeros(len(row)), torch.zeros(len(row), 1, HIDDEN), torch.zeros(len(row), HIDDEN))
            for row in rows
        ]

    def handed_out(self, answer: list[HiddenStates]) -> None:
        with self.lock:
            self.outstanding -= sum(states.token_ids.shape[0] for states in answer) * TOKEN
            self.requests -= 1

    def close(self) -> None:
        pass


def request(index: int, tokens: int) -> list[Row]:
    return [Row(index, np.zeros(tokens, np.int64), np.ones(tokens, bool))]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hidden-states")]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), max_size=25),
    delays=st.lists(st.sampled_from([0.0, 0.0005, 0.003]), min_size=1, max_size=7),
    depth=st.integers(1, 6),
    workers=st.integers(1, 8),
    room=st.integers(1, 60),
    reader=st.sampled_from([0.0, 0.001]),
    stop_after=st.one_of(st.none(), st.integers(0, 10)),
)
def test_order_bounds_and_threads(
    sizes: list[int], delays: list[float], depth: int, workers: int, room: int, reader: float, stop_after: int | None
) -> None:
    """In order, never more asked for than the bounds allow, no deadlock where one request is beyond them, no thread left."""
    source, bound = FakeSource(delays), room * TOKEN
    plan = (request(index, size) for index, size in enumerate(sizes))
    answers = prefetch(source, plan, depth=depth, max_bytes=bound, workers=workers)
    seen = []
    for answer in answers:
        # The bound is of what was not handed out; between the two the source may already have been asked for the next.
        source.handed_out(answer)
        seen.append(answer[0].row_id)
        assert answer[0].features.shape[0] == sizes[answer[0].row_id]
        time.sleep(reader)
        if stop_after is not None and len(seen) > stop_after:
            break
    answers.close()
    assert seen == list(range(len(sizes)))[: len(sizes) if stop_after is None else stop_after + 1]
    assert source.most_under_way <= min(workers, depth)
    assert source.most_requests <= depth + 1
    assert source.most_outstanding <= (max(room, *sizes, 0) + max([0, *sizes])) * TOKEN
    assert not threads()


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    depth=st.integers(1, 5),
    room=st.integers(1, 50),
)
@settings(max_examples=30, deadline=None)
def test_the_meter_never_sees_more_than_the_bound(sizes: list[int], depth: int, room: int) -> None:
    """Unless a single request is larger than the bound; then that one is alone."""

    class Strict(FlowMeter):
        def level(self, asked: int, ready: int, in_flight: int) -> None:
            assert 0 <= ready <= asked <= depth
            assert in_flight <= room * TOKEN or asked == 1
            assert (in_flight == 0) == (asked == 0)
            super().level(asked, ready, in_flight)

    meter, plan = Strict(), [request(index, size) for index, size in enumerate(sizes)]
    answers = list(prefetch(FakeSource([0.0, 0.001]), plan, depth=depth, max_bytes=room * TOKEN, workers=3, meter=meter))
    assert len(answers) == len(sizes)
    found = meter.take()
    assert found["in_flight_bytes"] == found["asked"] == found["queue"] == 0
    assert found["in_flight_bytes_max"] <= max(room, *sizes) * TOKEN
    assert found["tokens_per_s"] * TOKEN == pytest.approx(found["bytes_per_s"])


def test_several_fetches_are_under_way_at_once_and_come_in_order() -> None:
    source = FakeSource([0.2, 0.01, 0.01, 0.01])
    begun = time.monotonic()
    seen = [answer[0].row_id for answer in prefetch(source, [request(i, 1) for i in range(4)], depth=4, workers=4)]
    assert seen == [0, 1, 2, 3]
    assert source.most_under_way == 4
    assert time.monotonic() - begun < 0.4


def test_a_slow_reader_stops_the_source() -> None:
    source = FakeSource()
    answers = prefetch(source, [request(index, 1) for index in range(50)], depth=3, workers=2)
    for handed in range(1, 6):
        next(answers)
        time.sleep(0.02)
        assert len(source.asked) <= handed + 3
    answers.close()


def test_states_that_were_handed_over_are_kept_by_nobody() -> None:
    lengths = [1, 1, 1, 1, 100]  # one for each worker, which then waits until there is room for the last
    requests = [request(index, length) for index, length in enumerate(lengths)]
    answers = prefetch(FakeSource([0.02]), requests, depth=4, max_bytes=4 * TOKEN, workers=4)
    handed = [weakref.ref(next(answers)[0].final) for _ in range(3)]
    assert [state() is None for state in handed] == [True, True, False]  # the last is being used
    answers.close()


@pytest.mark.parametrize("workers", [1, 4])
def test_a_failure_is_raised_at_its_place(workers: int) -> None:
    source = FakeSource([0.01, 0.001], fails_at=3)
    answers = prefetch(source, [request(index, 1) for index in range(40)], depth=8, workers=workers)
    assert [next(answers)[0].row_id for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="this row is broken"):
        next(answers)
    assert not threads()
    assert len(source.asked) < 20


def test_a_failure_of_the_plan_is_raised_at_its_place() -> None:
    def plan():
        yield request(0, 1)
        yield request(1, 1)
        raise DataError("no such row")

    answers = prefetch(FakeSource([0.01]), plan(), depth=4, workers=3)
    assert [next(answers)[0].row_id, next(answers)[0].row_id] == [0, 1]
    with pytest.raises(DataError, match="no such row"):
        next(answers)
    assert not threads()


def test_prefetched_states_equal_fetched_ones(tmp_path) -> None:
    source = TransformersSource(load_verifier(tiny_verifier(tmp_path)), (1, 2))
    rows = random_rows(8)
    calls = [rows[2 * index : 2 * index + 2] for index in range(4)]
    for how in (prefetch(source, calls, depth=2), fetch_in_turn(source, calls)):
        for asked, answer in zip(calls, how, strict=True):
            for one, other in zip(answer, source.fetch(asked), strict=True):
                assert one.row_id == other.row_id
                assert torch.equal(one.features, other.features)
                assert torch.equal(one.final, other.final)


@pytest.mark.parametrize(("source_delay", "reader_delay", "low", "high"), [(0.02, 0.0, 0.7, 1.0), (0.0, 0.02, 0.0, 0.3)])
def test_the_meter_knows_who_waits_for_whom(source_delay: float, reader_delay: float, low: float, high: float) -> None:
    meter = FlowMeter()
    for _ in prefetch(FakeSource([source_delay]), [request(i, 1) for i in range(12)], depth=3, meter=meter):
        time.sleep(reader_delay)
    assert low <= meter.take()["waited_share"] <= high
    assert meter.take()["waited_share"] < 0.5  # counted anew


def test_a_source_may_say_how_it_is() -> None:
    class Talking(FakeSource):
        def status(self) -> dict[str, float | str]:
            return {"endpoints_alive": 2, "kind": "vllm"}

    assert status_of(Talking()) == {"endpoints_alive": 2, "kind": "vllm"}
    assert status_of(FakeSource()) == {}
