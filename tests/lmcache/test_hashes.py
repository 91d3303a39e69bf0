# SPDX-License-Identifier: Apache-2.0
"""LMCache's chunk hashes: every vector that LMCache computed, and what must differ."""

import hashlib
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsafe.lmcache import ALGORITHMS, PrefixHashes, chunks, hash_chain, kv_rank
from kvsafe.lmcache.chunking import spans
from kvsafe.lmcache.hashes import MAX_SHA256_TOKENS
from kvsafe.lmcache.siphash import seed_keys, siphash13
from tests.lmcache.golden import TOKENS, golden

SEEDED = [(name, "7") for name in ALGORITHMS]
_tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12)


def _chain(algo: str, seed: str | None):  # type: ignore[no-untyped-def]
    return hash_chain("sha256_cbor" if algo == "sha256_cbor_64bit" else algo, seed)


def _names(entry: dict[str, Any]) -> str:
    return f"{entry['algo']}-{entry['seed']}"


@pytest.mark.parametrize("entry", golden()["inproc"], ids=_names)
def test_every_vector_of_the_connector_in_the_engine(entry: dict[str, Any]) -> None:
    chain = _chain(entry["algo"], entry["seed"])
    assert chain.none_hash == entry["none_hash"]
    for name, expected in entry["chunks"].items():
        size, unfull, tokens = name.split("/")
        found, value = [], chain.none_hash
        places = spans(
            len(TOKENS[tokens]), int(size.removeprefix("chunk")), unfull=unfull.endswith("True")
        )
        for start, end in places:
            # `step`: one list holds negative ids, which LMCache takes and engines never have.
            value = chain.step(value, TOKENS[tokens][start:end])
            found.append([start, end, format(chain.number(value), "x")])
        assert found == expected, name


@pytest.mark.parametrize("entry", golden()["inproc"], ids=_names)
def test_a_masked_prefix_leaves_its_chunks_out_but_counts(entry: dict[str, Any]) -> None:
    chain = _chain(entry["algo"], entry["seed"])
    found = [c.value for c in chunks(chain, TOKENS["pattern_600"], skip=256)]
    assert [format(chain.number(value), "x") for value in found] == entry["mask_256_false"]
    with pytest.raises(ValueError, match="multiple of 256"):
        list(chunks(chain, TOKENS["pattern_600"], skip=255))


@pytest.mark.parametrize("entry", golden()["mp"], ids=_names)
def test_every_vector_of_the_multiprocess_server(entry: dict[str, Any]) -> None:
    name = "mp_sha256_cbor" if entry["algo"] == "sha256_cbor" else entry["algo"]
    chain = hash_chain(name, entry["seed"])
    assert chain.none_hash == bytes.fromhex(entry["none_hash"])
    for tokens, expected in entry["chunks"].items():
        assert [c.value for c in chunks(chain, TOKENS[tokens])] == list(
            map(bytes.fromhex, expected)
        )


def test_kv_ranks() -> None:
    wanted = golden()["kv_rank"]
    assert kv_rank(1, 0, 1, 0) == wanted["ws1_r0"]
    assert kv_rank(2, 1, 2, 1) == wanted["ws2_r1"]
    assert kv_rank(8, 3, 8, 3) == wanted["ws8_r3"]
    with pytest.raises(ValueError, match="one byte"):
        kv_rank(256, 0, 1, 0)


def test_sip_hash_is_the_published_one() -> None:
    assert seed_keys(0) == (0, 0)
    assert siphash13(0, 0, b"0") != siphash13(0, 0, b"1")
    with pytest.raises(ValueError, match="outside"):
        seed_keys(2**32)


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_the_written_serialisation_is_pythons_own(prefix: int, tokens: list[int]) -> None:
    whole = pickle.dumps((prefix, tuple(tokens), ()), protocol=5)
    expected = int.from_bytes(hashlib.sha256(whole).digest()[:8], "big")
    assert hash_chain("sha256").step(prefix, tokens) == expected


def test_the_longest_chunk_of_sha256_is_still_pythons_own() -> None:
    tokens = [2**32 - 1] * MAX_SHA256_TOKENS
    chain = hash_chain("sha256")
    whole = pickle.dumps((chain.none_hash, tuple(tokens), ()), protocol=5)
    expected = int.from_bytes(hashlib.sha256(whole).digest()[:8], "big")
    assert chain.step(chain.none_hash, tokens) == expected
    with pytest.raises(ValueError, match="at most"):
        chain.step(chain.none_hash, [1] * (MAX_SHA256_TOKENS + 1))


@pytest.mark.parametrize(("name", "seed"), SEEDED)
@given(one=_tokens, other=_tokens)
def test_other_tokens_another_hash(name: str, seed: str, one: list[int], other: list[int]) -> None:
    chain = hash_chain(name, seed)
    same = chain.extend(chain.none_hash, one) == chain.extend(chain.none_hash, other)
    assert same == (one == other)


@pytest.mark.parametrize(("name", "seed"), SEEDED)
@given(first=_tokens, second=_tokens)
def test_a_chunk_is_hashed_with_all_that_came_before(
    name: str, seed: str, first: list[int], second: list[int]
) -> None:
    chain = hash_chain(name, seed)
    assert chain.extend(chain.none_hash, second) != chain.extend(
        chain.extend(chain.none_hash, first), second
    )


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "blake3"])
def test_another_seed_another_hash(name: str) -> None:
    tokens = [1, 2, 3]
    found = set()
    for seed in ("0", "1", "42"):
        chain = hash_chain(name, seed)
        found.add(chain.extend(chain.none_hash, tokens))
    assert len(found) == 3
    assert hash_chain("blake3", "0").none_hash == hash_chain("blake3", "1").none_hash


@pytest.mark.parametrize("seed", [None, "random", "-1", "4294967296", "01", "\uff11"])
def test_builtin_without_a_seed_that_peers_can_share_is_refused(seed: str | None) -> None:
    with pytest.raises(ValueError, match="none_hash_seed"):
        hash_chain("builtin", seed)
    assert hash_chain("builtin", "1").none_hash != 0


def test_misuse_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown hash algorithm"):
        hash_chain("md5")
    chain = hash_chain("blake3")
    for token in (-1, 2**32):
        with pytest.raises(ValueError, match="token ids"):
            chain.extend(chain.none_hash, [token])


@given(st.lists(st.integers(0, 500), max_size=70), st.integers(1, 20))
def test_growing_prompts_hash_as_whole_ones(tokens: list[int], size: int) -> None:
    chain = hash_chain("sha256_cbor")
    wanted = {c.end: c.value for c in chunks(chain, tokens, size)}
    grown = PrefixHashes(chain, size)
    for end in reversed(range(len(tokens) + size + 1)):
        assert grown.value(end, tokens) == wanted.get(end)
