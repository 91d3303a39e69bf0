# SPDX-License-Identifier: Apache-2.0
"""The files of a `kvsafe-fs` tier towards the engine: refused ones, KV events, and counts."""

import queue
from collections import Counter, OrderedDict
from collections.abc import Iterable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
)

from kvsafe.engine.tiers.objects import NOT_THE_OBJECTS_FAULT, NoteObject
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.tiers import SUFFIX, ChunkStore, Flaw

OPERATIONS = "kvsafe:fs_operations"
EVICTED = "kvsafe:fs_evicted"
CHARGED = "kvsafe:fs_charged_bytes"
CAPACITY = "kvsafe:fs_capacity_bytes"
STUCK = "kvsafe:fs_stuck_threads"


class FsTierObjects:
    """The files of a `kvsafe-fs` tier as `ProvingTier` handles refused ones."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self.on_refusal: NoteObject | None = None
        store.on_flaw = self._note

    def exists(self, name: OffloadKey) -> bool:
        """Whether anything stands at the name."""
        return self._store.exists(bytes(name))

    def quarantine(self, name: OffloadKey, refusal: Refusal) -> bool:
        """Take the file that was refused out of the way; one that is newer stays."""
        if refusal.kind in NOT_THE_OBJECTS_FAULT:
            return False
        if refusal.kind is RefusalKind.EPOCH_REVOKED:
            # Whole but worthless for ever; keeping it aside proves nothing.
            return self._store.discard(bytes(name))
        return self._store.quarantine(bytes(name), refusal.number, str(refusal))

    def _note(self, name: bytes, flaw: Flaw, moved: bool) -> None:
        refusal = Refusal.of(RefusalKind.TIER_OBJECT, flaw.field, flaw.expected, flaw.found)
        if self.on_refusal is not None:
            self.on_refusal(OffloadKey(name), refusal, moved)


class FsEvents:
    """KV events of one tier: what it has stored, and what of that has gone again.

    What other processes store or remove in the same folder is not told, nor what this one
    stored before its last `LIMIT` chunks.
    """

    LIMIT = 1 << 18

    def __init__(self, store: ChunkStore, locality: Locality | None) -> None:
        self._locality = locality
        self._told: OrderedDict[bytes, OffloadKey] = OrderedDict()
        self._on_their_way: dict[bytes, bool] = {}
        self._gone: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._events: list[OffloadingEvent] = []
        store.room.on_gone = self._gone.put

    def begin(self, names: Iterable[bytes]) -> None:
        """These chunks are being stored; each may be evicted again before that is known."""
        self._on_their_way.update(dict.fromkeys(names, True))

    def end(self, chunks: Iterable[tuple[bytes, OffloadKey, bool]]) -> None:
        """Stores have ended: name, key, and whether it is in the tier now."""
        self._remove_gone()
        new = {}
        for name, key, good in chunks:
            if self._on_their_way.pop(name, True) and good:
                new[name] = key
        self._told.update(new)
        while len(self._told) > self.LIMIT:
            self._told.popitem(last=False)
        self._add(list(new.values()), removed=False)

    def take(self) -> list[OffloadingEvent]:
        """The events since the last call."""
        self._remove_gone()
        events, self._events = self._events, []
        return events

    def _remove_gone(self) -> None:
        keys = []
        for _ in range(self._gone.qsize()):
            name = _object_name(self._gone.get())
            if name in self._told:
                keys.append(self._told.pop(name))
            elif name in self._on_their_way:
                self._on_their_way[name] = False
        self._add(keys, removed=True)

    def _add(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys:
            self._events.append(
                OffloadingEvent(keys, Medium.STORAGE, removed, locality=self._locality)
            )


def _object_name(file: str) -> bytes:
    """The object name of a chunk file; none for a stray file, which is evicted like any other."""
    try:
        return bytes.fromhex(file.removesuffix(SUFFIX))
    except ValueError:
        return b""


def fs_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Metrics of a `kvsafe-fs` tier, by name."""
    counter, gauge = OffloadingCounterMetadata, OffloadingGaugeMetadata
    return {
        OPERATIONS: counter(
            "Loads and stores of the kvsafe-fs tier, and what came of them.",
            labelnames=("tier", "outcome"),
        ),
        EVICTED: counter("Files evicted from the kvsafe-fs tier.", labelnames=("tier", "kind")),
        CHARGED: gauge("Bytes charged to the store, all writers.", labelnames=("tier",)),
        CAPACITY: gauge("Capacity of the store in bytes.", labelnames=("tier",)),
        STUCK: gauge("Threads that are stuck in a call.", labelnames=("tier",)),
    }


class FsTally:
    """Turns the store's running totals into what vLLM collects."""

    def __init__(self, store: ChunkStore, tier: str) -> None:
        self._store = store
        self._tier = tier
        self._told: Counter[tuple[str, str]] = Counter()

    def stats(self, stuck_threads: int) -> OffloadingConnectorStats:
        """Counts since the last call, and the present gauges."""
        stats = OffloadingConnectorStats()
        store, tier = self._store, self._tier
        for name, counts in ((OPERATIONS, store.counts), (EVICTED, store.room.evicted)):
            for label, total in list(counts.items()):
                amount = total - self._told[name, label]
                if amount:
                    stats.increase_counter(name, amount, (tier, label))
                    self._told[name, label] = total
        stats.set_gauge(CHARGED, store.charged, (tier,))
        stats.set_gauge(CAPACITY, store.setting.capacity_bytes, (tier,))
        stats.set_gauge(STUCK, stuck_threads, (tier,))
        return stats
