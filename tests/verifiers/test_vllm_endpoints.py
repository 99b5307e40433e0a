"""Several servers as one: balance, leaving, rejoining, giving up."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from speculators.errors import VerifierError
from speculators.verifiers.vllm.endpoints import EndpointFault, Endpoints, patience
from speculators.verifiers.vllm.protocol import Served
from tests.verifiers.fake_states_server import FakeStatesServer
from tests.verifiers.test_vllm_source import CAPTURED, ROWS, assert_same, opened, truth, verifier

__all__ = ["truth", "verifier"]  # fixtures


class Servers:
    """Servers that live or not, without HTTP."""

    def __init__(self, *names: str) -> None:
        self.dead: set[str] = set()
        self.asked: dict[str, list[float]] = {name: [] for name in names}

    def ask(self, base: str) -> Served:
        self.asked[base].append(time.monotonic())
        if base in self.dead:
            raise EndpointFault("refused")
        return Served("m", "m", None)


def endpoints(servers: Servers, max_retries: int = 3, first_wait: float = 0.02) -> Endpoints:
    return Endpoints(list(servers.asked), servers.ask, max_retries=max_retries, first_wait=first_wait, hint="start one")


def until(condition) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_work_goes_where_the_fewest_tokens_are_under_way():
    pool = endpoints(Servers("a", "b"))
    with pool.one(1):
        pass
    until(lambda: pool.alive == 2)
    with pool.one(100) as first, pool.one(10) as second, pool.one(50) as third, pool.one(50) as fourth:
        assert first is not second
        assert [third, fourth] == [second, second]  # 10, 60 and then 110 tokens beside 100
        with pool.one(1) as fifth:
            assert fifth is first
        with pool.one(1, avoid=first) as sixth:
            assert sixth is second
    assert [endpoint.tokens for endpoint in pool.all] == [0, 0]
    pool.close()


def test_a_server_that_fails_is_left_for_longer_and_longer_until_it_works_again():
    servers = Servers("a", "b")
    pool = endpoints(servers)
    until(lambda: pool_ready(pool))
    waits = []
    for _ in range(3):
        left = time.monotonic()
        with pytest.raises(EndpointFault), pool.one(1, avoid=pool.all[1]) as used:
            raise EndpointFault("status 500")
        assert used is pool.all[0]
        with pool.one(1) as other:
            assert other is pool.all[1]
        until(lambda: pool.all[0].alive)
        waits.append(time.monotonic() - left)
    assert all(wait >= least for wait, least in zip(waits, (0.02, 0.04, 0.08)))
    pool.succeeded(pool.all[0])
    assert pool.all[0].faults == 0
    assert (pool.counts.left, pool.counts.rejoined) == (3, 3)
    pool.close()


def pool_ready(pool: Endpoints) -> bool:
    with pool.one(0):
        return pool.alive == len(pool.all)


def test_many_faults_of_one_death_count_once():
    pool = endpoints(Servers("a"), first_wait=0.05)
    leases = [pool.one(1) for _ in range(5)]
    for lease in leases:
        lease.__enter__()
    for lease in leases:
        with suppress(EndpointFault):
            lease.__exit__(EndpointFault, EndpointFault("reset"), None)
    assert pool.counts.left == 1
    assert pool.all[0].faults == 1
    pool.close()


def test_bad_answers_are_faults_only_in_a_row():
    pool = endpoints(Servers("a"), first_wait=0.05)
    with pool.one(1) as used:
        pass
    pool.answered_badly(used, "nan")
    pool.answered_badly(used, "nan")
    pool.succeeded(used)
    pool.answered_badly(used, "nan")
    pool.answered_badly(used, "nan")
    assert used.alive
    pool.answered_badly(used, "nan")
    assert not used.alive
    pool.close()


def test_a_server_that_is_gone_for_long_does_not_hold_up_another_one():
    servers = Servers("a", "b", "c")
    servers.dead = {"a"}
    pool = endpoints(servers)
    with pool.one(1):
        until(lambda: pool.alive == 2 and pool.all[0].in_vain)
    pool.all[0].ask_at += 60
    time.sleep(0.05)  # now it is waited for
    with pytest.raises(EndpointFault), pool.one(1, avoid=pool.all[2]) as used:
        raise EndpointFault("reset")
    assert used is pool.all[1]
    until(lambda: used.alive)
    pool.close()


def test_callers_wait_for_a_server_to_come_back():
    servers = Servers("a")
    pool = endpoints(servers, max_retries=6)
    with pool.one(1) as used:
        servers.dead = {"a"}
    with pytest.raises(EndpointFault), pool.one(1):
        raise EndpointFault("reset")
    assert not used.alive
    threading.Timer(0.3, servers.dead.clear).start()
    started = time.monotonic()
    with pool.one(1):
        assert time.monotonic() - started > 0.25
    pool.close()


@pytest.mark.parametrize("max_retries", [0, 3])
def test_callers_wait_as_long_as_the_retries_would_take(max_retries):
    servers = Servers("a", "b")
    servers.dead = {"a", "b"}
    pool = endpoints(servers, max_retries)
    started = time.monotonic()
    with pytest.raises(VerifierError, match=r"no vLLM server answers \(a: refused; b: refused\); start one"), pool.one(1):
        pass
    waited = time.monotonic() - started
    assert patience(max_retries, 0.02) <= waited < patience(max_retries, 0.02) + 0.5
    assert patience(3, 1.0) == 14
    pool.close()


def test_the_work_of_a_dead_server_is_done_by_the_others(verifier, truth, tmp_path):
    with (
        FakeStatesServer(verifier, tmp_path / "a", CAPTURED, delay=0.03) as first,
        FakeStatesServer(verifier, tmp_path / "b", CAPTURED, delay=0.03) as second,
    ):
        source = opened(verifier, tmp_path, first, second, max_retries=0)
        until(lambda: source.status()["endpoints_alive"] == 2)
        assert source.concurrency == 8
        assert_same(source.fetch(ROWS), truth)
        assert len(first.prompts) > 1
        assert len(second.prompts) > 1
        second.always = 500
        assert_same(source.fetch(ROWS), truth)
        before, second.always = len(second.prompts), None
        until(lambda: source.status()["endpoints_alive"] == 2)
        assert_same(source.fetch(ROWS), truth)
        assert len(second.prompts) > before  # it is back in work
        assert source.status()["failures"] == 0
        source.close()


def test_a_server_that_gives_wrong_states_does_not_spoil_the_others(verifier, truth, tmp_path):
    with (
        FakeStatesServer(verifier, tmp_path / "a", CAPTURED) as good,
        FakeStatesServer(verifier, tmp_path / "b", CAPTURED) as bad,
    ):
        source = opened(verifier, tmp_path, good, bad)
        bad.always = "nan"
        until(lambda: source.status()["endpoints_alive"] == 2)
        for _ in range(5):
            assert_same(source.fetch(ROWS), truth)
        assert source.status()["failures"] == 0
        assert source.status()["retries"] > 0
        source.close()
