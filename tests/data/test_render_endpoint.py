"""Rows from a server's render endpoint are the tokenizer's own, and a server that is not as it should be is one sentence."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from speculators.data.render_endpoint import EndpointRenderer
from speculators.data.rendering import RenderError, TemplateRenderer
from speculators.errors import VerifierError
from tests.data.kinds import KINDS

Reply = tuple[int, Any]
CALL = {"id": "weather:0", "type": "function", "function": {"name": "weather", "arguments": {"city": "SF"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "text"}}}]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", "reasoning_content": "it is"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "no 0", "reasoning_content": "why"},
    ],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "tool_call_id": "weather:0", "content": "sunny"},
        {"role": "assistant", "content": ""},
    ],
]


class Server(ThreadingHTTPServer):
    """Answers every request with what ``reply`` makes of its body."""

    daemon_threads = True
    reply: Callable[[dict[str, Any]], Reply]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or every answer takes 40 ms

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        status, answer = self.server.reply(body)
        content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


def rendering(tokenizer: Any) -> Callable[[dict[str, Any]], Reply]:
    """A server's reply, as vLLM's render endpoint gives it."""

    def reply(body: dict[str, Any]) -> Reply:
        try:
            ids = tokenizer.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                add_generation_prompt=body["add_generation_prompt"],
                return_dict=False,
                **body.get("chat_template_kwargs", {}),
            )
        except Exception as error:
            return 400, {"error": {"message": str(error), "type": "BadRequestError"}}
        return 200, {"request_id": "render-1", "token_ids": list(ids)}

    return reply


@pytest.mark.parametrize("name", ["chatml", "qwen3", "qwen3-no-thinking", "qwen3-thinking", "llama3", "harmony", "kimi"])
def test_rows_are_the_tokenizers_own(server: Server, name: str) -> None:
    kind = KINDS[name]
    tokenizer = kind.tokenizer
    server.reply = rendering(tokenizer)
    local = TemplateRenderer(tokenizer, eos_ids=kind.eos_ids, options=kind.options)
    ends = [*kind.eos_ids, tokenizer.eos_token_id]
    remote = pickle.loads(pickle.dumps(EndpointRenderer(server.url + "/v1", eos_ids=ends, options=kind.options)))
    for messages in CONVERSATIONS:
        if name == "chatml" and any(message.get("tool_calls") for message in messages):
            continue
        tools = TOOLS if kind.tools else None
        expected, found = local.rows(messages, tools), remote.rows(messages, tools)
        assert [row.input_ids.tolist() for row in found] == [row.input_ids.tolist() for row in expected]
        assert [row.loss_mask.tolist() for row in found] == [row.loss_mask.tolist() for row in expected]
        assert [(row.turn, row.supervised_turns) for row in found] == [(row.turn, row.supervised_turns) for row in expected]
        assert remote.prompt(messages[:1], tools) == local.prompt(messages[:1], tools)
    assert {path for path, _ in server.seen} == {"/v1/chat/completions/render"}
    remote.close()


def test_what_is_sent(server: Server) -> None:
    server.reply = lambda body: (200, {"token_ids": [1]})
    renderer = EndpointRenderer(server.url, model="m", eos_ids=[2], options={"a": 1})
    renderer.prompt([{"role": "user", "content": "hi"}], TOOLS, {"b": 2})
    renderer.prompt([{"role": "user", "content": "hi"}])
    first, second = (body for _, body in server.seen)
    assert first["messages"] == [{"role": "user", "content": "hi"}]
    assert (first["model"], first["tools"], first["add_generation_prompt"]) == ("m", TOOLS, True)
    assert first["chat_template_kwargs"] == {"a": 1, "b": 2}
    assert "tools" not in second
    renderer.close()


def test_a_conversation_that_the_server_refuses(server: Server) -> None:
    server.reply = rendering(KINDS["gemma"].tokenizer)
    renderer = EndpointRenderer(server.url, eos_ids=[1], history="conversation")
    twice = [{"role": "user", "content": "hi"}, *CONVERSATIONS[0]]
    with pytest.raises(RenderError, match=r"messages 0 and 1 are both of the role user .*roles must alternate") as caught:
        renderer.rows(twice)
    assert caught.value.outcome == "role_order"
    server.reply = lambda body: (422, {"detail": "no\nsuch field"})
    with pytest.raises(RenderError, match=r"refuses the conversation \(no such field\)") as caught:
        renderer.rows(CONVERSATIONS[0])
    assert caught.value.outcome == "template_refused"
    assert len(server.seen) == 2  # what is refused is not asked again
    server.reply = rendering(KINDS["qwen3"].tokenizer)
    with pytest.raises(RenderError, match=r"assistant turn 1 otherwise once others follow \(ids \.\.\.\[") as caught:
        renderer.rows(CONVERSATIONS[1])
    assert caught.value.outcome == "unstable_template"


def test_a_server_that_is_busy_is_asked_again(server: Server) -> None:
    replies = iter([(503, "starting"), (429, {"error": "busy"}), (200, {"token_ids": [4, 5]})])
    server.reply = lambda body: next(replies)
    renderer = EndpointRenderer(server.url, eos_ids=[1], pause=0.001)
    assert renderer.prompt(CONVERSATIONS[0]) == [4, 5]
    server.reply = lambda body: (500, "broken " * 200)
    with pytest.raises(VerifierError, match=r"answers with status 500 \(broken .*\); check that it runs") as caught:
        EndpointRenderer(server.url, eos_ids=[1], pause=0.001, retries=1).prompt(CONVERSATIONS[0])
    assert len(server.seen) == 5
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((404, "<html>not found</html>"), r"status 404 \(<html>not found</html>\); check that it runs and has that endpoint"),
        ((200, "<html>hello</html>"), "answers without token_ids"),
        ((200, {"choices": []}), "answers without token_ids"),
        ((200, [1, 2]), "answers without token_ids"),
        ((200, {"token_ids": ["a"]}), "answers without token_ids"),
        ((401, {"error": {"message": "who are you"}}), r"status 401 \(who are you\)"),
    ],
)
def test_a_server_that_is_another(server: Server, reply: Reply, words: str) -> None:
    server.reply = lambda body: reply
    with pytest.raises(VerifierError, match=words):
        EndpointRenderer(server.url, eos_ids=[1]).rows(CONVERSATIONS[0])
    assert len(server.seen) == 1


def test_a_server_that_is_not_there(server: Server) -> None:
    url = server.url
    server.shutdown()
    server.server_close()
    with pytest.raises(VerifierError, match=rf"{url}/v1/chat/completions/render cannot be reached \(.*refused"):
        EndpointRenderer(url, eos_ids=[1], retries=1, pause=0.001).rows(CONVERSATIONS[0])
    with pytest.raises(VerifierError, match="render"):
        EndpointRenderer("localhost", eos_ids=[1], retries=0).rows(CONVERSATIONS[0])
