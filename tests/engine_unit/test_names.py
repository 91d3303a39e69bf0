# SPDX-License-Identifier: Apache-2.0
"""Names of objects: keyed, of one identity, and telling nothing of the key but its group."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsafe.engine.tiers import names as names_module
from kvsafe.engine.tiers.names import ForeignNames, ObjectNames, object_name
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.suites import Suite
from tests.seal.rows import KEY, OLD_SECRET, SECRET, keyring

DIGEST = b"\x11" * 32
keys = st.tuples(st.binary(min_size=32, max_size=32), st.integers(0, 5)).map(
    lambda pair: pair[0] + pair[1].to_bytes(4, "big")
)
suites = pytest.mark.parametrize("suite", Suite, ids=lambda suite: suite.label)


@suites
@settings(max_examples=60, deadline=None)
@given(left=keys, right=keys)
def test_a_name_is_as_long_as_its_key_and_its_own(suite: Suite, left: bytes, right: bytes) -> None:
    names = ObjectNames(suite, keyring(suite), DIGEST)
    assert len(names.name(left)) == len(left)
    assert names.name(left)[-4:] == left[-4:]
    assert (names.name(left) == names.name(right)) is (left == right)
    assert names.name(left) == ObjectNames(suite, keyring(suite), DIGEST).name(left)


@suites
@settings(max_examples=60, deadline=None)
@given(key=keys)
def test_nothing_of_the_hash_is_in_the_name(suite: Suite, key: bytes) -> None:
    name = ObjectNames(suite, keyring(suite), DIGEST).name(key)
    parts = {key[at : at + 4] for at in range(28)}
    assert not any(part in name[:-4] for part in parts if len(set(part)) > 2)


def test_a_name_needs_the_secret_the_identity_and_the_suite() -> None:
    ring = keyring(Suite.BLAKE3_KEYED)
    base = ObjectNames(Suite.BLAKE3_KEYED, ring, DIGEST).name(KEY)
    other_suite = ObjectNames(Suite.HMAC_SHA256, keyring(Suite.HMAC_SHA256), DIGEST)
    others = [
        ObjectNames(Suite.BLAKE3_KEYED, ring, b"\x12" * 32).name(KEY),
        other_suite.name(KEY),
        ObjectNames(Suite.BLAKE3, keyring(Suite.BLAKE3), DIGEST).name(KEY),
        object_name(Suite.BLAKE3_KEYED, b"\x01" * 32, DIGEST, KEY),
    ]
    assert len({base, *others}) == 5
    assert object_name(Suite.BLAKE3_KEYED, ring.name_secret, DIGEST, KEY) == base


def test_names_survive_a_rotation_of_the_seal_key() -> None:
    before = keyring(Suite.BLAKE3_KEYED, (OLD_SECRET,))
    after = keyring(Suite.BLAKE3_KEYED, (SECRET, OLD_SECRET))
    assert before.active.key_id != after.active.key_id
    left = ObjectNames(Suite.BLAKE3_KEYED, before, DIGEST).name(KEY)
    assert left == ObjectNames(Suite.BLAKE3_KEYED, after, DIGEST).name(KEY)


@pytest.mark.parametrize("length", [5, 12, 20, 36, 68, 128])
def test_keys_of_any_length_keep_their_length_and_group(length: int) -> None:
    key = bytes(length - 4) + (3).to_bytes(4, "big")
    name = object_name(Suite.BLAKE3_KEYED, SECRET, DIGEST, key)
    assert len(name) == length and name[-4:] == key[-4:]


def test_the_cache_is_bounded_and_changes_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "_CACHE_LIMIT", 8)
    names = ObjectNames(Suite.BLAKE3_KEYED, keyring(Suite.BLAKE3_KEYED), DIGEST)
    several = [number.to_bytes(32, "big") + bytes(4) for number in range(40)]
    first = [names.name(key) for key in several]
    assert len(names._cache) <= 8
    assert [names.name(key) for key in several] == first


def test_foreign_names_are_those_of_the_other_engine() -> None:
    ring, theirs = keyring(Suite.BLAKE3_KEYED), b"\x12" * 32
    refusal = Refusal.of(RefusalKind.IDENTITY_ELSEWHERE, "rope", "x", "y")
    foreign = ForeignNames(Suite.BLAKE3_KEYED, ring.name_secret, theirs, refusal)
    assert foreign.name(KEY) == ObjectNames(Suite.BLAKE3_KEYED, ring, theirs).name(KEY)
    assert foreign.name(KEY) != ObjectNames(Suite.BLAKE3_KEYED, ring, DIGEST).name(KEY)
