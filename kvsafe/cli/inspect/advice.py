# SPDX-License-Identifier: Apache-2.0
"""What an operator can do about the chunks that are refused or stale: one line for each cause."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from kvsafe.cli.inspect.judge import Verdict, namespace_of
from kvsafe.cli.inspect.tree import shown
from kvsafe.seal.refusal import RefusalKind
from kvsafe.seal.suites import Suite

__all__ = ["OF_THE_READER", "Advice"]

OF_THE_READER = (RefusalKind.VERSION, RefusalKind.SUITE, RefusalKind.KEY_ID)
"""Refusals that speak of the reader, not of the bytes: with other keys a chunk may be whole."""

_Text = TypeVar("_Text", str, tuple[str, str])
_NAMED = 3
_LIMIT = 4096


@dataclass(slots=True)
class Advice:
    """Collects causes while files are counted; memory is bounded."""

    damaged: int = 0
    versions: int = 0
    key_ids: Counter[str] = field(default_factory=Counter)
    suites: Counter[str] = field(default_factory=Counter)
    revoked: Counter[tuple[str, str]] = field(default_factory=Counter)
    unknown: int = 0

    def add(self, verdict: Verdict) -> None:
        """Note why one chunk is refused or stale, if it is."""
        refusal, stale = verdict.refusal, verdict.stale
        if refusal is not None:
            if refusal.kind is RefusalKind.KEY_ID:
                _count(self.key_ids, refusal.found)
            elif refusal.kind is RefusalKind.SUITE:
                _count(self.suites, refusal.found)
            elif refusal.kind is RefusalKind.VERSION:
                self.versions += 1
            else:
                self.damaged += 1
        elif stale is not None and stale.kind is RefusalKind.EPOCH_UNKNOWN:
            self.unknown += 1
        elif stale is not None and verdict.outline is not None:
            _count(self.revoked, (str(namespace_of(verdict.outline)), stale.expected))

    def texts(self, root: str) -> list[str]:
        """One text for each cause; `root` is the folder as it was named."""
        quoted = shlex.quote(root)
        return [shown(text) for text in (*self._foreign(quoted), *self._own(quoted))]

    def lines(self, root: str) -> Iterator[str]:
        """The texts under a head, if there is anything to do."""
        if texts := self.texts(root):
            yield from ("", "what to do", *(f"  {text}" for text in texts))

    def _foreign(self, root: str) -> Iterator[str]:
        for key_id, files in self.key_ids.most_common(_NAMED):
            yield (
                f"{files:,} sealed with key {key_id}: add that key to the key file again, or "
                f"remove them: kvsafe purge {root} --key-id {key_id}"
            )
        for suite, files in self.suites.most_common(_NAMED):
            yield f"{files:,} of suite {suite}: {_suite_text(suite, root)}"
        if self.versions:
            yield f"{self.versions:,} of another format version: read them with that kvsafe"

    def _own(self, root: str) -> Iterator[str]:
        for (namespace, epoch), files in self.revoked.most_common(_NAMED):
            yield (
                f"{files:,} from before a reset, which no engine will load: remove them: "
                f"kvsafe purge {root} --namespace {shlex.quote(namespace)} --epoch-below {epoch}"
            )
        if self.unknown:
            yield (
                f"{self.unknown:,} of an epoch that the state folder has not reached: is it the "
                "engine's own and present one, or an old copy?"
            )
        if self.damaged:
            yield (
                f"{self.damaged:,} damaged, forged or out of place: an engine refuses them and "
                f"computes anew; to move them aside now: kvsafe verify {root} --quarantine"
            )


def _suite_text(suite: str, root: str) -> str:
    if suite == Suite.BLAKE3.label:
        # Its key id is a constant: zeros.
        return (
            "unkeyed, so anyone could have made them; look at them with --suite blake3, or "
            f"remove them: kvsafe purge {root} --key-id {bytes(8).hex()}"
        )
    if suite in [str(known.label) for known in Suite]:
        return f"look at them with --suite {suite}"
    return "no suite of this version: read them with a later kvsafe"


def _count(counter: Counter[_Text], what: _Text) -> None:
    """Count, but never more than so many different texts: they come from foreign files."""
    if what in counter or len(counter) < _LIMIT:
        counter[what] += 1
