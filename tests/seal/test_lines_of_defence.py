# SPDX-License-Identifier: Apache-2.0
"""Rules that a later rule would cover up: each is checked for itself, by what it alone can say.

A document with a tag is refused by the decoder, and would be refused again by the comparison of
encodings. Were only the outcome looked at, the first line could be gone and nobody would know.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from itertools import pairwise
from pathlib import Path

import cbor2
import pytest
from blake3 import blake3
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvsafe.seal import cbor, epoch, identity, keyfile, keyring, layout, private, suites
from kvsafe.seal.cbor import CborError, decode, encode
from kvsafe.seal.epoch import EpochError, EpochFile
from kvsafe.seal.identity import Identity, IdentityError
from kvsafe.seal.opening import Expectation
from kvsafe.seal.refusal import Refusal, RefusalKind, bounded
from tests.seal.rows import SECRET, World
from tests.seal.test_epoch import mac
from tests.seal.test_identity import sample

DECODER = "not a document: CBORDecodeError"
SUBSET = "not a document: CborError"
SHAPE = "not the canonical encoding"

FIRST_LINE = {
    "tag": ("c000", DECODER),
    "unknown tag": ("d84d00", DECODER),
    "shared value": ("d81c80", DECODER),
    "indefinite list": ("9fff", DECODER),
    "indefinite map": ("bfff", DECODER),
    "indefinite text": ("7f6161ff", DECODER),
    "indefinite bytes": ("5f41ffff", DECODER),
    "duplicate key": ("a2616100616100", DECODER),
    "list as key": ("a18000", DECODER),
    "map as key": ("a1a000", DECODER),
    "undefined": ("f7", SUBSET),
    "simple value": ("e0", SUBSET),
    "self-described": ("d9d9f700", SHAPE),
    "longer form": ("1800", SHAPE),
    "trailing byte": ("0000", SHAPE),
}


@pytest.mark.parametrize("name", FIRST_LINE)
def test_each_rule_of_the_decoder_refuses_by_itself(name: str) -> None:
    text, reason = FIRST_LINE[name]
    for data in (bytes.fromhex(text), b"\xa1\x61a" + bytes.fromhex(text)):
        with pytest.raises(CborError, match=f"^{reason}$"):
            decode(data, limit=100)


def test_nothing_that_the_library_would_convert_is_converted() -> None:
    """Every tag for which cbor2 has code of its own has our refusal in that code's place."""
    own = {number for number in range(70_000) if _converts(number)}
    assert {0, 2, 25, 30, 35, 36, 43000} <= own, "the probe sees nothing"
    # The tag that says "this is CBOR" has no code; the comparison of encodings refuses it.
    assert own - set(cbor._TAG_DECODERS) == {55799}
    for refuse in cbor._TAG_DECODERS.values():
        with pytest.raises(CborError, match="tags"):
            refuse("anything")


def _converts(number: int) -> bool:
    for value in (b"\x01", b"\x61x", b"\x82\x01\x02"):
        head = b"\xda" + number.to_bytes(4, "big")
        try:
            if not isinstance(cbor2.loads(head + value), cbor2.CBORTag):
                return True
        except cbor2.CBORDecodeError:
            return True
    return False


def test_text_that_is_no_unicode_is_our_misuse() -> None:
    """A path of bytes that are no UTF-8 comes as text with lone surrogates."""
    for value in ("\udcff", ["\udcff"], {"\udcff": 1}):
        with pytest.raises(CborError, match="Unicode"):
            encode(value)
    with pytest.raises(IdentityError, match="cannot be encoded"):
        Identity.of({**sample(), "model": "\udcff"})
    assert Identity.of({**sample(), "model": "\u00ff"}).values["model"] == "\u00ff"


def test_an_integer_that_no_document_holds_is_our_misuse() -> None:
    with pytest.raises(IdentityError, match="cannot be encoded"):
        Identity.of({**sample(), "rope": {"a": 2**64}})
    assert Identity.of({**sample(), "rope": {"a": 2**64 - 1}}).values["rope"] == {"a": 2**64 - 1}


LIMITS = [
    (cbor, "MAX_DEPTH", 8),
    (epoch, "EPOCH_FILE_VERSION", 1),
    (epoch, "EPOCH_FILE_LIMIT", 4096),
    (epoch, "MAX_EPOCH", 2**63 - 1),
    (epoch, "MAX_REASON", 200),
    (epoch, "_MIN_TAG_BYTES", 16),
    (identity, "DOCUMENT_LIMIT", 65536),
    (identity, "_DIFFERENCE_LIMIT", 64),
    (identity, "_TEXT_LIMIT", 1024),
    (identity, "_TREE_DEPTH", 5),
    (keyfile, "KEY_FILE_VERSION", 1),
    (keyfile, "KEY_FILE_LIMIT", 65536),
    (keyring, "MAX_KEYS", 64),
    (keyring, "SECRET_BYTES", 32),
    (keyring, "KEY_ID_BYTES", 8),
    (keyring, "_MIN_DISTINCT_BYTES", 8),
    (layout, "FORMAT_VERSION", 1),
    (layout, "PAGE_BYTES", 4096),
    (layout, "MAX_KEY_BYTES", 128),
    (layout, "MAX_SLOTS", 4096),
    (layout, "MAX_WRITERS", 1024),
    (layout, "MAX_DOCUMENT_BYTES", 65536),
    (layout, "MAX_HEADER_BYTES", 1 << 20),
    (layout, "GEOMETRY_RESERVE", 1024),
    (private, "LOCK_DEADLINE_S", 10.0),
    (suites, "TAG_BYTES", 32),
    (suites, "DIGEST_BYTES", 32),
]


@pytest.mark.parametrize(("module", "name", "value"), LIMITS, ids=lambda value: str(value)[:40])
def test_published_numbers_stay_what_they_are(module: object, name: str, value: int) -> None:
    """Other tests ask these modules for their limits; here they are written down once more."""
    assert getattr(module, name) == value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "epoch.json"


def _forge(path: Path, document: str = "", /, **body: object) -> None:
    """An epoch file with a right tag over whatever the body says."""
    if not path.exists():
        EpochFile(path, mac).read()
    whole = {"version": 1, "epoch": 3, "reason": "", "raised": ""} | body
    text = json.dumps(whole, separators=(",", ":"))
    known = {name: whole[name] for name in ("version", "epoch", "reason", "raised")}
    message = b"kvsafe 1 epoch\0" + path.name.encode() + b"\0"
    tag = mac(message + json.dumps(known, separators=(",", ":")).encode()).hex()
    path.write_text(f'{{"body":{text},"tag":"{tag}"{document}}}')


def test_a_right_tag_over_a_sound_body_is_taken(path: Path) -> None:
    for number in (0, 3, 2**63 - 1):
        _forge(path, epoch=number)
        assert EpochFile(path, mac).read() == number


@pytest.mark.parametrize(
    "body", [{"version": 0}, {"version": 2}, {"epoch": -1}, {"epoch": 2**63}, {"epoch": 2**70}]
)
def test_a_right_tag_over_another_version_or_no_epoch_is_refused(
    path: Path, body: dict[str, object]
) -> None:
    _forge(path, **body)
    with pytest.raises(EpochError):
        EpochFile(path, mac).read()


def test_what_the_tag_does_not_cover_is_refused(path: Path) -> None:
    """Names that this version does not know are not under the tag: they may not be there."""
    _forge(path, more=1)
    with pytest.raises(EpochError, match="not an epoch file"):
        EpochFile(path, mac).read()
    _forge(path, ',"more":1')
    with pytest.raises(EpochError, match="not an epoch file"):
        EpochFile(path, mac).read()


def test_the_limit_of_the_file_is_in_bytes_and_exact(path: Path) -> None:
    _forge(path)
    text = path.read_text()
    path.write_text(text.ljust(4096))
    assert EpochFile(path, mac).read() == 3
    path.write_text(text.ljust(4097))
    with pytest.raises(EpochError, match="larger than 4096"):
        EpochFile(path, mac).read()


@pytest.mark.parametrize("length", [0, 15])
def test_a_tag_is_not_shorter_than_sixteen_bytes(path: Path, length: int) -> None:
    with pytest.raises(EpochError, match="real MAC"):
        EpochFile(path, lambda message: mac(message)[:length]).read()
    assert EpochFile(path, lambda message: mac(message)[:16]).read() == 0


def test_an_epoch_begins_inside_its_range(path: Path) -> None:
    for first in (-1, 2**63 - 1, 2**63):
        with pytest.raises(ValueError, match="cannot begin"):
            EpochFile(path, mac, first=first)
    assert EpochFile(path, mac, first=2**63 - 2).raise_epoch("last") == 2**63 - 1
    assert EpochFile(path.with_name("b"), mac, first=5).read() == 5


def test_the_structs_have_the_sizes_of_the_page() -> None:
    assert layout.FIXED.size == 144
    assert layout.RECORD.size == 64


def test_the_longest_text_the_deepest_tree_and_the_largest_count_are_taken() -> None:
    deep: object = {"a": {"b": {"c": {"d": 1}}}}
    for field, value, wrong in (
        ("model", "x" * 1024, "x" * 1025),
        ("rope", deep, {"z": deep}),
        ("layers", 2**63 - 1, 2**63),
        ("layers", 0, -1),
        ("rope", {"a": "x" * 1024}, {"a": "x" * 1025}),
        ("rope", {"a": [1.5, None, True, b"x"]}, {"a": [float("inf")]}),
    ):
        assert Identity.of({**sample(), field: value}).values[field] == value
        with pytest.raises(IdentityError, match=field):
            Identity.of({**sample(), field: wrong})


def test_the_longest_document_is_taken() -> None:
    shortest = len(Identity.of({**sample(), "rope": {"a": b""}}).document)
    # The length of a byte string takes two bytes more when it is long.
    room = 65536 - shortest - 2
    assert len(Identity.of({**sample(), "rope": {"a": bytes(room)}}).document) == 65536
    with pytest.raises(IdentityError, match="at most 65536"):
        Identity.of({**sample(), "rope": {"a": bytes(room + 1)}})


@pytest.mark.parametrize("step", [1, 3, 7, 85, 254, 255])
@pytest.mark.parametrize("start", [0, 1, 128, 250, 255])
def test_a_counted_sequence_is_no_secret_wherever_it_wraps(start: int, step: int) -> None:
    counted = bytes((start + step * place) % 256 for place in range(32))
    assert keyring.weakness_of(counted) is not None
    # One byte out of step, and it is none.
    other = bytes([*counted[:-1], counted[-1] ^ 0x55])
    few = "it has fewer than 8 different bytes"
    assert keyring.weakness_of(other) == (few if len(set(other)) < 8 else None)


def test_a_secret_has_eight_different_bytes_at_least() -> None:
    for distinct, fine in ((7, False), (8, True)):
        secret = bytes(place * place % 251 for place in range(distinct)) * 5
        assert (keyring.weakness_of(secret[:32]) is None) is fine


def test_what_is_derived_from_a_secret_is_what_the_page_says() -> None:
    """Written down once more: another word in one of these makes every stored chunk foreign."""
    assert keyring.key_id_of(SECRET) == hmac.digest(SECRET, b"kvsafe 1 key id", "sha256")[:8]
    named = hmac.digest(SECRET, b"kvsafe 1 name secret", "sha256")
    assert keyring.name_secret_from(SECRET) == named
    for purpose in ("header", "slice", "name", "state"):
        context = f"kvsafe 1 subkey blake3-keyed {purpose}".encode()
        keyed = keyring.derive_subkey(SECRET, "blake3-keyed", purpose)
        assert keyed == blake3(context, key=SECRET).digest()
        # RFC 5869 without salt: one block is enough for 32 bytes.
        info = f"kvsafe 1 subkey hmac-sha256 {purpose}".encode()
        extracted = hmac.digest(bytes(32), SECRET, "sha256")
        expanded = hmac.digest(extracted, info + b"\x01", "sha256")
        assert keyring.derive_subkey(SECRET, "hmac-sha256", purpose) == expanded


def test_the_unkeyed_ring_is_made_of_public_words() -> None:
    ring = keyring.Keyring.unkeyed()
    secret = hashlib.sha256(b"kvsafe 1 unkeyed: public, proves nothing").digest()
    names = hashlib.sha256(b"kvsafe 1 unkeyed names: public").digest()
    assert (ring.active.key_id, ring.active.secret) == (bytes(8), secret)
    for purpose, found in (("name", ring.name_secret), ("state", ring.state_secret)):
        assert found == blake3(f"kvsafe 1 subkey blake3 {purpose}".encode(), key=names).digest()


@given(
    st.integers(1, 65536),
    st.integers(1, 128),
    st.integers(1, 4096),
    st.lists(st.integers(1, 1 << 40), min_size=1, max_size=40),
)
@example(4096 - 144 - 36 - 1 - 1024 - 64 - 32, 36, 8, [4096])
@example(4096 - 144 - 36 - 1 - 1024 - 64 - 32 + 1, 36, 8, [4096])
@settings(max_examples=60, deadline=None)
def test_a_layout_is_what_the_page_says(
    identity_bytes: int, key_bytes: int, slots: int, slices: list[int]
) -> None:
    plan = layout.RowLayout.plan(
        identity_bytes=identity_bytes, key_bytes=key_bytes, slots=slots, slice_bytes=slices
    )
    used = 144 + key_bytes + (slots + 7) // 8 + identity_bytes + 1024 + 64 * len(slices) + 32
    assert used <= plan.header_bytes < used + 4096 and plan.header_bytes % 4096 == 0
    assert plan.payload_bytes == sum(slices) and plan.slots == slots
    end = plan.header_bytes + plan.payload_bytes
    assert end <= plan.row_bytes < end + 4096 and plan.row_bytes % 4096 == 0
    offsets = [sum(slices[:rank]) for rank in range(len(slices))]
    found = [(one.rank, one.offset, one.length) for one in plan.slices]
    assert found == list(zip(range(len(slices)), offsets, slices, strict=True))
    ends = [plan.record_offset(rank) + 64 for rank in range(len(slices))]
    assert ends[-1] == plan.header_bytes - 32
    assert all(after - before == 64 for before, after in pairwise(ends))


def test_a_printed_expectation_is_not_longer_than_what_it_expects() -> None:
    """It stands in error texts of tests and tools; the zeros that it compares with do not."""
    world = World()
    expectation = Expectation(
        world.suite, world.keyring, world.layout, world.document, b"digest", world.geometry
    )
    assert len(repr(expectation)) < 4 * (len(world.document) + len(world.geometry)) + 2000
    rest = world.layout.row_bytes - world.layout.payload_bytes
    assert len(expectation.zeros(10**9)) == rest >= world.layout.header_bytes
    assert expectation.zeros(5) == bytes(5)


def test_no_refusal_leaves_a_descriptor_open(tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    folder = tmp_path / "state"
    EpochFile(folder / "a", mac).raise_epoch("x")
    (folder / "large").touch(0o600)
    os.truncate(folder / "large", 5000)
    (folder / "shared").touch(0o644)
    (folder / "b.lock").touch(0o644)
    (tmp_path / "open").mkdir(0o777)
    (tmp_path / "open").chmod(0o777)
    for name in ("state/large", "state/shared", "state/b", "open/a", "state/a/b"):
        with pytest.raises(EpochError):
            EpochFile(tmp_path / name, mac).read()
    with pytest.raises(EpochError):
        EpochFile(folder / "b", mac).raise_epoch("x")
    assert count() == before


BOTH_SIDES: dict[str, tuple[dict[str, int], str, str]] = {
    "version": ({"version": 2}, "1", "2"),
    "suite": ({"suite": 3}, "1", "3"),
    "flags": ({"flags": 4}, "0", "4"),
    "reserved": ({"reserved": 5}, "0", "5"),
    "header length": ({"header_bytes": 4097}, "pages within 8192", "4097"),
    "key length": ({"key_bytes": 129}, "1 to 128", "129"),
    "slots": ({"slots": 4097}, "1 to 4096", "4097"),
    "writers": ({"writers": 1025}, "1 to 1024", "1025"),
    "payload": ({"payload_bytes": 4097}, "1 to 4096", "4097"),
    "old epoch": ({"epoch": 6}, "7", "6"),
    "new epoch": ({"epoch": 8}, "7", "8"),
    "shape": ({"payload_bytes": 161}, "160", "161"),
    "writers of the layout": ({"writers": 3}, "2", "3"),
    "generation": ({"generation": 12}, "12", "11"),
}


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_a_refusal_tells_what_was_expected_and_what_was_found(name: str) -> None:
    fields, expected, found = BOTH_SIDES[name]
    world = World()
    answer = world.open(world.forge(world.chunk(), **fields))
    assert isinstance(answer, Refusal)
    assert (answer.expected, answer.found) == (expected, found)
    assert answer.step == answer.number // 100 > 0
    assert str(answer).startswith(f"refusal {answer.number} at step {answer.step}: ")


def test_a_refused_record_is_told_with_its_place() -> None:
    world = World()
    answer = world.open(world.forge_record(world.chunk(), 1, reserved=1))
    assert isinstance(answer, Refusal)
    assert (answer.expected, answer.found) == ("(1, 0, 96, 64)", "(1, 1, 96, 64)")


def test_refusals_have_the_numbers_of_the_page() -> None:
    """Two names with one number would be one refusal: members are asked with their aliases."""
    page = Path(__file__).resolve().parents[2] / "spec" / "refusals.md"
    rows = [line.split("|") for line in page.read_text().splitlines() if "| `" in line]
    written = {cells[3].strip(" `"): int(cells[1]) for cells in rows}
    assert {name: kind.value for name, kind in RefusalKind.__members__.items()} == written
    assert len(written) > 30


def test_text_is_cut_where_it_is_too_long_and_says_so() -> None:
    assert bounded("x" * 160) == "x" * 160
    assert bounded("x" * 161) == "x" * 159 + "…"
    assert bounded(b"\xab" * 80) == "ab" * 80
    assert bounded(b"\xab" * 81) == ("ab" * 80)[:159] + "…"
