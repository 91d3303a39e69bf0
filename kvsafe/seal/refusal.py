# SPDX-License-Identifier: Apache-2.0
"""Refusals: the numbered, typed "no" of kvsafe.

A refusal is a value, not an exception: hostile or damaged bytes are an ordinary outcome of
reading a cache. It says the step, the field, what was expected and what was found, in
bounded text without any token or KV byte. Numbers are assigned once and never reused, so
they survive in logs, metrics and tickets. `spec/refusals.md` is generated from this table.
"""

import enum
from dataclasses import dataclass

_TEXT_LIMIT = 160


class RefusalKind(enum.IntEnum):
    """Every way to refuse; the hundreds are the step of opening (11 and up: around it)."""

    TOO_SHORT = 101
    BAD_MAGIC = 102
    VERSION = 201
    SUITE = 202
    FLAGS = 203
    KEY_ID = 204
    HEADER_LENGTH = 301
    DOCUMENT_LENGTH = 302
    PAYLOAD_LENGTH = 303
    WRITER_COUNT = 304
    HEADER_TAG = 401
    KEY = 501
    EPOCH_REVOKED = 601
    EPOCH_UNKNOWN = 602
    IDENTITY = 701
    IDENTITY_DAMAGED = 702
    IDENTITY_ELSEWHERE = 703
    GEOMETRY = 801
    GEOMETRY_DAMAGED = 802
    WRITER = 901
    WRITER_GENERATION = 902
    COVERAGE = 903
    PADDING = 904
    PAYLOAD_TAG = 1001
    FENCE = 1101
    COPY_PLAN = 1102
    COPY_FAULT = 1103
    DEADLINE = 1104
    SOURCE_HASH = 1105
    TIER_READ = 1201
    TIER_OBJECT = 1202
    PEER_REPLY = 1301
    PEER_CODE = 1302
    PEER_LENGTH = 1303
    PEER_SHAPE = 1304
    PEER_FORMAT = 1305
    PEER_DTYPE = 1306
    PEER_TORN = 1307
    PEER_KEY = 1308
    PEER_ABSENT = 1309
    PEER_COMPANION = 1310
    PEER_CONTENT = 1311
    PEER_LATE = 1312

    @property
    def step(self) -> int:
        """The numbered step that refuses (see `spec/chunk.md`)."""
        return self.value // 100


MEANINGS: dict[RefusalKind, str] = {
    RefusalKind.TOO_SHORT: "the row is shorter than a header",
    RefusalKind.BAD_MAGIC: "the row does not begin with the kvsafe magic",
    RefusalKind.VERSION: "the format version is not one that this reader knows",
    RefusalKind.SUITE: "the suite is unknown, or not the one that this reader is set to accept",
    RefusalKind.FLAGS: "a reserved flag or reserved byte is set",
    RefusalKind.KEY_ID: "the key id is not in the key ring",
    RefusalKind.HEADER_LENGTH: "the header length is not a whole number of pages inside the row",
    RefusalKind.DOCUMENT_LENGTH: "key, coverage, documents and records do not fit the header",
    RefusalKind.PAYLOAD_LENGTH: "the payload does not fit behind the header in the row",
    RefusalKind.WRITER_COUNT: "the number of writers is outside what a header may have",
    RefusalKind.HEADER_TAG: "the header tag is wrong: damaged, forged, or another key",
    RefusalKind.KEY: "an authentic chunk, but of another key than the one asked for",
    RefusalKind.EPOCH_REVOKED: "sealed before the last reset: its epoch is revoked",
    RefusalKind.EPOCH_UNKNOWN: "sealed in an epoch that this engine has not reached",
    RefusalKind.IDENTITY: "an authentic chunk of another engine, model or setting",
    RefusalKind.IDENTITY_DAMAGED: "the identity document cannot be decoded or has another digest",
    RefusalKind.IDENTITY_ELSEWHERE: "the tier holds this chunk, but under another identity",
    RefusalKind.GEOMETRY: "an authentic chunk with another geometry of the payload",
    RefusalKind.GEOMETRY_DAMAGED: "the geometry document cannot be decoded or has another digest",
    RefusalKind.WRITER: "a writer is missing, appears twice, or holds another slice",
    RefusalKind.WRITER_GENERATION: "a writer wrote for another allocation of the row",
    RefusalKind.COVERAGE: "a wanted block was never written into this chunk",
    RefusalKind.PADDING: "bytes that must be zero are not",
    RefusalKind.PAYLOAD_TAG: "the payload is not what its writer tagged",
    RefusalKind.FENCE: "the row was given to another chunk before the transfer ran",
    RefusalKind.COPY_PLAN: "a copy plan names a place that does not exist or is not allowed",
    RefusalKind.COPY_FAULT: "the copy itself failed",
    RefusalKind.DEADLINE: "the transfer did not complete before its deadline",
    RefusalKind.SOURCE_HASH: "a block to be stored does not hold what its key says",
    RefusalKind.TIER_OBJECT: "what the tier holds cannot be a chunk: wrong kind or wrong length",
    RefusalKind.TIER_READ: "the tier said that it holds the chunk and then could not deliver it",
    RefusalKind.PEER_REPLY: "the reply of a peer is not one that the protocol has for this request",
    RefusalKind.PEER_CODE: "the reply of a peer carries a code that the protocol does not have",
    RefusalKind.PEER_LENGTH: "a peer declares another length than that of the chunk asked for",
    RefusalKind.PEER_SHAPE: "a peer declares another shape than that of the chunk asked for",
    RefusalKind.PEER_FORMAT: "a peer declares another memory format than the one asked for",
    RefusalKind.PEER_DTYPE: "a peer declares another element type than the one asked for",
    RefusalKind.PEER_TORN: "the connection ended inside a reply or a value",
    RefusalKind.PEER_KEY: "a peer would take this key material for another key",
    RefusalKind.PEER_ABSENT: "a peer said that it holds the chunk and then did not have it",
    RefusalKind.PEER_COMPANION: "the companion entry does not belong to this chunk of this peer",
    RefusalKind.PEER_CONTENT: "the values of a peer's chunk are none that a model computes",
    RefusalKind.PEER_LATE: "a reply began and did not end before its deadline",
}


def bounded(value: object) -> str:
    """Short printable text of `value` for a refusal: bytes as hex, never longer than a line."""
    text = value.hex() if isinstance(value, bytes | bytearray | memoryview) else str(value)
    text = "".join(char if char.isprintable() else "?" for char in text[: _TEXT_LIMIT + 1])
    return text if len(text) <= _TEXT_LIMIT else text[: _TEXT_LIMIT - 1] + "…"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal: which rule, on which field, what was expected, what was found."""

    kind: RefusalKind
    field: str
    expected: str
    found: str

    @classmethod
    def of(cls, kind: RefusalKind, field: str, expected: object, found: object) -> "Refusal":
        """Build a refusal with bounded text."""
        return cls(kind, bounded(field), bounded(expected), bounded(found))

    @property
    def number(self) -> int:
        """The number in logs and metrics."""
        return self.kind.value

    @property
    def step(self) -> int:
        """The step of opening that refused."""
        return self.kind.step

    def __str__(self) -> str:
        return (
            f"refusal {self.number} at step {self.step}: {MEANINGS[self.kind]}; "
            f"field {self.field}: expected {self.expected}, found {self.found}"
        )
