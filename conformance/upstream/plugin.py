# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that puts our classes in place of vLLM's, under vLLM's names.

Their tests make these classes in their own way and have no worker that would tag rows. Each
stand-in takes their arguments and adds only what is missing: a station, a region, and at the
end of a store the worker's part, with sealing done at once. Every tier of a manager stands
behind a proof, which their tests do not see: they look at the very tiers that they passed.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler, worker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu import manager as cpu_manager
from vllm.v1.kv_offload.cpu import spec as cpu_spec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering import manager as tiering_manager
from vllm.v1.kv_offload.tiering import spec as tiering_spec
from vllm.v1.kv_offload.tiering.fs import manager as fs_manager

from conformance.upstream.bench import Bench, HereAndNow, WideSealer, ledger
from conformance.upstream.processes import follow
from conformance.upstream.region import MADE, put_in_place
from conformance.upstream.specs import CpuSpec, Spec
from conformance.upstream.tiers import FsTier, proven
from conformance.upstream.workers import CpuWorker
from kvsafe.engine.connector import KVSafeConnector
from kvsafe.engine.counters import Counters
from kvsafe.engine.journal import RefusalJournal
from kvsafe.engine.manager import IssuedStore, KVSafeManager
from kvsafe.engine.requests.verdicts import Verdicts
from kvsafe.engine.rows.primary import SealedPrimaryTier
from kvsafe.engine.rows.transfer import ProofCounts
from kvsafe.engine.scheduler import KVSafeConnectorScheduler
from kvsafe.engine.worker import KVSafeConnectorWorker
from kvsafe.seal.header import bitmap

_MANY_TOKENS = 1 << 16
SKIP = tuple(name for name in os.environ.get("KVSAFE_UPSTREAM_KEEP", "").split(",") if name)


class Primary(SealedPrimaryTier):
    """Our primary tier, made as theirs."""

    def __init__(
        self,
        num_chunks: int,
        mmap_region: Any = None,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
    ) -> None:
        self.bench = Bench(num_chunks)
        super().__init__(
            self.bench.region,
            self.bench.epochs,
            cache_policy=cache_policy,
            cache_policy_module_path=cache_policy_module_path,
            enable_events=enable_events,
        )
        if mmap_region is not None:
            self._mmap_region = mmap_region
            self._kv_memoryview = mmap_region.create_kv_memoryview()


class CpuManager(Primary):
    """Our primary tier in place of their manager without tiers."""

    def __init__(
        self,
        num_chunks: int,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
    ) -> None:
        super().__init__(num_chunks, None, cache_policy, cache_policy_module_path, enable_events)
        self.store_threshold, self.max_tracker_size = store_threshold, max_tracker_size
        self.counts: OrderedDict[Any, int] | None = OrderedDict() if store_threshold >= 2 else None


class Manager(KVSafeManager):
    """Our manager, made as theirs; what a worker does to a store happens when it is complete."""

    def __init__(self, primary_tier: Any, secondary_tiers: Any = None) -> None:
        bench = primary_tier.bench if isinstance(primary_tier, Primary) else Bench(1)
        self._bench = bench
        threads: Any = HereAndNow()
        super().__init__(
            primary_tier,
            proven(secondary_tiers or [], primary_tier, bench),
            bench.station,
            bench.epochs,
            Counters("blake3-keyed", ()),
            RefusalJournal(lambda key: key),
            Verdicts(active=False),
            threads,
        )
        self._sealer: Any = WideSealer(self._sealer)

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        """Tag, seal, and wait for it."""
        epoch = self._epochs.epoch
        for key in keys if success else ():
            row, generation = self.primary_tier.row_of(key), self.primary_tier.generation_of(key)
            if row is not None and generation is not None:
                self._bench.write(key, row, generation, epoch)
                self.issue_store(key, IssuedStore(generation, epoch, bitmap(1, [0])))
        super().complete_store(keys, req_context, success)
        self.settle()


class Scheduler(KVSafeConnectorScheduler):
    """Our scheduler half, made as theirs; some are not even made, and given what they need."""

    _turns: Any = ()
    _verdicts = Verdicts(active=False)

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any, *rest: Any) -> None:
        if not isinstance(getattr(vllm_config, "max_in_flight_tokens", None), int):
            # A double of a configuration: sizes as large as in an engine of theirs.
            vllm_config.max_in_flight_tokens = _MANY_TOKENS
            vllm_config.model_config = SimpleNamespace(max_model_len=_MANY_TOKENS)
            vllm_config.speculative_config = getattr(vllm_config, "speculative_config", None)
        super().__init__(spec, vllm_config, kv_cache_config, *(rest or (ledger(),)))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "manager":
            # Some tests put another manager in later.
            _complete_manager(value)
        super().__setattr__(name, value)

    def _bound_state(self, status: Any, request: Any) -> Any:
        # A mock of a request has a mock of an adapter; to these tests it has none.
        mocked = isinstance(request.lora_request, MagicMock)
        return status if mocked else super()._bound_state(status, request)


class Worker(KVSafeConnectorWorker):
    """Our worker half over their workers, which report no failures and prove nothing."""

    def _collect(self) -> None:
        if self.worker is not None and not hasattr(self.worker, "take_failures"):
            self.worker.take_failures = list  # type: ignore[method-assign]
            self.worker.take_counts = ProofCounts  # type: ignore[method-assign]
        super()._collect()


class Connector(KVSafeConnector):
    """Our connector over the specs of their tests."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_worker is not None:
            self.connector_worker.__class__ = Worker
        if self.connector_scheduler is not None:
            self.connector_scheduler.__class__ = Scheduler
            _complete_manager(self.connector_scheduler.manager)

    def _assemble(self, vllm_config: Any, kv_cache_config: Any, *, scheduler: bool) -> Any:
        offloading = build_offloading_config(vllm_config, kv_cache_config)
        spec = OffloadingSpecFactory.create_spec(offloading)
        if not hasattr(spec, "epochs"):
            spec.epochs = MagicMock()
            spec.epochs.raise_epoch.return_value = True
        config = SimpleNamespace(active_overrides=())
        return SimpleNamespace(config=config, offloading=offloading, spec=spec, adapters=ledger())


def _complete_manager(manager: Any) -> None:
    """Their mocks of a manager do not know the calls that ours has besides."""
    if isinstance(manager, KVSafeManager):
        return
    ours = {*dir(KVSafeManager), "counters", "waits", "primary_tier"}
    for name in sorted(name for name in ours if not name.startswith("__")):
        if not hasattr(manager, name):
            setattr(manager, name, MagicMock())


REPLACED = {
    "CPUOffloadingManager": (cpu_manager, CpuManager),
    "CPUPrimaryTierOffloadingManager": (tiering_manager, Primary),
    "TieringOffloadingManager": (tiering_manager, Manager),
    "OffloadingConnectorScheduler": (scheduler, Scheduler),
    "OffloadingConnectorWorker": (worker, Worker),
    "OffloadingConnector": (offloading_connector, Connector),
    "CPUOffloadingSpec": (cpu_spec, CpuSpec),
    "TieringOffloadingSpec": (tiering_spec, Spec),
    "FileSystemTierManager": (fs_manager, FsTier),
    "CPUOffloadingWorker": (gpu_worker, CpuWorker),
}


def replace() -> None:
    """From here on the names mean our classes."""
    for name, (module, stand_in) in REPLACED.items():
        if name not in SKIP:
            setattr(module, name, stand_in)
            _count(name, stand_in)
    if "SharedOffloadRegion" not in SKIP:
        put_in_place()
        follow()


def _count(name: str, stand_in: Any) -> None:
    made = stand_in.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        MADE[name] += type(self) is stand_in
        made(self, *args, **options)

    stand_in.__init__ = init


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How often each stand-in was made: a run without any would prove nothing."""
    for name in (*REPLACED, "SharedOffloadRegion", "tiers without a proof"):
        terminalreporter.write_line(f"kvsafe: {MADE[name]} in place of {name}")


replace()
