# SPDX-License-Identifier: Apache-2.0
"""F13 through vLLM's own fs tier: wrong bytes of the right name are refused, and it heals."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvsafe.seal.layout import FIXED
from tests.engine.cases import Bench, Fresh, Stored, refused
from tests.support.engine import Engine

pytestmark = pytest.mark.engine

HEADER_TAG, BAD_MAGIC, VERSION, KEY, PADDING = 401, 102, 201, 501, 904
PAYLOAD_TAG, TIER_OBJECT = 1001, 1202


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a file in place; a negative place counts from the end."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << bit]))


def zero(path: Path, at: int, length: int = 4096) -> None:
    """Zero a range."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(length))


def swap_ranges(path: Path, one: int, other: int, length: int) -> None:
    """Exchange two ranges of equal length."""
    data = bytearray(path.read_bytes())
    first, second = data[one : one + length], data[other : other + length]
    assert first != second
    data[one : one + length], data[other : other + length] = second, first
    path.write_bytes(data)


def resize(path: Path, change: int) -> None:
    """Make a file longer or shorter."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + change)


def as_directory(path: Path) -> None:
    """A folder with something in it instead of the file."""
    path.unlink()
    path.mkdir()
    (path / "kept").write_text("not ours")


def as_fifo(path: Path) -> None:
    """A FIFO that nobody writes to."""
    path.unlink()
    os.mkfifo(path)


def as_link(path: Path) -> None:
    """A symbolic link to the very chunk."""
    good = path.with_suffix(".good")
    path.rename(good)
    path.symlink_to(good)


@dataclass(frozen=True)
class Damage:
    """What is done to a file, and the refusal that has to come of it."""

    name: str
    do: Callable[[Path], None]
    number: int

    def __str__(self) -> str:
        return self.name


PAGE = 4096
DAMAGES = [
    Damage("magic", lambda path: flip(path, 0), BAD_MAGIC),
    Damage("version", lambda path: flip(path, 8), VERSION),
    Damage("key in header", lambda path: flip(path, FIXED.size + 3), HEADER_TAG),
    Damage("identity in header", lambda path: flip(path, FIXED.size + 200, 5), HEADER_TAG),
    Damage("end of header", lambda path: flip(path, PAGE - 1, 7), HEADER_TAG),
    Damage("first payload bit", lambda path: flip(path, PAGE), PAYLOAD_TAG),
    Damage("middle of payload", lambda path: flip(path, PAGE + 500_001, 3), PAYLOAD_TAG),
    Damage("last payload bit", lambda path: flip(path, -1, 7), PAYLOAD_TAG),
    Damage("ranges swapped", lambda path: swap_ranges(path, PAGE, 5 * PAGE, PAGE), PAYLOAD_TAG),
    Damage("page zeroed", lambda path: zero(path, 9 * PAGE), PAYLOAD_TAG),
    Damage("header zeroed", lambda path: zero(path, 0), BAD_MAGIC),
    Damage("truncated", lambda path: resize(path, -1), TIER_OBJECT),
    Damage("a page short", lambda path: resize(path, -PAGE), TIER_OBJECT),
    Damage("lengthened", lambda path: resize(path, PAGE), TIER_OBJECT),
    Damage("empty", lambda path: os.truncate(path, 0), TIER_OBJECT),
    Damage("directory", as_directory, TIER_OBJECT),
    Damage("fifo", as_fifo, TIER_OBJECT),
    Damage("symlink", as_link, TIER_OBJECT),
]


def check_refused(stored: Stored, damage: Damage, chunk: int = 1) -> None:
    """The damaged chunk is refused and moved aside, the tokens are right, and it heals."""
    bench, engine = stored.bench, stored.bench.engine
    stored.expect_whole()
    aside = set(bench.place.quarantined())
    engine.drop_host()
    damage.do(stored.paths[chunk])
    before = engine.metrics()
    done = engine.ask(stored.prompt)
    engine.settle()
    assert done.tokens == stored.cold.tokens
    assert done.cached == chunk * bench.chunk
    assert refused(before, engine) == {damage.number: 1}
    added = engine.metrics().since(before)
    assert added.total("quarantined_total") == 1
    [moved] = set(bench.place.quarantined()) - aside
    assert moved.name.startswith(f"{damage.number}-")
    stored.expect_whole()


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damage_is_refused_and_heals(bench: Bench, fresh: Fresh, damage: Damage) -> None:
    check_refused(bench.stored(fresh), damage)


@pytest.mark.parametrize("chunk", [0, 2])
def test_any_chunk_may_be_the_bad_one(bench: Bench, fresh: Fresh, chunk: int) -> None:
    check_refused(bench.stored(fresh), DAMAGES[5], chunk)


def test_two_files_swapped(bench: Bench, fresh: Fresh) -> None:
    stored = bench.stored(fresh)
    first, second = stored.paths[0], stored.paths[1]
    bench.engine.drop_host()
    spare = first.with_suffix(".spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    before = bench.engine.metrics()
    done = bench.engine.ask(stored.prompt)
    bench.engine.settle()
    assert (done.tokens, done.cached) == (stored.cold.tokens, 0)
    assert refused(before, bench.engine) == {KEY: 2}
    stored.expect_whole()


def test_the_chunk_of_another_prompt(bench: Bench, fresh: Fresh) -> None:
    mine, other = bench.stored(fresh), bench.stored(fresh)
    bench.engine.drop_host()
    shutil.copyfile(other.paths[0], mine.paths[0])
    before = bench.engine.metrics()
    done = bench.engine.ask(mine.prompt)
    bench.engine.settle()
    assert (done.tokens, done.cached) == (mine.cold.tokens, 0)
    assert refused(before, bench.engine) == {KEY: 1}
    mine.expect_whole()
    other.expect_whole()


def test_every_chunk_bad(bench: Bench, fresh: Fresh) -> None:
    stored = bench.stored(fresh)
    bench.engine.drop_host()
    for path in stored.paths:
        flip(path, PAGE + 7)
    before = bench.engine.metrics()
    done = bench.engine.ask(stored.prompt)
    bench.engine.settle()
    assert (done.tokens, done.cached) == (stored.cold.tokens, 0)
    assert refused(before, bench.engine) == {PAYLOAD_TAG: 3}
    stored.expect_whole()


def test_several_requests_meet_the_same_bad_chunk(bench: Bench, fresh: Fresh) -> None:
    stored = bench.stored(fresh)
    prompts = [stored.prompt, stored.prompt[:-1], stored.prompt + fresh(3)]
    cold = bench.engine.ask_all(prompts)
    bench.engine.settle()
    bench.engine.drop_host()
    flip(stored.paths[1], PAGE + 99)
    before = bench.engine.metrics()
    done = bench.engine.ask_all(prompts)
    bench.engine.settle()
    assert [item.tokens for item in done] == [item.tokens for item in cold]
    assert refused(before, bench.engine) == {PAYLOAD_TAG: 1}
    stored.expect_whole()


@pytest.mark.parametrize("damage", [DAMAGES[4], DAMAGES[5], DAMAGES[11], DAMAGES[16]], ids=str)
@pytest.mark.parametrize("bench", ["qwen3-fail", "gemma3-fail"], indirect=True)
def test_under_policy_fail_the_request_ends_with_an_error(
    bench: Bench, fresh: Fresh, damage: Damage
) -> None:
    stored = bench.stored(fresh)
    stored.expect_whole()
    bench.engine.drop_host()
    damage.do(stored.paths[1])
    before = bench.engine.metrics()
    assert bench.engine.ask(stored.prompt).finish == "error"
    assert refused(before, bench.engine) == {damage.number: 1}
    healthy = bench.stored(fresh)
    assert healthy.cold.finish == "length"
    healthy.expect_whole()
    # The refused chunk is gone: the next request computes and stores it anew.
    again = bench.engine.stored(stored.prompt)
    assert (again.tokens, again.finish) == (stored.cold.tokens, "length")
    stored.expect_whole()


@pytest.mark.parametrize("bench", ["gemma3", "gemma3-2", "qwen3-2-arc"], indirect=True)
@pytest.mark.parametrize("place", ["header", "payload", "short"])
def test_damage_with_groups_and_larger_chunks(bench: Bench, fresh: Fresh, place: str) -> None:
    stored = bench.stored(fresh)
    whole = stored.again().cached
    assert whole > 0
    for victim in (0, -1):
        bench.engine.drop_host()
        path, before = stored.paths[victim], bench.engine.metrics()
        number = _spoil(path, place, bench.header)
        done = bench.engine.ask(stored.prompt)
        bench.engine.settle()
        assert done.tokens == stored.cold.tokens
        assert done.cached < whole
        assert refused(before, bench.engine) == {number: 1}
        assert stored.again().cached == whole
        assert stored.again(lower=False).tokens == stored.cold.tokens


def _spoil(path: Path, place: str, header: int) -> int:
    if place == "header":
        flip(path, FIXED.size + 11)
        return HEADER_TAG
    if place == "payload":
        flip(path, header + 4321)
        return PAYLOAD_TAG
    resize(path, -1)
    return TIER_OBJECT


@pytest.mark.parametrize("bench", ["mla"], indirect=True)
def test_bytes_behind_the_payload_must_be_zero(bench: Bench, fresh: Fresh) -> None:
    stored = bench.stored(fresh, chunks=6)
    assert stored.again().cached == stored.whole
    bench.engine.drop_host()
    before = bench.engine.metrics()
    flip(stored.paths[2], -1)
    assert bench.engine.ask(stored.prompt).cached == 2 * bench.chunk
    assert refused(before, bench.engine) == {PADDING: 1}


def test_canary_without_step_10_wrong_bytes_are_served(bench: Bench, fresh: Fresh) -> None:
    """The check that `check_refused` relies on, switched off: the same check must go red."""
    stored = bench.stored(fresh)
    damage = Damage("payload", lambda path: _overwrite(path, stored.paths[2], PAGE), PAYLOAD_TAG)
    bench.engine.do("accept_payloads")
    with pytest.raises(AssertionError):
        check_refused(stored, damage)
    served = stored.again()
    assert served.cached == stored.whole
    assert served.tokens != stored.cold.tokens
    _forget(bench.engine, stored)
    check_refused(bench.stored(fresh), DAMAGES[6])


def _overwrite(path: Path, other: Path, header: int) -> None:
    """The payload of another chunk under this chunk's header."""
    payload = other.read_bytes()[header:]
    with path.open("r+b") as file:
        file.seek(header)
        file.write(payload)


def _forget(engine: Engine, stored: Stored) -> None:
    """Check again from here on, and let nothing of the damaged prompt stay."""
    engine.do("restore")
    engine.drop_host()
    for path in stored.paths:
        path.unlink(missing_ok=True)
