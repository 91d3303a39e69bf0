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
        self._believed: set[bytes] = set()
        self._generation = 0
        self._take = half.manager.take_events
        half.manager.take_events = self._heard

    def _heard(self) -> Iterable[OffloadingEvent]:
        self._note_reset()
        for event in self._take():
            if event.medium is Medium.CPU:
                self._counts["announcement"] += 1
                keys = set(event.keys)
                self._believed = self._believed - keys if event.removed else self._believed | keys
            yield event

    def look(self) -> None:
        """Raises `WrongWorld` if a chunk is believed to be there that is not.

        What is queued has not been heard yet, so it is counted in.
        """
        self._note_reset()
        manager = self._half.manager
        believed = set(self._believed)
        for event in primary_of(manager).events:
            keys = set(event.keys)
            believed = believed - keys if event.removed else believed | keys
        missing = believed - set(chunks_of(manager))
        if missing:
            raise WrongWorld("announced", "a chunk was announced as stored that is not there")

    def _note_reset(self) -> None:
        # A reset is no secret: whoever asks for it can tell the listeners. So they forget.
        generation = primary_of(self._half.manager)._cache_generation
        if generation != self._generation:
            self._generation = generation
            self._believed.clear()
