# SPDX-License-Identifier: Apache-2.0
"""The door to a tier that somebody else wrote: it may answer anything, and it may raise.

vLLM's managers trust their tiers: a report of a job that they do not know, a statistic without
a definition, or any exception ends the engine. Every call of a wrapped tier goes through here;
an exception becomes the answer that costs least, and what is reported is taken apart and put
together again from what can be used. Each kind of fault is logged once and counted. A tier that
holds the scheduler up is left alone for a while (`pace`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvsafe.engine.counters import TIER_FAULTS, Counters
from kvsafe.engine.journal import logger
from kvsafe.engine.tiers.pace import Pace

T = TypeVar("T")

MOST_AT_ONCE = 65536
"""How many reports, events or samples are taken from one call; the rest waits or is dropped."""
_NEEDED = frozenset({"submit_load", "on_new_request", "on_request_finished"})
"""Calls that are made also while a tier is left alone: rows, or its own books, depend on them."""


class TierDoor:
    """Calls into one wrapped tier. One thread (the scheduler's)."""

    def __init__(self, inner: SecondaryTierManager, label: str, counters: Counters) -> None:
        self._inner = inner
        self._label = label
        self._counters = counters
        self.faults: Counter[str] = Counter()
        self._pace = Pace(label, self.fault)

    def fault(self, call: str, what: object) -> None:
        """Note something that the tier should not have done; only its kind is logged, once."""
        kind = type(what).__name__ if isinstance(what, BaseException) else str(what)
        if not self.faults[call]:
            logger.error("kvsafe: tier %s: %s: %s (only counted from now on)",
                         self._label, call, kind)  # fmt: skip
        self.faults[call] += 1
        self._counters.add(TIER_FAULTS, 1, (self._label, call))

    def ask(self, call: str, action: Callable[[], T], otherwise: T) -> T:
        """The answer of a call, or `otherwise` if it raises or answers with another type."""
        if self._spared(call):
            return otherwise
        self._pace.enter(call)
        try:
            answer = action()
        except Exception as exc:  # whatever a tier does, the engine goes on
            self.fault(call, exc)
            return otherwise
        finally:
            self._pace.leave()
        if not isinstance(answer, type(otherwise)):
            self.fault(call, f"answered with {type(answer).__name__}")
            return otherwise
        return answer

    def tell(self, call: str, action: Callable[[], object]) -> bool:
        """Make a call that has no answer; False if it raised, or was not made."""
        if self._spared(call):
            return False
        self._pace.enter(call)
        try:
            action()
        except Exception as exc:  # as above
            self.fault(call, exc)
            return False
        finally:
            self._pace.leave()
        return True

    def _spared(self, call: str) -> bool:
        return self._pace.resting and call not in _NEEDED

    def results(self) -> list[JobResult]:
        """What `get_finished_jobs` reports, as far as it can be used."""
        return self._listed("get_finished_jobs", self._inner.get_finished_jobs, clean_result)

    def events(self) -> list[OffloadingEvent]:
        """What `take_events` tells, as far as it can be used."""
        return self._listed("take_events", self._inner.take_events, clean_event)

    def _listed(
        self, call: str, source: Callable[[], Iterable[Any]], clean: Callable[[Any], T | None]
    ) -> list[T]:
        if self._spared(call):
            return []
        self._pace.enter(call)
        try:
            return list(self._taken(call, source, clean))
        finally:
            self._pace.leave()

    def _taken(
        self, call: str, source: Callable[[], Iterable[Any]], clean: Callable[[Any], T | None]
    ) -> Iterator[T]:
        try:
            for count, raw in enumerate(source()):
                if count == MOST_AT_ONCE:
                    self.fault(call, "no end")
                    return
                item = clean(raw)
                if item is None:
                    self.fault(call, f"unusable {type(raw).__name__}")
                else:
                    yield item
        except Exception as exc:  # what came before counts
            self.fault(call, exc)

    def stats(self) -> OffloadingConnectorStats | None:
        """The statistics for which the tier's class has definitions."""
        if self._spared("get_stats"):
            return None
        self._pace.enter("get_stats")
        try:
            raw = self._inner.get_stats()
            if raw is None or raw.is_empty():
                return None
            return self._clean_stats(raw)
        except Exception as exc:  # statistics are worth no engine
            self.fault("get_stats", exc)
            return None
        finally:
            self._pace.leave()

    def _clean_stats(self, raw: OffloadingConnectorStats) -> OffloadingConnectorStats | None:
        definitions = self._definitions()
        kept = OffloadingConnectorStats()
        for name, by_label in raw.data["data"].items():
            known = definitions.get(name)
            for labels, value in by_label.items():
                if known is None or not _keep(kept, name, labels, value, known):
                    self.fault("get_stats", "a value without a definition, or of another kind")
        return None if kept.is_empty() else kept

    def _definitions(self) -> Mapping[str, OffloadingMetricMetadata]:
        """What vLLM's front end will know of this tier: all else would end it."""
        spec = getattr(self._inner, "_offloading_spec", None)
        found: dict[str, OffloadingMetricMetadata] = {}
        for options in getattr(spec, "secondary_tier_configs", None) or [{}]:
            found.update(type(self._inner).build_metric_definitions(options))
        return found


def clean_result(raw: object) -> JobResult | None:
    """A report with values that vLLM can count with, or None if it names no job."""
    if not isinstance(raw, JobResult) or type(raw.job_id) is not int:
        return None
    success = isinstance(raw.success, bool | np.bool_) and bool(raw.success)
    named = raw.successful_keys
    keys = tuple(key for key in named if isinstance(key, bytes)) if _is_listing(named) else None
    moved = clean_number(raw.transfer_bytes)
    return JobResult(
        job_id=raw.job_id,
        success=success,
        successful_keys=None if keys is None else tuple(map(OffloadKey, keys)) or None,
        transfer_time=clean_number(raw.transfer_time),
        transfer_bytes=None if moved is None else int(moved),
    )


def clean_event(raw: object) -> OffloadingEvent | None:
    """An event that vLLM can publish, or None."""
    if not isinstance(raw, OffloadingEvent) or not isinstance(raw.medium, Medium):
        return None
    keys = raw.keys if _is_listing(raw.keys) else ()
    if not keys or not all(isinstance(key, bytes) and len(key) > 4 for key in keys):
        return None
    where, owner = raw.locality, raw.ownership
    if not isinstance(where, Locality | None) or not isinstance(owner, str | None):
        return None
    return OffloadingEvent(
        list(keys)[:MOST_AT_ONCE], raw.medium, bool(raw.removed), where, owner,
        bool(raw.removal_expected),
    )  # fmt: skip


def _is_listing(value: object) -> bool:
    return isinstance(value, list | tuple | set | frozenset)


def clean_number(value: object) -> float | None:
    """A number that a counter can take."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _keep(
    kept: OffloadingConnectorStats,
    name: str,
    labels: object,
    value: Any,
    known: OffloadingMetricMetadata,
) -> bool:
    if not isinstance(labels, tuple) or len(labels) != len(known.labelnames):
        return False
    if not all(isinstance(label, str) for label in labels):
        return False
    if isinstance(known, OffloadingHistogramMetadata):
        return _keep_samples(kept, name, labels, value)
    amount = clean_number(value)
    if amount is None:
        return False
    if isinstance(known, OffloadingCounterMetadata):
        kept.increase_counter(name, amount, labels)
    elif isinstance(known, OffloadingGaugeMetadata):
        kept.set_gauge(name, amount, labels)
    else:
        return False
    return True


def _keep_samples(
    kept: OffloadingConnectorStats, name: str, labels: tuple[str, ...], value: object
) -> bool:
    if not isinstance(value, list):
        return False
    samples = [clean_number(sample) for sample in value[:MOST_AT_ONCE]]
    for sample in samples:
        if sample is not None:
            kept.observe_histogram(name, sample, labels)
    return None not in samples
