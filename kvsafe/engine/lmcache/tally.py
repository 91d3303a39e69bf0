# SPDX-License-Identifier: Apache-2.0
"""Counts of a `kvsafe-lmcache` tier for metrics: what came of operations, and what is trusted."""

import threading
from collections import Counter

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvsafe.lmcache.links import Links

OPERATIONS = "kvsafe:peer_operations"
UNATTESTED = "kvsafe:peer_unattested_chunks"
TRUST = "kvsafe:peer_trust_info"
CONNECTIONS = "kvsafe:peer_connections"
STUCK = "kvsafe:peer_stuck_threads"


def peer_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Metrics of a `kvsafe-lmcache` tier, by name."""
    counter, gauge = OffloadingCounterMetadata, OffloadingGaugeMetadata
    return {
        OPERATIONS: counter(
            "Loads and stores of a kvsafe-lmcache tier, and what came of them.",
            labelnames=("tier", "operation", "outcome"),
        ),
        UNATTESTED: counter(
            "Chunks of peers that were taken although nobody attests them (trust: peer).",
            labelnames=("tier",),
        ),
        TRUST: gauge("1 for the trust in use.", labelnames=("tier", "trust")),
        CONNECTIONS: counter(
            "Connections to the peers' server: made, failed, dropped.",
            labelnames=("tier", "event"),
        ),
        STUCK: gauge("Threads of the tier that are stuck in a call.", labelnames=("tier",)),
    }


class PeerTally:
    """Turns running totals into what vLLM collects. Counting is thread-safe."""

    def __init__(self, tier: str, trust: str, links: Links) -> None:
        self._tier = tier
        self._trust = trust
        self._links = links
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._told: Counter[str] = Counter()

    def count(self, operation: str, outcome: str) -> None:
        """One load or store of one chunk has ended."""
        with self._lock:
            self._counts[OPERATIONS, (self._tier, operation, outcome)] += 1

    def unattested(self) -> None:
        """A chunk was taken that nobody attests."""
        with self._lock:
            self._counts[UNATTESTED, (self._tier,)] += 1

    def stats(self, stuck_threads: int) -> OffloadingConnectorStats:
        """Counts since the last call, and the present gauges."""
        stats = OffloadingConnectorStats()
        with self._lock:
            counts, self._counts = self._counts, Counter()
        for (name, labels), amount in counts.items():
            stats.increase_counter(name, amount, labels)
        links = self._links.counts
        for event, total in (
            ("made", links.connected),
            ("failed", links.failed),
            ("dropped", links.dropped),
        ):
            if total != self._told[event]:
                amount, self._told[event] = total - self._told[event], total
                stats.increase_counter(CONNECTIONS, amount, (self._tier, event))
        stats.set_gauge(TRUST, 1, (self._tier, self._trust))
        stats.set_gauge(STUCK, stuck_threads, (self._tier,))
        return stats
