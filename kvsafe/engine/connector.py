# SPDX-License-Identifier: Apache-2.0
"""`KVSafeConnector`: vLLM's offloading connector, with every chunk proven before it is used."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)

from kvsafe.engine.assembly import Parts, assemble
from kvsafe.engine.journal import adopt_vllm_handlers, logger
from kvsafe.engine.plugin import SPEC_NAME, register
from kvsafe.engine.scheduler import KVSafeConnectorScheduler
from kvsafe.engine.worker import KVSafeConnectorWorker


class KVSafeConnector(OffloadingConnector):
    """Drop-in for `OffloadingConnector`: `"kv_connector": "KVSafeConnector"`."""

    connector_scheduler: OffloadingConnectorScheduler | None
    connector_worker: KVSafeConnectorWorker | None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        # Not OffloadingConnector.__init__: it would build its own spec and halves first.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        adopt_vllm_handlers()
        register()
        scheduler = role == KVConnectorRole.SCHEDULER
        parts = self._assemble(vllm_config, kv_cache_config, scheduler=scheduler)
        self._canonical_layout = parts.offloading.canonical_layout
        self._spec = parts.spec
        self.connector_scheduler = None
        self.connector_worker = None
        self._idle_step = False
        _log_overrides(parts)
        if scheduler:
            self.connector_scheduler = KVSafeConnectorScheduler(
                parts.spec, vllm_config, kv_cache_config, parts.adapters
            )
        else:
            self.connector_worker = KVSafeConnectorWorker(parts.spec, vllm_config, kv_cache_config)

    def _assemble(self, vllm_config: Any, kv_cache_config: Any, *, scheduler: bool) -> Parts:
        return assemble(vllm_config, kv_cache_config, scheduler=scheduler)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Keep the block pool: where it knows a block's content, stores are checked against it."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if isinstance(self.connector_scheduler, KVSafeConnectorScheduler):
            self.connector_scheduler.block_pool = kv_cache_manager.block_pool

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's transfers, and see whether the step computes anything."""
        self._idle_step = getattr(forward_context, "attn_metadata", None) is None
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that ended; those that failed are in both sets, as vLLM expects."""
        worker = self.connector_worker
        if worker is None:
            return KVConnectorTransferResults()
        if self._idle_step and worker.worker is not None:
            worker.worker.rest()
        _, received = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(
            finished_recving=received, failed_recving=worker.take_failed_requests()
        )

    def reset_cache(self) -> bool | None:
        """Forget every chunk and revoke all that was ever stored, in every tier and for good.

        Returns False, and offers and stores nothing more, when the new epoch could not be
        made persistent: a reset that could not happen says so.
        """
        scheduler = self.connector_scheduler
        if not isinstance(scheduler, KVSafeConnectorScheduler) or self._spec.epochs is None:
            return False
        done = self._spec.epochs.raise_epoch("reset of external tiers")
        scheduler.reset_cache()
        return done

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """vLLM's metrics and ours; vLLM finds them through the name of the spec."""
        register()
        vllm_config.kv_transfer_config.kv_connector_extra_config.setdefault("spec_name", SPEC_NAME)
        return super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )


def _log_overrides(parts: Parts) -> None:
    for name in parts.config.active_overrides:
        logger.warning("kvsafe: safety override %s is set", name)
