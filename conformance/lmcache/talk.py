# SPDX-License-Identifier: Apache-2.0
"""What the steps of a case do, whatever the wire: connections by name, keys by name, races.

A step is a JSON object: `do` is the verb, `on` the connection ("a" unless said), `want` the
outcomes that are right. A verb returns its outcome as a short text: "hit 3" is a hit with
exactly the bytes of pattern 3 and what was said about them when they were put.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from conformance.lmcache.channel import Channel, Trouble
from conformance.lmcache.wire import pattern

__all__ = ["SEEDS", "Step", "Talk"]

Step = Mapping[str, Any]
Verb = Callable[[Step], str]
SEEDS = 16
LARGEST = 64 << 20


class Talk:
    """One case's conversation with the server; a fresh one per case, closed at its end."""

    def __init__(self, address: tuple[str, int], patience_s: float, model: str) -> None:
        self.address, self.patience_s, self.model = address, patience_s, model
        self._channels: dict[str, Channel] = {}

    def verbs(self) -> dict[str, Verb]:
        """The verbs of this wire by name."""
        return {"leave": self.leave, "wait": self.wait, "race": self.race, "bytes": self.raw}

    def play(self, step: Step) -> str:
        """Do one step; trouble on the way is its outcome, and drops the connection."""
        try:
            return self.verbs()[step["do"]](step)
        except Trouble as trouble:
            self.drop(step)
            return str(trouble)
        except OSError:
            self.drop(step)
            return "closed"

    def channel(self, step: Step) -> Channel:
        """The connection that the step names, opened at its first use."""
        name = step.get("on", "a")
        if name not in self._channels:
            self._channels[name] = Channel(self.address, self.patience_s)
        return self._channels[name]

    def drop(self, step: Step) -> None:
        """Close the connection that the step names, if it is open."""
        channel = self._channels.pop(step.get("on", "a"), None)
        if channel is not None:
            channel.close()

    def leave(self, step: Step) -> str:
        """The client goes away."""
        self.drop(step)
        return "gone"

    def wait(self, step: Step) -> str:
        """Do nothing for `seconds`."""
        time.sleep(float(step["seconds"]))
        return "waited"

    def raw(self, step: Step) -> str:
        """Send the bytes of `text` as they are, `times` over."""
        text = str(step["text"]).encode("latin-1")
        self.channel(step).send(text * int(step.get("times", 1)))
        return "sent"

    def stray(self) -> bool:
        """Whether any open connection holds bytes that nobody asked for."""
        return any(channel.stray() for channel in self._channels.values())

    def close(self) -> None:
        """Close every connection."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def payload(self, step: Step, length: int) -> bytes:
        """The pattern that a step writes."""
        return pattern(length, int(step.get("data", 0)))

    def which(self, data: bytes) -> int | None:
        """The number of the pattern that `data` is, None for other bytes."""
        return next((seed for seed in range(SEEDS) if pattern(len(data), seed) == data), None)

    def round(self, talk: Talk, name: str, seed: int) -> str:
        """Write pattern `seed` under `name` and read it back, on one connection."""
        raise NotImplementedError

    def twin(self) -> Talk:
        """A second conversation with the same server, keys and patience."""
        raise NotImplementedError

    def race(self, step: Step) -> str:
        """Several clients at once, each with its own key, or all on one key (`shared`)."""
        found: list[str] = []
        clients, rounds, shared = step["clients"], step["rounds"], step.get("shared", False)

        def one(number: int) -> None:
            talk = self.twin()
            try:
                for turn in range(rounds):
                    seed = (number + turn) % SEEDS
                    outcome = self.round(talk, "S" if shared else f"R{number}", seed)
                    right = outcome.startswith("hit ") if shared else outcome == f"hit {seed}"
                    if not right:
                        found.append(outcome)
                        return
            finally:
                talk.close()

        threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join((2 * rounds + 1) * self.patience_s)
        if any(thread.is_alive() for thread in threads):
            return "silent"
        return found[0] if found else "ok"
