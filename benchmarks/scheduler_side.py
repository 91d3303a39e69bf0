# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's thread pays per chunk: our manager against vLLM's, same calls, same keys.

    python -m benchmarks.scheduler_side [--json] [--rounds N]

Both are real: vLLM's `TieringOffloadingManager` over its shared region, and `KVSafeManager`
over sealed rows with its monitor on (the default), both LRU, no secondary tier. What workers do
(copy, tag) is not counted. The last row compares our manager with its monitor and without.
"""

import contextlib
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from benchmarks.report import arguments, paired, show
from kvsafe.engine.counters import Counters
from kvsafe.engine.journal import RefusalJournal
from kvsafe.engine.manager import IssuedStore, KVSafeManager
from kvsafe.engine.requests.verdicts import Verdicts
from kvsafe.engine.rows.epochs import EpochKeeper
from kvsafe.engine.rows.watched import primary_tier
from kvsafe.seal.header import bitmap
from kvsafe.seal.layout import RECORD

ROWS = 512
BATCH = 32
PAYLOAD = 64 * 1024
STEPS = ("prepare_store", "complete_store", "collect", "lookup", "prepare_load", "complete_load")


class Side:
    """One manager and what has to happen around it."""

    def __init__(
        self,
        manager: Any,
        issue: Callable[[Any, list[OffloadKey]], None],
        work: Callable[[Any], None],
    ) -> None:
        self.manager = manager
        self.issue = issue
        self.work = work
        self.seconds = dict.fromkeys(STEPS, 0.0)

    def run(self, keys: list[OffloadKey]) -> None:
        """Store and load one batch, timing each call of the manager."""
        context = ReqContext(req_id=uuid.uuid4().hex)
        manager = self.manager
        manager.on_new_request(context)
        output = self._time("prepare_store", lambda: self._prepare(keys, context))
        self.work(output.store_spec)
        self._time("complete_store", lambda: manager.complete_store(set(keys), context))
        if isinstance(manager, KVSafeManager):
            self._time("collect", lambda: self._collect(manager, context))
        self._time("lookup", lambda: [manager.lookup(key, context) for key in keys])
        self._time("prepare_load", lambda: manager.prepare_load(keys, context))
        self._time("complete_load", lambda: manager.complete_load(set(keys), context))
        manager.on_request_finished(context)

    def _prepare(self, keys: list[OffloadKey], context: ReqContext) -> Any:
        output = self.manager.prepare_store(keys, context)
        self.issue(output.store_spec, keys)
        return output

    def _collect(self, manager: KVSafeManager, context: ReqContext) -> None:
        # The next step's first call takes back what the proof thread has sealed.
        while manager._seals:
            waiting = manager._seals._pending[0].answer
            start = time.perf_counter()
            wait([waiting])
            self.seconds["collect"] -= time.perf_counter() - start
            manager._processed_jobs_this_step = False
            manager._maybe_process_finished_jobs()

    def _time(self, step: str, action: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = action()
        self.seconds[step] += time.perf_counter() - start
        return result


@contextlib.contextmanager
def sealed_side(monitor: str) -> Iterator[Side]:
    """Our manager, watched or not; what a worker writes is written outside the timing."""
    from tests.support.stations import bare_station

    with tempfile.TemporaryDirectory() as folder:
        station = bare_station(Path(folder), slice_bytes=PAYLOAD, rows=ROWS)
        region = station.open_region(ROWS)
        epochs = EpochKeeper(station.epoch_file, region.announce_epoch)
        counters = Counters("blake3-keyed", ())
        primary = primary_tier(
            monitor,
            counters,
            region,
            epochs,
            cache_policy="lru",
            cache_policy_module_path=None,
            enable_events=False,
        )
        manager = KVSafeManager(
            primary,
            [],
            station,
            epochs,
            counters,
            RefusalJournal(lambda key: key),
            Verdicts(active=False),
            ThreadPoolExecutor(1),
        )
        layout = station.seal_setting.layout
        full = bitmap(1, [0])

        def issue(spec: Any, keys: list[OffloadKey]) -> None:
            for key, generation in zip(keys, spec.generations, strict=True):
                manager.issue_store(key, IssuedStore(generation, spec.epoch, full))

        def work(spec: Any) -> None:
            for row, generation in zip(spec.block_ids.tolist(), spec.generations, strict=True):
                place = layout.slices[0]
                view = region.row(row)
                RECORD.pack_into(
                    view, layout.record_offset(0), 0, 0, 0, place.length, generation, bytes(32)
                )

        try:
            yield Side(manager, issue, work)
        finally:
            manager.shutdown()


@contextlib.contextmanager
def stock_side() -> Iterator[Side]:
    """vLLM's manager."""
    region = SharedOffloadRegion(
        engine_id=uuid.uuid4().hex,
        num_chunks=ROWS,
        rank=None,
        kv_bytes_per_chunk=PAYLOAD,
        cpu_page_size=PAYLOAD,
    )
    manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(ROWS, region), [])
    try:
        yield Side(manager, lambda spec, keys: None, lambda spec: None)
    finally:
        manager.shutdown()


def main() -> int:
    """Run and print microseconds per chunk."""
    options = arguments("scheduler-side cost per chunk", 30)
    with (
        sealed_side("log") as ours,
        stock_side() as theirs,
        sealed_side("off") as unwatched,
    ):
        batches = [[make_offload_key(os.urandom(32), 0) for _ in range(BATCH)] for _ in range(40)]
        rows = []
        totals: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": [], "unwatched": []}

        def one(side: Side, name: str) -> float:
            before = dict(side.seconds)
            for keys in batches:
                side.run(keys)
            step = {key: side.seconds[key] - before[key] for key in STEPS}
            totals[name].append(step)
            return sum(step.values())

        one(ours, "ours")
        one(theirs, "theirs")
        one(unwatched, "unwatched")
        totals["ours"].clear()
        totals["theirs"].clear()
        whole = paired(lambda: one(ours, "ours"), lambda: one(theirs, "theirs"), options.rounds)
        chunks = BATCH * len(batches)
        monitor = paired(
            lambda: one(ours, "ours"), lambda: one(unwatched, "unwatched"), options.rounds
        )
        for step in STEPS:
            mine = median(item[step] for item in totals["ours"])
            yours = median(item[step] for item in totals["theirs"])
            rows.append(_row(step, mine / chunks, yours / chunks, mine / yours if yours else 0.0))
        rows.append(_row("all", whole.ours / chunks, whole.theirs / chunks, whole.ratio))
        rows.append(
            _row(
                "all, monitor on / off",
                monitor.ours / chunks,
                monitor.theirs / chunks,
                monitor.ratio,
            )
        )
    show(rows, as_json=options.json)
    return 0


def _row(step: str, mine: float, yours: float, ratio: float) -> dict[str, object]:
    return {
        "call": step,
        "kvsafe_us_per_chunk": mine * 1e6,
        "stock_us_per_chunk": yours * 1e6,
        "ratio": ratio,
    }


if __name__ == "__main__":
    sys.exit(main())
