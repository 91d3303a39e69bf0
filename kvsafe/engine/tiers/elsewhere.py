# SPDX-License-Identifier: Apache-2.0
"""A miss with a reason: does the tier hold this chunk under another identity?

Object names contain the identity, so a changed setting gives misses and not refusals. This asks
the tier's store in the background and counts what it finds as the refusal that names the field.
"""

from concurrent.futures import ThreadPoolExecutor

from vllm.v1.kv_offload.base import OffloadKey

from kvsafe.engine.counters import Counters
from kvsafe.engine.journal import RefusalJournal
from kvsafe.engine.tiers.names import ObjectNames
from kvsafe.engine.tiers.objects import ObjectStore

_ASK_LIMIT = 4096


class Elsewhere:
    """The questions of one tier: each request asks for a key once."""

    def __init__(
        self, names: ObjectNames, counters: Counters, journal: RefusalJournal, label: str
    ) -> None:
        self._names = names
        self._counters = counters
        self._journal = journal
        self._label = label
        self._asked: dict[str, set[OffloadKey]] = {}
        self._to_ask: list[OffloadKey] = []

    def ask(self, key: OffloadKey, request: str) -> None:
        """This chunk was a miss for this request."""
        asked = self._asked.setdefault(request, set())
        if key not in asked and len(self._to_ask) < _ASK_LIMIT:
            asked.add(key)
            self._to_ask.append(key)

    def forget(self, request: str) -> None:
        """The request is over."""
        self._asked.pop(request, None)

    def send(self, store: ObjectStore | None, threads: ThreadPoolExecutor) -> None:
        """Look for what was asked since the last call."""
        if self._to_ask and store is not None:
            keys, self._to_ask = self._to_ask, []
            threads.submit(self._answer, store, keys)

    def _answer(self, store: ObjectStore, keys: list[OffloadKey]) -> None:
        for key in keys:
            for foreign in self._names.foreign:
                if store.exists(OffloadKey(foreign.name(key))):
                    self._counters.refused(foreign.refusal, self._label)
                    self._journal.note(foreign.refusal, key, self._label)
                    break
