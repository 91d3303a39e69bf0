# SPDX-License-Identifier: Apache-2.0
"""The verbs of cases for an lm:// server."""

from __future__ import annotations

import hashlib

from conformance.lmcache.channel import Channel
from conformance.lmcache.talk import LARGEST, Step, Talk, Verb
from conformance.lmcache.wire import (
    CHUNK,
    FAIL,
    KEY_BYTES,
    NO_SHAPE,
    REPLY_BYTES,
    SUCCESS,
    Command,
    Meta,
    Reply,
    Request,
)

__all__ = ["LmTalk"]

METAS = {
    "chunk": CHUNK,
    "half": CHUNK.but(length=2048, shape=(2, 2, 8, 32)),
    "large": CHUNK.but(length=8 << 20, shape=(2, 4, 2048, 256)),
    "token-major": CHUNK.but(fmt=2, shape=(16, 2, 64, 0)),
    "mla": CHUNK.but(fmt=6, shape=(1, 4, 16, 32)),
    "float32": CHUNK.but(dtype=4, shape=(2, 2, 8, 32)),
    "bytes": Meta(4096, 4, 6, (4096, 0, 0, 0)),
}


class LmTalk(Talk):
    """A conversation over lm://."""

    def __init__(self, address: tuple[str, int], patience_s: float, model: str) -> None:
        super().__init__(address, patience_s, model)
        self._said: dict[tuple[str, int], Meta] = {}

    def verbs(self) -> dict[str, Verb]:
        """Everything that a step of an lm case can do."""
        return {
            **super().verbs(),
            "put": self.put,
            "get": self.get,
            "exist": self.exist,
            "health": self.health,
            "ask": self.ask,
            "header": self.header,
            "answer": self.answer,
            "put-and-get": self.put_and_get,
        }

    def key(self, step: Step) -> str:
        """The key text of a step: `text` filled in, or one made from `key`.

        {model} is this case's model name, {fill} as much as makes the text 150 bytes long.
        """
        if "text" in step:
            text = str(step["text"]).replace("{model}", self.model)
            return text.replace("{fill}", "f" * (KEY_BYTES + len("{fill}") - len(text)))
        digest = hashlib.sha256(str(step["key"]).encode()).hexdigest()[:15]
        return f"{self.model}@1@0@1{digest}@bfloat16"

    def put(self, step: Step) -> str:
        """Put pattern `data`; `sent` bytes of it only, if given, and `lie` changes the header."""
        self.channel(step).send(self._put_bytes(step))
        return "sent"

    def get(self, step: Step) -> str:
        """Ask for a chunk and judge what comes."""
        channel = self.channel(step)
        channel.send(Request(Command.GET, self.key(step)).pack())
        return self._chunk(channel, step)

    def exist(self, step: Step) -> str:
        """Ask whether a chunk is there: "yes" or "no"."""
        self.channel(step).send(Request(Command.EXIST, self.key(step)).pack())
        return self._word(self.channel(step))

    def health(self, step: Step) -> str:
        """Ask for health: "yes" or "no"."""
        request = Request(Command.HEALTH, self.key({"key": "health"}))
        self.channel(step).send(request.pack())
        return self._word(self.channel(step))

    def ask(self, step: Step) -> str:
        """Several GETs before any answer is read; outcomes joined by commas, in order."""
        channel, keys = self.channel(step), step["keys"]
        asked = [Request(Command.GET, self.key({"key": name})).pack() for name in keys]
        channel.send(b"".join(asked))
        return ", ".join(self._chunk(channel, {"key": name}) for name in keys)

    def put_and_get(self, step: Step) -> str:
        """A PUT and the GET of its key in one segment."""
        channel = self.channel(step)
        channel.send(self._put_bytes(step) + Request(Command.GET, self.key(step)).pack())
        return self._chunk(channel, step)

    def header(self, step: Step) -> str:
        """A request header with changed fields (`lie`), `first` bytes of it, then what comes."""
        meta = Meta().but(**_lies(step))
        raw_key = step.get("raw_key")
        key = None if raw_key is None else str(raw_key).encode("latin-1")
        request = Request(step["command"], "" if key else self.key(step), meta)
        channel = self.channel(step)
        channel.send(request.pack(key)[: step.get("first", None)])
        return self._word(channel) if step.get("read", True) else "sent"

    def answer(self, step: Step) -> str:
        """Read the answer to a GET that was sent before."""
        return self._chunk(self.channel(step), step)

    def round(self, talk: Talk, name: str, seed: int) -> str:
        """Put and get on one connection of `talk`."""
        step = {"key": name, "data": seed}
        put = talk.play({"do": "put", **step})
        return talk.play({"do": "get", **step}) if put == "sent" else put

    def twin(self) -> Talk:
        """Another conversation that knows what all said."""
        twin = LmTalk(self.address, self.patience_s, self.model)
        twin._said = self._said
        return twin

    def _put_bytes(self, step: Step) -> bytes:
        meta = METAS[step.get("meta", "chunk")]
        self._said[self.key(step), int(step.get("data", 0))] = meta
        data = self.payload(step, meta.length)[: step.get("sent", None)]
        return Request(Command.PUT, self.key(step), meta.but(**_lies(step))).pack() + data

    def _word(self, channel: Channel) -> str:
        reply = Reply.unpack(channel.read(REPLY_BYTES))
        if reply.meta.length != 0:
            return f"length {reply.meta.length} where none was asked"
        return {SUCCESS: "yes", FAIL: "no"}.get(reply.code, f"code {reply.code}")

    def _chunk(self, channel: Channel, step: Step) -> str:
        reply = Reply.unpack(channel.read(REPLY_BYTES))
        if reply.code == FAIL:
            return "miss" if reply.meta.length == 0 else "miss with bytes"
        if reply.code != SUCCESS:
            return f"code {reply.code}"
        if not 0 <= reply.meta.length <= LARGEST:
            return f"length {reply.meta.length}"
        return self._judge(reply.meta, channel.read(reply.meta.length), step)

    def _judge(self, meta: Meta, data: bytes, step: Step) -> str:
        seed = self.which(data)
        if seed is None or not data:
            return f"{len(data)} wrong bytes"
        said = self._said.get((self.key(step), seed))
        if said is None:
            said = next((m for (_, s), m in self._said.items() if s == seed), Meta())
        if said.but(location=meta.location) != meta or not 0 <= meta.location <= 2:
            return f"hit {seed} with another header"
        return f"hit {seed}"


def _lies(step: Step) -> dict[str, int | tuple[int, int, int, int]]:
    """The changed header fields of a step, `shape` as a tuple."""
    lies = dict(step.get("lie", {}))
    if "shape" in lies:
        a, b, c, d = lies["shape"] or NO_SHAPE
        lies["shape"] = (a, b, c, d)
    return lies
