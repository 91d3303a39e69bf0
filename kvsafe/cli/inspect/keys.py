# SPDX-License-Identifier: Apache-2.0
"""Which keys a command looks with, and which epoch is the present one. Nothing is made here."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvsafe.cli import UsageError
from kvsafe.seal.epoch import EpochError, EpochFile
from kvsafe.seal.keyfile import KeyFileError, from_environment, load_or_create
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.suites import Suite

__all__ = [
    "Epochs",
    "Keys",
    "add_key_arguments",
    "default_state_dir",
    "epochs_of",
    "read_keys",
]

KEYED = tuple(suite for suite in Suite if suite.keyed)
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Keys:
    """The rings to look with, by suite; `source` is a text for people, empty without a key.

    `accepted` are the suites that count at all: a chunk of another one is refusal 202.
    """

    rings: Mapping[Suite, Keyring]
    accepted: tuple[Suite, ...]
    source: str = ""

    def ring(self, suite: Suite) -> Keyring | None:
        """The ring for chunks of this suite. Suite `blake3` has no secret, so always has one."""
        return Keyring.unkeyed() if suite is Suite.BLAKE3 else self.rings.get(suite)

    @property
    def complete(self) -> bool:
        """Whether every accepted suite can be checked."""
        return all(self.ring(suite) is not None for suite in self.accepted)


def add_key_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where the keys come from."""
    group = parser.add_argument_group("keys (the same as in the engine's configuration)")
    group.add_argument("--state-dir", metavar="DIR", help="folder of keys.json and the epoch files")
    group.add_argument("--epoch-file", metavar="FILE", help="epoch file that several engines share")
    group.add_argument("--key-file", metavar="FILE", help="key file (default: keys.json there)")
    group.add_argument("--key-env", metavar="NAME", help="variable that holds the key instead")
    group.add_argument("--no-key", action="store_true", help="look without any key")
    names = [suite.label for suite in Suite]
    group.add_argument("--suite", choices=names, help="the only suite that is accepted")


def default_state_dir(environ: Mapping[str, str]) -> Path | None:
    """Where the engine keeps keys and epochs if nothing else was set."""
    base, home = environ.get("XDG_STATE_HOME", ""), environ.get("HOME", "")
    if base.startswith("/"):
        return Path(base) / "kvsafe"
    return Path(home) / ".local" / "state" / "kvsafe" if home.startswith("/") else None


def read_keys(
    args: argparse.Namespace, environ: Mapping[str, str], accepted: tuple[Suite, ...]
) -> Keys:
    """The keys that the options name, or none if nothing was named and the default is not there.

    Raises `UsageError` for options that exclude one another, and for keys that cannot be read.
    """
    named = [name for name in ("key_file", "key_env", "no_key") if getattr(args, name)]
    if len(named) > 1:
        given = " and ".join("--" + name.replace("_", "-") for name in named)
        raise UsageError(f"{given} exclude one another")
    if args.suite:
        accepted = (Suite.named(args.suite),)
    if args.no_key:
        return Keys({}, accepted)
    try:
        if args.key_env:
            made = {s: from_environment(environ, args.key_env, suite=s.label) for s in KEYED}
            return Keys(made, accepted, f"variable {args.key_env}")
        return _from_file(args, environ, accepted)
    except KeyFileError as exc:
        raise UsageError(f"{exc}{'' if args.key_env else _whose(exc.path)}") from None


def _whose(path: Path) -> str:
    """A way out that the engine's own words do not have: be the user whose key it is."""
    try:
        owner = path.lstat().st_uid if os.path.lexists(path) else path.parent.lstat().st_uid
    except OSError:
        return ""
    return f" Or run this as user {owner}." if owner != os.geteuid() else ""


def _from_file(
    args: argparse.Namespace, environ: Mapping[str, str], accepted: tuple[Suite, ...]
) -> Keys:
    folder = state_dir_of(args, environ)
    path = Path(args.key_file) if args.key_file else folder / "keys.json" if folder else None
    # Only an engine makes a key file: a fresh key here would open nothing.
    if path is None or not os.path.lexists(path):
        if args.key_file or args.state_dir:
            raise UsageError(
                f"{path}: there is no key file; name the engine's (to inspect without: --no-key)"
            )
        return Keys({}, accepted)
    path = Path(os.path.abspath(path))
    return Keys({s: load_or_create(path, suite=s.label) for s in KEYED}, accepted, str(path))


def state_dir_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Path | None:
    """The state folder that was named, or the default one."""
    return Path(os.path.abspath(args.state_dir)) if args.state_dir else default_state_dir(environ)


def epochs_of(args: argparse.Namespace, environ: Mapping[str, str], keys: Keys) -> Epochs:
    """The epochs that the options name, or those of the default folder."""
    file = Path(os.path.abspath(args.epoch_file)) if args.epoch_file else None
    if file is not None and not os.path.lexists(file):
        raise UsageError(f"{file}: there is no epoch file")
    return Epochs(state_dir_of(args, environ), keys, file)


@dataclass(slots=True)
class Epochs:
    """The present epoch of each namespace, as far as the state folder tells. Thread-safe.

    `file` is the epoch file of all namespaces, where engines share one.
    """

    folder: Path | None
    keys: Keys
    file: Path | None = None
    troubles: list[str] = field(default_factory=list)
    _known: dict[tuple[Suite, str], int | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def current(self, suite: Suite, namespace: object) -> int | None:
        """The number in the epoch file, or None where it cannot be told. Never writes."""
        if (self.folder is None and self.file is None) or not isinstance(namespace, str):
            return None
        # From a foreign document: it becomes part of a path.
        if _NAMESPACE.fullmatch(namespace) is None:
            return None
        with self._lock:
            if (suite, namespace) not in self._known:
                if len(self._known) >= 1024:
                    return None
                self._known[suite, namespace] = self._read(suite, namespace)
            return self._known[suite, namespace]

    def _read(self, suite: Suite, namespace: str) -> int | None:
        ring = self.keys.ring(suite)
        path = self.file or (self.folder or Path()) / f"epoch-{namespace}.json"
        used = path.with_name(f"{path.name}.used")
        # Reading a folder that was never used would start an epoch.
        if ring is None or not (os.path.lexists(path) and os.path.lexists(used)):
            return None
        try:
            return _epoch_of(path, suite, ring)
        except EpochError as exc:
            trouble = self._other_suite(path, suite) or str(exc)
            if trouble not in self.troubles:
                self.troubles.append(trouble)
            return None

    def _other_suite(self, path: Path, suite: Suite) -> str:
        """Words for an epoch file that is whole, but of engines with another suite."""
        for other in Suite:
            ring = self.keys.ring(other)
            if other is suite or ring is None:
                continue
            with contextlib.suppress(EpochError):
                _epoch_of(path, other, ring)
                return f"{path}: is of suite {other.label}, so it says nothing about {suite.label}"
        return ""


def _epoch_of(path: Path, suite: Suite, ring: Keyring) -> int:
    secret = ring.state_secret
    return EpochFile(path, lambda message: suite.tag(secret, message)).read()
