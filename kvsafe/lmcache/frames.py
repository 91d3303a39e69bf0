# SPDX-License-Identifier: Apache-2.0
"""The lm:// frames of LMCache 0.3.4 to 0.5.6, and the check of a reply against its request.

Request, 186 bytes: nine little-endian 32-bit numbers (command, length, format, element type,
location, four dimensions) and the key, padded with spaces. Reply, 36 bytes: code, length, format,
element type, four dimensions, location. A reply names no request, so it is only ever compared
with the one that is next in order, and everything it declares must be what was asked for.
"""

import enum
import math
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvsafe.lmcache.answers import Answer, ChunkShape, Found
from kvsafe.lmcache.keys import KEY_BYTES, check_length
from kvsafe.seal.refusal import Refusal, RefusalKind

REQUEST: Final = struct.Struct("<9i150s")
REPLY: Final = struct.Struct("<9i")
MAX_LENGTH: Final = (1 << 31) - 1

OK: Final = 200
FAIL: Final = 400


class Command(enum.IntEnum):
    """What a client asks. LIST is never answered, so it is never sent."""

    PUT = 1
    GET = 2
    EXIST = 3
    LIST = 4
    HEALTH = 5


class Fmt(enum.IntEnum):
    """Memory formats: [2, layers, tokens, heads x size] and [1, layers, tokens, size] are ours."""

    UNDEFINED = 0
    KV_2LTD = 1
    KV_T2D = 2
    KV_2TD = 3
    BINARY = 4
    BINARY_BUFFER = 5
    KV_MLA = 6
    EC_TD = 7
    HS_TD = 8


class Dtype(enum.IntEnum):
    """Element types."""

    NONE = 0
    HALF = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT32 = 4
    FLOAT64 = 5
    UINT8 = 6
    FLOAT8_E4M3FN = 7
    FLOAT8_E5M2 = 8


DTYPE_BYTES: Final = {
    Dtype.HALF: 2, Dtype.FLOAT16: 2, Dtype.BFLOAT16: 2, Dtype.FLOAT32: 4, Dtype.FLOAT64: 8,
    Dtype.UINT8: 1, Dtype.FLOAT8_E4M3FN: 1, Dtype.FLOAT8_E5M2: 1,
}  # fmt: skip

_NO_VALUE: Final = (0, int(Fmt.KV_2LTD), int(Dtype.FLOAT16), 0, 0, 0, 0, 0)
"""What LMCache's client writes into the fields of a request that carries no value."""

SAME_DTYPE: Final = ({Dtype.HALF, Dtype.FLOAT16},)
"""Two numbers for one type: LMCache writes either."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as values; `key` is text without padding."""

    command: int
    key: str
    length: int = 0
    fmt: int = Fmt.KV_2LTD
    dtype: int = Dtype.FLOAT16
    location: int = 0
    dims: tuple[int, int, int, int] = (0, 0, 0, 0)

    def encode(self) -> bytes:
        """The 186 bytes. Raises `ValueError` for a key that does not fit: check keys before."""
        key = self.key.encode("utf-8")
        if check_length(self.key) is not None:
            raise ValueError(f"key of {len(key)} bytes, room for {KEY_BYTES}")
        return REQUEST.pack(
            self.command, self.length, self.fmt, self.dtype, self.location, *self.dims,
            key.ljust(KEY_BYTES),
        )  # fmt: skip


class Reply(NamedTuple):
    """A reply as values, nothing of it believed."""

    code: int
    length: int
    fmt: int
    dtype: int
    dims: tuple[int, int, int, int]
    location: int

    def encode(self) -> bytes:
        """The 36 bytes."""
        head = (self.code, self.length, self.fmt, self.dtype)
        return REPLY.pack(*head, *self.dims, self.location)


def decode_reply(data: bytes | bytearray | memoryview) -> Reply:
    """Read 36 bytes. Raises `struct.error` for any other number of bytes."""
    code, length, fmt, dtype, d0, d1, d2, d3, location = REPLY.unpack(data)
    return Reply(code, length, fmt, dtype, (d0, d1, d2, d3), location)


def decode_request(data: bytes | bytearray | memoryview) -> Request | Refusal:
    """Read 186 bytes, as a server does. The key may be any text without its padding."""
    command, length, fmt, dtype, location, d0, d1, d2, d3, raw = REQUEST.unpack(data)
    try:
        key = bytes(raw).decode("utf-8").strip(" ")
    except UnicodeDecodeError:
        return Refusal.of(RefusalKind.PEER_KEY, "key", "UTF-8", "other bytes")
    return Request(command, key, length, fmt, dtype, location, (d0, d1, d2, d3))


def get_request(key: str) -> bytes:
    """GET."""
    return _bare(Command.GET, key)


def exist_request(key: str) -> bytes:
    """EXIST."""
    return _bare(Command.EXIST, key)


def health_request(key: str) -> bytes:
    """HEALTH. LMCache's server parses the key of this request too, so it has to be one."""
    return _bare(Command.HEALTH, key)


def _bare(command: Command, key: str) -> bytes:
    """A request without a value, as `Request(command, key).encode()` gives it, but sooner."""
    raw = key.encode("utf-8")
    if len(raw) > KEY_BYTES:
        raise ValueError(f"key of {len(raw)} bytes, room for {KEY_BYTES}")
    return REQUEST.pack(command, *_NO_VALUE, raw.ljust(KEY_BYTES))


def put_request(key: str, shape: ChunkShape) -> bytes:
    """PUT; `shape.length` bytes follow."""
    if not 1 <= shape.length <= MAX_LENGTH:
        raise ValueError(f"value of {shape.length} bytes")
    return Request(Command.PUT, key, shape.length, shape.fmt, shape.dtype, 0, shape.dims).encode()


def chunk_shape(fmt: Fmt, dtype: Dtype, dims: tuple[int, int, int, int]) -> ChunkShape:
    """The shape with the only length that fits it.

    Raises `ValueError` for dimensions that no request could carry.
    """
    length = math.prod(dims) * DTYPE_BYTES[dtype]
    if min(dims) < 1 or not length <= MAX_LENGTH:
        raise ValueError(f"dimensions {dims} of {dtype.name}: {length} bytes")
    return ChunkShape(int(fmt), int(dtype), dims, length)


def judge_look(reply: Reply) -> Answer:
    """A reply to EXIST or HEALTH: yes, no, or a refusal. It never announces a value."""
    if reply.length != 0:
        return Refusal.of(RefusalKind.PEER_LENGTH, "length", 0, reply.length)
    if reply.code == OK:
        return Found.HIT
    return Found.ABSENT if reply.code == FAIL else _bad_code(reply.code)


def judge_get(reply: Reply, shape: ChunkShape) -> Answer:
    """A reply to GET: HIT (exactly `shape.length` bytes follow), ABSENT, or a refusal.

    Cheap checks first; nothing here allocates. After a refusal the rest of the connection means
    nothing any more.
    """
    if reply.code == FAIL:
        if reply.length != 0:
            return Refusal.of(RefusalKind.PEER_LENGTH, "length", 0, reply.length)
        return Found.ABSENT
    if reply.code != OK:
        return _bad_code(reply.code)
    if reply.length != shape.length:
        return Refusal.of(RefusalKind.PEER_LENGTH, "length", shape.length, reply.length)
    if reply.fmt != shape.fmt:
        return Refusal.of(RefusalKind.PEER_FORMAT, "fmt", shape.fmt, reply.fmt)
    if reply.dtype != shape.dtype and not _same_dtype(reply.dtype, shape.dtype):
        return Refusal.of(RefusalKind.PEER_DTYPE, "dtype", shape.dtype, reply.dtype)
    if reply.dims != shape.dims:
        return Refusal.of(RefusalKind.PEER_SHAPE, "shape", shape.dims, reply.dims)
    return Found.HIT


def _same_dtype(one: int, other: int) -> bool:
    return any(one in same and other in same for same in SAME_DTYPE)


def _bad_code(code: int) -> Refusal:
    return Refusal.of(RefusalKind.PEER_CODE, "code", f"{OK} or {FAIL}", code)
