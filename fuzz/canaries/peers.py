# SPDX-License-Identifier: Apache-2.0
"""Seeded faults in the LMCache side: key texts, companions, and what clients believe."""

from __future__ import annotations

import re
from typing import Any

from fuzz.canaries import Canary
from fuzz.canaries.tools import gone, instead
from kvsafe.lmcache import companion, exchange, frames, keys, lmclient, objectkeys, resp, respclient
from kvsafe.lmcache.answers import Found

_judge_get = frames.judge_get
_names = companion.Companions._names
_body = resp.ReplyReader.body
_ANY = re.compile(r".*", re.DOTALL)


def _as_asked(*names: str) -> Any:
    """The judge of a reply that does not look at these fields."""

    def judge(reply: Any, shape: Any) -> Any:
        return _judge_get(reply._replace(**{name: getattr(shape, name) for name in names}), shape)

    return instead(lmclient, "judge_get", judge)


def _any_length(reader: Any, into: memoryview, deadline: Any) -> Any:
    typed = resp._typed(reader, deadline)
    if isinstance(typed, tuple) and typed[0] == b"$" and typed[1] != b"-1":
        return reader.body(into, deadline) or Found.HIT
    return Found.ABSENT if isinstance(typed, tuple) else typed


def _no_line_end(self: Any, into: memoryview, deadline: Any) -> None:
    _body(self, into, deadline)


CANARIES = (
    Canary("the length of a value is not compared", "lm", "another length passes as a hit", 600,
           _as_asked("length")),
    Canary("the shape of a value is not compared", "lm", "another shape of equal size passes", 1500,
           _as_asked("dims")),
    Canary("the type of a value is not compared", "lm", "another element type passes", 1500,
           _as_asked("dtype")),
    Canary("any code is a hit", "lm", "a refusal with bytes behind it passes", 1500,
           instead(lmclient, "judge_get",
                   lambda reply, shape: _judge_get(reply._replace(code=200), shape))),
    Canary("torn values stay in the buffer", "lm", "half a value is left behind", 300,
           instead(lmclient, "wipe_misses", lambda items, answers: answers)),
    Canary("answers are in another order", "lm", "a hit belongs to another question", 100,
           instead(lmclient, "run",
                   lambda links, one, answers: exchange.run(links, one, answers)[::-1])),
    Canary("a store is believed unasked", "lm", "nobody asks whether a value is there", 600,
           instead(lmclient, "_take_look", lambda replies, at, deadline: (
               replies.next(deadline), Found.HIT)[1])),
    Canary("a length is not compared", "resp", "another length passes as a hit", 600,
           instead(respclient, "read_value", _any_length)),
    Canary("no line end behind a value", "resp", "what is behind a value is not looked at", 600,
           instead(resp.ReplyReader, "body", _no_line_end)),
    Canary("half a value stays in the buffer", "resp", "half a value is left behind", 300,
           instead(respclient, "wipe_misses", lambda items, answers: answers)),
    Canary("an absent value is a hit", "resp", "the null reply passes as a value", 100,
           instead(respclient, "read_value",
                   lambda reader, into, deadline, right=resp.read_value: (
                       Found.HIT if right(reader, into, deadline) is Found.ABSENT
                       else Found.ABSENT))),
    Canary("names may hold separators", "lmkeys", "one text for two keys", 1000,
           instead(keys, "_NAME", _ANY)),
    Canary("tags may hold separators", "lmkeys", "a tag is taken for two", 600,
           instead(keys, "_BARE", _ANY)),
    Canary("numbers may have leading zeros", "lmkeys", "two texts for one key", 2000,
           instead(keys, "_NUMBER", re.compile(r"[0-9]+"))),
    Canary("keys of any length", "lmkeys", "a server cuts the key", 2000,
           gone(keys, "check_length")),
    Canary("a salt may hold separators", "lmkeys", "one text for two object keys", 600,
           instead(objectkeys, "_SALT", _ANY)),
    Canary("a companion of other names", "lmkeys", "a chunk's companion passes for another's", 600,
           instead(companion.Companions, "_names", lambda self, parts: _names(
               self, parts[:1]))),
    Canary("a companion's tag is not compared", "lmkeys", "anybody can make a companion", 1500,
           instead(companion, "tags_equal", lambda *_: True)),
)  # fmt: skip
