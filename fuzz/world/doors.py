# SPDX-License-Identifier: Apache-2.0
"""The two connectors as vLLM finds them by name: the real classes, watched at their loads."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from fuzz.world import parts
from fuzz.world.checks import chunks_of
from fuzz.world.ours import assemble_world
from kvsafe.engine.assembly import Parts
from kvsafe.engine.connector import KVSafeConnector


def _watch_loads(metadata: Any) -> None:
    world = parts.current()
    for entry in metadata.load_jobs.values():
        world.watch.expect(entry.req_id, world.scripts[entry.req_id], entry.dst_spec)


MASKS: set[str] = set()
"""Known faults of the stock half that are mended here, so that others can be seen: C, E, N."""


class WorldStockConnector(OffloadingConnector):
    """vLLM's connector; only its loads are watched."""

    def reset_cache(self) -> bool | None:
        """vLLM's, with the faults C and E mended if they are masked."""
        half: Any = self.connector_scheduler
        flush = set(half._current_batch_jobs_to_flush)
        if "C" in MASKS:
            half._current_batch_jobs_to_flush.clear()
        done: bool | None = super().reset_cache()
        if "C" in MASKS:
            half._current_batch_jobs_to_flush.update(flush)
        events = getattr(half.manager, "primary_tier", half.manager).events
        if "E" in MASKS and events is not None:
            events.clear()
        return done

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """vLLM's, with the fault N mended if it is masked."""
        half: Any = self.connector_scheduler
        known = scheduler_output.preempted_req_ids
        if "N" in MASKS and known:
            loading = {half._jobs[job].req_id for job in half._current_batch_load_jobs}
            scheduler_output.preempted_req_ids = set(known) - loading
        meta: Any = super().build_connector_meta(scheduler_output)
        scheduler_output.preempted_req_ids = known
        owners = {chunk.chunk_id: key for key, chunk in chunks_of(half.manager).items()}
        for job, entry in meta.store_jobs.items():
            rows = entry.dst_spec.block_ids.tolist()
            parts.current().store_keys[job] = {row: owners[row] for row in rows}
        return meta

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's transfers."""
        _watch_loads(self._connector_metadata)
        super().start_load_kv(forward_context, **kwargs)


class WorldSafeConnector(KVSafeConnector):
    """Our connector over an invented identity; its loads are watched."""

    def _assemble(self, vllm_config: Any, kv_cache_config: Any, *, scheduler: bool) -> Parts:
        return assemble_world(vllm_config, kv_cache_config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's transfers."""
        _watch_loads(self._connector_metadata)
        super().start_load_kv(forward_context, **kwargs)
