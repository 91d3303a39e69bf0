# SPDX-License-Identifier: Apache-2.0
"""The station: everything one process of one engine needs to seal and open, built once.

Scheduler and workers each build their own from the same effective configuration and must
come to the same identity; what only a worker can know (the geometry of the real tensors)
reaches the others through the host region.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvsafe.engine.config import KVSafeConfig
from kvsafe.engine.journal import logger
from kvsafe.host import HostRegion, RegionShape
from kvsafe.seal.batch import BatchOpener, batch_opener
from kvsafe.seal.cbor import decode, encode
from kvsafe.seal.epoch import EpochFile
from kvsafe.seal.header import Header
from kvsafe.seal.identity import Identity
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.layout import RowLayout
from kvsafe.seal.opening import Expectation, Opener
from kvsafe.seal.refusal import Refusal
from kvsafe.seal.sealing import HeaderSealer, SealSetting, SliceSealer
from kvsafe.seal.suites import Suite


class StationError(RuntimeError):
    """The parts of one engine do not fit together; the text says which."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of one engine: its token, its number of workers, this process's rank."""

    token: str
    workers: int
    rank: int | None


class Station:
    """Seal and open for one process. Thread-safe after the region is open."""

    def __init__(
        self,
        config: KVSafeConfig,
        identity: Identity,
        keyring: Keyring,
        epoch_file: EpochFile,
        launch: Launch,
    ) -> None:
        self.config = config
        self.identity = identity
        self.suite = Suite.named(config.suite)
        self.keyring = keyring
        self.epoch_file = epoch_file
        self.launch = launch
        self.region: HostRegion | None = None
        self.setting: SealSetting | None = None
        self._opener: Opener | None = None
        self._batch: tuple[BatchOpener | None] | None = None
        self.key_bytes = 0
        self._geometry: bytes | None = None
        self._lock = threading.Lock()

    def lay_out(self, *, key_bytes: int, slots: int, slice_bytes: tuple[int, ...]) -> RowLayout:
        """Decide the shape of rows (bytes per key, blocks per chunk, bytes per writer)."""
        self.key_bytes = key_bytes
        layout = RowLayout.plan(
            identity_bytes=len(self.identity.document),
            key_bytes=key_bytes,
            slots=slots,
            slice_bytes=slice_bytes,
        )
        self.setting = SealSetting(
            suite=self.suite,
            keyring=self.keyring,
            layout=layout,
            identity_document=self.identity.document,
            identity_digest=self.identity.digest(self.suite),
        )
        return layout

    @property
    def seal_setting(self) -> SealSetting:
        """The setting that `lay_out` made. Raises `StationError` before that."""
        if self.setting is None:
            raise StationError("lay_out has not been called")
        return self.setting

    def open_region(self, num_rows: int) -> HostRegion:
        """Create or join the rows of this launch."""
        if self.region is None:
            layout = self.seal_setting.layout
            shape = RegionShape(num_rows, layout.row_bytes, self.launch.workers)
            self.region = HostRegion.open(self.launch.token, shape)
        return self.region

    def geometry(self) -> bytes:
        """The geometry document of all workers: what each registered, equal ones once.

        Raises `StationError` while a worker has not registered.
        """
        with self._lock:
            if self._geometry is None:
                self._geometry = self._gather()
            return self._geometry

    def _gather(self) -> bytes:
        region = self.region
        if region is None:
            raise StationError("the region is not open")
        ranks: dict[bytes, list[int]] = {}
        for rank in range(self.launch.workers):
            note = region.registration(rank)
            if note is None:
                raise StationError(
                    f"worker {rank} has not registered its KV cache in {region.path.name}; "
                    "all processes of one engine must see the same shared memory"
                )
            ranks.setdefault(self._judge_note(rank, note), []).append(rank)
        return encode({"workers": [[owners, document] for document, owners in ranks.items()]})

    def register(
        self, rank: int, geometry: dict[str, object], more: Mapping[str, object] | None = None
    ) -> None:
        """Leave what this worker found at registration for the other processes.

        `more` are notes that are no part of the geometry; `notes` reads them.
        """
        if self.region is None:
            raise StationError("the region is not open")
        note = {"geometry": encode(geometry), "identity": self.seal_setting.identity_digest}
        self.region.register_worker(rank, encode({**note, **(more or {})}))

    def notes(self, name: str) -> list[object]:
        """The note of this name of every worker, None where one has left none."""
        found = []
        for rank in range(self.launch.workers):
            raw = None if self.region is None else self.region.registration(rank)
            note = decode(raw, limit=len(raw)) if raw is not None else None
            found.append(note.get(name) if isinstance(note, dict) else None)
        return found

    def _judge_note(self, rank: int, note: bytes) -> bytes:
        """The geometry in a worker's note, if the worker has come to the same identity."""
        value = decode(note, limit=len(note))
        if isinstance(value, dict):
            geometry, digest = value.get("geometry"), value.get("identity")
            if isinstance(geometry, bytes) and digest == self.seal_setting.identity_digest:
                return geometry
        raise StationError(
            f"worker {rank} and this process read different identities from what should be "
            "one configuration: does the model change its own config while it loads?"
        )

    def opener(self) -> Opener:
        """The opener for rows of this engine (made on first use, when all have registered)."""
        if self._opener is None:
            self._opener = Opener(self._expectation())
        return self._opener

    def _expectation(self) -> Expectation:
        setting = self.seal_setting
        return Expectation(
            suite=setting.suite,
            keyring=setting.keyring,
            layout=setting.layout,
            identity_document=setting.identity_document,
            identity_digest=setting.identity_digest,
            geometry_document=self.geometry(),
        )

    def header_sealer(self) -> HeaderSealer:
        """A sealer for the scheduler side."""
        return HeaderSealer(self.seal_setting, self.geometry())

    def slice_sealer(self, index: int) -> SliceSealer:
        """A sealer for the writer with this index."""
        return SliceSealer(self.seal_setting, index)

    def open_row(self, row: memoryview, key: bytes, epoch: int) -> Header | Refusal:
        """All ten steps on one row."""
        return self.opener().open(row, key, epoch)

    def right_rows(
        self, rows: Sequence[memoryview], keys: Sequence[bytes], epoch: int
    ) -> list[bool]:
        """Per row whether it is surely right; where not, `open_row` is to be asked."""
        if self._batch is None:
            self._batch = (batch_opener(self._expectation(), self.key_bytes),)
            together = "one by one" if self._batch[0] is None else "together"
            logger.info("kvsafe: rows that a tier brings are opened %s", together)
        batch = self._batch[0]
        return [False] * len(rows) if batch is None else batch.right(rows, keys, epoch)

    def close(self) -> None:
        """Let go of the region."""
        if self.region is not None:
            self.region.close()
            self.region = None


__all__ = ["Launch", "Station", "StationError"]
