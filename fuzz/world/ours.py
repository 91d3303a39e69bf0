# SPDX-License-Identifier: Apache-2.0
"""The kvsafe flavour: everything of ours is real, only threads, tiers and time are by hand."""

import os
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from conformance.stations import invented_identity
from fuzz.world import parts
from fuzz.world.device import PAGE_BYTES
from fuzz.world.hands import HandPool
from fuzz.world.tier import HandTier
from fuzz.world.watch import LoadWatch
from kvsafe.device import Copier, ExpectedGroup, Geometry, GeometryExpectation, RowWindow
from kvsafe.device.cpu import CpuEngine
from kvsafe.device.order import CopyTask
from kvsafe.device.plan import RowPlan
from kvsafe.device.work import TaskDone, first_refusal
from kvsafe.engine.assembly import Parts
from kvsafe.engine.config import KVSafeConfig, parse_config, to_vllm_extra
from kvsafe.engine.counters import Counters
from kvsafe.engine.identity.adapters import AdapterLedger
from kvsafe.engine.rows.epochs import EpochKeeper
from kvsafe.engine.rows.proof import RowProof
from kvsafe.engine.spec import Assembly, KVSafeSpec
from kvsafe.engine.station import Launch, Station
from kvsafe.engine.tiers.names import ObjectNames
from kvsafe.engine.tiers.patience import RowKeeper
from kvsafe.engine.tiers.proving import ProofDesk, ProvingTier
from kvsafe.seal.epoch import EpochFile
from kvsafe.seal.keyfile import load_or_create
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.refusal import Refusal
from kvsafe.seal.suites import Suite

_A_WAIT_S = 1.0
"""What is shorter is a rest: a pause in which copies may go on or not."""
_MEMORY = Path("/dev/shm")  # noqa: S108 - small files that are written often


class HandEngine(CpuEngine):
    """The real engine for host memory; its tasks run, or fail, when the driver says so."""

    def __init__(self, geometry: Geometry, window: RowWindow, proof: RowProof | None) -> None:
        self.pool = HandPool()
        super().__init__(geometry, window, proof, pool=self.pool)
        self.fault = False
        self.landed: list[int] = []
        self.between: Counter[int] = Counter()

    def _run(self, task: CopyTask, done: TaskDone) -> None:
        """In two strides, because proof and copy of a real thread are not one moment.

        A load is proven first and copied later; a store is copied first and tagged later.
        """
        first = self._steps[task.direction][:-1]
        failure = first_refusal(first, task.row)
        if failure is not None:
            done(task, failure, 0)
        else:
            self.between[task.row.row] += 1
            self.pool.submit(partial(self._run_last, task, done))

    def _run_last(self, task: CopyTask, done: TaskDone) -> None:
        self.between[task.row.row] -= 1
        failure = first_refusal(self._steps[task.direction][-1:], task.row)
        done(task, failure, 0 if failure is not None else self._map.size(task.row))

    def copy_in(self, row: RowPlan) -> None:
        """Row -> device, looked at afterwards."""
        self._maybe_fail()
        super().copy_in(row)
        self.landed += [block for _, block in row.blocks]

    def copy_out(self, row: RowPlan) -> None:
        """Device -> row."""
        self._maybe_fail()
        super().copy_out(row)

    def _maybe_fail(self) -> None:
        if self.fault:
            self.fault = False
            raise OSError("by hand")


class HandCopier(Copier):
    """The real copier, waiting for which makes its tasks run."""

    def __init__(
        self, geometry: Geometry, window: RowWindow, proof: RowProof | None, watch: LoadWatch
    ) -> None:
        self.hand = HandEngine(geometry, window, proof)
        super().__init__(geometry, window, self.hand)
        self._watch = watch

    @property
    def waiting(self) -> int:
        """Tasks that may run."""
        return len(self.hand.pool.waiting)

    def run(self, index: int, *, fault: bool = False) -> None:
        """Run one of them."""
        self.hand.fault = fault
        self.hand.pool.run(index)
        self.hand.fault = False
        landed, self.hand.landed = self.hand.landed, []
        self._watch.landed(landed)

    def wait(self, jobs: set[int], timeout_s: float) -> bool:
        """Run until none of these jobs is under way; the worker's short rest ends nothing."""
        while timeout_s >= _A_WAIT_S and not self._jobs.keys().isdisjoint(jobs) and self.waiting:
            self.run(0)
        return super().wait(jobs, 0.0)


class WorldSpec(KVSafeSpec):
    """Our spec with proof threads, tiers and copy tasks by hand."""

    def __init__(self, config: Any, assembly: Assembly, world: parts.Parts) -> None:
        self.world = world
        super().__init__(config, assembly)

    def _lay_out_rows(self) -> None:
        super()._lay_out_rows()
        self.num_chunks = self.world.setting.rows

    def _proof_desk(
        self, epochs: EpochKeeper, counters: Counters, names: ObjectNames, primary: RowKeeper
    ) -> ProofDesk:
        desk = super()._proof_desk(epochs, counters, names, primary)
        desk.threads.shutdown(wait=False)
        return replace(desk, threads=cast(Any, self.world.threads))

    def _build_tiers(self, rows: memoryview, desk: ProofDesk) -> list[SecondaryTierManager]:
        world = self.world
        world.tiers = [
            HandTier(rows, world.counts, request_level=wish) for wish in world.setting.tiers
        ]
        return [ProvingTier(tier, index, desk, None) for index, tier in enumerate(world.tiers)]

    def _copier(self, geometry: Geometry, window: RowWindow, proof: RowProof | None) -> Copier:
        copier = HandCopier(geometry, window, proof, self.world.watch)
        self.world.copies = copier
        return copier


@cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(
        prefix="kvsafe-world-", dir=_MEMORY if _MEMORY.is_dir() else None
    )


@cache
def _config(survive: bool) -> KVSafeConfig:
    extra = {
        "cpu_bytes_to_use": 1 << 20,
        "state_dir": str(Path(_home().name) / "state"),
        "weights_survive_reset": survive,
        "load_deadline_s": 60,
        "store_deadline_s": 60,
    }
    return parse_config(extra, environ=os.environ)


@cache
def _keyring(path: str, suite: Suite) -> Keyring:
    return load_or_create(Path(path), suite=suite.label)


def _station(world: parts.Parts) -> Station:
    config = _config(not world.setting.new_weights)
    suite = Suite.named(config.suite)
    keyring = _keyring(str(config.key_file), suite)
    secret = keyring.state_secret
    epoch = Path(config.state_dir) / f"epoch-{uuid.uuid4().hex}.json"
    file = EpochFile(epoch, lambda data: suite.tag(secret, data), first=1)
    return Station(config, invented_identity(), keyring, file, Launch(uuid.uuid4().hex, 1, None))


def _build(vllm_config: Any, kv_cache_config: Any, world: parts.Parts) -> Parts:
    offloading = build_offloading_config(vllm_config, kv_cache_config)
    station = _station(world)
    names = [group.layer_names[0] for group in kv_cache_config.kv_cache_groups]
    expectation = GeometryExpectation(
        device_type="cpu",
        blocks_per_chunk=world.setting.blocks_per_chunk,
        slice_bytes=PAGE_BYTES * world.setting.blocks_per_chunk,
        groups=tuple(ExpectedGroup((name,), (PAGE_BYTES,)) for name in names),
    )
    extra = {**to_vllm_extra(station.config), "eviction_policy": world.setting.policy}
    extra["offload_prompt_only"] = not world.setting.whole
    extra["blocks_per_chunk"] = world.setting.blocks_per_chunk
    assembly = Assembly(station, expectation, (), world.setting.fail)
    spec = WorldSpec(replace(offloading, extra_config=extra), assembly, world)
    caches = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(world.device.tensor, PAGE_BYTES)],
        group_data_refs=[[CanonicalKVCacheRef(0, PAGE_BYTES)] for _ in names],
    )
    spec.get_worker(caches)
    adapters = AdapterLedger(Path(station.config.state_dir) / "adapters.json")
    return Parts(station.config, offloading, spec, adapters)


def assemble_world(vllm_config: Any, kv_cache_config: Any) -> Parts:
    """The parts of both halves of this world: built for the first, shared with the second."""
    world = parts.current()
    if world.spec is None:
        world.spec = _build(vllm_config, kv_cache_config, world)
    return cast(Parts, world.spec)


_REFUSED = Counters.refused


def counted(self: Counters, refusal: Refusal, tier: str) -> None:
    """Stands in for `Counters.refused`: the world counts refusals too, by number."""
    for name in ("refused", f"refused_{refusal.number}"):
        parts.current().counts[name] += 1
    _REFUSED(self, refusal, tier)


def inline(action: Callable[[], None], limit_s: float, what: str) -> bool:
    """Stands in for `ends_within`: a tier that hangs is one that does not come to rest."""
    action()
    owner = getattr(action, "__self__", None)
    return not (isinstance(owner, HandTier) and owner.hung)
