# SPDX-License-Identifier: Apache-2.0
"""SpoolCache's token-file store (`spoolcache`, MIT), driven through its own interface.

Each chunk is a chain of one data file. No accelerator: a chunk is committed from memory and
streamed back into memory, through the same authentication that comes before its GPU copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from spoolcache.errors import ManifestError, StoreBusyError
from spoolcache.hma import GroupGeometry, HMALayout, LayerGeometry
from spoolcache.token_files import TokenFileStore

from conformance.tier.drivers.stock import installed
from conformance.tier.subject import PATIENCE_S, PAYLOAD, Seen, Span, content_of, key_of


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _layout() -> HMALayout:
    group = GroupGeometry(
        group_index=0,
        spec_name="trial",
        block_size=256,
        storage_block_size=256,
        manager_page_size_bytes=PAYLOAD,
        dcp_replicated=False,
        dcp_shard_count=1,
        logical_tokens_per_page=256,
        reuse_policy="full",
        reuse_window_tokens=None,
        running_state_tail_pages=0,
        is_eagle_group=False,
        layers=(LayerGeometry("layer", "trial", PAYLOAD),),
    )
    return HMALayout(num_manager_blocks=100, dcp_degree=1, groups=(group,))


class SpoolCache:
    """One rank's store; each model has a folder of its own, named by its identity."""

    NAME: ClassVar[str] = "SpoolCache token files"
    # From its docs: every file authenticated (SHA-256) before placement, identity in each header,
    # durable publication, crash leftovers reclaimed, corruption quarantined and served as a miss.
    PROMISES: ClassVar[frozenset[str]] = frozenset(
        {"bytes", "place", "identity", "longer", "shorter", "kind", "heal", "cleanup"}
        | {"full disk", "killed writer"}
    )

    def __init__(self, root: Path, model: str, options: Mapping[str, Any]) -> None:
        self._model = model
        layout = _layout()
        self._store = TokenFileStore(
            root / _digest(model) / "rank-0000",
            layout=layout,
            slot_bytes=PAYLOAD,
            slot_count=1,
            expected_deployment_digest=_digest(model),
            expected_rank_digest=_digest(f"{model} rank 0"),
            expected_rank=0,
            expected_topology_digest=_digest("one rank"),
            expected_profile=layout.profile,
            expected_layout_digest=layout.digest,
            **options,
        )

    @classmethod
    def open(cls, root: Path, model: str, options: Mapping[str, Any]) -> SpoolCache:
        """The store under `root`."""
        return cls(root, model, options)

    @classmethod
    def versions(cls) -> Mapping[str, str]:
        """SpoolCache's."""
        return installed("spoolcache")

    def store(self, number: int) -> bool:
        """Commit, unless a valid file is there, as its mover does."""
        key, data = key_of(number).hex(), content_of(self._model, number)
        try:
            if self._store.valid_chunk(key, None, 256) is None:
                self._store.commit_chunk(key, None, 256, data)
        except (OSError, ManifestError):
            return False
        return True

    def load(self, number: int) -> Seen:
        """Take a restore view and stream the file; each call in time or it is a hang."""
        return _in_time(lambda: self._load(number))

    def _load(self, number: int) -> Seen:
        taken = bytearray()

        @contextlib.contextmanager
        def receiver(descriptor: Any) -> Iterator[Callable[[memoryview], None]]:
            yield taken.extend

        there = self._path(number).exists()
        try:
            with self._store.restore_view(key_of(number).hex()) as view:
                if not view.result.is_hit:
                    return Seen.REFUSED if there else Seen.MISS
                self._store.stream_objects(view.descriptors, receiver, lease=view)
        except (OSError, ManifestError):
            return Seen.REFUSED
        except StoreBusyError:
            return Seen.MISS
        return Seen.HIT if bytes(taken) == content_of(self._model, number) else Seen.WRONG

    def _path(self, number: int) -> Path:
        return Path(self._store._manifest_path(key_of(number).hex()))

    def forge(self, span: Span, number: int, body: bytes) -> bool:
        """Its hashes have no key: a file with new ones is made with its own code."""
        key = key_of(number).hex()
        digest = hashlib.sha256(body).hexdigest()
        payload = self._store._header_payload(key, None, 256, digest, "data", [digest])
        span.path.write_bytes(self._store._encode_header(payload) + body)
        return True

    def raise_epoch(self) -> bool:
        """No such way."""
        return False

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def _in_time(work: Callable[[], Seen]) -> Seen:
    found: list[Seen] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if failed:
        raise failed[0]
    return found[0] if found else Seen.HANG
