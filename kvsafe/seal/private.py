# SPDX-License-Identifier: Apache-2.0
"""Private files: a folder that only its owner writes, and files in it that nobody else may open.

Key file and epoch file are kept in one. What was checked is what is used, each change replaces the
whole file at once, and of several processes one at a time changes it. Errors name the path, what is
wrong and the way out, never the contents.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn, Self

LOCK_DEADLINE_S: Final = 10.0
"""Longest wait for another process that is changing the same file, in seconds."""

_LOCK_POLL_S: Final = 0.005
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class StateFileError(Exception):
    """One of our private files cannot be trusted or changed: the path, the problem, the way out."""

    def __init__(self, path: Path, problem: str, way_out: str) -> None:
        super().__init__(f"{path}: {problem}. {way_out}")
        self.path = path
        self.problem = problem
        self.way_out = way_out


class PrivateFolder:
    """A folder only its owner can write, held open; names in it are opened relative to it.

    Holding the descriptor means that what was checked is what is used, whatever happens to the
    path meanwhile. Every failure is raised as the `error` type given.
    """

    def __init__(self, path: Path, error: type[StateFileError], *, create: bool) -> None:
        """Open `path`; with `create` make it (0700) and its parents when missing."""
        self.path = path
        self._error = error
        try:
            if create:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as exc:
            self._fail(path, exc)
        try:
            self._check(os.fstat(self._fd))
        except StateFileError:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def exists(self, name: str) -> bool:
        """Whether anything, of any kind, has this name."""
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as exc:
            self._fail(self.path / name, exc)
        return True

    def read(self, name: str, limit: int) -> bytes | None:
        """Read a private regular file of at most `limit` bytes; None when there is none."""
        path = self.path / name
        try:
            fd = os.open(name, _READ_FLAGS, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            self._fail(path, exc)
        try:
            check_private(path, os.fstat(fd), self._error)
            data = _read_all(fd, limit + 1)
        except OSError as exc:
            self._fail(path, exc)
        finally:
            os.close(fd)
        if len(data) > limit:
            raise self._error(path, f"larger than {limit} bytes", "It is not a file of ours.")
        return data

    def replace(self, name: str, data: bytes) -> None:
        """Put `data` (0600) under `name` at once and durably. The caller holds `lock(name)`."""
        new = f"{name}.new"
        try:
            # Only a writer that died while it held the lock can have left one.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new, dir_fd=self._fd)
            try:
                self._write(new, data)
                os.rename(new, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(new, dir_fd=self._fd)
                raise
            os.fsync(self._fd)
        except OSError as exc:
            self._fail(self.path / name, exc)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Keep others, threads too, from changing `name`; waits `LOCK_DEADLINE_S` at most."""
        path = self.path / f"{name}.lock"
        try:
            fd = os.open(path.name, _LOCK_FLAGS, 0o600, dir_fd=self._fd)
        except OSError as exc:
            self._fail(path, exc)
        try:
            check_private(path, os.fstat(fd), self._error)
            self._wait_for_lock(fd, path)
            yield
        finally:
            os.close(fd)

    def _wait_for_lock(self, fd: int, path: Path) -> None:
        deadline = time.monotonic() + LOCK_DEADLINE_S
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise self._error(
                        path,
                        f"still locked by another process after {LOCK_DEADLINE_S:g} s",
                        "Find the process that holds it.",
                    ) from None
            except OSError as exc:
                self._fail(path, exc)
            time.sleep(_LOCK_POLL_S)

    def _write(self, name: str, data: bytes) -> None:
        fd = os.open(name, _CREATE_FLAGS, 0o600, dir_fd=self._fd)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)

    def _check(self, info: os.stat_result) -> None:
        mode = stat.S_IMODE(info.st_mode)
        if mode & 0o022:
            raise self._error(
                self.path,
                f"the folder is writable by group or others (mode {mode:04o})",
                "Run chmod go-w on it, or name a file in another folder.",
            )
        if info.st_uid not in (os.geteuid(), 0):
            raise self._error(
                self.path,
                f"the folder belongs to user {info.st_uid}, this process runs as {os.geteuid()}",
                "Name a file in a folder of your own.",
            )

    def _fail(self, path: Path, exc: OSError | ValueError) -> NoReturn:
        if isinstance(exc, OSError) and exc.errno == errno.ELOOP:
            raise self._error(path, "is a symbolic link", "Name the file itself.") from None
        reason = getattr(exc, "strerror", None) or type(exc).__name__
        raise self._error(
            path, f"cannot be used ({reason})", "Check the path, its owner and the space left."
        ) from None


def check_private(path: Path, info: os.stat_result, error: type[StateFileError]) -> None:
    """Raise `error` unless `info` is a regular file of this user that nobody else can open."""
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISREG(info.st_mode):
        raise error(path, "is not a regular file", "Name a regular file.")
    if mode & 0o077:
        raise error(path, f"others may open it (mode {mode:04o})", "Run chmod 600 on it.")
    if info.st_uid != os.geteuid():
        raise error(
            path,
            f"belongs to user {info.st_uid}, this process runs as {os.geteuid()}",
            "Run chown on it, or run as its owner.",
        )


def _read_all(fd: int, limit: int) -> bytes:
    data = b""
    while len(data) < limit and (part := os.read(fd, limit - len(data))):
        data += part
    return data
