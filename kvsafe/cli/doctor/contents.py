# SPDX-License-Identifier: Apache-2.0
"""What a store holds already, by the headers of its first chunks: is it this engine's store?

Two engines with one folder and different keys, a key that was lost, a clock that went back:
none of them stops an engine, and each makes a store that serves nothing.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator

from kvsafe.cli.doctor.disk import Store
from kvsafe.cli.doctor.finding import Finding, ok, warn
from kvsafe.cli.doctor.state import State
from kvsafe.cli.inspect.advice import Advice
from kvsafe.cli.inspect.judge import Judge
from kvsafe.cli.inspect.keys import KEYED, Epochs, Keys
from kvsafe.cli.inspect.reading import Depth, Examined, Reader
from kvsafe.cli.inspect.tree import Entry, Role, Tree
from kvsafe.seal.suites import Suite

__all__ = ["SAMPLE", "examine_contents"]

SAMPLE = 256
"""Most chunks whose header is looked at."""

_AHEAD_S = 300.0


def examine_contents(store: Store, state: State, now: float | None = None) -> Iterator[Finding]:
    """Findings about the chunks that are there; nothing is said of an empty store."""
    now = time.time() if now is None else now
    keys = state.keys or Keys({}, tuple(Suite))
    # All keyed suites count: a store may hold chunks from before the suite was changed.
    keys = Keys(keys.rings, (*KEYED, *keys.accepted), keys.source)
    advice, words = Advice(), Counter[str]()
    later = 0
    with Tree(store.root) as tree:
        reader = Reader(Judge(keys, Epochs(None, keys)), owner=tree.owner)
        chunks = (entry for entry in tree.entries() if entry.role is Role.CHUNK)
        for entry in itertools.islice(chunks, SAMPLE):
            found = _look(tree, reader, entry)
            words[found.word] += 1
            later += entry.info.st_mtime > now + _AHEAD_S
            if found.verdict is not None:
                advice.add(found.verdict)
    if looked := sum(words.values()):
        yield from _keys(store, state, advice, words, looked)
        yield from _rest(store, advice, words, later)


def _look(tree: Tree, reader: Reader, entry: Entry) -> Examined:
    try:
        with tree.folder(entry.parts[:-1]) as folder:
            return reader.examine(folder, entry.parts, Depth.HEADER)
    except OSError as exc:
        return Examined(entry.info, trouble=exc.strerror or "error")


def _keys(
    store: Store, state: State, advice: Advice, words: Counter[str], looked: int
) -> Iterator[Finding]:
    said = f"of {looked} chunks looked at (headers only)"
    if state.keys is None and words["unproven"]:
        todo = "name the state_dir or the key that they were stored with, or start with new folders"
        yield warn(store.name, f"{said}, none can be opened: there is no key", todo)
        return
    if foreign := sum(advice.key_ids.values()):
        ids = ", ".join(key_id for key_id, _ in advice.key_ids.most_common(3))
        todo = (
            "engines that share a folder need one key file; else a root_dir each. If the key was "
            f"lost: kvsafe purge {store.root} --key-id ID"
        )
        yield warn(store.name, f"{said}, {foreign} are under keys that are not here ({ids})", todo)
    if good := words["good"] + words["stale"]:
        yield ok(store.name, f"{said}, {good} are of these keys")


def _rest(store: Store, advice: Advice, words: Counter[str], later: int) -> Iterator[Finding]:
    if advice.damaged:
        todo = f"kvsafe verify {store.root} says more; an engine refuses them and goes on"
        yield warn(store.name, f"{advice.damaged} of them are damaged or out of place", todo)
    if suites := sum(advice.suites.values()):
        names = ", ".join(suite for suite, _ in advice.suites.most_common(3))
        todo = f"kvsafe inspect {store.root} shows them; an engine refuses them and goes on"
        yield warn(store.name, f"{suites} of them are of a suite that is not used: {names}", todo)
    if words["unread"]:
        yield warn(store.name, f"{words['unread']} of them could not be read", "see the disk's log")
    if later:
        todo = "set the clock (NTP): age and ttl_s of chunks go by it"
        yield warn(store.name, f"{later} of them were written later than it is now", todo)
