# SPDX-License-Identifier: Apache-2.0
"""A client of vLLM's OpenAI-compatible server: complete a prompt, look at health and metrics."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsafe.cli.demo.reading import Metrics, read_metrics

__all__ = ["Answer", "Client", "ClientError", "Outcome"]

HOST = "127.0.0.1"
REQUEST_S = 240.0
"""Longest time for one whole completion, in seconds."""
QUICK_S = 10.0
LINE_LIMIT = 1 << 20
BODY_LIMIT = 16 << 20


class ClientError(Exception):
    """The server did not answer as a server of completions does."""


@dataclass
class Answer:
    """A streamed completion: its tokens and what the server says about the prompt.

    `first_token_s` is the time from sending the request to the first token, in seconds;
    `cached_tokens` how many tokens of the prompt were not computed.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    first_token_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    """An answer in one piece: the HTTP status and, if it is no success, the server's message."""

    status: int
    reason: str
    message: str


class Client:
    """Speaks to one server on this machine's loopback."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model

    def healthy(self) -> bool:
        """Whether the server says that its engine is alive."""
        try:
            return self._get("/health")[0] == 200
        except ClientError:
            return False

    def metrics(self) -> Metrics:
        """The metrics page. Raises `ClientError`."""
        status, body = self._get("/metrics")
        if status != 200:
            raise ClientError(f"/metrics answered {status}")
        return read_metrics(body.decode("utf-8", "replace"))

    def stream(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Complete `prompt` (token ids) greedily, token by token. Raises `ClientError`."""
        answer, start = Answer(), time.monotonic()
        extra = {"stream": True, "stream_options": {"include_usage": True}}
        with self._post(prompt, tokens, extra) as response:
            if response.status != 200:
                raise ClientError(f"completion answered {response.status}")
            for event in _events(response, start + REQUEST_S):
                _take(answer, event, time.monotonic() - start)
        if len(answer.tokens) != tokens:
            raise ClientError(f"{len(answer.tokens)} tokens came, {tokens} were asked for")
        return answer

    def ask(self, prompt: Sequence[int], tokens: int) -> Outcome:
        """Complete `prompt` in one piece and say how it ended. Raises `ClientError`."""
        with self._post(prompt, tokens, {}) as response:
            body = _bounded(response)
        return Outcome(response.status, response.reason, _message(body))

    def _get(self, path: str) -> tuple[int, bytes]:
        with _Exchange(self._port, "GET", path, None, QUICK_S) as response:
            return response.status, _bounded(response)

    def _post(self, prompt: Sequence[int], tokens: int, extra: dict[str, Any]) -> _Exchange:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **extra,
        }
        return _Exchange(self._port, "POST", "/v1/completions", json.dumps(body), REQUEST_S)


class _Exchange:
    """One request and its response; every failure of the connection becomes a `ClientError`."""

    def __init__(self, port: int, method: str, path: str, body: str | None, limit_s: float) -> None:
        self._request = (method, path, body, {"Content-Type": "application/json"})
        self._connection = http.client.HTTPConnection(HOST, port, timeout=limit_s)

    def __enter__(self) -> http.client.HTTPResponse:
        try:
            self._connection.request(*self._request)
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ClientError(_no_answer(error)) from error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._connection.close()
        if isinstance(error, OSError | http.client.HTTPException):
            raise ClientError(_no_answer(error)) from error


def _no_answer(error: Exception) -> str:
    return f"no whole answer from the server: {error or type(error).__name__}"


def _bounded(response: http.client.HTTPResponse) -> bytes:
    body = response.read(BODY_LIMIT + 1)
    if len(body) > BODY_LIMIT:
        raise ClientError("an answer without end")
    return body


def _events(response: http.client.HTTPResponse, deadline: float) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to `[DONE]`."""
    while line := response.readline(LINE_LIMIT):
        if time.monotonic() > deadline:
            raise ClientError(f"not done after {REQUEST_S:.0f} s")
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = _object(line[len(b"data: ") :])
        if "error" in event:
            raise ClientError(f"the server ended the stream: {event['error']}")
        yield event


def _take(answer: Answer, event: dict[str, Any], elapsed_s: float) -> None:
    """Add what one event of the stream brings."""
    for choice in event.get("choices", ()):
        if new := choice.get("token_ids") or ():
            answer.first_token_s = answer.first_token_s or elapsed_s
            answer.tokens.extend(new)
        answer.text += choice.get("text") or ""
    if usage := event.get("usage"):
        answer.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = int(details.get("cached_tokens") or 0)


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ClientError("the server sent something that is no JSON") from error
    if not isinstance(value, dict):
        raise ClientError("the server sent JSON that is no object")
    return value


def _message(body: bytes) -> str:
    """The message of an error answer; empty for a success."""
    error = _object(body).get("error")
    if isinstance(error, dict):
        return str(error.get("message", ""))
    return "" if error is None else str(error)
