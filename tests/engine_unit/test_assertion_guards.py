# SPDX-License-Identifier: Apache-2.0
"""Guards before assertions of vLLM that an input can reach; `spec/assertions.md` has the list.

Beside each stands vLLM's own class in the same place, which must raise: when it no longer does,
the page and the guard can go. What a tier can do is in `test_hostile_tier.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    OffloadPromMetrics,
    get_connector_metric_definitions,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, TransferResult

from fuzz.world.plan import Event, Plan, Setting
from fuzz.world.world import run_plan
from kvsafe.engine.counters import metric_definitions
from kvsafe.engine.rows.transfer import ChunkFailure, KVSafeWorkerMetadata, SealedRowsSpec
from kvsafe.engine.spec import KVSafeSpec
from kvsafe.engine.worker import KVSafeConnectorWorker, KVSafeWorker
from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.engine_unit.sealed_world import HandExecutor, World, key_of, running
from tests.engine_unit.stock_world import StockWorld

A, B, C = (key_of(number) for number in range(1, 4))
REFUSAL = Refusal.of(RefusalKind.PAYLOAD_TAG, "writers[0]", "a", "b")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A world with a tier by hand."""
    with running(World(tmp_path, tiers=["hand"], threads=HandExecutor())) as made:
        yield made


# --- loads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["gone", "not ready"])
def test_a_load_of_a_chunk_that_cannot_be_read_is_withheld(world: World, missing: str) -> None:
    """`_prepare_load`: `assert chunk is not None`, `assert chunk.is_ready`."""
    control = StockWorld()
    control.store(A)
    world.store(A)
    if missing == "not ready":
        assert control.manager.prepare_store([B], control.request()) is not None
        assert world.prepare([B], world.request()) is not None
    with pytest.raises(AssertionError):
        control.manager.prepare_load([A, B], control.request())
    context = world.request()
    before = world.chunks()[A].ref_cnt
    spec = world.manager.prepare_load([A, B], context)
    assert isinstance(spec, SealedRowsSpec) and spec.withheld is not None
    world.recount()
    world.manager.complete_load([A, B], context)
    assert world.chunks()[A].ref_cnt == before
    world.recount()
    spec = world.manager.prepare_load([A], context)
    assert isinstance(spec, SealedRowsSpec) and spec.withheld is None
    world.manager.complete_load([A], context)


def _half(kind: type[Any], meta: OffloadingWorkerMetadata, worker: Any) -> Any:
    half = object.__new__(kind)
    half.worker, half._connector_worker_meta, half._load_jobs = worker, meta, {1: "request"}
    half._failed_requests = set()
    half._unsubmitted_store_jobs = []
    return half


def test_a_transfer_that_failed_is_a_report() -> None:
    """The worker's `assert transfer_result.success`."""
    results = [TransferResult(1, False), TransferResult(2, False), TransferResult(3, True, 8, 0.1)]
    failures = [ChunkFailure(1, True, bytes(A), REFUSAL)]
    stub = SimpleNamespace(
        get_finished=lambda: results,
        take_failures=lambda: failures,
        take_counts=lambda: KVSafeWorkerMetadata().counts,
    )
    with pytest.raises(AssertionError):
        _half(OffloadingConnectorWorker, OffloadingWorkerMetadata(), stub).get_finished(set())
    half = _half(KVSafeConnectorWorker, KVSafeWorkerMetadata(), stub)
    assert half.get_finished(set()) == (set(), {"request"})
    assert half.take_failed_requests() == {"request"}
    meta = half.build_connector_worker_meta()
    assert dict(meta.completed_jobs) == {1: 1, 2: 1, 3: 1} and meta.failures == failures


def test_a_transfer_that_cannot_begin_is_a_report() -> None:
    """The worker's `assert success` after `submit_load` and `submit_store`."""
    worker = KVSafeWorker(MagicMock(), None, {}, 1.0)
    blocks = GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
    strange: Any = object()
    half = _half(KVSafeConnectorWorker, KVSafeWorkerMetadata(), worker)
    load = SimpleNamespace(req_id="request", src_spec=strange, dst_spec=blocks)
    half._unsubmitted_store_jobs = [(7, blocks, strange)]
    half.start_kv_transfers(SimpleNamespace(load_jobs={1: load}))
    ended = {result.job_id: result.success for result in worker.get_finished()}
    assert ended == {1: False, 7: False}
    refusing = SimpleNamespace(submit_load=lambda *_: False)
    control = _half(OffloadingConnectorWorker, OffloadingWorkerMetadata(), refusing)
    with pytest.raises(AssertionError):
        control.start_kv_transfers(SimpleNamespace(load_jobs={1: load}))


# --- resets --------------------------------------------------------------------------------------


def test_two_resets_without_a_step_between_are_two_resets() -> None:
    """`reset_cache`: `assert not self._current_batch_jobs_to_flush` (finding C)."""
    events = [Event("arrive", 20, 1, 8), *[Event("step")] * 3, Event("reset_twice")]
    setting = Setting(rows=8, blocks=24)
    control = run_plan(Plan("stock", setting, tuple(events)))
    assert control.finding is not None and control.finding.kind == "died"
    assert "_current_batch_jobs_to_flush" in control.finding.detail
    ours = run_plan(Plan("kvsafe", setting, tuple(events)))
    assert ours.clean, ours.finding
    assert ours.counts["did_reset_twice"] == 1


# --- statistics ----------------------------------------------------------------------------------


def _front_end() -> Any:
    """vLLM's metrics of the front end, with metrics that do nothing."""
    front: Any = object.__new__(OffloadPromMetrics)
    front._offloading_metric_metadata = {
        **KVSafeSpec.build_metric_definitions({}),
        **get_connector_metric_definitions(),
    }
    front._offloading_metric_defs = {
        name: MagicMock() for name in front._offloading_metric_metadata
    }
    front.offloading_metrics, front.per_engine_labelvalues = {}, {0: ["0"]}
    front._observe_deprecated_metrics = False
    return front


def test_the_front_end_knows_every_statistic_of_ours(world: World) -> None:
    """`observe`: `assert key in self._offloading_metric_defs`, and the number of labels."""
    world.store(A, B)
    world.hand.complete_store()
    world.step()
    world.step()
    world.primary.reset_cache()
    assert world.lookup(A) is LookupResult.HIT_PENDING
    world.step()
    world.hand.complete_load(count=0)
    world.step()
    world.manager.fail_chunks([ChunkFailure(1, True, bytes(C), REFUSAL)])
    world.counters.served(1)
    stats = world.manager.get_stats()
    assert stats is not None
    front = _front_end()
    front.observe(stats.data)
    assert {name[1] for name in front.offloading_metrics} >= {"kvsafe:refusals", "kvsafe:epoch"}
    # Controls: the very same front end falls over what it does not know.
    strange = OffloadingConnectorStats()
    strange.increase_counter("kvsafe:unknown")
    with pytest.raises(AssertionError):
        front.observe(strange.data)
    unlabelled = OffloadingConnectorStats()
    unlabelled.increase_counter("kvsafe:refusals")
    with pytest.raises(AssertionError, match="expects 3 labels"):
        front.observe(unlabelled.data)


def test_every_count_of_ours_has_its_definition_and_labels(world: World) -> None:
    definitions = metric_definitions()
    world.store(A)
    world.counters.refused(REFUSAL, "0:primary")
    world.counters.proven("worker", 8, 0.1)
    stats = world.counters.drain(1)
    for name, by_label in stats.data["data"].items():
        assert name in definitions
        assert {len(labels) for labels in by_label} == {len(definitions[name].labelnames)}
