# SPDX-License-Identifier: Apache-2.0
"""Content digest of model weights, cached by what the file system says about each file.

A model name does not say which weights are loaded: the files under it can be replaced in
place. The digest is BLAKE3 over the content of every weight file and does not depend on
the folder or on the order of the files. Files are read as bytes and never interpreted.

Limit of the cache: it believes size, mtime, ctime, inode and device. A program cannot set
ctime, so an in-place change with a restored mtime is seen; what is not seen is a change
below the file system (block device, a remote server that reports stale attributes), or one
made while the clock stood still. Files changed in the last two seconds are not cached,
because a second change within one tick of the clock would leave the same times.
"""

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from kvsafe.engine.identity.folder import resolve_model_folder

__all__ = [
    "CacheFile",
    "CachedFile",
    "FileStamp",
    "WeightsError",
    "code_digest",
    "content_digest",
    "hash_file",
    "is_settled",
    "read_cache",
    "resolve_model_folder",
    "stamp_of",
    "weight_files",
    "weights_digest",
    "write_cache",
]

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and the name of the file."""

SETTLE_NS = 2_000_000_000
"""A file must be unchanged for this long before its digest is cached."""
LOCK_SECONDS = 3600.0
"""Wait at most this long for another process that hashes the same model."""

_CHUNK = 8 << 20
_MAX_FILES = 16384
_MAX_DEPTH = 4
_MAX_CACHE_BYTES = 8 << 20
_MAX_CACHE_FILES = 16384
_POLL_SECONDS = 0.05
_LEGACY = (".bin", ".pt", ".gguf")
# These say which tensors of which file are used, and how quantised ones are read.
_SIDE_FILES = (
    ".index.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
)


class WeightsError(RuntimeError):
    """Weight files cannot be read, or changed while they were read: refuse to start."""


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What the file system says about one file. Times in nanoseconds, size in bytes."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileStamp":
        """The stamp in a stat result."""
        return cls(
            status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev
        )

    def changed_at_ns(self) -> int:
        """The latest moment at which the file is known to have changed."""
        return max(self.mtime_ns, self.ctime_ns)


class CachedFile(msgspec.Struct, frozen=True):
    """Digest of one file and the stamp under which it was taken."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int
    digest: str

    def matches(self, stamp: FileStamp) -> bool:
        """Whether the file still has the stamp under which it was hashed."""
        mine = FileStamp(self.size, self.mtime_ns, self.ctime_ns, self.inode, self.device)
        return mine == stamp


def is_settled(entry: CachedFile, read_at_ns: int) -> bool:
    """Whether the file was unchanged long enough before it was read to believe its times."""
    return read_at_ns - max(entry.mtime_ns, entry.ctime_ns) > SETTLE_NS


class CacheFile(msgspec.Struct):
    """The JSON file of the cache."""

    version: int = 1
    files: dict[str, CachedFile] = {}


def weights_digest(
    folder: Path,
    *,
    cache: Path | None = None,
    threads: int = 1,
    progress: Progress | None = None,
    load_format: str = "auto",
) -> str | None:
    """`blake3:` and 64 hex digits over the weight files under `folder`.

    `None` means unknown: no weight file, or a format whose weights are not in files
    (`dummy`). Several processes at once: one hashes, the others wait and use its result.
    Raises `WeightsError` when a file cannot be read or changes meanwhile.
    """
    if load_format == "dummy":
        return None
    names = weight_files(folder, load_format)
    if not any(not _is_side_file(name) for name in names):
        return None
    return _digest_files("weights", folder, names, cache, threads, progress)


def newest_change_ns(folder: Path, load_format: str = "auto") -> int:
    """The latest moment (wall clock, ns) at which a weight file, or a link to it, has changed."""
    newest = 0
    for path in (folder, *(folder / name for name in weight_files(folder, load_format))):
        if path.is_symlink():
            newest = max(newest, FileStamp.of(os.lstat(path)).changed_at_ns())
        if path != folder:
            newest = max(newest, stamp_of(path).changed_at_ns())
    return newest


def code_digest(folder: Path, *, cache: Path | None = None) -> str:
    """`blake3:` and 64 hex digits over the Python files that trusted remote code may run."""
    names = sorted(name for name in _walk(folder) if name.endswith(".py"))
    return _digest_files("code", folder, names, cache, 1, None)


def content_digest(purpose: str, files: Mapping[str, str]) -> str:
    """`blake3:` and 64 hex digits over relative names and digests of files, sorted."""
    hasher = blake3(derive_key_context=f"kvsafe v1 content of {purpose}")
    for name in sorted(files):
        line = msgspec.json.encode([name, files[name]])
        hasher.update(len(line).to_bytes(8, "big") + line)
    return f"blake3:{hasher.hexdigest()}"


def weight_files(folder: Path, load_format: str = "auto") -> list[str]:
    """Relative names of the files that decide the weights, sorted.

    Safetensors when there are any, else the legacy formats; formats that load the legacy
    files although there are safetensors take both.
    """
    found = list(_walk(folder))
    tensors = [name for name in found if name.endswith(".safetensors")]
    legacy = [name for name in found if name.endswith(_LEGACY)]
    side = [name for name in found if _is_side_file(name)]
    if tensors and load_format not in ("pt", "npcache", "gguf"):
        legacy = []
    return sorted(tensors + legacy + side)


def _is_side_file(name: str) -> bool:
    return name.endswith(_SIDE_FILES)


def _walk(folder: Path) -> Iterator[str]:
    """Relative names of the files under `folder`, links followed, within fixed bounds."""
    seen = 0
    for base, folders, files in os.walk(folder, followlinks=True, onerror=_raise):
        relative = Path(base).relative_to(folder)
        deepest = len(relative.parts) >= _MAX_DEPTH
        # `original` is a copy in another format that vLLM does not load.
        keep = [name for name in folders if name != "original" and not name.startswith(".")]
        folders[:] = [] if deepest else sorted(keep)
        for name in files:
            seen += 1
            if seen > _MAX_FILES:
                raise WeightsError(f"more than {_MAX_FILES} files in the model folder")
            yield (relative / name).as_posix()


def _raise(error: OSError) -> None:
    raise WeightsError(f"model folder cannot be read: {error.strerror}") from error


def _digest_files(
    purpose: str,
    folder: Path,
    names: list[str],
    cache: Path | None,
    threads: int,
    progress: Progress | None,
) -> str:
    if cache is None:
        return content_digest(purpose, _hash_all(folder, names, {}, threads, progress)[0])
    with _locked(cache):
        known = read_cache(cache)
        digests, fresh = _hash_all(folder, names, known, threads, progress)
        if fresh:
            write_cache(cache, {**known, **fresh})
    return content_digest(purpose, digests)


def _hash_all(
    folder: Path,
    names: list[str],
    known: Mapping[str, CachedFile],
    threads: int,
    progress: Progress | None,
) -> tuple[dict[str, str], dict[str, CachedFile]]:
    """Digest of every file by relative name, and the new entries for the cache."""
    paths = {name: _real(folder / name) for name in names}
    total = sum(stamp_of(path).size for path in paths.values())
    digests: dict[str, str] = {}
    fresh: dict[str, CachedFile] = {}
    done = 0
    for name, path in paths.items():
        stamp = stamp_of(path)
        entry = known.get(str(path))
        if entry is None or not entry.matches(stamp):
            read_at = time.time_ns()
            entry = hash_file(path, threads=threads, told=_teller(progress, done, total, name))
            if is_settled(entry, read_at):
                fresh[str(path)] = entry
        digests[name] = entry.digest
        done += entry.size
    return digests, fresh


def _teller(
    progress: Progress | None, base: int, total: int, name: str
) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda done: progress(base + done, total, name)


def _real(path: Path) -> Path:
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError) as exc:
        raise WeightsError(f"{path.name} cannot be found") from exc


def stamp_of(path: Path) -> FileStamp:
    """The stamp of a regular file. Raises `WeightsError` for anything else."""
    try:
        status = path.stat()
    except OSError as exc:
        raise WeightsError(f"{path.name} cannot be read: {exc.strerror}") from exc
    if not stat.S_ISREG(status.st_mode):
        raise WeightsError(f"{path.name} is not a regular file")
    return FileStamp.of(status)


def hash_file(
    path: Path, *, threads: int = 1, told: Callable[[int], None] | None = None
) -> CachedFile:
    """Digest of one regular file with the stamp under which it was read.

    Raises `WeightsError` when it cannot be read, or changed while it was read.
    """
    stamp_of(path)  # a FIFO must not block the open
    try:
        with path.open("rb", buffering=0) as file:
            before = FileStamp.of(os.fstat(file.fileno()))
            digest = _hash_stream(file.readinto, threads, told)
            after = FileStamp.of(os.fstat(file.fileno()))
    except OSError as exc:
        raise WeightsError(f"{path.name} cannot be read: {exc.strerror}") from exc
    if before != after:
        raise WeightsError(f"{path.name} changed while it was read")
    return CachedFile(
        before.size, before.mtime_ns, before.ctime_ns, before.inode, before.device, digest
    )


def _hash_stream(
    readinto: Callable[[memoryview], int | None],
    threads: int,
    told: Callable[[int], None] | None,
) -> str:
    hasher = blake3(max_threads=max(1, threads))
    buffer = memoryview(bytearray(_CHUNK))
    done = 0
    while count := readinto(buffer):
        hasher.update(buffer[:count])
        done += count
        if told is not None:
            told(done)
    return hasher.hexdigest()


def read_cache(path: Path) -> dict[str, CachedFile]:
    """Entries of the cache; empty when it is missing, damaged, or not ours alone.

    A file that others may write could claim any digest for the weights.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        private = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not (stat.S_ISREG(status.st_mode) and private):
            return {}
        data = file.read(_MAX_CACHE_BYTES + 1)
    if len(data) > _MAX_CACHE_BYTES:
        return {}
    try:
        found = msgspec.json.decode(data, type=CacheFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    sound = found.version == 1 and all(_HEX.fullmatch(e.digest) for e in found.files.values())
    return found.files if sound else {}


_HEX = re.compile(r"[0-9a-f]{64}")


def write_cache(path: Path, entries: Mapping[str, CachedFile]) -> None:
    """Replace the cache atomically (mode 0600). A cache that cannot be written is no error."""
    newest = dict(list(entries.items())[-_MAX_CACHE_FILES:])
    data = msgspec.json.encode(CacheFile(files=newest))
    if len(data) > _MAX_CACHE_BYTES:
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Hold the lock beside the cache; without it after a bounded wait, or where it fails.

    The lock saves work and is not needed for truth: the cache is replaced atomically.
    """
    handle = None
    try:
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = cache.with_name(f"{cache.name}.lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(lock, flags, 0o600)
        _wait_for(handle)
    except OSError:
        pass
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _wait_for(handle: int) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
