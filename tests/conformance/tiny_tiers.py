# SPDX-License-Identifier: Apache-2.0
"""Two tiers of a few lines for the trials: one that checks nothing, one that checks all.

Both promise everything, so the trials must fail the first wherever it deserves it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from conformance.tier.subject import PAYLOAD, Seen, Span, content_of, key_of

WAIT_S = 2.0
EVERYTHING = frozenset(
    {"heal", "bytes", "place", "authentic", "fresh", "identity", "longer", "shorter", "kind"}
    | {"mode", "private", "deadline", "errors", "full disk", "writers", "killed writer"}
)


class Careless:
    """A file per chunk and no question asked."""

    NAME: ClassVar[str] = "careless"
    PROMISES: ClassVar[frozenset[str]] = EVERYTHING

    def __init__(self, root: Path, model: str) -> None:
        self._root = root
        self._model = model

    @classmethod
    def versions(cls) -> Mapping[str, str]:
        return {"test": "1"}

    @classmethod
    def open(cls, root: Path, model: str, options: Mapping[str, Any]) -> Careless:
        return cls(root, model)

    def path(self, number: int) -> Path:
        name = hmac.digest(self._model.encode(), key_of(number), "sha256").hex()
        return self._root / f"{name}.kv"

    def store(self, number: int) -> bool:
        self.path(number).write_bytes(content_of(self._model, number))
        return True

    def load(self, number: int) -> Seen:
        if not self.path(number).exists():
            return Seen.MISS
        with self.path(number).open("rb") as file:
            data = file.read(PAYLOAD)
        return Seen.HIT if data == content_of(self._model, number) else Seen.WRONG

    def forge(self, span: Span, number: int, body: bytes) -> bool:
        span.path.write_bytes(body)
        return True

    def raise_epoch(self) -> bool:
        return False

    def close(self) -> None:
        return None


class Careful(Careless):
    """A tag over model, chunk, epoch and payload; the key lies beside the folder."""

    NAME: ClassVar[str] = "careful"

    def __init__(self, root: Path, model: str) -> None:
        super().__init__(root, model)
        self._key = root.parent / "key"
        self._epoch = root.parent / "epoch"
        if not self._key.exists():
            self._key.write_bytes(b"k" * 32)
            self._epoch.write_text("1")

    def _tag(self, number: int, body: bytes) -> bytes:
        said = f"{self._model} {number} {self._epoch.read_text()} ".encode()
        return hmac.digest(self._key.read_bytes(), said + body, "sha256")

    def store(self, number: int) -> bool:
        body = content_of(self._model, number)
        temporary = self._root / f".{secrets.token_hex(8)}"
        try:
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with open(fd, "wb", buffering=0) as file:
                file.write(self._tag(number, body) + body)
            temporary.rename(self.path(number))
        except OSError:
            temporary.unlink(missing_ok=True)
            return False
        return True

    def load(self, number: int) -> Seen:
        found: list[Seen] = []
        thread = threading.Thread(target=lambda: found.append(self._load(number)), daemon=True)
        thread.start()
        thread.join(WAIT_S)
        return found[0] if found else Seen.REFUSED

    def _load(self, number: int) -> Seen:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self.path(number), flags)
        except FileNotFoundError:
            return Seen.MISS
        except OSError:
            return Seen.REFUSED
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size != 32 + PAYLOAD:
                return Seen.REFUSED
            data = os.read(fd, 64 + PAYLOAD)
        except OSError:
            return Seen.REFUSED
        finally:
            os.close(fd)
        if info.st_mode & 0o077 or not hmac.compare_digest(data[:32], self._tag(number, data[32:])):
            return Seen.REFUSED
        return Seen.HIT if data[32:] == content_of(self._model, number) else Seen.WRONG

    def forge(self, span: Span, number: int, body: bytes) -> bool:
        span.path.write_bytes(hmac.digest(b"", body, "sha256") + body)
        return True

    def raise_epoch(self) -> bool:
        self._epoch.write_text(str(int(self._epoch.read_text()) + 1))
        return True


class Crashing(Careless):
    """Raises where a tier must answer."""

    NAME: ClassVar[str] = "crashing"

    def load(self, number: int) -> Seen:
        raise OSError(5, "out of a tier's method")


class Dying(Careless):
    """Takes its process with it."""

    NAME: ClassVar[str] = "dying"

    def load(self, number: int) -> Seen:
        os.abort()
