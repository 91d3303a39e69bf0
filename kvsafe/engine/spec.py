# SPDX-License-Identifier: Apache-2.0
"""The spec: vLLM's tiering spec, with sealed rows, a checked worker and proven tiers."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvsafe.device import (
    Copier,
    DeviceTensor,
    Geometry,
    GeometryExpectation,
    GroupRef,
    RowWindow,
    cpu_copier,
    cuda_copier,
    require_expectation,
)
from kvsafe.engine.config import ConfigError, Problem
from kvsafe.engine.counters import Counters, metric_definitions
from kvsafe.engine.journal import RefusalJournal, logger
from kvsafe.engine.lmcache.probe import NOTE, note_document, probe_pages
from kvsafe.engine.lmcache.tier import TIER_TYPE as LMCACHE_TIER
from kvsafe.engine.lmcache.tier import KVSafeLmcacheTier
from kvsafe.engine.manager import KVSafeManager
from kvsafe.engine.requests.verdicts import Verdicts
from kvsafe.engine.rows.epochs import EpochKeeper
from kvsafe.engine.rows.proof import RowProof
from kvsafe.engine.rows.watched import primary_tier
from kvsafe.engine.station import Station
from kvsafe.engine.tiers.names import ForeignNames, ObjectNames
from kvsafe.engine.tiers.objects import adopt_objects
from kvsafe.engine.tiers.patience import RowKeeper
from kvsafe.engine.tiers.proving import ProofDesk, ProvingTier
from kvsafe.engine.worker import KVSafeWorker
from kvsafe.host import HostRegion

BLOCK_HASH_BYTES = 32
KEY_BYTES = BLOCK_HASH_BYTES + 4


def _without_kv(block_bytes: int) -> ConfigError:
    problem = Problem(
        "worker_kv_bytes_per_block",
        f"{block_bytes}, so that this engine has no KV to keep",
        "at least 1",
        "run a model without a KV cache without offload: take KVSafeConnector out of "
        "--kv-transfer-config; if the model has a KV cache, give it memory, with "
        "--num-gpu-blocks-override, --gpu-memory-utilization or, on a CPU, VLLM_CPU_KVCACHE_SPACE",
    )
    return ConfigError("kvsafe refuses this engine:", [problem])


@dataclass(frozen=True, slots=True)
class Assembly:
    """What the connector has prepared for the spec."""

    station: Station
    expectation: GeometryExpectation
    foreign: tuple[ForeignNames, ...]
    fail_loads: bool
    layers: Mapping[str, Any] = field(default_factory=dict)
    """The engine's attention layers by name, as far as this process has built them."""


class KVSafeSpec(TieringOffloadingSpec):
    """vLLM's `TieringOffloadingSpec` over sealed rows. Made by `KVSafeConnector`."""

    # Set to None by vLLM's classes, which mypy does not follow.
    _manager: KVSafeManager | None
    _worker: KVSafeWorker | None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """vLLM's metrics and ours."""
        return {**super().build_metric_definitions(extra_config), **metric_definitions()}

    def __init__(self, config: OffloadingConfig, assembly: Assembly | None = None) -> None:
        if assembly is None:
            raise ValueError(
                "KVSafeSpec needs the identity of the engine and cannot be used alone: "
                'set "kv_connector": "KVSafeConnector"'
            )
        super().__init__(config)
        self.station = assembly.station
        self._expectation = assembly.expectation
        self._foreign = assembly.foreign
        self.verdicts = Verdicts(active=assembly.fail_loads)
        self._layers = assembly.layers
        self._lay_out_rows()
        self.epochs: EpochKeeper | None = None

    @property
    def writers(self) -> int:
        """Slices per row: one per worker, or one for all where they hold the same bytes."""
        return 1 if self.replicated_layout else int(self.config.parallel.world_size)

    def _lay_out_rows(self) -> None:
        if self.cpu_page_size_per_worker < 1:
            raise _without_kv(self.config.worker_kv_bytes_per_block)
        layout = self.station.lay_out(
            key_bytes=KEY_BYTES,
            slots=self.blocks_per_chunk,
            slice_bytes=(self.cpu_page_size_per_worker,) * self.writers,
        )
        self.kv_bytes_per_chunk = layout.row_bytes
        self.num_chunks = self.station.config.cpu_bytes_to_use // layout.row_bytes

    def get_manager(self) -> OffloadingManager:
        """The scheduler-side manager (built once)."""
        if self._manager is None:
            self._manager = self._build_manager()
        return self._manager

    def _build_manager(self) -> KVSafeManager:
        station, config = self.station, self.station.config
        region = station.open_region(self.num_chunks)
        # Now, not at the first store: a worker on another shared memory must stop the start.
        station.geometry()
        region.forget_name()
        names = self._object_names()

        def announce(epoch: int) -> None:
            region.announce_epoch(epoch)
            names.follow(epoch)

        self.epochs = epochs = EpochKeeper(
            station.epoch_file, announce, weights_survive_reset=config.weights_survive_reset
        )
        counters = Counters(config.suite, config.active_overrides)
        primary = primary_tier(
            config.monitor,
            counters,
            region,
            epochs,
            cache_policy=self.eviction_policy,
            cache_policy_module_path=self.cache_policy_module_path,
            enable_events=self.kv_events_config.enable_kv_cache_events,
        )
        desk = self._proof_desk(epochs, counters, names, primary)
        tiers = self._build_tiers(primary.get_kv_memoryview(), desk)
        logger.info(
            "kvsafe: %d rows of %d bytes, %d secondary tier(s), suite %s, epoch %d",
            region.shape.num_rows,
            region.shape.row_bytes,
            len(tiers),
            config.suite,
            epochs.epoch,
        )
        return KVSafeManager(
            primary, tiers, station, epochs, counters, desk.journal, desk.verdicts, desk.threads
        )

    def _object_names(self) -> ObjectNames:
        station = self.station
        digest = station.seal_setting.identity_digest
        return ObjectNames(station.suite, station.keyring, digest, self._foreign)

    def _proof_desk(
        self, epochs: EpochKeeper, counters: Counters, names: ObjectNames, primary: RowKeeper
    ) -> ProofDesk:
        threads = ThreadPoolExecutor(
            self.station.config.verify_threads, thread_name_prefix="kvsafe-proof"
        )
        return ProofDesk(
            station=self.station,
            epochs=epochs,
            counters=counters,
            journal=RefusalJournal(names.name),
            names=names,
            verdicts=self.verdicts,
            threads=threads,
            rows=primary,
        )

    def _build_tiers(self, rows: memoryview, desk: ProofDesk) -> list[SecondaryTierManager]:
        tiers: list[SecondaryTierManager] = []
        try:
            for index, options in enumerate(self.secondary_tier_configs):
                inner = SecondaryTierFactory.create_secondary_tier(options, rows, self)
                if isinstance(inner, KVSafeLmcacheTier):
                    tiers.append(ProvingTier(inner, index, inner.join(desk, index), inner.objects))
                    continue
                root = str(options.get("root_dir", ""))
                store = adopt_objects(inner, root, self.station.config.quarantine)
                tiers.append(ProvingTier(inner, index, desk, store))
        except BaseException:
            for tier in tiers:
                tier.shutdown()
            raise
        return tiers

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker half, after the real tensors were compared with the identity."""
        if self._worker is None:
            self._worker = self._build_worker(kv_caches)
        return self._worker

    def _build_worker(self, kv_caches: CanonicalKVCaches) -> KVSafeWorker:
        geometry = self._geometry(kv_caches)
        geometry.check()
        require_expectation(self._expectation, geometry)
        region = self.station.open_region(self.num_chunks)
        rank = int(self.config.parallel.rank)
        self.station.register(rank, geometry.describe(), self._page_notes(geometry))
        slot = 0 if self.replicated_layout else rank
        config = self.station.config
        proof = RowProof(self.station, region, slot, once=config.verify_loads == "once")
        copier = self._copier(geometry, self._window(region, slot), proof)
        groups = {group.group_id: index for index, group in enumerate(self.config.groups)}
        return KVSafeWorker(copier, proof, groups, config.store_deadline_s)

    def _page_notes(self, geometry: Geometry) -> dict[str, object]:
        """How the engine keeps its pages, where a tier has to know."""
        if all(options.get("type") != LMCACHE_TIER for options in self.secondary_tier_configs):
            return {}
        return {NOTE: note_document(probe_pages(geometry, self._layers))}

    def _geometry(self, kv_caches: CanonicalKVCaches) -> Geometry:
        layers: dict[int, list[str]] = {}
        for group, refs in zip(self.config.groups, kv_caches.group_data_refs, strict=True):
            names = group.layer_names if len(refs) == len(group.layer_names) else ()
            for name, ref in zip(names, refs, strict=False):
                layers.setdefault(ref.tensor_idx, []).append(name)
        tensors = tuple(
            DeviceTensor(
                item.tensor.view(torch.int8), item.page_size_bytes, tuple(layers.get(index, ()))
            )
            for index, item in enumerate(kv_caches.tensors)
        )
        groups = tuple(
            tuple(GroupRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs)
            for refs in kv_caches.group_data_refs
        )
        return Geometry(tensors, groups, self.blocks_per_chunk)

    def _window(self, region: HostRegion, slot: int) -> RowWindow:
        layout = self.station.seal_setting.layout
        place = layout.slices[slot]
        return RowWindow(
            base=torch.frombuffer(region.memory, dtype=torch.int8),
            rows_offset=region.shape.rows_offset,
            num_rows=region.shape.num_rows,
            row_stride=region.shape.row_bytes,
            slice_offset=layout.header_bytes + place.offset,
            slice_bytes=place.length,
        )

    def _copier(self, geometry: Geometry, window: RowWindow, proof: RowProof | None) -> Copier:
        threads = self.station.config.copy_threads
        if geometry.device_type == "cuda":
            return cuda_copier(geometry, window, proof, ops.swap_blocks_batch, threads)
        return cpu_copier(geometry, window, proof, threads=threads)
