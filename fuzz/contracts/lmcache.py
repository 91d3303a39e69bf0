# SPDX-License-Identifier: Apache-2.0
"""Contracts of `kvsafe.lmcache`: key texts mean one key, and bad material is refused."""

from __future__ import annotations

from kvsafe.lmcache.keys import KEY_BYTES, CacheKey, check_length, check_name, check_tags, parse_key
from kvsafe.seal.refusal import Refusal


def names_with_separators_are_refused(before: str, mark: int, after: str) -> None:
    """A model name with `@` or `%` anywhere is never passed on."""
    assert 0 <= mark <= 1
    assert len(before) <= 2
    assert len(after) <= 2
    assert check_name("model", before + "@%"[mark] + after) is not None


def names_with_outer_spaces_are_refused(name: str) -> None:
    """A server strips them: the key would be another one."""
    assert len(name) <= 3
    assert check_name("model", name + " ") is not None
    assert check_name("model", " " + name) is not None


def two_equal_tag_names_are_refused(value: str, other: str) -> None:
    """A tag name stands once."""
    assert len(value) <= 2
    assert len(other) <= 2
    assert check_tags((("t", value), ("t", other))) is not None


def long_keys_are_refused(length: int) -> None:
    """What LMCache would cut is never sent."""
    assert 0 <= length <= 400
    assert (check_length("k" * length) is not None) == (length > KEY_BYTES)


def a_key_that_passes_comes_back(world_size: int, worker: int, number: int) -> None:
    """The text of a sound key is read as that key and no other."""
    assert 0 <= world_size < 1000
    assert 0 <= worker < 1000
    assert -(1 << 16) < number < 1 << 16
    key = CacheKey("m", world_size, worker, number, "half")
    assert key.check() is None
    assert parse_key(key.text()) == key


def a_text_that_is_read_is_the_text_of_its_key(text: str) -> None:
    """No two texts are read as one key."""
    assert len(text) <= 8
    key = parse_key("m@1@0@" + text + "@half")
    if not isinstance(key, Refusal):
        assert key.text() == "m@1@0@" + text + "@half"
