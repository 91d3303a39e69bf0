# SPDX-License-Identifier: Apache-2.0
"""Choices from bytes, edits, patches, the smallest input, and the guard of one execution."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.execute import check
from fuzz.minimise import minimise
from fuzz.mutate import KINDS, Edit, Maker, apply_edits
from fuzz.patching import Patch
from fuzz.source import ByteSource
from fuzz.target import Target, demand
from fuzz.targets.selftest import SelfTest
from tests.tidy.tree import ROOT


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60), st.integers(1, 1 << 40), st.integers(0, 40))
def test_choices_stay_in_their_bounds_and_end(data: bytes, count: int, length: int) -> None:
    source = ByteSource(data)
    assert 0 <= source.below(count) < count
    assert -5 <= source.between(-5, 7) <= 7
    assert source.pick("abc") in "abc"
    assert 0 <= source.number(16) < 1 << 16
    assert len(source.raw(length)) == length
    assert len(source.some(9)) <= 9
    source.rest()
    assert (source.left, source.below(count), source.flag()) == (0, 0, False)


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=40),
    st.lists(st.builds(Edit, st.integers(0, KINDS), *[st.integers(0, 1 << 16)] * 2, st.binary())),
)
def test_edits_never_fail_and_keep_the_limit(data: bytes, edits: list[Edit]) -> None:
    assert len(apply_edits(data, edits, 30)) <= 30


def test_the_same_seed_makes_the_same_inputs() -> None:
    pool = [b"abc", b"defgh" * 9]
    made = [[Maker(seed, 64).next(pool) for _ in range(1)] for seed in (1, 1, 2)]
    one, other = Maker(1, 64), Maker(1, 64)
    assert [one.next(pool) for _ in range(50)] == [other.next(pool) for _ in range(50)]
    assert made[0] == made[1]
    assert len({Maker(seed, 64).next(pool) for seed in range(20)}) > 10


def test_a_patch_is_undone_also_where_a_name_was_inherited() -> None:
    class Base:
        word = "right"

    class Child(Base):
        pass

    place = SimpleNamespace(word="right")
    with pytest.raises(RuntimeError), Patch() as patch:
        patch.set(place, "word", "wrong")
        patch.set(place, "word", "worse")
        patch.set(Child, "word", "wrong")
        assert (place.word, Child.word) == ("worse", "wrong")
        raise RuntimeError
    assert (place.word, Child.word, "word" in vars(Child)) == ("right", "right", False)
    with pytest.raises(AttributeError), Patch() as patch:
        patch.set(place, "no such name", 1)


def test_an_input_becomes_as_small_as_it_can() -> None:
    data = bytes(range(1, 200))
    assert minimise(data, lambda small: 77 in small and 150 in small) == bytes([77, 150])
    assert minimise(b"abc", lambda small: False) == b"abc"


@pytest.mark.parametrize(
    ("data", "oracle"),
    [(b"r", "exception"), (b"f", "accepted"), (b"h", "hang"), (b"m", "memory"), (b"l", "memory")],
)
def test_what_is_wrong_becomes_a_finding(data: bytes, oracle: str) -> None:
    # In a process of its own, as targets are, and one that a large process has started: the peak
    # of a parent, or of an earlier execution, hides nothing.
    code = (
        "from tests.fuzz.test_parts import SelfTest, check\n"
        "quiet = check(SelfTest(), bytes(1))\n"
        "large = b'x' * (700 << 20)\n"
        "del large\n"
        f"found = check(SelfTest(), {data!r})\n"
        "print(quiet, getattr(found, 'oracle', None))\n"
    )
    large = bytearray(b"x") * (700 << 20)
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100)
    del large
    assert done.stdout.split()[-2:] == ["None", oracle]


def test_the_alarm_of_somebody_else_goes_on() -> None:
    old = signal.setitimer(signal.ITIMER_REAL, 900.0)
    try:
        check(SelfTest(), b"")
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left <= 900.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, *old)


def test_findings_of_one_fault_have_one_signature() -> None:
    class Two(Target):
        name = "two"

        def once(self, data: bytes) -> None:
            demand(data[:1] != b"a", f"first: {len(data)}")
            demand(data[:1] != b"b", "second")

    signatures = [str(found.signature) for d in (b"a", b"ab", b"b") if (found := check(Two(), d))]
    assert signatures[0] == signatures[1] != signatures[2]
