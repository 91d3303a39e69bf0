# SPDX-License-Identifier: Apache-2.0
"""What a tier needs to seal and open by itself, for the engine that is building it.

Built by the same `assemble` as `KVSafeConnector`, from the same configuration and the options
that the tier brings, so that identity, keys, epoch file and layout are those of the other door.
"""

import itertools
import time
from dataclasses import replace
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvsafe.engine.assembly import AssemblyError, assemble
from kvsafe.engine.config.options import OVERRIDES
from kvsafe.engine.counters import SEALED, Counters
from kvsafe.engine.identity.found_config import engine_configs
from kvsafe.engine.identity.planned_geometry import planned_geometry
from kvsafe.engine.journal import RefusalJournal, logger
from kvsafe.engine.rows.epochs import EpochKeeper
from kvsafe.engine.tiers.names import ObjectNames
from kvsafe.seal.batch import batch_opener
from kvsafe.seal.cbor import encode
from kvsafe.seal.layout import coverage_bytes
from kvsafe.seal.opening import Expectation, Opener
from kvsafe.seal.refusal import Refusal
from kvsafe.seal.sealing import HeaderSealer, SliceSealer
from kvsafe.tiers.buffers import copy

SEAL_OPTIONS = (
    "suite",
    "key_file",
    "key_env",
    "state_dir",
    "namespace",
    "weights_digest",
    "weights_survive_reset",
    *OVERRIDES,
)
"""Options of `KVSafeConnector` that a sealing tier takes beside those of `kvsafe-fs`."""


class TierSeal:
    """Seals and opens files of one engine. `seal` and `open` are for any thread."""

    def __init__(self, offloading_spec: Any, tier_options: dict[str, Any]) -> None:
        """Raises what `assemble` raises, `ConfigNotFound` and `GeometryUnknown`."""
        vllm_config, kv_cache_config = engine_configs(offloading_spec.extra_config)
        refuse_unsealable(vllm_config, kv_cache_config, offloading_spec)
        parts = assemble(
            _Engine(vllm_config, _extra(offloading_spec, tier_options)),
            kv_cache_config,
            scheduler=True,
        )
        if replace(parts.offloading, extra_config={}) != replace(
            offloading_spec.config, extra_config={}
        ):
            raise AssemblyError("the configuration that was found is not that of the tier's spec")
        self.config = parts.config
        self.station = parts.spec.station
        self._setting = setting = self.station.seal_setting
        self.layout = layout = setting.layout
        geometry = planned_geometry(
            kv_cache_config,
            parts.spec._expectation,
            pipeline_stages=parts.offloading.parallel.pp_size,
        )
        document = _as_workers_write(geometry.describe(), parts.offloading.parallel.world_size)
        self._header = HeaderSealer(setting, document)
        self._slices = [SliceSealer(setting, index) for index in range(len(layout.slices))]
        expectation = Expectation(
            suite=setting.suite,
            keyring=setting.keyring,
            layout=layout,
            identity_document=setting.identity_document,
            identity_digest=setting.identity_digest,
            geometry_document=document,
        )
        self._opener = Opener(expectation)
        self._batch = batch_opener(expectation, self.station.key_bytes)
        self._coverage = ((1 << layout.slots) - 1).to_bytes(coverage_bytes(layout.slots), "little")
        self._generations = itertools.count(1)
        self.names = ObjectNames(setting.suite, setting.keyring, setting.identity_digest)
        self.counters = Counters(self.config.suite, self.config.active_overrides)
        self.journal = RefusalJournal(self.names.name)
        self.epochs = EpochKeeper(
            self.station.epoch_file,
            self.names.follow,
            weights_survive_reset=self.config.weights_survive_reset,
        )

    def take_in(self, buffer: memoryview, row: memoryview) -> None:
        """Copy a row's payload behind the header of `buffer` (a whole file)."""
        header, payload = self.layout.header_bytes, self.layout.payload_bytes
        copy(buffer[header : header + payload], row[:payload])

    def seal(self, buffer: memoryview, key: bytes, epoch: int) -> Refusal | None:
        """Seal the payload in `buffer` as the whole chunk `key`."""
        generation = next(self._generations)
        for sealer in self._slices:
            sealer.seal_slice(buffer, key, epoch, generation)
        refusal = self._header.seal(buffer, key, epoch, generation, self._coverage)
        if refusal is None:
            self.counters.add(SEALED)
        return refusal

    def open(self, buffer: memoryview, key: bytes, epoch: int, place: str) -> Refusal | None:
        """All ten steps on a file in `buffer`; the whole chunk is wanted."""
        start = time.perf_counter()
        answer = self._opener.open(buffer, key, epoch, range(self.layout.slots))
        if isinstance(answer, Refusal):
            return answer
        self.counters.proven(place, answer.fixed.payload_bytes, time.perf_counter() - start)
        return None

    def right(
        self, buffers: list[memoryview], keys: list[bytes], epoch: int, place: str
    ) -> list[bool]:
        """Per file in `buffers` whether it is surely right and whole; where not, `open` it."""
        if self._batch is None:
            return [False] * len(buffers)
        start = time.perf_counter()
        try:
            found = self._batch.right(buffers, keys, epoch)
        except Exception as exc:  # a fault of ours: each is opened by itself
            logger.error("kvsafe: rows were not opened together: %s", type(exc).__name__)
            return [False] * len(buffers)
        taken, count = time.perf_counter() - start, sum(found)
        if count:
            self.counters.proven(place, self.layout.payload_bytes, taken / len(found), count)
        return found

    def give_out(self, row: memoryview, buffer: memoryview) -> None:
        """Copy the payload of an opened file into a row."""
        header, payload = self.layout.header_bytes, self.layout.payload_bytes
        copy(row[:payload], buffer[header : header + payload])


def refuse_unsealable(vllm_config: Any, kv_cache_config: Any, offloading_spec: Any) -> None:
    """Raise `AssemblyError` for engines whose rows vLLM's own spec does not make provable."""
    if vllm_config.lora_config is not None:
        raise AssemblyError(
            "LoRA: vLLM's keys hold an adapter's name and not its content; use KVSafeConnector"
        )
    if offloading_spec.config.canonical_layout:
        raise AssemblyError("canonical_layout: chunks portable between topologies are not proven")
    if offloading_spec.blocks_per_chunk > 1 and not all(
        isinstance(group.kv_cache_spec, FullAttentionSpec)
        for group in kv_cache_config.kv_cache_groups
    ):
        raise AssemblyError(
            "several blocks per chunk with sliding windows or state: vLLM's workers may leave "
            "blocks of such a chunk unwritten, and nobody tells which; use KVSafeConnector"
        )


class _Engine:
    """A `VllmConfig` with the options of a tier where those of the connector would stand."""

    def __init__(self, vllm_config: Any, extra: dict[str, Any]) -> None:
        self._inner = vllm_config
        self.kv_transfer_config = _Transfer(vllm_config.kv_transfer_config, extra)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Transfer:
    def __init__(self, inner: Any, extra: dict[str, Any]) -> None:
        self._inner = inner
        self.kv_connector_extra_config = extra

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _extra(offloading_spec: Any, tier_options: dict[str, Any]) -> dict[str, Any]:
    """What `KVSafeConnector` would have been configured with."""
    own = {name: tier_options[name] for name in SEAL_OPTIONS if name in tier_options}
    rest = {name: value for name, value in tier_options.items() if name not in own}
    return {
        "cpu_bytes_to_use": int(offloading_spec.extra_config["cpu_bytes_to_use"]),
        "blocks_per_chunk": int(offloading_spec.blocks_per_chunk),
        "secondary_tiers": [{"type": "kvsafe-fs", **rest}],
        **own,
    }


def _as_workers_write(geometry: dict[str, object], workers: int) -> bytes:
    """The document of `Station.geometry` where all workers have registered the same."""
    return encode({"workers": [[list(range(workers)), encode(geometry)]]})
