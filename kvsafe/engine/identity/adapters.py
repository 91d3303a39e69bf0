# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: which content a request's adapter has, not only which name (F06).

vLLM's block hash holds the name and the path of an adapter. What the content is must come
from here. Read in vLLM 0.32 (`lora/worker_manager.py`, `entrypoints/openai/models/serving.py`,
`v1/worker/gpu_input_batch.py`, `v1/worker/gpu/lora_utils.py`):

- A worker loads an adapter when it does not hold its `lora_int_id`, or at *every model step*
  when the request says `load_inplace`.
- The API server keeps the request object of a load, so after one in-place load the flag
  stays set on every later request of that adapter: each of them reloads from disk.
- Workers evict by LRU without telling anyone and reload from disk at the next use.
- The load call of the API server runs before the first request is seen by the scheduler.
- Loading an unloaded name again gives a new `lora_int_id` with the same name and path.
- The accelerator's own prefix cache is keyed by name and path only, and vLLM does not drop
  blocks of the earlier content: they may still be hit, and must not be stored again as
  blocks of the new content. Hence `AdapterDigest.storable`.
"""

import os
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from kvsafe.engine.identity.weights import (
    CachedFile,
    FileStamp,
    WeightsError,
    content_digest,
    hash_file,
    is_settled,
    read_cache,
    stamp_of,
    write_cache,
)

_CONFIG = "adapter_config.json"
_SUFFIXES = (".json", ".safetensors", ".bin", ".pt")
_MAX_FILES = 256
_MAX_ADAPTERS = 4096
_BIND_CONTEXT = "kvsafe v1 block hash of an adapter"


@dataclass(frozen=True, slots=True)
class AdapterDigest:
    """Content of an adapter as the engine serves it.

    Attributes:
        digest: 32 bytes over `adapter_config.json` and the weight files.
        lora_int_id: the engine's number for the load.
        storable: false when the accelerator's prefix cache may still hold blocks of other
            content under the same block hashes: chunks may be loaded, not stored.
    """

    digest: bytes
    lora_int_id: int
    storable: bool


@dataclass(frozen=True, slots=True)
class AdapterUnknown:
    """The content cannot be known: serve the request without offload."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Stamps:
    """Every file of an adapter folder with its stamp, and what the path leads through."""

    files: tuple[tuple[str, FileStamp], ...]
    links: tuple[FileStamp, ...]

    def changed_at_ns(self) -> int:
        stamps = [stamp for _, stamp in self.files] + list(self.links)
        return max(stamp.changed_at_ns() for stamp in stamps)


@dataclass(slots=True)
class _Load:
    """What is known of one `lora_int_id`."""

    name: str
    path: str
    stamps: _Stamps | None
    digest: bytes
    doubt: str = ""


@dataclass(slots=True)
class _Served:
    """Contents that this engine has computed with under one name and path."""

    first: bytes
    mixed: bool = False


@dataclass(slots=True)
class AdapterLedger:
    """Remembers the content of each loaded adapter; one per engine process, one thread.

    A digest is taken when an int id is first seen, and again with every in-place load whose
    files have changed. If files change without an in-place load, the engine may hold the
    old content or, after its own eviction, the new one: unknown for that int id from then
    on, until an in-place load.

    Attributes:
        cache: JSON file of file digests, or `None` to hash every time.
        started_ns: wall clock at engine start. An adapter first seen without an in-place
            load must not have changed since: the engine may have loaded it at any moment
            between, and nobody recorded which content it read.
        trust_first_sight: accept such adapters; what is then trusted is that files are not
            replaced between the load call and the first request.
    """

    cache: Path | None
    started_ns: int = field(default_factory=time.time_ns)
    trust_first_sight: bool = False
    _loads: "OrderedDict[int, _Load]" = field(default_factory=OrderedDict, init=False)
    _served: "OrderedDict[tuple[str, str], _Served]" = field(
        default_factory=OrderedDict, init=False
    )
    _forgotten_below: int = field(default=0, init=False)
    _forgot_served: bool = field(default=False, init=False)

    def digest_for(
        self, lora_name: str, lora_int_id: int, lora_path: str, load_inplace: bool
    ) -> AdapterDigest | AdapterUnknown:
        """Content of the adapter for a request that arrives now. Costs a few stat calls.

        Keep the answer with the request and ask `is_current` before each store: after a
        reload the rest of a running request mixes two contents and belongs to neither.
        """
        folder = _local_folder(lora_path)
        if folder is None:
            self._doubt(lora_int_id, "its folder could not be reached")
            return AdapterUnknown("the adapter's path is not a local folder that can be reached")
        try:
            stamps = _stamps_of(lora_path, folder)
            load = self._load_for(lora_name, lora_int_id, lora_path, load_inplace, stamps)
        except (WeightsError, OSError, RuntimeError, ValueError) as exc:
            self._doubt(lora_int_id, "its files could not be read")
            return AdapterUnknown(f"the adapter's files cannot be read: {exc}")
        if isinstance(load, AdapterUnknown):
            return load
        if load.doubt:
            return AdapterUnknown(load.doubt)
        return AdapterDigest(load.digest, lora_int_id, self._serve(load))

    def is_current(self, answer: AdapterDigest) -> bool:
        """Whether everything computed since `answer` was computed with that content.

        Ask after the computation and before the store. False is final for the answer.
        """
        load = self._loads.get(answer.lora_int_id)
        if load is None or load.doubt or load.digest != answer.digest:
            return False
        folder = _local_folder(load.path)
        try:
            return folder is not None and _stamps_of(load.path, folder) == load.stamps
        except (WeightsError, OSError, RuntimeError, ValueError):
            return False

    def prefix_cache_reset(self) -> None:
        """The accelerator's prefix cache is empty: no block of other content is left."""
        self._served.clear()
        self._forgot_served = False

    def _load_for(
        self, name: str, int_id: int, path: str, inplace: bool, stamps: _Stamps
    ) -> _Load | AdapterUnknown:
        load = self._loads.get(int_id)
        if load is not None and (load.name, load.path) != (name, path) and not inplace:
            load.doubt = "the same lora_int_id was used for two adapters"
            return load
        if load is None and int_id <= self._forgotten_below and not inplace:
            return AdapterUnknown("the load is older than what the ledger remembers")
        if load is None or inplace:
            return self._taken(load, name, int_id, path, inplace, stamps)
        self._loads.move_to_end(int_id)
        if load.stamps != stamps:
            load.doubt = load.doubt or "the files changed without an in-place load"
        return load

    def _taken(
        self, load: _Load | None, name: str, int_id: int, path: str, inplace: bool, stamps: _Stamps
    ) -> _Load | AdapterUnknown:
        """Take the content of a new load, or again after an in-place load."""
        same = load is not None and (load.name, load.path) == (name, path)
        if load is not None and same and load.stamps == stamps and not load.doubt:
            self._loads.move_to_end(int_id)
            return load
        changed = not inplace and stamps.changed_at_ns() >= self.started_ns
        if changed and not self.trust_first_sight:
            reason = "the files changed after engine start and were not loaded in place"
            return self._keep(int_id, _Load(name, path, None, b"", reason))
        digest = _digest_of(Path(path).expanduser(), stamps, self.cache)
        folder = _local_folder(path)
        if folder is None or _stamps_of(path, folder) != stamps:
            raise WeightsError("the files change while they are read")
        return self._keep(int_id, _Load(name, path, stamps, digest))

    def _keep(self, int_id: int, load: _Load) -> _Load:
        self._loads[int_id] = load
        self._loads.move_to_end(int_id)
        while len(self._loads) > _MAX_ADAPTERS:
            oldest, _ = self._loads.popitem(last=False)
            # A forgotten number must not be taken for a new load: its content may differ.
            self._forgotten_below = max(self._forgotten_below, oldest)
        return load

    def _doubt(self, int_id: int, reason: str) -> None:
        load = self._loads.get(int_id)
        if load is not None:
            load.doubt = load.doubt or reason

    def _serve(self, load: _Load) -> bool:
        """Note that blocks of this content come into being; false once contents are mixed."""
        key = (load.name, load.path)
        served = self._served.get(key)
        if served is None:
            served = self._served[key] = _Served(load.digest, mixed=self._forgot_served)
        self._served.move_to_end(key)
        if served.first != load.digest:
            served.mixed = True
        while len(self._served) > _MAX_ADAPTERS:
            self._served.popitem(last=False)
            self._forgot_served = True
        return not served.mixed


def bind_adapter(block_hash: bytes, adapter_digest: bytes) -> bytes:
    """A block hash of the same length that also stands for the adapter's content.

    Raises `ValueError` unless the hash has 16 to 64 bytes and the digest 32.
    """
    if not 16 <= len(block_hash) <= 64 or len(adapter_digest) != 32:
        raise ValueError("a block hash has 16 to 64 bytes and an adapter digest 32")
    key = blake3(adapter_digest, derive_key_context=_BIND_CONTEXT).digest()
    return blake3(block_hash, key=key).digest(length=len(block_hash))


def _local_folder(path: str) -> Path | None:
    """The folder that vLLM would load from, when it is on this machine."""
    try:
        folder = Path(path).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):
        # A share that is away, a loop of links, no such user: not to be had, whatever it is.
        return None


def _stamps_of(path: str, folder: Path) -> _Stamps:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.endswith(_SUFFIXES)]
    if len(names) > _MAX_FILES:
        raise WeightsError(f"more than {_MAX_FILES} files")
    if _CONFIG not in names or all(name.endswith(".json") for name in names):
        raise WeightsError(f"no {_CONFIG} with weights beside it")
    files = tuple((name, stamp_of(folder / name)) for name in sorted(names))
    return _Stamps(files, _links_of(Path(path).expanduser().absolute(), names))


def _links_of(folder: Path, names: list[str]) -> tuple[FileStamp, ...]:
    """Stamps of the folder and of every symbolic link on the way to it and to its files.

    Re-pointing a link changes no file, and moving a folder into place changes only the
    folder's own times.
    """
    stamps = [FileStamp.of(folder.stat())]
    ways = [*reversed(folder.parents), folder, *(folder / name for name in sorted(names))]
    for way in ways:
        if way.is_symlink():
            stamps.append(FileStamp.of(way.lstat()))
    return tuple(stamps)


def _digest_of(folder: Path, stamps: _Stamps, cache: Path | None) -> bytes:
    known = read_cache(cache) if cache is not None else {}
    digests: dict[str, str] = {}
    fresh: dict[str, CachedFile] = {}
    read_at = time.time_ns()
    for name, stamp in stamps.files:
        place = str((folder / name).resolve())
        entry = known.get(place)
        if entry is None or not entry.matches(stamp):
            entry = fresh[place] = hash_file(folder / name)
        digests[name] = entry.digest
    settled = {place: entry for place, entry in fresh.items() if is_settled(entry, read_at)}
    if cache is not None and settled:
        write_cache(cache, {**known, **settled})
    return bytes.fromhex(content_digest("adapter", digests).partition(":")[2])
