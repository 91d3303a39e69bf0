# SPDX-License-Identifier: Apache-2.0
"""Strict decoder for the CBOR of spec/chunk.md, section 5: one encoding for each value."""

from __future__ import annotations

import math
import struct
from typing import TypeAlias

Value: TypeAlias = "dict[str, Value] | list[Value] | int | float | str | bytes | bool | None"

LEVELS = 8
CONSTANTS: dict[int, bool | None] = {20: False, 21: True, 22: None}
FLOATS = {25: ">e", 26: ">f", 27: ">d"}
NAN = b"\xf9\x7e\x00"


class DocumentError(ValueError):
    """The bytes are not a document in the one permitted encoding."""


class _Decoder:
    """Walks `data` once; `parts` collects the encoded values of the outermost map."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.parts: dict[str, bytes] = {}

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise DocumentError("ends too early")
        self.at += count
        return self.data[self.at - count : self.at]

    def argument(self, info: int) -> int:
        """The number in a head; only its shortest form."""
        if info < 24:
            return info
        if info > 27:
            raise DocumentError("indefinite or reserved length")
        size = 1 << (info - 24)
        number = int.from_bytes(self.take(size), "big")
        if number < (24 if size == 1 else 1 << (4 * size)):
            raise DocumentError("number not in its shortest form")
        return number

    def item(self, level: int) -> Value:
        """One value; `level` counts the lists and maps around it."""
        major, info = divmod(self.take(1)[0], 32)
        if major == 7:
            return self.simple(info)
        number = self.argument(info)
        if major < 2:
            if major and number >> 63:
                raise DocumentError("an integer below -2^63")
            return -1 - number if major else number
        if major == 2:
            return self.take(number)
        if major == 3:
            return self.text(number)
        if major == 6:
            raise DocumentError("tag")
        if level == LEVELS:
            raise DocumentError("nested too deeply")
        if major == 4:
            return [self.item(level + 1) for _ in range(number)]
        return self.map(number, level + 1)

    def simple(self, info: int) -> Value:
        if info in CONSTANTS:
            return CONSTANTS[info]
        if info not in FLOATS:
            raise DocumentError("simple value that is not false, true or null")
        raw = self.take(1 << (info - 24))
        number: float = struct.unpack(FLOATS[info], raw)[0]
        if bytes([0xE0 + info]) + raw != shortest_float(number):
            raise DocumentError("float not in its shortest form")
        return number

    def text(self, length: int) -> str:
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DocumentError("text is not UTF-8") from error

    def map(self, count: int, level: int) -> Value:
        found: dict[str, Value] = {}
        before = b""
        for _ in range(count):
            start = self.at
            name = self.item(level)
            encoded = self.data[start : self.at]
            if not isinstance(name, str):
                raise DocumentError("map key is not text")
            if encoded <= before:
                raise DocumentError("map keys double or out of order")
            before = encoded
            start = self.at
            found[name] = self.item(level)
            if level == 1:
                self.parts[name] = self.data[start : self.at]
        return found


def shortest_float(number: float) -> bytes:
    """The shortest encoding, head included, that keeps the value; NaN has one form only."""
    if math.isnan(number):
        return NAN
    for info, form in FLOATS.items():
        try:
            raw = struct.pack(form, number)
        except OverflowError:
            continue
        if struct.unpack(form, raw)[0] == number:
            return bytes([0xE0 + info]) + raw
    raise DocumentError("no such float")


def _walk(data: bytes) -> tuple[Value, dict[str, bytes]]:
    decoder = _Decoder(data)
    value = decoder.item(0)
    if decoder.at != len(data):
        raise DocumentError("bytes after the end")
    return value, decoder.parts


def decode(data: bytes) -> Value:
    """The value of one whole document; DocumentError for anything else."""
    return _walk(data)[0]


def entries(data: bytes) -> dict[str, bytes]:
    """Encoded value of each entry of a document that is a map; DocumentError otherwise."""
    value, parts = _walk(data)
    if not isinstance(value, dict):
        raise DocumentError("not a map")
    return parts
