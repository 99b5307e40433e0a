"""A server that hands over hidden states as vLLM does, of a tiny verifier, and misbehaves on demand.

In a test's process (:class:`FakeStatesServer`), or as one of its own that can be killed (:class:`ServerProcess`).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from speculators.data.rows import Row
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.state_dtypes import encode
from speculators.verifiers.transformers_source import TransformersSource

#: Faults of the states alone: the answer names them as if all was well.
OF_STATES = ("nan", "few", "other ids", "half", "lies", "pickle", "nothing", "no ids")
#: Faults of the answer.
OF_ANSWERS = ("drop", "garbage", "drip", "hang", "other prompt", "no params")


class FakeStatesServer:
    """Serves while its context is open.

    :param folder: that it shares with clients.
    :param layer_ids: that it captures, ascending.
    :param faults: what the first requests meet, one each: a status, or one of :data:`OF_STATES` and :data:`OF_ANSWERS`.
    :param always: what all others meet.
    :param locks: as vLLM's own connector: files are written in place under a lock. Else they appear by rename.
    :param record: metadata of the files, such as our connector writes.
    :param names: path to name instead of the file's.
    :param key: bearer token that ``/models`` wants.
    :param delay: seconds that an answer takes at least; ``write_delay``: from the answer to the file.
    """

    def __init__(
        self,
        verifier: Verifier,
        folder: Path,
        layer_ids: Iterable[int],
        faults: Iterable[str | int] = (),
        *,
        always: str | int | None = None,
        locks: bool = True,
        fp8: bool = False,
        record: dict[str, str] | None = None,
        names: Path | None = None,
        root: str | None = None,
        models: Iterable[str] = ("tiny",),
        key: str | None = None,
        max_model_len: int | None = 512,
        delay: float = 0.0,
        write_delay: float = 0.0,
        port: int = 0,
    ) -> None:
        self.verifier, self.folder, self.layer_ids = verifier, Path(folder), tuple(layer_ids)
        self.faults, self.always = deque(faults), always
        self.locks, self.fp8, self.record, self.names = locks, fp8, record, names
        self.root, self.max_model_len = root or verifier.name, max_model_len
        self.models, self.key = list(models), key
        self.delay, self.write_delay = delay, write_delay
        self.source = TransformersSource(verifier, self.layer_ids, "pre_norm")
        self.prompts: list[list[int]] = []  #: of all requests, in their order
        self.asked_models = 0
        self.busiest = self._busy = 0
        self.closing = threading.Event()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self.address = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeStatesServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def serve(self) -> None:
        self._server.serve_forever(0.02)

    def enter(self, prompt: list[int]) -> tuple[str | int | None, int]:
        with self._lock:
            self.prompts.append(prompt)
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
            return (self.faults.popleft() if self.faults else self.always), len(self.prompts)

    def leave(self) -> None:
        with self._lock:
            self._busy -= 1

    def states(self, ids: list[int]) -> Tensor:
        """``[T, n, H]``."""
        (found,) = self.source.fetch([Row(0, np.array(ids, dtype=np.int64), np.zeros(len(ids), bool))])
        return found.features

    def hand_over(self, ids: list[int], number: int, fault: str | int | None) -> str:
        """The path of the states, which are written behind the answer."""
        path = self.folder / "states" / f"cmpl-{number}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = None
        if self.locks:
            lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Thread(target=self._write, args=(path, lock, ids, fault), daemon=True).start()
        return str(path if self.names is None else self.names)

    def _write(self, path: Path, lock: int | None, ids: list[int], fault: str | int | None) -> None:
        time.sleep(self.write_delay)
        states, tokens = self.states(ids), torch.tensor(ids, dtype=torch.int64)
        if fault == "nan":
            states[len(ids) // 2, -1, 3] = torch.nan
        elif fault == "few":
            states = states[:-1]
        elif fault == "other ids":
            tokens = tokens.flip(0) + 1
        tensors = {**(encode(states, "fp8") if self.fp8 else {"hidden_states": states.contiguous()}), "token_ids": tokens}
        if fault == "no ids":
            del tensors["token_ids"]
        content = save(tensors, metadata=self.record)
        if fault == "half":
            content = content[: len(content) // 2]
        elif fault == "pickle":
            content = pickle.dumps(tensors)
        elif fault == "lies":
            content = content.replace(b'"token_ids":{"dtype":"I64","shape":[', b'"token_ids":{"dtype":"I64","shape":[9')
        if fault == "nothing":
            if lock is not None:
                os.write(lock, b"no space left on device\n")
        elif self.locks:
            path.write_bytes(content)
        else:
            path.with_suffix(".tmp").write_bytes(content)
            os.replace(path.with_suffix(".tmp"), path)
        if lock is not None:
            os.close(lock)

    def logprobs(self, ids: list[int], count: int) -> list[dict[str, Any] | None]:
        """As vLLM tells them: of every prompt token, the best ones at its place and itself."""
        with self.verifier.lock, torch.no_grad():
            told = self.verifier.logits(torch.tensor([ids]))[0].float().log_softmax(-1)
        entries: list[dict[str, Any] | None] = [None]
        for place, token in enumerate(ids[1:]):
            ranked = told[place].argsort(descending=True).tolist()
            chosen = dict.fromkeys([token, *ranked[:count]])
            entries.append(
                {
                    str(one): {"logprob": float(told[place, one]), "rank": ranked.index(one) + 1, "decoded_token": "?"}
                    for one in chosen
                }
            )
        return entries


class _Handler(BaseHTTPRequestHandler):
    fake: FakeStatesServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.fake.asked_models += 1
        if self.fake.always == "hang" and not self.fake.faults:
            self.fake.closing.wait(60)
        fake = self.fake
        refused = fake.key is not None and self.headers.get("Authorization") != f"Bearer {fake.key}"
        data = [{"id": name, "root": fake.root, "max_model_len": fake.max_model_len} for name in fake.models]
        with suppress(BrokenPipeError, ConnectionResetError):
            self._send({"object": "list", "data": data}, 401 if refused else 200)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = body["prompt"]
        fault, number = self.fake.enter(ids)
        time.sleep(self.fake.delay)
        try:
            answer: dict[str, Any] = {"choices": [{"index": 0, "text": "", "token_ids": [1], "prompt_token_ids": ids}]}
            if not isinstance(fault, int) and fault not in ("drop", "hang"):
                answer["kv_transfer_params"] = {"hidden_states_path": self.fake.hand_over(ids, number, fault)}
            if "prompt_logprobs" in body:
                answer["choices"][0]["prompt_logprobs"] = self.fake.logprobs(ids, body["prompt_logprobs"])
        finally:
            self.fake.leave()  # before the client can know of it and send the next
        with suppress(BrokenPipeError, ConnectionResetError):
            self._answer(answer, fault)

    def _answer(self, answer: dict[str, Any], fault: str | int | None) -> None:
        choice = answer["choices"][0]
        if isinstance(fault, int):
            self._send({"error": {"message": "not today"}}, fault)
        elif fault == "drop":
            self.close_connection = True
        elif fault == "hang":
            self.fake.closing.wait(60)
            self.close_connection = True
        elif fault == "garbage":
            self._send_bytes(b"<html>")
        elif fault == "drip":  # never long without a byte
            content = json.dumps(answer).encode()
            self._send_bytes(content[:1], length=len(content) + 100)
            for _ in range(100):
                if self.fake.closing.wait(0.1):
                    break
                self.wfile.write(b" ")
                self.wfile.flush()
            self.close_connection = True
        else:
            if fault == "other prompt":
                choice["prompt_token_ids"] = [*choice["prompt_token_ids"][:-1], 1]
            elif fault == "no params":
                del answer["kv_transfer_params"]
            self._send(answer)

    def _send(self, body: Any, status: int = 200) -> None:
        self._send_bytes(json.dumps(body).encode(), status)

    def _send_bytes(self, content: bytes, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(length or len(content)))
        self.end_headers()
        self.wfile.write(content)


class ServerProcess:
    """A server in a process of its own, that can be killed and started again at the same port. Gone when its context closes."""

    def __init__(self, verifier: Path, folder: Path, layer_ids: Iterable[int], *arguments: str) -> None:
        self._command = [sys.executable, "-m", __name__, str(verifier), str(folder)]
        self._command += ["--layers", *map(str, layer_ids), *arguments]
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        """Waits for the server to answer, the first time."""
        if not self._port:
            assert self._process is not None
            assert self._process.stdout is not None
            self._port = int(self._process.stdout.readline())
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._process = subprocess.Popen([*self._command, "--port", str(self._port)], stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """At once, as an out-of-memory killer does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


def write_states(path: Path, states: Tensor, ids: Iterable[int], record: dict[str, str] | None = None) -> None:
    """A file of states as upstream keeps them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(list(ids))}, path, metadata=record)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verifier", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0)
    given = parser.parse_args()
    verifier = load_verifier(given.verifier, dtype=torch.float32)
    server = FakeStatesServer(verifier, given.folder, given.layers, port=given.port, delay=given.delay)
    print(server.port, flush=True)
    server.serve()


if __name__ == "__main__":
    main()
