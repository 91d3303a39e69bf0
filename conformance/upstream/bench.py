# SPDX-License-Identifier: Apache-2.0
"""What our classes need and vLLM's tests do not bring: a station, a region, an epoch, a worker."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from conformance.stations import invented_station
from kvsafe.engine.identity.adapters import AdapterLedger
from kvsafe.engine.rows.epochs import EpochKeeper
from kvsafe.engine.station import Station
from kvsafe.seal.header import bitmap

KEY_BYTES = 36
SLICE_BYTES = 64


def whole_key(key: bytes) -> bytes:
    """Their keys are of any length; ours are a hash of 32 bytes and a group of 4."""
    return bytes(key) if len(key) == KEY_BYTES else blake3(key[:-4]).digest() + bytes(key[-4:])


class HereAndNow(Executor):
    """Threads that have done everything as soon as it is handed to them."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Do it."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as exc:
            future.set_exception(exc)
        return future


class WideSealer:
    """A sealer of ours that takes their keys."""

    def __init__(self, sealer: Any) -> None:
        self._sealer = sealer

    def seal(self, row: Any, key: bytes, *rest: Any) -> Any:
        """Close a header."""
        return self._sealer.seal(row, whole_key(key), *rest)


class Bench:
    """One station over `rows` rows, and the part of a worker in a store."""

    def __init__(self, rows: int) -> None:
        self.station = bare_station(1 << 20, 1)
        self.station.lay_out(key_bytes=KEY_BYTES, slots=1, slice_bytes=(SLICE_BYTES,))
        self.region = self.station.open_region(max(1, rows))
        self.region.forget_name()
        self.station.register(0, {"invented": True})
        self.epochs = EpochKeeper(self.station.epoch_file, self.region.announce_epoch)
        self._worker: Any = None

    def write(self, key: bytes, row: int, generation: int, epoch: int) -> None:
        """Tag one slice, as a worker does after its copy."""
        if self._worker is None:
            self._worker = self.station.slice_sealer(0)
        self._worker.seal_slice(self.region.row(row), whole_key(key), epoch, generation)

    def seal(self, key: bytes, row: int) -> None:
        """Write and seal one row, as a tier brings it that has stored it before."""
        generation, epoch = self.region.ledger.generation(row), self.epochs.epoch
        self.write(key, row, generation, epoch)
        sealer = self.station.header_sealer()
        sealer.seal(self.region.row(row), whole_key(key), epoch, generation, bitmap(1, [0]))


@cache
def _folder() -> str:
    folder = tempfile.mkdtemp(prefix="kvsafe-upstream-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _key_file() -> str:
    return str(Path(_folder()) / "key")


def ledger() -> AdapterLedger:
    """A ledger of adapters that nobody has used yet."""
    return AdapterLedger(Path(tempfile.mkdtemp(dir=_folder())) / "adapters.json")


def bare_station(cpu_bytes: Any, workers: int) -> Station:
    """A station with an invented identity, not laid out yet. Raises `ConfigError`."""
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    options = {"state_dir": str(folder), "key_file": _key_file()}
    sizes = {} if cpu_bytes is None else {"cpu_bytes_to_use": cpu_bytes}
    return invented_station({**options, **sizes}, workers)
