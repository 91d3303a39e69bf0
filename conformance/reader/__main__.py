# SPDX-License-Identifier: Apache-2.0
"""Judge one row. Exit status: 0 accepted, 1 refused, 2 wrong use of the command.

What the command line does not give is taken from the row itself and listed in `not_checked`.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from conformance.reader import suites
from conformance.reader.canonical import DocumentError, entries
from conformance.reader.chunk_reader import FIXED, Expected, Header, judge

LARGEST = 1 << 32
EMPTY_MAP = b"\xa0"
NAMES = {number: name for name, number in suites.NUMBERS.items()}


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m conformance.reader", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="one whole row")
    parser.add_argument("--expect", type=Path, metavar="JSON", help="expectation, as in vectors/")
    parser.add_argument("--suite", choices=list(suites.NUMBERS), help="the suite to accept")
    parser.add_argument("--secret-hex", type=bytes.fromhex, action="append", metavar="HEX")
    parser.add_argument("--key-hex", type=bytes.fromhex, metavar="HEX", help="key asked for")
    parser.add_argument("--epoch", type=int)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return parser


def from_json(text: str) -> dict[str, Any]:
    """Fields of Expected in a file as in `vectors/`; ValueError or KeyError for another file."""
    given: dict[str, Any] = json.loads(text)["expected"]
    for name in ("key", "identity", "geometry"):
        given[name] = bytes.fromhex(given[name])
    given["secrets"] = tuple(bytes.fromhex(secret) for secret in given["secrets"])
    given["slices"] = tuple((offset, length) for offset, length in given["slices"])
    given["wanted"] = tuple(given["wanted"])
    return given


def _document(data: bytes) -> bytes:
    """`data`, or a document that no damaged one equals, so that the steps still judge it."""
    try:
        entries(data)
    except DocumentError:
        return EMPTY_MAP
    return data


def declared(row: bytes) -> dict[str, Any]:
    """What the header says of itself."""
    head = Header(memoryview(row))
    fixed = head.fixed
    fits = fixed.header_bytes <= len(row) and 0 < head.filler_at <= head.writers_at
    lengths = [w.length for w in head.writers()] if fits else [0] * min(fixed.writers, 1024)
    offsets = list(accumulate(lengths, initial=0))[: len(lengths)]
    if lengths:
        lengths[-1] = fixed.payload_bytes - offsets[-1]
    return {
        "suite": NAMES.get(fixed.suite, NAMES[1]),
        "secrets": (),
        "key": head.key(),
        "epoch": fixed.epoch,
        "identity": _document(head.identity() if fits else b""),
        "geometry": _document(head.geometry() if fits else b""),
        "header_bytes": fixed.header_bytes,
        "payload_bytes": fixed.payload_bytes,
        "slots": fixed.slots,
        "slices": tuple(zip(offsets, lengths, strict=True)),
    }


def _given(chosen: argparse.Namespace) -> dict[str, Any]:
    given = from_json(chosen.expect.read_text("utf-8")) if chosen.expect else {}
    secrets = tuple(chosen.secret_hex) if chosen.secret_hex else None
    flags = {"suite": chosen.suite, "secrets": secrets, "key": chosen.key_hex}
    flags["epoch"] = chosen.epoch
    return {**given, **{name: value for name, value in flags.items() if value is not None}}


def _answer(row: bytes, given: dict[str, Any]) -> dict[str, Any]:
    blank = declared(row.ljust(FIXED.size, b"\0"))
    verdict = judge(row, Expected(**{**blank, **given}))
    answer = {"accepted": not verdict.step, **verdict._asdict()}
    answer["not_checked"] = [name for name in (*blank, "wanted") if name not in given]
    if verdict.step != 1:
        fixed = Header(memoryview(row)).fixed._asdict()
        answer["header"] = {n: v.hex() if isinstance(v, bytes) else v for n, v in fixed.items()}
    return answer


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = _options()
    chosen = parser.parse_args(arguments)
    try:
        if chosen.file.stat().st_size > LARGEST:
            raise ValueError("FILE is too large to be a row")
        answer = _answer(chosen.file.read_bytes(), _given(chosen))
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(str(error))
    if chosen.json:
        print(json.dumps(answer))
    else:
        print("\n".join(f"{name}: {value}" for name, value in answer.items()))
    return 0 if answer["accepted"] else 1


if __name__ == "__main__":
    sys.exit(main())
