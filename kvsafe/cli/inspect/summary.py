# SPDX-License-Identifier: Apache-2.0
"""What a folder holds, by identity, epoch and key id: headers only, no payload is read."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvsafe.cli.inspect.advice import Advice
from kvsafe.cli.inspect.chunk import document_of, refusal_document
from kvsafe.cli.inspect.outline import Outline
from kvsafe.cli.inspect.reading import Examined
from kvsafe.cli.inspect.screen import amount, moment, table
from kvsafe.cli.inspect.tree import Role, shown
from kvsafe.engine.rows.epochs import PRIVATE_EPOCH
from kvsafe.seal.refusal import MEANINGS, Refusal, RefusalKind

__all__ = ["Line", "Lot", "Sort", "Summary", "refusal_lines", "sort_of"]

SORTS_LIMIT = 4096
"""Different sorts that are told apart; a folder full of inventions must not fill memory."""


class Sort(NamedTuple):
    """What chunks of one line have in common; texts are bounded and printable."""

    identity: str
    model: str
    namespace: str
    epoch: int
    key_id: str
    suite: str
    word: str


Line = dict[str, Any]
_NAME_LIMIT = 48

_HEAD = (
    "identity", "model", "namespace", "epoch", "key id", "suite", "state", "chunks", "bytes",
    "sealed (UTC)",
)  # fmt: skip


@dataclass(slots=True)
class Lot:
    """How many, how much, and when sealed (Unix seconds)."""

    files: int = 0
    size: int = 0
    first: int = 1 << 64
    last: int = 0

    def add(self, size: int, sealed_at: int) -> None:
        """One more file."""
        self.files += 1
        self.size += size
        self.first, self.last = min(self.first, sealed_at), max(self.last, sealed_at)


def sort_of(found: Outline, word: str) -> Sort:
    """The line that a chunk belongs to."""
    model, namespace = _names(found.identity)
    fixed = found.fixed
    digest = fixed.identity_digest.hex()
    return Sort(digest, model, namespace, fixed.epoch, fixed.key_id.hex(), found.suite.label, word)


@functools.lru_cache(64)
def _names(identity: bytes) -> tuple[str, str]:
    document = document_of(identity) or {}
    return _name(document.get("model", "-")), _name(document.get("namespace", "-"))


def _name(value: object) -> str:
    """The end of a name: where it is a path, that is what tells models apart."""
    text = shown(str(value))
    return text if len(text) <= _NAME_LIMIT else f"…{text[1 - _NAME_LIMIT :]}"


@dataclass(slots=True)
class Summary:
    """Sums over one folder."""

    sorts: dict[Sort, Lot] = field(default_factory=dict)
    left_out: Lot = field(default_factory=Lot)
    refused: Counter[RefusalKind] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    others: Counter[Role] = field(default_factory=Counter)
    other_bytes: int = 0
    files: int = 0
    size: int = 0
    unchecked: Counter[str] = field(default_factory=Counter)
    advice: Advice = field(default_factory=Advice)

    def add(self, found: Examined) -> None:
        """Count one chunk file."""
        verdict, size = found.verdict, found.info.st_size if found.info is not None else 0
        self.files += 1
        self.size += size
        if verdict is None:
            self.unread.update([] if found.gone else [found.trouble])
            return
        self.unchecked.update(verdict.unchecked)
        self.advice.add(verdict)
        if verdict.refusal is not None:
            self.refused[verdict.refusal.kind] += 1
        elif verdict.outline is not None:
            lot = self._lot(sort_of(verdict.outline, verdict.word))
            lot.add(size, verdict.outline.fixed.sealed_at)

    def _lot(self, sort: Sort) -> Lot:
        if sort not in self.sorts and len(self.sorts) >= SORTS_LIMIT:
            return self.left_out
        return self.sorts.setdefault(sort, Lot())

    @property
    def found_something(self) -> bool:
        """Whether anything is refused or could not be read."""
        return bool(self.refused or self.unread)

    def document(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "chunks": [
                {**sort._asdict(), **_sizes(lot)} for sort, lot in sorted(self.sorts.items())
            ],
            "chunks_left_out": self.left_out.files,
            "refused": [_refused(kind, count) for kind, count in sorted(self.refused.items())],
            "unread": dict(self.unread),
            "unchecked": dict(self.unchecked),
            **{role.value: self.others[role] for role in Role if role is not Role.CHUNK},
            "other_bytes": self.other_bytes,
        }

    def table(self) -> list[str]:
        """The chunks whose header can be read, by sort."""
        rows = [_cells(sort, lot) for sort, lot in sorted(self.sorts.items())]
        return table(_HEAD, rows, right="epoch chunks bytes")

    def lines(self) -> Iterator[str]:
        """Text for people."""
        yield from self.table() if self.sorts else ["no chunk has a readable header"]
        if self.left_out.files:
            yield f"and {self.left_out.files} chunks of more than {SORTS_LIMIT} other sorts"
        yield from refusal_lines(self.refused)
        yield from (f"{count} not read: {shown(text)}" for text, count in self.unread.items())
        for role in (Role.QUARANTINED, Role.TEMPORARY, Role.OTHER):
            if self.others[role]:
                yield f"{self.others[role]} {_ROLE_WORDS[role]}"
        yield from (f"not checked in {n}: {text}" for text, n in self.unchecked.items())


_ROLE_WORDS = {
    Role.QUARANTINED: "in quarantine",
    Role.TEMPORARY: "being written, or left by a writer",
    Role.OTHER: "other files (a store's own ledger and leases among them)",
}


def refusal_lines(refused: Counter[RefusalKind]) -> Iterator[str]:
    """One line per refusal number."""
    if refused:
        rows = [
            (str(kind.value), str(count), MEANINGS[kind]) for kind, count in sorted(refused.items())
        ]
        yield ""
        yield from table(("refusal", "files", "meaning"), rows, right="refusal files")


def _refused(kind: RefusalKind, count: int) -> Line:
    named = refusal_document(Refusal.of(kind, "", "", ""))
    return {key: named[key] for key in ("number", "name", "meaning")} | {"files": count}


def _sizes(lot: Lot) -> Line:
    return {
        "files": lot.files,
        "bytes": lot.size,
        "sealed_first": lot.first,
        "sealed_last": lot.last,
    }


def _cells(sort: Sort, lot: Lot) -> tuple[str, ...]:
    epoch = f"{sort.epoch & ~PRIVATE_EPOCH:x} private" if sort.epoch & PRIVATE_EPOCH else sort.epoch
    when = moment(lot.first)[:16]
    if lot.last != lot.first:
        when += f" to {moment(lot.last)[:16]}"
    return (
        sort.identity[:12],
        sort.model,
        sort.namespace,
        str(epoch),
        sort.key_id[:8],
        sort.suite,
        sort.word,
        f"{lot.files:,}",
        amount(lot.size),
        when,
    )
