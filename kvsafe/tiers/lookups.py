# SPDX-License-Identifier: Apache-2.0
"""Lookups that never block: asked by the scheduler, answered by a thread, kept per request.

An answer lives as long as a request that asked for it, so that one scheduling decision does
not change under it; a chunk that failed to load is a miss for all of them (F11), one that
was stored meanwhile a hit. A lookup that is not answered in time is a miss. There is one
small record per name in use, and a limit on their number: above it everything is a miss.
"""

from collections.abc import Hashable, Iterable

NAMES_LIMIT = 1 << 18
BATCH = 128


class _Record:
    __slots__ = ("answer", "asked", "requests")

    def __init__(self) -> None:
        self.answer: bool | None = None
        self.asked = False
        self.requests: set[Hashable] = set()


class LookupDesk:
    """Names asked for by the requests of one engine, in batches. Used by one thread."""

    def __init__(self, limit: int = NAMES_LIMIT, batch: int = BATCH) -> None:
        self._limit = limit
        self._batch = batch
        self._records: dict[bytes, _Record] = {}
        self._by_request: dict[Hashable, set[bytes]] = {}
        self._new: list[bytes] = []

    def __len__(self) -> int:
        return len(self._records)

    def ask(self, name: bytes, request: Hashable) -> bool | None:
        """True, False, or None while the answer is on its way."""
        record = self._records.get(name)
        if record is None:
            if len(self._records) >= self._limit:
                return False
            record = self._records[name] = _Record()
            self._new.append(name)
        record.requests.add(request)
        self._by_request.setdefault(request, set()).add(name)
        return record.answer

    def batches(self) -> list[list[bytes]]:
        """The names to look for since the last call, in batches."""
        names, self._new = self._new, []
        wanted = []
        for name in names:
            record = self._records.get(name)
            if record is not None and not record.asked:
                record.asked = True
                wanted.append(name)
        step = self._batch
        return [wanted[at : at + step] for at in range(0, len(wanted), step)]

    def answer(self, names: Iterable[bytes], found: Iterable[bool]) -> None:
        """Note what a batch has found. What was settled meanwhile stays as it is."""
        for name, hit in zip(names, found, strict=True):
            record = self._records.get(name)
            if record is not None and record.answer is None:
                record.answer = hit
                if not record.requests:
                    del self._records[name]

    def settle(self, names: Iterable[bytes], found: bool) -> None:
        """What is known for certain now: stored, or failed to load."""
        for name in names:
            record = self._records.get(name)
            if record is not None:
                record.answer = found
                if not record.requests:
                    del self._records[name]

    def forget(self, request: Hashable) -> None:
        """A request has ended."""
        for name in self._by_request.pop(request, ()):
            record = self._records[name]
            record.requests.discard(request)
            if not record.requests and (record.answer is not None or not record.asked):
                del self._records[name]
