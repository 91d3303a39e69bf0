# SPDX-License-Identifier: Apache-2.0
"""The reader by itself: what it imports, its decoder, its command."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.reader import canonical
from conformance.reader.__main__ import main
from conformance.reader.chunk_reader import OK, judge
from tests.conformance.rows import Draft
from tests.conformance.vectors import FOLDER, drafts, wanted
from tests.tidy.tree import imports, sources

PERMITTED = {
    *("__future__", "argparse", "collections", "dataclasses", "hashlib", "hmac", "itertools"),
    *("json", "math", "pathlib", "struct", "sys", "typing", "blake3", "conformance"),
    "cryptography",
}

# Appendix A of RFC 8949, as far as the values belong to the subset.
EXAMPLES: dict[str, Any] = {
    "00": 0,
    "17": 23,
    "1818": 24,
    "1903e8": 1000,
    "1b000000e8d4a51000": 1000000000000,
    "1bffffffffffffffff": 18446744073709551615,
    "20": -1,
    "3903e7": -1000,
    "f90000": 0.0,
    "fb3ff199999999999a": 1.1,
    "f93e00": 1.5,
    "f97bff": 65504.0,
    "fa47c35000": 100000.0,
    "fb7e37e43c8800759c": 1.0e300,
    "f90001": 5.960464477539063e-8,
    "fbc010666666666666": -4.1,
    "f97c00": math.inf,
    "f4": False,
    "f6": None,
    "4401020304": b"\1\2\3\4",
    "6449455446": "IETF",
    "63e6b0b4": "水",
    "8301820203820405": [1, [2, 3], [4, 5]],
    "a26161016162820203": {"a": 1, "b": [2, 3]},
}
REFUSED = {
    "": "ends too early",
    "1817": "shortest",
    "f7": "simple value",
    "fa3f800000": "shortest",
    "f97e01": "shortest",
    "c100": "tag",
    "5f42010243030405ff": "indefinite",
    "62c328": "UTF-8",
    "8201": "ends too early",
    "0000": "after the end",
    "a10102": "not text",
    "a2616201616102": "order",
    "a2616101616102": "double",
    "818181818181818180": "deeply",
}


def test_it_imports_nothing_that_it_should_not() -> None:
    found = sources("conformance/reader")
    assert len(found) >= 5
    names = {name for one in found for name in imports(ast.walk(one.tree), one.place)}
    assert {name.split(".")[0] for name in names} <= PERMITTED


@pytest.mark.parametrize("encoded", EXAMPLES)
def test_documents(encoded: str) -> None:
    value = canonical.decode(bytes.fromhex(encoded))
    assert value == EXAMPLES[encoded]
    assert type(value) is type(EXAMPLES[encoded])


@pytest.mark.parametrize("encoded", REFUSED)
def test_what_is_no_document(encoded: str) -> None:
    with pytest.raises(canonical.DocumentError, match=REFUSED[encoded]):
        canonical.decode(bytes.fromhex(encoded))


@pytest.mark.parametrize("document", [b"\x80", b"\xa0\0", b""])
def test_a_caller_without_documents_is_told(document: bytes) -> None:
    expected = drafts()["blake3"].expected()
    assert judge(drafts()["blake3"].row(), expected) == OK
    with pytest.raises(ValueError, match=r"map|end|early"):
        replace(expected, identity=document)


def test_a_worker_may_check_only_its_own_slice() -> None:
    made = drafts()["blake3-keyed-two-writers"]
    row = bytearray(made.row())
    row[made.header_bytes] ^= 1
    for ranks, number in ((None, 1001), ((0,), 1001), ((1,), 0), ((0, 1), 1001)):
        assert judge(row, replace(made.expected(), ranks=ranks)).number == number


def test_differing_fields_are_named() -> None:
    made = drafts()["blake3"]
    other = made.but(identity=b"\xa2\x66engine\x64vllm\x66layers\xf9\x4f\x00")
    verdict = judge(other.row(), made.expected())
    assert (verdict.step, verdict.field) == (7, "layers, version")


def write(folder: Path, made: Draft, row: bytes | None = None) -> list[str]:
    """A row in a file, and the arguments that tell the command its secret."""
    path = folder / "row"
    path.write_bytes(made.row() if row is None else row)
    return [str(path), "--json", "--secret-hex", made.secret.hex()]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Exit status and answer of the command."""
    status = main(arguments)
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, answer


@pytest.mark.parametrize("name", drafts())
def test_the_command_says_what_it_did_not_check(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = drafts()[name]
    status, answer = run(write(tmp_path, made), capsys)
    assert (status, answer["accepted"]) == (0, True)
    assert {"suite", "key", "epoch", "identity", "slices"} <= set(answer["not_checked"])
    key = ["--key-hex", made.key.hex(), "--epoch", "5", "--suite", made.suite]
    status, answer = run([*write(tmp_path, made), *key], capsys)
    assert (status, answer["header"]["generation"]) == (0, made.generation)
    assert not {"suite", "key", "epoch"} & set(answer["not_checked"])


def test_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = drafts()["blake3-keyed"]
    right = write(tmp_path, made)
    for more, number in (
        ([], 0),
        (["--key-hex", "00"], 501),
        (["--epoch", "6"], 601),
        (["--suite", "blake3"], 202),
    ):
        status, answer = run([*right, *more], capsys)
        assert (status, answer["number"]) == (1 if number else 0, number)
    assert run(right[:2], capsys)[1]["number"] == 204
    # Nothing that a row says of itself may break the command.
    for changed, number in (
        (made.but(identity=b"\xff\xff"), 702),
        (made.but(fixed={"writers": 2**32 - 1}), 304),
        (made.but(fixed={"header_bytes": 2**32 - 4096}), 301),
        (made.but(fixed={"payload_bytes": 383}), 901),
        (made.but(records={0: {"length": 2**64 - 1}}), 901),
    ):
        assert run(write(tmp_path, changed), capsys)[1]["number"] == number
    for cut, number in ((0, 101), (143, 101), (144, 301)):
        assert run(write(tmp_path, made, made.row()[:cut]), capsys)[1]["number"] == number


def test_the_command_used_wrongly(tmp_path: Path) -> None:
    row = str(FOLDER / "blake3.bin")
    broken = tmp_path / "expect.json"
    broken.write_text('{"expected": {"key": "zz"}}')
    for arguments in (
        [],
        [str(tmp_path / "absent")],
        [row, "--key-hex", "0"],
        [row, "--secret-hex", "00"],
        [row, "--expect", str(broken)],
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2


def test_the_covered_slots_of_the_golden_rows() -> None:
    assert wanted(drafts()["blake3-keyed-two-writers"]) == [0, 2, 3, 4, 5, 6, 7, 8]
