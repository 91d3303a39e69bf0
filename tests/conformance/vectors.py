# SPDX-License-Identifier: Apache-2.0
"""What the golden rows in `conformance/vectors/` hold, and the command that writes new ones.

`python -m tests.conformance.vectors` writes those that are not there; it never changes one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.conformance.rows import Draft

FOLDER = Path(__file__).resolve().parents[2] / "conformance" / "vectors"
SUITES = ("blake3-keyed", "hmac-sha256", "blake3", "aes256-gmac")
PAIRS = ("blake3-keyed", "aes256-gmac")
NAMES = (*SUITES, *(f"{suite}-two-writers" for suite in PAIRS))


def _content(seed: int, length: int) -> bytes:
    return hashlib.shake_256(bytes([seed])).digest(length)


def _draft(suite: str, slots: int, lengths: tuple[int, ...], covered: bytes) -> Draft:
    """Documents are given as bytes, so that no encoder takes part."""
    return Draft(
        suite=suite,
        secret=hashlib.sha256(b"a secret of the golden rows, known to all").digest(),
        key=hashlib.sha256(b"a block of the golden rows").digest() + b"\0\0\0\1",
        epoch=5,
        generation=41,
        identity=b"\xa3"
        + b"\x66engine\x64vllm"
        + b"\x66layers\x18\x1c"
        + b"\x67version\xf9\x3e\x00",
        geometry=b"\xa1\x67workers\x81\x82\x82\x00\x01\x45\xa1\x61a\x18\x40",
        slots=slots,
        coverage=covered,
        slices=tuple(_content(rank, length) for rank, length in enumerate(lengths)),
        sealed_at=1_750_000_000,
    )


def drafts() -> dict[str, Draft]:
    """The golden rows by name."""
    one = {suite: _draft(suite, 1, (384,), b"\1") for suite in SUITES}
    two = {f"{suite}-two-writers": _draft(suite, 10, (320, 200), b"\xfd\1") for suite in PAIRS}
    return {**one, **two}


def wanted(made: Draft) -> list[int]:
    """Every slot that is covered."""
    bits = int.from_bytes(made.coverage, "little")
    return [slot for slot in range(made.slots) if bits >> slot & 1]


def description(made: Draft, row: bytes) -> dict[str, Any]:
    """The `.json` of a row: the expectation that accepts it, and edits that must be refused."""
    expected: dict[str, Any] = {**vars(made.expected(wanted(made)))}
    del expected["ranks"]
    for name in ("key", "identity", "geometry"):
        expected[name] = expected[name].hex()
    expected["secrets"] = [secret.hex() for secret in expected["secrets"]]
    payload = made.header_bytes + sum(map(len, made.slices))
    edits = [
        *((7, 102), (8, 201), (10, 202), (12, 203), (57, 301), (62, 302), (54, 303), (24, 401)),
        *((144, 401), (made.header_bytes - 1, 401), (made.header_bytes, 1001)),
        *((payload - 1, 1001), (payload, 904)),
    ]
    return {
        "sha256": hashlib.sha256(row).hexdigest(),
        "expected": expected,
        "refused": [{"byte": byte, "xor": 255, "number": number} for byte, number in edits],
    }


def main() -> None:
    """Write the rows that are not there."""
    for name, made in drafts().items():
        row = made.row()
        text = json.dumps(description(made, row), indent=1) + "\n"
        for path, data in (
            (FOLDER / f"{name}.bin", row),
            (FOLDER / f"{name}.json", text.encode("ascii")),
        ):
            if not path.exists():
                path.write_bytes(data)


if __name__ == "__main__":
    main()
