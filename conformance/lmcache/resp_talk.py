# SPDX-License-Identifier: Apache-2.0
"""The verbs of cases for a RESP server (Redis, Valkey and what claims to be one)."""

from __future__ import annotations

import hashlib

from conformance.lmcache.channel import Channel
from conformance.lmcache.talk import LARGEST, Step, Talk, Verb

__all__ = ["RespTalk"]

SIZES = {"chunk": 4096, "half": 2048, "large": 8 << 20, "none": 0}


def command(*words: bytes) -> bytes:
    """A command as RESP sends it: an array of bulk strings."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


class RespTalk(Talk):
    """A conversation over RESP."""

    def __init__(self, address: tuple[str, int], patience_s: float, model: str) -> None:
        super().__init__(address, patience_s, model)
        self._sizes: dict[tuple[bytes, int], int] = {}

    def verbs(self) -> dict[str, Verb]:
        """Everything that a step of a resp case can do."""
        return {
            **super().verbs(),
            "set": self.set,
            "get": self.get,
            "exists": self.exists,
            "ask": self.ask,
            "say": self.say,
            "answer": self.answer,
        }

    def key(self, name: str) -> bytes:
        """The key text of an MP peer: model, kv rank, group, 64 hex digits."""
        digest = hashlib.sha256(name.encode()).hexdigest()
        return f"{self.model}@01000100@0@{digest}{name if '@' in name else ''}".encode()

    def set(self, step: Step) -> str:
        """Set pattern `data`; `sent` bytes of the command only, if given."""
        value = self.payload(step, SIZES[step.get("size", "chunk")])
        key = self.key(step["key"])
        self._sizes[key, int(step.get("data", 0))] = len(value)
        raw = command(b"SET", key, value)[: step.get("sent", None)]
        channel = self.channel(step)
        for start in range(0, len(raw), step.get("piece", len(raw))):
            channel.send(raw[start : start + step.get("piece", len(raw))])
        return "sent" if "sent" in step else self._answer(channel)

    def get(self, step: Step) -> str:
        """Get a value and judge it."""
        channel = self.channel(step)
        channel.send(command(b"GET", self.key(step["key"])))
        return self._value(channel, step["key"])

    def exists(self, step: Step) -> str:
        """Ask for the number of these keys that exist: "int N"."""
        channel = self.channel(step)
        names = step.get("keys") or [step["key"]]
        channel.send(command(b"EXISTS", *(self.key(name) for name in names)))
        return self._answer(channel)

    def ask(self, step: Step) -> str:
        """Several GETs before any answer is read; outcomes joined by commas, in order."""
        channel, keys = self.channel(step), step["keys"]
        channel.send(b"".join(command(b"GET", self.key(name)) for name in keys))
        return ", ".join(self._value(channel, name) for name in keys)

    def say(self, step: Step) -> str:
        """Any command by its words; {key:NAME} stands for a key."""
        words = [self._word(str(word)) for word in step["words"]]
        channel = self.channel(step)
        channel.send(command(*words))
        return self._answer(channel)

    def answer(self, step: Step) -> str:
        """Read one answer to what was sent before."""
        return self._answer(self.channel(step))

    def round(self, talk: Talk, name: str, seed: int) -> str:
        """Set and get on one connection of `talk`."""
        done = talk.play({"do": "set", "key": name, "data": seed})
        return talk.play({"do": "get", "key": name}) if done == "ok" else done

    def twin(self) -> Talk:
        """Another conversation with the same server."""
        twin = RespTalk(self.address, self.patience_s, self.model)
        twin._sizes = self._sizes
        return twin

    def _word(self, word: str) -> bytes:
        if word.startswith("{key:"):
            return self.key(word[5:-1])
        return word.encode("latin-1")

    def _value(self, channel: Channel, name: str) -> str:
        """The answer to a GET; a hit must have the length that was set."""
        outcome, length = self._read(channel)
        if not outcome.startswith("hit "):
            return outcome
        said = self._sizes.get((self.key(name), int(outcome[4:])), length)
        return outcome if length == said else f"{outcome} in {length} bytes instead of {said}"

    def _answer(self, channel: Channel) -> str:
        return self._read(channel)[0]

    def _read(self, channel: Channel) -> tuple[str, int]:
        line = channel.read_line()
        mark, text = line[:1], line[1:].decode("latin-1")
        if mark == b"$" and text.lstrip("-").isdigit():
            return self._bulk(channel, int(text)), int(text)
        match mark:
            case b"+":
                return text.lower()[:40], 0
            case b"-":
                return "error", 0
            case b":":
                return f"int {text[:20]}", 0
            case b"*" | b"%":
                return f"several values ({text[:10]})", 0
        return f"answer of an unknown form: {line[:20]!r}", 0

    def _bulk(self, channel: Channel, length: int) -> str:
        if length == -1:
            return "nil"
        if not 0 <= length <= LARGEST:
            return f"length {length}"
        data = channel.read(length + 2)
        if not data.endswith(b"\r\n"):
            return "no end of line behind the value"
        if length == 0:
            return "empty"
        seed = self.which(data[:-2])
        return f"{length} wrong bytes" if seed is None else f"hit {seed}"
