from __future__ import annotations

import fcntl
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from speculators_vllm_connector.files import FileTransport

from speculators.vllm_server.leftovers import remove_if_empty, sweep_dead_servers


@pytest.fixture
def transport(tmp_path):
    opened = FileTransport(tmp_path, "engine", retention_seconds=0)
    opened.open()
    yield opened
    opened.close()


def tensors(tokens: int = 3) -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.randn(tokens, 2, 4), "token_ids": torch.arange(tokens)}


def read_as_client(path: str) -> dict[str, torch.Tensor]:
    """As the client of upstream does."""
    with open(f"{path}.lock", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        return load_file(path)


def free(path: str) -> bool:
    with open(f"{path}.lock", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_a_client_waits_for_the_whole_file(transport):
    ticket = transport.ticket("request")
    transport.expect(ticket)
    assert not free(ticket)
    sent, got = tensors(), {}
    client = threading.Thread(target=lambda: got.update(read_as_client(ticket)))
    client.start()
    time.sleep(0.05)
    assert not got
    transport.deliver(ticket, sent, {"format": "x"})
    client.join(5)
    assert torch.equal(got["hidden_states"], sent["hidden_states"])
    with safe_open(ticket, "pt") as file:
        assert file.metadata() == {"format": "x"}
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(os.stat(ticket).st_mode) == 0o666 & ~mask
    assert transport.announcement(ticket, {}) == {"hidden_states_path": ticket}


def test_a_failure_releases_the_client_and_says_why(transport):
    ticket = transport.ticket("request")
    transport.expect(ticket)
    transport.fail(ticket, "the disk is full")
    with pytest.raises(FileNotFoundError):
        read_as_client(ticket)
    assert Path(f"{ticket}.lock").read_text() == "the disk is full\n"


def test_an_aborted_request_leaves_nothing(transport):
    ticket = transport.ticket("request")
    transport.expect(ticket)
    transport.forget(ticket)
    assert names(transport.folder) == {"owner"}


def test_ids_that_clients_choose_stay_in_the_folder(transport):
    tickets = [
        transport.ticket(name) for name in ("../../x", "/etc/passwd", "a/b", ".hidden", "", "x" * 500, "plain-id", "plain-id")
    ]
    assert len(set(tickets)) == len(tickets)
    assert all(Path(ticket).parent == transport.folder for ticket in tickets)
    assert Path(tickets[-2]).name.startswith("plain-id-")
    for ticket in tickets:
        transport.expect(ticket)


def test_without_locks_there_are_none(tmp_path):
    transport = FileTransport(tmp_path, "engine", 0, locks=False)
    transport.open()
    ticket = transport.ticket("request")
    transport.expect(ticket)
    transport.deliver(ticket, tensors(), {})
    assert names(transport.folder) == {"owner", Path(ticket).name}
    transport.close()


def test_what_nobody_fetches_goes_and_what_is_under_way_stays(tmp_path):
    transport = FileTransport(tmp_path, "engine", retention_seconds=0.4)
    transport.open()
    old, busy = transport.ticket("old"), transport.ticket("busy")
    transport.expect(busy)
    transport.expect(old)
    transport.deliver(old, tensors(), {})
    until = time.monotonic() + 5
    while Path(old).exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.2)
    assert names(transport.folder) == {"owner", f"{Path(busy).name}.lock"}
    transport.deliver(busy, tensors(), {})
    assert Path(busy).exists()
    transport.close()
    assert not transport.folder.exists()


def test_a_server_removes_what_dead_ones_left_and_nothing_else(tmp_path):
    alive = FileTransport(tmp_path, "alive", 0)
    alive.open()
    dead = tmp_path / "hs-dead"
    dead.mkdir()
    (dead / "owner").touch()
    (dead / "x.safetensors").touch()
    (tmp_path / "hs-not-a-servers").mkdir()
    (tmp_path / "hs_0.safetensors").touch()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "owner").touch()
    (tmp_path / "hs-link").symlink_to(outside)
    other = FileTransport(tmp_path, "other", 0)
    other.open()
    kept = {".hs-owners.lock", "hs-alive", "hs-other", "hs-not-a-servers", "hs_0.safetensors", "outside", "hs-link"}
    assert names(tmp_path) == kept
    other.close()
    alive.close()


def test_the_launcher_sweeps_by_the_same_rule(tmp_path):
    alive = FileTransport(tmp_path / "root", "alive", 0)
    alive.open()
    dead = FileTransport(tmp_path / "root", "dead", 0)
    dead.open()
    os.close(dead._owner)  # as the system does for a process that is killed
    sweep_dead_servers(tmp_path / "root")
    assert names(tmp_path / "root") == {".hs-owners.lock", "hs-alive"}
    alive.close()
    sweep_dead_servers(tmp_path / "root")
    remove_if_empty(tmp_path / "root")
    assert not (tmp_path / "root").exists()
    (tmp_path / "mine").touch()
    remove_if_empty(tmp_path)
    sweep_dead_servers(tmp_path / "nowhere")
    assert (tmp_path / "mine").exists()


def write_beyond_the_limit(root: str) -> None:
    """In a process of its own: a disk that is full is a limit on the size of files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    transport = FileTransport(root, "engine", 0)
    transport.open()
    ticket = transport.ticket("request")
    transport.expect(ticket)
    try:
        transport.deliver(ticket, tensors(1000), {})
    except Exception as error:
        transport.fail(ticket, str(error))
    print(sorted(names(transport.folder)), Path(f"{ticket}.lock").read_text().strip(), free(ticket))
    small = transport.ticket("small")
    transport.expect(small)
    transport.deliver(small, tensors(1), {})
    print(Path(small).exists())
    transport.close()


def test_a_full_disk_ends_one_request_and_leaves_no_part_of_it(tmp_path):
    script = f"import sys; sys.path[:0] = {sys.path!r}; import test_files; test_files.write_beyond_the_limit({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    first, second = done.stdout.splitlines()
    assert first.startswith("['owner', 'request-0.safetensors.lock']")
    assert "arge" in first  # "File too large"
    assert first.endswith("True")
    assert second == "True"
