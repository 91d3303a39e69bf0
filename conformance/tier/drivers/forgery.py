# SPDX-License-Identifier: Apache-2.0
"""The best forgery of a sealed chunk that can be made without its key."""

from __future__ import annotations

from kvsafe.cli.inspect.outline import layout_of, outline_of
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.refusal import Refusal
from kvsafe.seal.sealing import HeaderSealer, SealSetting, SliceSealer
from kvsafe.seal.suites import Suite


def forged(chunk: bytes, body: bytes) -> bytes:
    """A whole chunk in the unkeyed suite: all that the header of `chunk` says, over `body`.

    Raises `ValueError` if `chunk` has no readable header, or `body` does not fit.
    """
    found = outline_of(memoryview(chunk), len(chunk))
    layout = found if isinstance(found, Refusal) else layout_of(found)
    if isinstance(found, Refusal) or isinstance(layout, Refusal):
        raise ValueError(f"no chunk to copy from: {layout}")
    if len(body) != layout.payload_bytes or len(chunk) != layout.row_bytes:
        raise ValueError(f"{len(body)} bytes for a payload of {layout.payload_bytes}")
    suite, fixed = Suite.BLAKE3, found.fixed
    setting = SealSetting(
        suite, Keyring.unkeyed(), layout, found.identity, suite.digest(found.identity)
    )
    row = bytearray(layout.row_bytes)
    view, begin = memoryview(row), layout.header_bytes
    view[begin : begin + len(body)] = body
    for index in range(len(layout.slices)):
        SliceSealer(setting, index).seal_slice(view, found.key, fixed.epoch, fixed.generation)
    sealer = HeaderSealer(setting, found.geometry)
    refusal = sealer.seal(view, found.key, fixed.epoch, fixed.generation, found.coverage)
    if refusal is not None:
        raise ValueError(str(refusal))
    return bytes(row)
