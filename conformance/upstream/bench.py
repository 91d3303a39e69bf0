# SPDX-License-Identifier: Apache-2.0
"""What our classes need and vLLM's tests do not bring: a station, a region, an epoch, a worker."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvsafe.engine.config import parse_config
from kvsafe.engine.identity.adapters import AdapterLedger
from kvsafe.engine.rows.epochs import EpochKeeper
from kvsafe.engine.station import Launch, Station
from kvsafe.seal.epoch import EpochFile
from kvsafe.seal.header import bitmap
from kvsafe.seal.identity import IDENTITY_FIELDS, Identity
from kvsafe.seal.keyfile import load_or_create
from kvsafe.seal.suites import Suite

KEY_BYTES = 36
SLICE_BYTES = 64
_VALUES: dict[str, Any] = {
    "text": "x",
    "count": 1,
    "flag": False,
    "number": 1.0,
    "digest": bytes(32),
    "list": [],
    "map": {},
}


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
    config = parse_config({**options, **sizes}, environ=os.environ)
    suite = Suite.named(config.suite)
    keyring = load_or_create(Path(_key_file()), suite=suite.label)
    secret = keyring.state_secret
    epoch_file = EpochFile(folder / "epoch.json", lambda data: suite.tag(secret, data))
    identity = Identity.of({field.name: _VALUES[field.kind] for field in IDENTITY_FIELDS})
    launch = Launch(uuid.uuid4().hex, workers, None)
    return Station(config, identity, keyring, epoch_file, launch)
