"""An OpenAI-compatible server of a tiny verifier that misbehaves on demand."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from speculators.sampling import SamplingParams
from speculators.verifiers.answering import Answer, Question, answer_all
from speculators.verifiers.loading import Verifier
from speculators.verifiers.local_answers import LocalEngine

#: What of an answer :attr:`FakeServer.faults` can spoil.
SPOILT = ("no choices", "abort", "no ids in list", "huge id", "no prompt", "empty")
#: What they may name: a status, or one of these.
FAULTS = ("drop", "cut", "slow", "drip", "garbage", "gzip", *SPOILT)


class FakeServer:
    """Serves while its context is open.

    :param faults: what the first requests get instead of an answer, one each.
    :param token_ids: False for a server that knows no ``return_token_ids``.
    :param key: bearer token that is wanted.
    :param delay: seconds that every answer takes at least.
    :param models: that it serves.
    :param eats_prompt: it reads another prompt than is sent.
    :param stops_after: answers after which nothing is answered any more.
    """

    def __init__(
        self,
        verifier: Verifier,
        faults: Iterable[str | int] = (),
        *,
        token_ids: bool = True,
        key: str | None = None,
        delay: float = 0.0,
        models: Iterable[str] = ("tiny",),
        eats_prompt: bool = False,
        stops_after: int | None = None,
    ) -> None:
        self.verifier = verifier
        self.faults = deque(faults)
        self.token_ids, self.key, self.delay, self.models, self.eats_prompt = token_ids, key, delay, list(models), eats_prompt
        self.bodies: list[dict[str, Any]] = []  #: of all POSTs
        self.stopped = False
        self.stops_after = stops_after
        self.busiest = 0  #: most requests at once
        self._busy = 0
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Be gone: connections that are open get no answer either."""
        self.stopped = True
        self._server.shutdown()
        self._server.server_close()

    def answer(self, prompt: list[int], body: dict[str, Any]) -> Answer:
        sampling = SamplingParams(**{key: body[key] for key in ("temperature", "top_k", "top_p") if key in body})
        with self._lock:
            engine = LocalEngine(self.verifier, 1)
            question = Question(0, prompt, body["max_tokens"], sampling, body["seed"])
            ((_, outcome),) = answer_all(engine, [question])
        assert isinstance(outcome, Answer)
        return outcome

    def enter(self, body: dict[str, Any]) -> str | int | None:
        """Count a request in; the fault it is to meet."""
        with self._lock:
            self.bodies.append(body)
            self.stopped = self.stopped or len(self.bodies) - 1 == self.stops_after
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
            return self.faults.popleft() if self.faults else None

    def leave(self) -> None:
        with self._lock:
            self._busy -= 1


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        fake = self.fake
        if fake.stopped:
            self.close_connection = True
            return None
        if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
            return self._send({"error": {"message": "who are you"}}, 401)
        entries = [
            {"id": name, "root": fake.verifier.name, "max_model_len": fake.verifier.context_length} for name in fake.models
        ]
        return self._send({"object": "list", "data": entries})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.fake.enter(body)
        time.sleep(self.fake.delay)
        if self.fake.stopped:
            self.close_connection = True
            return
        whole = {} if isinstance(fault, int) else self._answer(body)
        self.fake.leave()  # before the client can know of it and send the next
        with suppress(BrokenPipeError, ConnectionResetError):
            if fault is None:
                self._send(whole)
            else:
                self._misbehave(fault, whole)

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        fake, tokenizer = self.fake, self.fake.verifier.tokenizer
        assert tokenizer is not None
        chat = self.path.endswith("/chat/completions")
        prompt = body["prompt"] if not chat else _rendered(tokenizer, body)
        answer = fake.answer(prompt, body)
        text = tokenizer.decode(answer.ids, skip_special_tokens=True)
        choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason}
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
            if fake.token_ids and body.get("return_token_ids"):
                choice |= {"token_ids": answer.ids, "prompt_token_ids": prompt[1:] if fake.eats_prompt else prompt}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer.ids)}
        return {"id": "x", "model": body["model"], "choices": [choice], "usage": usage}

    def _misbehave(self, fault: str | int, whole: dict[str, Any]) -> None:
        if isinstance(fault, int):
            self._send({"error": {"message": "not today"}}, fault, {"Retry-After": "0"} if fault == 429 else {})
        elif fault == "drop":
            self.close_connection = True
        elif fault == "cut":
            self._send(whole, length=10_000)
            self.close_connection = True
        elif fault == "slow":
            time.sleep(1.2)
            self._send(whole)
        elif fault == "drip":  # never long without a byte
            content = json.dumps(whole).encode()
            self._send_bytes(content[:1], length=len(content) + 5)
            for _ in range(5):
                time.sleep(0.25)
                self.wfile.write(b" ")
            self.wfile.write(content[1:])
        elif fault == "gzip":
            self._send(whole, headers={"Content-Encoding": "gzip"})
        elif fault == "garbage":
            self._send_bytes(b"<html>")
        else:
            choice = whole["choices"][0]
            change: dict[str, Any] = {
                "no choices": {"choices": []},
                "abort": {"choices": [{**choice, "finish_reason": "abort"}]},
                "no ids in list": {"choices": [{**choice, "token_ids": ["a"]}]},
                "huge id": {"choices": [{**choice, "token_ids": [1 << 70]}]},
                "no prompt": {"choices": [{**choice, "prompt_token_ids": 5}]},
                "empty": {"choices": [{**choice, "token_ids": []}]},
            }[fault]
            self._send({**whole, **change})

    def _send(self, body: Any, status: int = 200, headers: dict[str, str] | None = None, length: int | None = None) -> None:
        self._send_bytes(json.dumps(body).encode(), status, headers, length)

    def _send_bytes(
        self, content: bytes, status: int = 200, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(length or len(content)))
        self.end_headers()
        self.wfile.write(content)


def _rendered(tokenizer: Any, body: dict[str, Any]) -> list[int]:
    return list(tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=True, return_dict=False))
