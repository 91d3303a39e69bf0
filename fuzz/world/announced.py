# SPDX-License-Identifier: Apache-2.0
"""What a listener to KV events believes about host memory, held against host memory."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.v1.kv_offload.base import Medium, OffloadingEvent

from fuzz.world.checks import chunks_of, primary_of
from fuzz.world.outcome import WrongWorld


class Announced:
    """Listens where the manager's events leave it."""

    def __init__(self, half: Any, counts: Counter[str]) -> None:
        self._half = half
        self._counts = counts
        self._believed: frozenset[bytes] = frozenset()
        self._generation = 0
        self._take = half.manager.take_events
        half.manager.take_events = self._heard

    def _heard(self) -> Iterable[OffloadingEvent]:
        self._note_reset()
        for event in self._take():
            if event.medium is Medium.CPU:
                self._counts["announcement"] += 1
                self._believed = _after(self._believed, event)
            yield event

    def look(self) -> None:
        """Raises `WrongWorld` if what is believed to be there is not what is there.

        What is queued has not been heard yet, so it is counted in.
        """
        self._note_reset()
        manager = self._half.manager
        believed = self._believed
        for event in primary_of(manager).events:
            believed = _after(believed, event)
        chunks = chunks_of(manager)
        if believed - set(chunks):
            raise WrongWorld("announced", "a chunk was announced as stored that is not there")
        written = {key for key, chunk in chunks.items() if chunk.ref_cnt >= 0}
        if written - believed:
            raise WrongWorld("announced", "a chunk is there that was never announced")

    def _note_reset(self) -> None:
        # A reset is no secret: whoever asks for it can tell the listeners. So they forget.
        generation = primary_of(self._half.manager)._cache_generation
        if generation != self._generation:
            self._generation = generation
            self._believed = frozenset()


def _after(believed: frozenset[bytes], event: OffloadingEvent) -> frozenset[bytes]:
    """What is believed after one more event. A listener that counts must hear of each once."""
    keys = frozenset(event.keys)
    if event.removed:
        if keys - believed:
            raise WrongWorld("announced", "a chunk was announced as removed that was not stored")
        return believed - keys
    if keys & believed:
        raise WrongWorld("announced", "a chunk was announced as stored twice")
    return believed | keys
