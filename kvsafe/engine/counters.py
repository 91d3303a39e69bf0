# SPDX-License-Identifier: Apache-2.0
"""Counters and Prometheus metrics of kvsafe, on vLLM's own `/metrics` under `kvsafe:`."""

import threading
import time
from collections import Counter

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvsafe.engine.rows.transfer import ProofCounts
from kvsafe.seal.refusal import Refusal

SEALED = "kvsafe:chunks_sealed"
OPENED = "kvsafe:chunks_opened"
SERVED = "kvsafe:chunks_served"
STORED = "kvsafe:chunks_stored"
REFUSED = "kvsafe:refusals"
QUARANTINED = "kvsafe:quarantined"
BYTES_VERIFIED = "kvsafe:bytes_verified"
VERIFY_SECONDS = "kvsafe:verify_seconds"
STORES_FAILED = "kvsafe:stores_failed"
EPOCH = "kvsafe:epoch"
SUITE = "kvsafe:suite_info"
OVERRIDE = "kvsafe:override_active"
TIER_FAULTS = "kvsafe:tier_faults"
DIVERGENCES = "kvsafe:monitor_divergences"
MONITOR_STOPPED = "kvsafe:monitor_stopped"
PUT_OFF = "kvsafe:loads_put_off"
UNSERVED = "kvsafe:stored_but_never_served_seconds"

_VERIFY_BUCKETS = (1e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0)


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """All metrics that kvsafe emits, by name."""
    counter, gauge = OffloadingCounterMetadata, OffloadingGaugeMetadata
    return {
        SEALED: counter("Chunks whose header was closed after all workers had reported."),
        OPENED: counter(
            "Chunks that passed every step of opening, by place.", labelnames=("place",)
        ),
        SERVED: counter("Chunks loaded into the accelerator."),
        STORED: counter("Chunks made ready in the host tier."),
        REFUSED: counter(
            "Chunks refused, by refusal number, step and tier.",
            labelnames=("number", "step", "tier"),
        ),
        QUARANTINED: counter(
            "Objects moved aside or removed after a refusal, by tier.", labelnames=("tier",)
        ),
        BYTES_VERIFIED: counter("Payload bytes whose tag was checked."),
        VERIFY_SECONDS: OffloadingHistogramMetadata(
            "Time to open one chunk, in seconds.", buckets=_VERIFY_BUCKETS
        ),
        STORES_FAILED: counter("Chunks whose store failed and that never became ready."),
        EPOCH: gauge("The present epoch; it goes up with every reset of external tiers."),
        SUITE: gauge("1 for the suite in use.", labelnames=("suite",)),
        OVERRIDE: gauge("1 for every safety override that is set.", labelnames=("override",)),
        TIER_FAULTS: counter(
            "Calls of a tier that raised, answered what cannot be used, or held up too long.",
            labelnames=("tier", "call"),
        ),
        DIVERGENCES: counter(
            "Steps of the host tier that the lifecycle machine does not allow, by the law broken.",
            labelnames=("law",),
        ),
        MONITOR_STOPPED: counter(
            "1 once the monitor (enforce) has stopped offering and storing chunks."
        ),
        PUT_OFF: counter(
            "Requests told to wait with a load until others that have loaded run, once per wait.",
            labelnames=("reason",),
        ),
        UNSERVED: gauge(
            "Seconds since the first chunk was stored without any chunk having been served; "
            "0 once one was. Alert when it stays above your reuse horizon."
        ),
    }


class Counters:
    """Counts of one scheduler process, drained into vLLM's stats once per interval.

    Thread-safe: proofs run in threads.
    """

    def __init__(self, suite: str, overrides: tuple[str, ...]) -> None:
        self._suite = suite
        self._overrides = overrides
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._seconds: list[float] = []
        self._first_stored: float | None = None
        self._served = 0
        self.totals: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1, labels: tuple[str, ...] = ()) -> None:
        """Increase a counter."""
        with self._lock:
            self._counts[name, labels] += amount
            self.totals[name] += amount

    def stored(self, chunks: int) -> None:
        """Note chunks that became ready."""
        if chunks and self._first_stored is None:
            self._first_stored = time.monotonic()
        self.add(STORED, chunks)

    def served(self, chunks: int) -> None:
        """Note chunks that reached the accelerator."""
        self._served += chunks
        self.add(SERVED, chunks)

    def refused(self, refusal: Refusal, tier: str) -> None:
        """Note one refusal."""
        self.add(REFUSED, 1, (str(refusal.number), str(refusal.step), tier))

    def proven(self, place: str, payload_bytes: int, seconds: float, chunks: int = 1) -> None:
        """Note chunks that were opened: bytes and seconds of each."""
        self.add(OPENED, chunks, (place,))
        self.add(BYTES_VERIFIED, payload_bytes * chunks)
        with self._lock:
            self._seconds += [seconds] * chunks

    def worker_proofs(self, counts: ProofCounts) -> None:
        """Note what workers have proven."""
        if counts.opened:
            self.add(OPENED, counts.opened, ("worker",))
            self.add(BYTES_VERIFIED, counts.bytes_verified)
        with self._lock:
            self._seconds.extend(counts.seconds)

    def drain(self, epoch: int) -> OffloadingConnectorStats:
        """Everything since the last call, as vLLM stats."""
        stats = OffloadingConnectorStats()
        with self._lock:
            counts, self._counts = self._counts, Counter()
            seconds, self._seconds = self._seconds, []
        for (name, labels), amount in counts.items():
            stats.increase_counter(name, amount, labels)
        for value in seconds:
            stats.observe_histogram(VERIFY_SECONDS, value)
        stats.set_gauge(EPOCH, epoch)
        stats.set_gauge(SUITE, 1, (self._suite,))
        for override in self._overrides:
            stats.set_gauge(OVERRIDE, 1, (override,))
        stats.set_gauge(UNSERVED, self._unserved_seconds())
        return stats

    def _unserved_seconds(self) -> float:
        if self._first_stored is None or self._served:
            return 0.0
        return time.monotonic() - self._first_stored
