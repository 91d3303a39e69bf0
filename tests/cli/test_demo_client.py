# SPDX-License-Identifier: Apache-2.0
"""The demo's client against a scripted server on loopback."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kvsafe.cli.demo.client import HOST, Client, ClientError


class Script:
    """What the server answers, and what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.body = b""
        self.asked: list[tuple[str, Any]] = []
        self.promised: int | None = None

    def events(self, *events: dict[str, Any], end: bool = True) -> None:
        """Answer with a stream of these events."""
        lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
        self.body = b"".join(lines) + (b"data: [DONE]\n\n" if end else b"")


class _Server:
    def __init__(self, script: Script) -> None:
        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                script.asked.append((self.path, json.loads(self.rfile.read(length) or "null")))
                self.send_response(script.status)
                promised = len(script.body) if script.promised is None else script.promised
                self.send_header("Content-Length", str(promised))
                self.end_headers()
                self.wfile.write(script.body)

            do_GET = do_POST = _answer

            def log_message(self, *args: object) -> None:
                pass

        self.http = HTTPServer((HOST, 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def client(script: Script) -> Iterator[Client]:
    server = _Server(script)
    yield Client(server.http.server_port, "demo")
    server.http.shutdown()
    server.http.server_close()
    server.thread.join(5)


def _tokens(*ids: int) -> dict[str, Any]:
    return {"choices": [{"text": "x" * len(ids), "token_ids": list(ids)}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}},
}


def test_a_stream_gives_tokens_and_usage(client: Client, script: Script) -> None:
    script.events({"choices": [{"text": "", "token_ids": None}]}, _tokens(5), _tokens(6, 7), USAGE)
    answer = client.stream([1, 2, 3], 3)
    assert (answer.tokens, answer.text) == ([5, 6, 7], "xxx")
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 8)
    assert answer.first_token_s > 0
    [(path, body)] = script.asked
    assert path == "/v1/completions"
    assert body["prompt"] == [1, 2, 3] and body["max_tokens"] == 3 and body["temperature"] == 0


def test_usage_without_details_means_nothing_was_cached(client: Client, script: Script) -> None:
    script.events(_tokens(5), {"usage": {"prompt_tokens": 9, "prompt_tokens_details": None}})
    assert client.stream([1], 1).cached_tokens == 0


def test_too_few_tokens_are_an_error(client: Client, script: Script) -> None:
    script.events(_tokens(5), USAGE)
    with pytest.raises(ClientError, match="1 tokens came"):
        client.stream([1], 2)


def test_an_error_inside_a_stream_is_an_error(client: Client, script: Script) -> None:
    script.events(_tokens(5), {"error": {"message": "refused"}})
    with pytest.raises(ClientError, match="refused"):
        client.stream([1], 2)


@pytest.mark.parametrize("body", [b"data: {\n\n", b"data: [1]\n\n", b"\xff\n"])
def test_nonsense_in_a_stream_is_an_error(client: Client, script: Script, body: bytes) -> None:
    script.body = body
    with pytest.raises(ClientError):
        client.stream([1], 1)


def test_a_stream_that_breaks_off_is_an_error(client: Client, script: Script) -> None:
    script.events(_tokens(5), end=False)
    script.promised = len(script.body) + 100
    with pytest.raises(ClientError):
        client.stream([1], 2)


def test_ask_tells_how_it_ended(client: Client, script: Script) -> None:
    script.status = 500
    script.body = json.dumps({"error": {"message": "Internal server error"}}).encode()
    outcome = client.ask([1], 1)
    assert (outcome.status, outcome.message) == (500, "Internal server error")
    script.status, script.body = 200, b'{"choices": []}'
    assert (client.ask([1], 1).status, client.ask([1], 1).message) == (200, "")


def test_health_and_metrics(client: Client, script: Script) -> None:
    script.body = b"kvsafe:chunks_served_total 3\n"
    assert client.healthy()
    assert client.metrics().total("kvsafe:chunks_served") == 3
    script.status = 503
    assert not client.healthy()
    with pytest.raises(ClientError):
        client.metrics()


def test_nobody_there_is_no_health_and_an_error() -> None:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        lonely = Client(probe.getsockname()[1], "demo")
        assert not lonely.healthy()
        with pytest.raises(ClientError):
            lonely.stream([1], 1)
