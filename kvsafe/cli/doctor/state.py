# SPDX-License-Identifier: Apache-2.0
"""The state folder: its owner and mode, the key file, the epoch file. Nothing is made."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvsafe.cli.doctor.disk import IN_MEMORY, examine_way, filesystem_of
from kvsafe.cli.doctor.finding import Finding, bad, ok, unknown, warn
from kvsafe.cli.inspect.keys import KEYED, Epochs, Keys
from kvsafe.seal.keyfile import KeyFileError, from_environment, load_or_create
from kvsafe.seal.private import PrivateFolder, StateFileError
from kvsafe.seal.suites import Suite

__all__ = ["State", "examine_state"]


_OTHER_SUITE = (
    "with another suite than before: set suite to that one, or begin with a new state_dir and new "
    "stores; else restore the state folder"
)


@dataclass(slots=True)
class State:
    """Where the engine keeps keys and epochs, and after the look what is in them.

    `presumed`: no configuration was given, so suite and namespace are the defaults.
    """

    folder: Path | None
    key_file: Path | None
    key_env: str | None
    suite: Suite
    namespace: str
    epoch_file: Path | None = None
    presumed: bool = False
    keys: Keys | None = None
    epoch: int | None = None


def examine_state(state: State, environ: Mapping[str, str], roots: list[str]) -> Iterator[Finding]:
    """Folder, key and epoch; fills `state.keys` and `state.epoch`."""
    if state.folder is None:
        yield bad("state_dir", "neither HOME nor XDG_STATE_HOME is set", "set state_dir")
        return
    yield _folder("state_dir", state.folder)
    yield from _stays("state_dir", state.folder)
    if state.epoch_file is not None:
        yield _folder("epoch_file", state.epoch_file.parent)
    yield from _key(state, environ)
    yield from _apart(state, roots)
    yield from _epoch(state)


def _folder(name: str, folder: Path) -> Finding:
    if not os.path.lexists(folder):
        return _will_be_made(name, folder)
    try:
        with PrivateFolder(folder, StateFileError, create=False):
            pass
    except StateFileError as exc:
        return bad(name, f"{folder}: {exc.problem}", exc.way_out)
    if not os.access(folder, os.W_OK | os.X_OK):
        return bad(name, f"{folder} is not writable for this user", "run this as the engine's user")
    return ok(name, f"{folder}, writable by its owner alone")


def _stays(name: str, folder: Path) -> Iterator[Finding]:
    """Whether it is there after a restart, and whether somebody else can put another there."""
    above = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    kind = filesystem_of(str(above))
    if kind in (*IN_MEMORY, "overlay"):
        said = f"on {kind}: keys and epochs are lost with the machine's memory or the container"
        todo = "put it on a volume that stays: without the keys every chunk is refused"
        yield warn(name, said, todo)
    yield from examine_way(name, str(folder))


def _will_be_made(name: str, folder: Path) -> Finding:
    """Whether the engine can make a folder that is not there."""
    above = next(path for path in folder.parents if os.path.lexists(path))
    if not os.access(above, os.W_OK | os.X_OK):
        return bad(
            name, f"{folder} cannot be made in {above}", "make it for the engine's user, 0700"
        )
    return ok(name, f"{folder} is not there yet; it is made (0700) at the first start")


def _key(state: State, environ: Mapping[str, str]) -> Iterator[Finding]:
    if state.suite is Suite.BLAKE3:
        state.keys = Keys({}, (Suite.BLAKE3,))
        yield warn("key", "suite blake3 has none")
        return
    path = state.key_file
    try:
        if state.key_env is not None:
            rings = {s: from_environment(environ, state.key_env, suite=s.label) for s in KEYED}
            state.keys = Keys(rings, (state.suite,), f"variable {state.key_env}")
        elif path is None or not os.path.lexists(path):
            yield ok(
                "key", f"{path or 'keys.json'} is not there yet; it is made at the first start"
            )
            return
        else:
            rings = {s: load_or_create(path, suite=s.label) for s in KEYED}
            state.keys = Keys(rings, (state.suite,), str(path))
    except KeyFileError as exc:
        yield bad("key", f"{exc.path}: {exc.problem}", exc.way_out)
        return
    ids = [key_id.hex() for key_id in state.keys.rings[state.suite].key_ids]
    older = f", {len(ids) - 1} older readable" if len(ids) > 1 else ""
    yield ok("key", f"{state.keys.source}: active {ids[0]}{older}")


def _apart(state: State, roots: list[str]) -> Iterator[Finding]:
    """Who may write chunks must not write keys: both are looked at as what they lead to."""
    ours = [("state_dir", state.folder), ("key file", state.key_file)]
    ours += [("epoch file", state.epoch_file)]
    for name, path in ours:
        real = None if path is None else os.path.realpath(path)
        for root in map(os.path.realpath, roots):
            if real is not None and (_inside(real, root) or (_inside(root, real))):
                said = f"{path} and the store {root} lie one in the other"
                yield bad(name, said, "put the state folder where the store's writers cannot write")


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _epoch(state: State) -> Iterator[Finding]:
    if state.folder is None:
        return
    path = state.epoch_file or state.folder / f"epoch-{state.namespace}.json"
    if not os.path.lexists(path):
        if os.path.lexists(path.with_name(f"{path.name}.used")):
            todo = "restore the state folder, or clear both the folder and every tier's store"
            yield bad("epoch", f"{path} is missing although it was used before", todo)
        else:
            yield ok("epoch", f"{path.name} is not there yet; it is made at the first start")
        return
    if state.keys is None:
        yield unknown("epoch", "without the key its file cannot be checked")
        return
    epochs = Epochs(state.folder, state.keys, state.epoch_file)
    suites = (state.suite, *KEYED) if state.presumed else (state.suite,)
    numbers = (epochs.current(suite, state.namespace) for suite in suites)
    state.epoch = next((number for number in numbers if number is not None), None)
    if epochs.troubles and state.epoch is None:
        yield bad("epoch", epochs.troubles[0], _OTHER_SUITE)
    elif state.epoch is None:
        yield unknown("epoch", f"{path.name} has no mark of use beside it; an engine makes one")
    else:
        yield ok("epoch", f"{state.epoch} in namespace {state.namespace}")
