# SPDX-License-Identifier: Apache-2.0
"""Keys of LMCache's multiprocess server in its RESP store (the L2 adapter of that name).

Text: `<model>@<kv_rank %08x>@<group %x>@<64 hex digits>[@salt]`, with the unfolded 32-byte
BLAKE3 chain and `kv_rank = world << 24 | rank << 16 | local_world << 8 | local_rank`.
"""

import re
from dataclasses import dataclass
from typing import Final

from kvsafe.lmcache.keys import check_name, refuse_key
from kvsafe.seal.refusal import Refusal

MAX_TEXT: Final = 1024
_KV_RANK: Final = re.compile(r"[0-9a-f]{8}")
_GROUP: Final = re.compile(r"0|[1-9a-f][0-9a-f]{0,7}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SALT: Final = re.compile(r"[!-.0-?A-\[\]-~]{1,128}")


def kv_rank(world_size: int, rank: int, local_world_size: int, local_rank: int) -> int:
    """The four numbers of a worker in one. Raises `ValueError` for one that is over a byte."""
    numbers = (world_size, rank, local_world_size, local_rank)
    if not all(0 <= number <= 255 for number in numbers):
        raise ValueError(f"kv_rank has one byte for each of {numbers}")
    return world_size << 24 | rank << 16 | local_world_size << 8 | local_rank


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """One chunk of one worker and one KV-cache group. `salt` is the request's cache salt."""

    model: str
    kv_rank: int
    group: int
    digest: bytes
    salt: str = ""

    def text(self) -> str:
        """The key text. Only what `check` lets through is safe to send."""
        tail = f"@{self.salt}" if self.salt else ""
        return f"{self.model}@{self.kv_rank:08x}@{self.group:x}@{self.digest.hex()}{tail}"

    def check(self) -> Refusal | None:
        """Why a peer could take this for another key, or None."""
        if refusal := check_name("model", self.model):
            return refusal
        for name, number in (("kv_rank", self.kv_rank), ("group", self.group)):
            if not 0 <= number < 1 << 32:
                return refuse_key(name, "32 bits", number)
        if len(self.digest) != 32:
            return refuse_key("digest", "32 bytes", len(self.digest))
        if self.salt and not _SALT.fullmatch(self.salt):
            return refuse_key(
                "salt", "at most 128 printable ASCII without @, slashes and spaces", "another"
            )
        length = len(self.text())
        return refuse_key("key", f"at most {MAX_TEXT} bytes", length) if length > MAX_TEXT else None


def parse_object_key(text: str) -> ObjectKey | Refusal:
    """Read a key text; only the one text that LMCache itself would print is taken."""
    if len(text) > MAX_TEXT:
        return refuse_key("key", f"at most {MAX_TEXT} bytes", len(text))
    parts = text.split("@")
    if len(parts) not in (4, 5):
        return refuse_key("key", "4 or 5 parts with @ between them", len(parts))
    model, rank, group, digest, *salt = parts
    for name, part, pattern in (
        ("kv_rank", rank, _KV_RANK),
        ("group", group, _GROUP),
        ("digest", digest, _DIGEST),
    ):
        if not pattern.fullmatch(part):
            return refuse_key(name, f"hex as {pattern.pattern}", part)
    if salt == [""]:
        return refuse_key("salt", "no @ without a salt", "an empty salt")
    key = ObjectKey(model, int(rank, 16), int(group, 16), bytes.fromhex(digest), "".join(salt))
    return key.check() or key
