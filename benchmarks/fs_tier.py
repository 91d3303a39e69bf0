# SPDX-License-Identifier: Apache-2.0
"""`kvsafe-fs` against vLLM's fs tier, in one run, over the same rows and the same disk.

    python -m benchmarks.fs_tier [--json] [--rounds N] [--dir FOLDER] [--mib N] [--sync none]
    python -m benchmarks.fs_tier --restart 100000 [--dir FOLDER]

Both tiers get the same jobs, all in flight at once, through vLLM's `SecondaryTierManager`
interface. Each round takes new names, stores them, drops the page cache where that is allowed
(both tiers read with O_DIRECT where the disk has it), and loads them. `load, opened` is our load
with keyed opening of every row by the thread that has read it, as `ProvingTier` has it done,
against their bare load, which checks nothing. Ratios are theirs / ours in seconds: above 1, ours is
faster; `best` compares the best rounds, `ratio` is the median over pairs of rounds. Lines with
`cpu` are seconds of CPU per GB. Ext4 looks, for each new file, at every inode of its group that
was freed in the last minutes (`recently_deleted` in `perf`), which can cost more than all the
rest, ours first: measure on a file system where nothing was removed for five minutes, or on one
that was made for it, on a loop device with `losetup --direct-io=on` over a file of 50 GiB. Without
direct I/O the page cache of the file below is measured, and rounds differ by a factor of three.

`--restart` makes a store of that many files of 8 KiB (of no blocks, but for one: names are what
a count has to look at) and tells how long a new process takes from opening the store to its first
chunk, while the files are counted in the background. What it does is told on standard error.
"""

import argparse
import gc
import hashlib
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.fs import manager as stock

from benchmarks.report import show
from benchmarks.seal_open import Bench
from kvsafe.engine.fs.tier import KVSafeFsTier
from kvsafe.host import HostRegion, RegionShape
from kvsafe.seal.batch import batch_opener
from kvsafe.seal.header import Header
from kvsafe.seal.keyring import DEFAULT_SUITE
from kvsafe.seal.suites import Suite
from kvsafe.tiers import ChunkStore, StoreSetting

KIB = 1024
SIZES = (128 * KIB, 1024 * KIB, 4096 * KIB)
ROWS_PER_JOB = 16
STEP_S = 0.001
"""Between two looks at a tier: a quick engine step. Whoever looks all the time holds both up."""


class _Mapper:
    """Where vLLM's tier files its objects: its own shape of path, without an engine."""

    def __init__(self, root: str) -> None:
        self._root = root

    def get_file_name(self, key: bytes) -> str:
        text = key.hex()
        return f"{self._root}/{text[:3]}/{text[3:5]}_g0/{text}.bin"

    def get_config_file_path(self) -> str:
        return f"{self._root}/config.json"

    def get_run_config(self) -> dict[str, object]:
        return {}


class Side:
    """One tier over the rows of a region."""

    def __init__(self, tier: SecondaryTierManager) -> None:
        self.tier = tier
        self.next_job = 0

    def run(self, keys: list[bytes], load: bool) -> tuple[float, float]:
        """Seconds and CPU seconds for all keys, row i for key i, all jobs in flight at once."""
        rows = np.arange(len(keys), dtype=np.int32)
        cpu, start = time.process_time(), time.perf_counter()
        jobs = 0
        for at in range(0, len(keys), ROWS_PER_JOB):
            part = slice(at, at + ROWS_PER_JOB)
            job = TransferJob(
                job_id=self.next_job,
                keys=[OffloadKey(key) for key in keys[part]],
                chunk_ids=rows[part],
                is_promotion=load,
                req_context=ReqContext(req_id="bench"),
            )
            self.next_job += 1
            jobs += 1
            (self.tier.submit_load if load else self.tier.submit_store)(job)
        while jobs:
            for result in self.tier.get_finished_jobs():
                if not result.success:
                    raise SystemExit(f"{self.tier.tier_type}: a job failed")
                jobs -= 1
            time.sleep(STEP_S)
        return time.perf_counter() - start, time.process_time() - cpu

    def lookups(self, keys: list[bytes]) -> float:
        """Seconds until every key is answered HIT."""
        start = time.perf_counter()
        request = ReqContext(req_id=f"look{self.next_job}")
        self.next_job += 1
        waiting = [OffloadKey(key) for key in keys]
        while waiting:
            waiting = [k for k in waiting if self.tier.lookup(k, request) is not LookupResult.HIT]
            self.tier.on_schedule_end(MagicMock())
            time.sleep(STEP_S)
        self.tier.on_request_finished(request)
        return time.perf_counter() - start


def _sides(root: Path, rows: memoryview, row_bytes: int, sync: str) -> tuple[Side, Side]:
    config = SimpleNamespace(quarantine="aside")
    ours = KVSafeFsTier(
        SimpleNamespace(station=SimpleNamespace(config=config)),
        rows,
        "kvsafe-fs",
        root_dir=str(root / "ours"),
        capacity_bytes=64 << 30,
        sync=sync,
    )
    _make_folders(ours.store, root / "theirs")
    spec = SimpleNamespace(
        blocks_per_chunk=1, kv_events_config=SimpleNamespace(enable_kv_cache_events=False)
    )
    mapper = MagicMock()
    mapper.from_offloading_spec = lambda **_: _Mapper(str(root / "theirs"))
    original, stock.FileMapper = stock.FileMapper, mapper
    try:
        theirs: Any = stock.FileSystemTierManager(spec, rows, "fs", root_dir=str(root / "theirs"))
    finally:
        stock.FileMapper = original
    return Side(ours), Side(theirs)


def _make_folders(store: ChunkStore, theirs: Path) -> None:
    """The folders that the first stores make, some 50 us each: an older store has them all.

    That is ours, and the upper ones of vLLM's tier, which are as many. What is new in a folder that
    was not used for a while waits for that folder to be read from the disk. Of its lower ones it
    makes a new one for nearly every chunk, for as long as it lives.
    """
    for number in range(1 << 12):
        with store.folders.bucket(f"{number:03x}", make=True):
            pass
        (theirs / f"{number:03x}").mkdir(parents=True)


def _drop_cache() -> None:
    """What is read next comes from the disk, also below a loop device.

    A sync of the file system on it leaves dirty pages of the file below, which a second one
    writes: what is dirty stays in the cache.
    """
    for _ in range(3):
        os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return


class Sealed:
    """Rows that carry seals, and the opening of all of them as they are filled."""

    def __init__(self, region: HostRegion, payload: int) -> None:
        self._bench = Bench(Suite.named(DEFAULT_SUITE), payload)
        self._region = region

    def fill(self) -> None:
        """The same sealed chunk in every row: what is measured is reading and opening."""
        for row in range(self._region.shape.num_rows):
            self._region.row(row)[:] = self._bench.row

    def load_and_open(self, one: Side, keys: list[bytes]) -> tuple[float, float]:
        """Seconds and CPU seconds until every key is loaded and its row opened."""
        tier, opened = one.tier, Counter[type]()
        tier.in_place = _Opening(self._bench, opened)
        taken = one.run(keys, load=True)
        tier.in_place = None
        if opened != {Header: len(keys)}:
            raise SystemExit(f"not every row was opened: {opened}")
        return taken


class _Opening:
    """Opens what a tier has read, as `ProvingTier` has it done."""

    def __init__(self, bench: Bench, opened: Counter[type]) -> None:
        self._bench = bench
        self._batch = batch_opener(bench.expectation, len(bench.key))
        self._opened = opened

    def open(
        self, job: int, places: list[int], rows: list[int], data: list[memoryview]
    ) -> list[int]:
        """The places whose bytes are right: together, and else one by one, as `Openings`."""
        batch, key = self._batch, self._bench.key
        right = batch.right(data, [key] * len(data), 0) if batch else [False] * len(data)
        answers = [
            Header if good else type(self._bench.opener.open(one, key, 0, (0,)))
            for good, one in zip(right, data, strict=True)
        ]
        self._opened.update(answers)
        return [place for place, kind in zip(places, answers, strict=True) if kind is Header]

    def filled(self, job: int, places: list[int]) -> None:
        """Nobody waits for it here."""


def _measure(size: int, options: argparse.Namespace, root: Path) -> list[dict[str, object]]:
    payload = size - 4096
    count = max(ROWS_PER_JOB, (options.mib << 20) // size)
    region = HostRegion.open(f"bench-{os.getpid()}-{size}", RegionShape(count, size, 1))
    region.forget_name()
    sealed = Sealed(region, payload)
    sides = _sides(root, memoryview(region.rows), size, options.sync)
    taken: dict[str, list[list[float]]] = {}
    # As vLLM's engine does after its start: what is there by now is looked through no more.
    gc.collect()
    gc.freeze()
    try:
        for round_ in range(options.rounds):
            for side in (0, 1) if round_ % 2 else (1, 0):
                sealed.fill()
                _round(sides[side], side, round_, count, sealed, taken)
    finally:
        for one in sides:
            one.tier.shutdown()
        region.close()
    return [_line(size, count, name, pairs, options.sync) for name, pairs in taken.items()]


def _round(
    one: Side,
    side: int,
    round_: int,
    count: int,
    sealed: Sealed,
    taken: dict[str, list[list[float]]],
) -> None:
    keys = [os.urandom(32) + bytes(4) for _ in range(count)]
    stored, stored_cpu = one.run(keys, load=False)
    looked = one.lookups(keys)
    kinds = ["load", "load, opened"] if side == 0 else ["load"]
    loads = {}
    # In turns: who reads a file again may find it elsewhere than who read it first.
    for kind in kinds[:: 1 if round_ % 4 < 2 else -1]:
        _drop_cache()
        loads[kind] = (
            one.run(keys, load=True) if kind == "load" else sealed.load_and_open(one, keys)
        )
    loaded, loaded_cpu = loads["load"]
    opened, opened_cpu = loads.get("load, opened", loads["load"])
    values = {
        "store": stored,
        "load": loaded,
        "load, opened": opened,
        "lookup": looked,
        "store cpu": stored_cpu,
        "load cpu": loaded_cpu,
        "load, opened cpu": opened_cpu,
    }
    for name, value in values.items():
        taken.setdefault(name, [[], []])[side].append(value)


def _line(
    size: int, count: int, name: str, pairs: list[list[float]], sync: str
) -> dict[str, object]:
    ours, theirs = statistics.median(pairs[0]), statistics.median(pairs[1])
    ratios = sorted(b / a for a, b in zip(*pairs, strict=True))
    gb = size * count / 1e9
    unit = "1/s" if name == "lookup" else ("cpu s/GB" if "cpu" in name else "GB/s")
    amount = count if name == "lookup" else gb
    return {
        "row_kib": size // KIB,
        "what": name,
        "sync": sync,
        "ours": ours / gb if "cpu" in name else amount / ours,
        "theirs": theirs / gb if "cpu" in name else amount / theirs,
        "unit": unit,
        "ratio": statistics.median(ratios),
        "low": ratios[0],
        "high": ratios[-1],
        "best": min(pairs[1]) / min(pairs[0]),
    }


def _restart(files: int, root: Path) -> dict[str, object]:
    """Seconds from opening a full store to its first chunk, and to the end of the count."""
    setting = StoreSetting(str(root / "store"), 8 * KIB, capacity_bytes=1 << 40)
    row, name = memoryview(mmap.mmap(-1, 8 * KIB)), hashlib.sha256(b"last").digest()
    filled = ChunkStore(setting)
    filled.keeper.wait_counted()
    _make_files(filled, files - 1)
    stored = filled.put(name, row)
    filled.close()
    _say("dropping the page cache")
    _drop_cache()
    _say("opening the store anew")
    start = time.perf_counter()
    again = ChunkStore(setting)
    found = stored.good and again.look([name]) == [True] and again.get(name, row).good
    first = time.perf_counter() - start
    _say(f"first hit after {first:.3f} s; counting")
    counted = again.keeper.wait_counted(1, 600)
    ended = time.perf_counter() - start
    files_seen = again.keeper.counted.files
    again.close()
    if not found or not counted or files_seen != files:
        raise SystemExit("the chunk was not found after the restart, or not every file counted")
    return {"files": files, "first_hit_s": first, "counted_s": ended}


def _make_files(store: ChunkStore, files: int) -> None:
    """Files with the mode and length of chunks, at the names of chunks."""
    start = time.perf_counter()
    for number in range(files):
        name = hashlib.sha256(number.to_bytes(8, "little")).digest()
        bucket, file = store.folders.place(name)
        with store.folders.bucket(bucket, make=True) as folder:
            fd = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=folder)
        os.truncate(fd, store.setting.row_bytes)
        os.close(fd)
        if (number + 1) % 10000 == 0:
            _say(f"{number + 1} files made in {time.perf_counter() - start:.0f} s")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description="kvsafe-fs against vLLM's fs tier")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512, help="MiB per round and side")
    parser.add_argument("--dir", default=None, help="a folder on the disk to measure")
    parser.add_argument("--sync", default="none", choices=("none", "data", "full"))
    parser.add_argument("--restart", type=int, default=0, metavar="N", help="files in the store")
    parser.add_argument("--row-kib", type=int, default=0, help="only rows of this length")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    sizes = (options.row_kib * KIB,) if options.row_kib else SIZES
    for size in (0,) if options.restart else sizes:
        root = Path(tempfile.mkdtemp(dir=options.dir))
        try:
            if options.restart:
                rows.append(_restart(options.restart, root))
            else:
                rows += _measure(size, options, root)
        finally:
            if options.restart:
                _say("removing the files")
            shutil.rmtree(root)
    show(rows, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
