# SPDX-License-Identifier: Apache-2.0
"""One world from its first event to rest: acts, looks, and says what was broken."""

import contextlib
import hashlib
import traceback
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

import kvsafe.engine.tiers.proving
from fuzz.world import bench, checks, doors, ours, parts
from fuzz.world.announced import Announced
from fuzz.world.driver import Driver
from fuzz.world.engine import Engine
from fuzz.world.hands import clocked
from fuzz.world.outcome import Finding, Outcome, WrongWorld
from fuzz.world.plan import Plan
from kvsafe.engine.counters import Counters

_DOORS = {"stock": doors.WorldStockConnector, "kvsafe": doors.WorldSafeConnector}
_STOCK_SPEC = {
    "spec_name": "StockSpec",
    "spec_module_path": "fuzz.world.stock",
    "cpu_bytes_to_use": 1 << 20,
}


class World:
    """The real scheduler and connector of one flavour over simulated memory."""

    def __init__(self, plan: Plan) -> None:
        setting = plan.setting
        self.parts = parts.fresh(setting)
        self._ours = plan.flavour == "kvsafe"
        with parts.at_work(self.parts):
            door = _DOORS[plan.flavour]
            extra = {} if self._ours else {**_STOCK_SPEC, "eviction_policy": setting.policy}
            config = bench.vllm_config(setting, door.__name__, extra)
            caches = bench.kv_cache_config(setting)
            self.scheduler = bench.scheduler(config, caches, setting)
            worker: Any = door(config, KVConnectorRole.WORKER, caches)
            worker.connector_worker.worker = worker.connector_worker.spec.get_worker(None)
        self.half: Any = self.scheduler.connector.connector_scheduler
        self.parts.half = self.half
        self.engine = Engine(self.parts, self.scheduler, worker)
        self.announced = Announced(self.half, self.parts.counts) if setting.events else None
        self.audit = checks.RowAudit(self.parts, self.half.manager) if self._ours else None
        self.driver = Driver(self.parts, self.engine, self.half, ours=self._ours)

    def look(self) -> None:
        """What must hold after every event."""
        for request in self.scheduler.requests.values():
            script = self.parts.scripts[request.request_id]
            self.parts.keys.learn(script, list(request.block_hashes))
        if self.audit is not None:
            self.audit.look()
        if self.announced is not None:
            self.announced.look()
        checks.recount(self.half.manager)

    def close(self) -> None:
        """Let go of threads and shared memory."""
        if self._ours:
            self.parts.threads.shutdown(wait=False)
            with contextlib.suppress(BufferError):
                self.parts.spec.spec.station.close()


def run_plan(plan: Plan) -> Outcome:
    """Run a plan to its end or to its first finding."""
    log = hashlib.sha256()
    at = -1
    world: World | None = None
    finding: Finding | None = None
    with _by_hand() as clock_of:
        try:
            world = World(plan)
            with parts.at_work(world.parts), clock_of(world.parts.clock):
                for event in plan.events:
                    at += 1
                    log.update(world.driver.act(event).encode())
                    world.look()
                at = len(plan.events)
                world.driver.settle(world.look)
                checks.at_rest(world.scheduler, world.half, world.parts)
        except WrongWorld as wrong:
            finding = _judged(wrong, at)
        except Exception as exc:
            finding = _died(exc, at)
        finally:
            if world is not None:
                world.close()
    counts = world.parts.counts if world is not None else parts.fresh(plan.setting).counts
    log.update(repr(sorted(counts.items())).encode())
    log.update(repr(finding and finding.signature).encode())
    return Outcome(finding, log.hexdigest()[:24], counts, len(plan.events))


@contextlib.contextmanager
def _by_hand() -> Iterator[Any]:
    with (
        bench.quiet(),
        mock.patch.object(kvsafe.engine.tiers.proving, "ends_within", ours.inline),
        mock.patch.object(Counters, "refused", ours.counted),
    ):
        yield clocked


def _judged(wrong: WrongWorld, at: int) -> Finding:
    text = wrong.detail
    where = "".join(" " if char.isdigit() else char for char in text)
    return Finding(wrong.kind, " ".join(where.split())[:90], text, at)


def _died(exc: Exception, at: int) -> Finding:
    frames = traceback.extract_tb(exc.__traceback__)
    inner = frames[-1]
    for frame in reversed(frames):
        if "vllm" in frame.filename or "kvsafe" in frame.filename:
            inner = frame
            break
    place = f"{PurePath(inner.filename).stem}.{inner.name}"
    detail = f"{type(exc).__name__} {exc} at {place}: {inner.line}"
    return Finding("died", f"{type(exc).__name__} {place}", detail, at)
