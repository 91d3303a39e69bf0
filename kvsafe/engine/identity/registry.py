# SPDX-License-Identifier: Apache-2.0
"""Identities that were used with a state folder, so that a miss can say why.

Objects of another identity have other names and are never looked at. Remembering which
identities there were lets a lookup that misses ask once whether the chunk is there under
one of them, and name the field that differs. The files are hints: they decide nothing.
"""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from kvsafe.engine.tiers.names import ForeignNames
from kvsafe.seal.identity import Identity
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.layout import MAX_DOCUMENT_BYTES
from kvsafe.seal.opening import explain_identity
from kvsafe.seal.refusal import RefusalKind
from kvsafe.seal.suites import Suite

_SUFFIX = ".identity"
_ASKED = 4
_KEPT = 64


def remember_identity(folder: Path, identity: Identity, suite: Suite) -> None:
    """Note this identity (a hint: failure to write is no failure to start)."""
    path = folder / f"{identity.digest(suite).hex()}{_SUFFIX}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        fd = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, identity.document)
        finally:
            os.close(fd)
        temporary.replace(path)
        for old in _newest_first(folder)[_KEPT:]:
            old.unlink(missing_ok=True)


def foreign_names(
    folder: Path, identity: Identity, suite: Suite, keyring: Keyring
) -> tuple[ForeignNames, ...]:
    """The most recent other identities, each with the refusal that names what differs."""
    own = identity.digest(suite)
    found: list[ForeignNames] = []
    for path in _newest_first(folder):
        document = _read(path)
        if document is None or len(found) == _ASKED:
            continue
        digest = suite.digest(document)
        if digest == own or digest.hex() != path.stem:
            continue
        refusal = explain_identity(suite, identity.document, document, digest)
        refusal = replace(refusal, kind=RefusalKind.IDENTITY_ELSEWHERE)
        found.append(ForeignNames(suite, keyring.name_secret, digest, refusal))
    return tuple(found)


def _newest_first(folder: Path) -> list[Path]:
    try:
        paths = [path for path in folder.iterdir() if path.suffix == _SUFFIX]
        return sorted(paths, key=lambda path: -path.stat().st_mtime_ns)
    except OSError:
        return []


def _read(path: Path) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        data = os.read(fd, MAX_DOCUMENT_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(fd)
    return data if len(data) <= MAX_DOCUMENT_BYTES else None
