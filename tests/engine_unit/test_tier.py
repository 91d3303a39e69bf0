# SPDX-License-Identifier: Apache-2.0
"""The proving tier around vLLM's own file tier, and around one whose jobs end by hand.

Nothing that a tier brings is offered before it was opened; what was refused is out of the way, is
counted, and is not offered again until it was stored anew.
"""

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingEvent, OffloadKey
from vllm.v1.kv_offload.tiering.base import JobResult

from kvsafe.engine.rows.transfer import SealedRowsSpec
from kvsafe.engine.tiers.names import ForeignNames
from kvsafe.engine.tiers.objects import QUARANTINE_FOLDER
from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.engine_unit.sealed_world import HandExecutor, World, content_of, key_of, running

A, B, C, D = (key_of(number) for number in range(1, 5))
HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[World]:
    """A world with a file tier that holds A and B, and nothing in its host tier."""
    with running(World(tmp_path, tiers=["fs"])) as world:
        world.store(A, B)
        world.forget_rows()
        yield world


@pytest.fixture
def hand(tmp_path: Path) -> Iterator[World]:
    """A world with a tier by hand that holds A and B; proofs run when the test says so."""
    threads = HandExecutor()
    with running(World(tmp_path, tiers=["hand"], threads=threads)) as world:
        world.store(A, B)
        world.hand.complete_store()
        world.step()
        world.step()
        world.primary.reset_cache()
        yield world


def replace_config(world: World, **changes: Any) -> Any:
    """The configuration of a world with some values changed."""
    return msgspec.structs.replace(world.station.config, **changes)


def prove(world: World) -> None:
    """Let waiting proofs run, and the manager see what came of them."""
    for _ in range(3):
        world.threads.run()
        world.step()


# --- the file tier -------------------------------------------------------------------------------


def test_what_was_stored_comes_back_proven(disk: World) -> None:
    assert disk.ask(A) is HIT and disk.ask(C) is MISS
    assert disk.ask(B) is HIT
    assert disk.refusals() == {}
    disk.recount()
    disk.prove_offers()


def _flip(at: int) -> Callable[[World], None]:
    def damage(world: World) -> None:
        data = bytearray(world.file(A).read_bytes())
        data[at] ^= 0x40
        world.file(A).write_bytes(data)

    return damage


def _swap(world: World) -> None:
    left, right = world.file(A).read_bytes(), world.file(B).read_bytes()
    world.file(A).write_bytes(right)
    world.file(B).write_bytes(left)


def _zero(at: int) -> Callable[[World], None]:
    def damage(world: World) -> None:
        data = bytearray(world.file(A).read_bytes())
        data[at : at + 4096] = bytes(4096)
        world.file(A).write_bytes(data)

    return damage


def _resize(change: int) -> Callable[[World], None]:
    def damage(world: World) -> None:
        os.truncate(world.file(A), max(0, world.file(A).stat().st_size + change))

    return damage


def _replaced(make: Callable[[Path], object]) -> Callable[[World], None]:
    def damage(world: World) -> None:
        path = world.file(A)
        path.rename(path.with_suffix(".kept"))
        make(path)

    return damage


def _bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path.name[-20:])
        os.rename(path.name[-20:], path.name)
    finally:
        os.chdir(here)


def _full_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").write_bytes(b"kept")


DAMAGE: dict[str, tuple[Callable[[World], None], RefusalKind]] = {
    "bit of the payload": (_flip(5000), RefusalKind.PAYLOAD_TAG),
    "bit of the header": (_flip(200), RefusalKind.HEADER_TAG),
    "files exchanged": (_swap, RefusalKind.KEY),
    "header zeroed": (_zero(0), RefusalKind.BAD_MAGIC),
    "payload zeroed": (_zero(4096), RefusalKind.PAYLOAD_TAG),
}
OBJECTS: dict[str, Callable[[World], None]] = {
    "empty": _resize(-(2**30)),
    "one byte short": _resize(-1),
    "one byte long": _resize(1),
    "one page long": _resize(4096),
    "folder": _replaced(Path.mkdir),
    "full folder": _replaced(_full_folder),
    "FIFO": _replaced(lambda path: os.mkfifo(path)),
    "socket": _replaced(_bind),
    "link to the right file": _replaced(lambda path: path.symlink_to(path.with_suffix(".kept"))),
    "link to nothing": _replaced(lambda path: path.symlink_to("nothing")),
    "link to itself": _replaced(lambda path: path.symlink_to(path)),
    "link to a device": _replaced(lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_set_aside_and_healed_by_the_next_store(disk: World, name: str) -> None:
    damage, kind = DAMAGE[name]
    damage(disk)
    path = disk.file(A)
    assert disk.ask(A) is MISS
    assert disk.refusals() == {str(kind.value): 1}
    disk.recount()
    assert not path.exists()
    aside = disk.folder / "store" / QUARANTINE_FOLDER
    assert stat.S_IMODE(aside.stat().st_mode) == 0o700
    assert [entry.name for entry in aside.iterdir()] == [f"{kind.value}-{path.name}"]
    assert disk.counters.totals["kvsafe:quarantined"] == 1
    assert disk.ask(A) is MISS
    assert disk.refusals() == {str(kind.value): 1}
    disk.store(A)
    disk.forget_rows()
    assert disk.ask(A) is HIT
    disk.recount()
    disk.prove_offers()


@pytest.mark.parametrize("name", OBJECTS)
def test_what_cannot_be_a_chunk_is_never_read(
    disk: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    OBJECTS[name](disk)
    loads: list[Any] = []
    monkeypatch.setattr(disk.tier.inner, "submit_load", loads.append)
    assert disk.ask(A) is MISS
    assert loads == []
    assert disk.refusals() == {str(RefusalKind.TIER_OBJECT.value): 1}
    assert not os.path.lexists(disk.file(A))
    monkeypatch.undo()
    kept = disk.file(A).with_suffix(".kept")
    assert not kept.exists() or kept.stat().st_size == disk.region.shape.row_bytes
    assert disk.ask(B) is HIT
    disk.store(A)
    disk.forget_rows()
    assert disk.ask(A) is HIT
    disk.prove_offers()


@pytest.mark.parametrize("policy", ["aside", "remove", "keep"])
def test_the_operator_chooses_what_becomes_of_a_refused_file(tmp_path: Path, policy: str) -> None:
    with running(World(tmp_path, tiers=["fs"], quarantine=policy)) as world:
        world.store(A)
        world.forget_rows()
        _flip(5000)(world)
        assert world.ask(A) is MISS
        assert world.file(A).exists() is (policy == "keep")
        aside = tmp_path / "store" / QUARANTINE_FOLDER
        assert aside.exists() is (policy == "aside")
        quarantined = world.counters.totals["kvsafe:quarantined"]
        assert quarantined == (0 if policy == "keep" else 1)
        # Kept in place it is still not offered again.
        assert world.ask(A) is MISS
        assert world.refusals() == {"1001": 1}


def test_with_remove_a_folder_that_holds_something_stays(tmp_path: Path) -> None:
    with running(World(tmp_path, tiers=["fs"], quarantine="remove")) as world:
        world.store(A)
        world.forget_rows()
        _replaced(_full_folder)(world)
        assert world.ask(A) is MISS
        assert (world.file(A) / "file").read_bytes() == b"kept"
        assert world.counters.totals["kvsafe:quarantined"] == 0
        (world.file(A) / "file").unlink()
        assert world.ask(A) is MISS
        assert not world.file(A).exists()
        assert world.counters.totals["kvsafe:quarantined"] == 1


def test_a_quarantine_folder_that_is_a_link_takes_nothing(disk: World) -> None:
    elsewhere = disk.folder / "elsewhere"
    elsewhere.mkdir()
    (disk.folder / "store" / QUARANTINE_FOLDER).symlink_to(elsewhere)
    _flip(5000)(disk)
    assert disk.ask(A) is MISS
    assert disk.file(A).exists() and not any(elsewhere.iterdir())
    assert disk.counters.totals["kvsafe:quarantined"] == 0
    assert disk.refusals() == {"1001": 1}


def test_a_quarantine_folder_that_others_could_enter_is_closed(disk: World) -> None:
    aside = disk.folder / "store" / QUARANTINE_FOLDER
    aside.mkdir(mode=0o777)
    aside.chmod(0o777)
    _flip(5000)(disk)
    assert disk.ask(A) is MISS
    assert stat.S_IMODE(aside.stat().st_mode) == 0o700
    assert len(list(aside.iterdir())) == 1


def test_a_full_folder_placed_twice_is_set_aside_twice(disk: World) -> None:
    aside = disk.folder / "store" / QUARANTINE_FOLDER
    name = f"{RefusalKind.TIER_OBJECT.value}-{disk.file(A).name}"
    disk.file(A).unlink()
    for times in (1, 2, 3):
        _full_folder(disk.file(A))
        assert disk.ask(A) is MISS
        assert not os.path.lexists(disk.file(A))
        assert disk.counters.totals["kvsafe:quarantined"] == times
        found = sorted(entry.name for entry in aside.iterdir())
        assert len(found) == times
        # Only where something stands already does a name get its suffix.
        assert found[0] == name and all(other.startswith(f"{name}.") for other in found[1:])
        assert all((aside / other / "file").read_bytes() == b"kept" for other in found)
    disk.store(A)
    disk.forget_rows()
    assert disk.ask(A) is HIT


@pytest.mark.parametrize("name", ["file", "link to nothing", "empty folder"])
def test_what_stands_in_quarantine_is_not_replaced(disk: World, name: str) -> None:
    make: dict[str, Callable[[Path], object]] = {
        "file": lambda path: path.write_bytes(b"first"),
        "link to nothing": lambda path: path.symlink_to("nothing"),
        "empty folder": Path.mkdir,
    }
    aside = disk.folder / "store" / QUARANTINE_FOLDER
    aside.mkdir(mode=0o700)
    first = aside / f"{RefusalKind.PAYLOAD_TAG.value}-{disk.file(A).name}"
    make[name](first)
    before = os.lstat(first)
    _flip(5000)(disk)
    damaged = disk.file(A).read_bytes()
    assert disk.ask(A) is MISS
    assert os.lstat(first).st_ino == before.st_ino
    (second,) = [entry for entry in aside.iterdir() if entry != first]
    assert second.name.startswith(f"{first.name}.") and second.read_bytes() == damaged
    assert disk.counters.totals["kvsafe:quarantined"] == 1


def test_a_quarantine_folder_exchanged_after_its_check_takes_nothing_elsewhere(
    disk: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = disk.folder / "store" / QUARANTINE_FOLDER
    moved, elsewhere = disk.folder / "moved", disk.folder / "elsewhere"
    aside.mkdir(mode=0o700)
    elsewhere.mkdir()
    real = os.rename

    def exchanged(source: Any, target: Any, **more: Any) -> None:
        real(aside, moved)
        aside.symlink_to(elsewhere)
        real(source, target, **more)

    _flip(5000)(disk)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", exchanged)
        assert disk.ask(A) is MISS
    assert aside.is_symlink() and not any(elsewhere.iterdir())
    assert [entry.name for entry in moved.iterdir()] == [f"1001-{disk.file(A).name}"]


def test_a_quarantine_folder_of_somebody_else_takes_nothing(
    disk: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = disk.folder / "store" / QUARANTINE_FOLDER
    ours = os.geteuid()
    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: ours + 1)
        _flip(5000)(disk)
        assert disk.ask(A) is MISS
    assert disk.file(A).exists() and not any(aside.iterdir())
    assert disk.counters.totals["kvsafe:quarantined"] == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    # The same folder, once it is ours, takes the next one.
    os.truncate(disk.file(B), 1)
    assert disk.ask(B) is MISS
    assert len(list(aside.iterdir())) == 1
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_revoked_chunk_is_removed_and_not_kept(disk: World) -> None:
    path = disk.file(A)
    assert path.exists()
    assert disk.epochs.raise_epoch("reset")
    disk.manager.reset_cache()
    assert disk.ask(A) is MISS
    assert disk.refusals() == {str(RefusalKind.EPOCH_REVOKED.value): 1}
    assert not path.exists()
    assert not (disk.folder / "store" / QUARANTINE_FOLDER).exists()
    disk.store(A)
    disk.forget_rows()
    assert disk.ask(A) is HIT


def test_a_chunk_of_an_epoch_that_is_not_reached_stays(disk: World) -> None:
    disk.epochs.epoch -= 1
    assert disk.ask(A) is MISS
    assert disk.refusals() == {str(RefusalKind.EPOCH_UNKNOWN.value): 1}
    assert disk.file(A).exists()


def test_no_name_in_the_store_tells_a_key(disk: World) -> None:
    names = [str(path.relative_to(disk.folder)) for path in (disk.folder / "store").rglob("*")]
    assert len([name for name in names if name.endswith(".bin")]) == 2
    listing = "\n".join(names)
    for key in (A, B):
        assert disk.names.name(key)[:-4].hex() in listing
        for at in range(0, 28):
            assert key[at : at + 4].hex() not in listing


def test_a_file_that_vanishes_is_a_miss_and_no_refusal(disk: World) -> None:
    disk.file(A).unlink()
    assert disk.ask(A) is MISS
    assert disk.refusals() == {}


def test_a_folder_that_cannot_be_reached_is_a_miss_and_nothing_is_removed(
    disk: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.lstat

    def unreachable(path: Any, *rest: Any, **more: Any) -> os.stat_result:
        if str(path).endswith(".bin"):
            raise OSError(5, "Input/output error")
        return real(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", unreachable)
        assert disk.ask(A) is MISS
    assert disk.refusals() == {} and disk.file(A).exists()
    assert disk.ask(A) is HIT


def test_a_chunk_under_another_identity_is_explained(tmp_path: Path) -> None:
    refusal = Refusal.of(RefusalKind.IDENTITY_ELSEWHERE, "rope", "x", "y")
    with running(World(tmp_path, tiers=["fs"])) as old:
        old.store(A)
        old.flush()
        ring, suite = old.station.keyring, old.station.suite
        digest = old.station.seal_setting.identity_digest
    foreign = ForeignNames(suite, ring.name_secret, digest, refusal)
    with running(World(tmp_path, tiers=["fs"], foreign=(foreign,))) as world:
        other = replace(foreign, identity_digest=b"\x01" * 32)
        world.names._identity_digest = other.identity_digest
        context = world.request()
        assert world.ask(A, context) is MISS and world.ask(B, context) is MISS
        world.step()
        world.threads.shutdown(wait=True)
        assert world.refusals() == {"703": 1}


def test_under_the_fail_policy_a_bad_object_fails_its_request(tmp_path: Path) -> None:
    with running(World(tmp_path, tiers=["fs"], fail=True)) as world:
        world.store(A)
        world.forget_rows()
        _resize(-1)(world)
        context, other = world.request(), world.request()
        assert world.ask(A, context) is HIT
        spec = world.manager.prepare_load([A], context)
        assert isinstance(spec, SealedRowsSpec) and spec.withheld is not None
        assert spec.withheld.kind is RefusalKind.TIER_OBJECT
        world.manager.complete_load([A], context)
        assert world.ask(A, other) is MISS
        world.recount()


# --- the tier by hand ----------------------------------------------------------------------------


def test_nothing_is_ready_before_it_was_opened(hand: World) -> None:
    context = hand.request()
    assert hand.lookup(A, context) is PENDING
    hand.step()
    assert hand.lookup(A, context) is PENDING
    hand.hand.complete_load()
    for _ in range(3):
        hand.step()
        assert hand.lookup(A, context) is PENDING
        hand.recount()
    prove(hand)
    assert hand.lookup(A, context) is HIT
    hand.recount()
    hand.prove_offers()


def test_a_refused_chunk_is_not_offered_until_it_is_stored_anew(hand: World) -> None:
    name = hand.names.name(A)
    hand.hand.objects[name] = hand.hand.objects[hand.names.name(B)]
    context = hand.request()
    assert hand.lookup(A, context) is PENDING
    hand.step()
    hand.hand.complete_load()
    prove(hand)
    assert hand.lookup(A, context) is MISS
    assert hand.refusals() == {"501": 1}
    hand.hand.asked.clear()
    assert hand.lookup(A) is MISS and hand.hand.asked == []
    hand.recount()
    hand.store(A)
    hand.hand.complete_store()
    hand.flush()
    hand.primary.reset_cache()
    assert hand.lookup(A) is PENDING
    hand.step()
    hand.hand.complete_load()
    prove(hand)
    assert hand.lookup(A) is HIT
    hand.prove_offers()


def test_the_tier_gets_names_and_never_keys(hand: World) -> None:
    hand.lookup(A)
    hand.lookup(C)
    hand.step()
    job = hand.hand.loads[0]
    hand.manager.touch([A, B], hand.request())
    seen = {*hand.hand.asked, *job.keys, *hand.hand.objects}
    assert seen == {hand.names.name(key) for key in (A, B, C)}
    assert not seen & {A, B, C}
    hand.hand.complete_load()
    prove(hand)


def test_events_of_a_tier_are_told_with_keys(hand: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """F28: stored and removed name the same key; an object that is not ours is not told."""
    monkeypatch.setattr(hand.hand, "events", [], raising=False)
    hand.store(C)
    name, foreign = OffloadKey(hand.names.name(C)), OffloadKey(b"f" * 36)
    told = [
        OffloadingEvent([name, foreign], Medium.STORAGE, removed=False),
        OffloadingEvent([name], Medium.STORAGE, removed=True),
        OffloadingEvent([foreign], Medium.STORAGE, removed=True),
    ]
    monkeypatch.setattr(hand.hand, "take_events", lambda: told)
    events = [(list(event.keys), event.removed) for event in hand.tier.take_events()]
    assert events == [([C], False), ([C], True)]


def test_what_arrived_is_kept_and_what_did_not_may_be_asked_for_again(hand: World) -> None:
    context = hand.request()
    assert hand.lookup(A, context) is hand.lookup(B, context) is PENDING
    hand.step()
    assert len(list(hand.hand.loads[0].keys)) == 2
    hand.hand.complete_load(count=1)
    prove(hand)
    assert hand.lookup(A, context) is HIT
    assert hand.refusals() == {}
    assert hand.lookup(B, context) is PENDING
    hand.step()
    hand.hand.complete_load()
    prove(hand)
    assert hand.lookup(B, context) is HIT
    hand.recount()
    hand.prove_offers()


def test_of_a_batch_only_the_refused_chunk_is_lost(hand: World) -> None:
    rotten = bytearray(hand.hand.objects[hand.names.name(A)])
    rotten[4096] ^= 1
    hand.hand.objects[hand.names.name(A)] = bytes(rotten)
    context = hand.request()
    assert hand.lookup(A, context) is hand.lookup(B, context) is PENDING
    hand.step()
    hand.hand.complete_load()
    prove(hand)
    assert hand.lookup(A, context) is MISS and hand.lookup(B, context) is HIT
    assert hand.refusals() == {"1001": 1}
    hand.recount()


def test_a_load_that_failed_as_a_whole_proves_nothing(hand: World) -> None:
    context = hand.request()
    hand.lookup(A, context)
    hand.step()
    hand.hand.complete_load(count=0)
    prove(hand)
    assert hand.refusals() == {} and hand.chunks() == {}
    hand.recount()
    assert hand.lookup(A, context) is PENDING


@pytest.mark.parametrize("left_behind", ["zeros", "another chunk", "an old epoch"])
def test_a_tier_that_says_loaded_and_brought_nothing_is_seen(hand: World, left_behind: str) -> None:
    context = hand.request()
    hand.lookup(A, context)
    hand.step()
    row = hand.primary.row_of(A)
    assert row is not None
    old = hand.hand.objects[hand.names.name(A)]
    contents = {
        "zeros": bytes(len(old)),
        "another chunk": hand.hand.objects[hand.names.name(B)],
        "an old epoch": old,
    }
    hand.region.row(row)[:] = contents[left_behind]
    if left_behind == "an old epoch":
        hand.epochs.epoch += 1
    job = hand.hand.loads.pop()
    hand.hand.results.append(JobResult(job.job_id, True))
    prove(hand)
    number = {"zeros": "102", "another chunk": "501", "an old epoch": "601"}[left_behind]
    assert hand.refusals() == {number: 1}
    assert hand.offered() == []
    hand.recount()


def test_a_proof_that_cannot_run_is_a_refusal(hand: World, monkeypatch: pytest.MonkeyPatch) -> None:
    context = hand.request()
    hand.lookup(A, context)
    hand.step()
    hand.hand.complete_load()

    def broken(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(hand.station, "open_row", broken)
        prove(hand)
    assert hand.lookup(A, context) is MISS
    assert hand.refusals() == {str(RefusalKind.COPY_FAULT.value): 1}
    assert hand.threads.waiting == []
    hand.recount()


def test_a_proof_that_could_not_run_leaves_the_file(
    disk: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(disk.station, "open_row", broken)
        assert disk.ask(A) is MISS
    assert disk.file(A).exists()
    assert disk.refusals() == {str(RefusalKind.COPY_FAULT.value): 1}


def test_a_quarantine_that_breaks_holds_up_no_promotion(
    disk: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bool:
        raise RuntimeError

    _flip(5000)(disk)
    monkeypatch.setattr(disk.objects, "quarantine", broken)
    assert disk.ask(A) is MISS
    assert disk.refusals() == {"1001": 1}
    disk.recount()


def test_a_region_that_is_gone_refuses_every_proof(hand: World) -> None:
    context = hand.request()
    hand.lookup(A, context)
    hand.step()
    hand.hand.complete_load()
    hand.step()
    region, hand.station.region = hand.station.region, None
    hand.threads.run()
    hand.station.region = region
    hand.step()
    assert hand.refusals() == {str(RefusalKind.FENCE.value): 1}
    assert hand.lookup(A, context) is MISS


def test_a_load_that_never_ends_is_given_up_and_its_row_kept_apart(hand: World) -> None:
    hand.station.config = replace_config(hand, load_deadline_s=0.05)
    context = hand.request()
    assert hand.lookup(A, context) is PENDING
    hand.step()
    row = hand.primary.row_of(A)
    assert row is not None
    time.sleep(0.1)
    hand.step()
    hand.step()
    assert hand.refusals() == {str(RefusalKind.DEADLINE.value): 1}
    assert hand.chunks() == {} and not hand.manager._jobs
    hand.recount()
    for number in range(30, 40):
        hand.store(key_of(number))
        assert row not in {int(chunk.chunk_id) for chunk in hand.chunks().values()}
        hand.hand.complete_store()
        hand.step()
    # The tier reports after all: the row is free again, and nothing has become ready of it.
    hand.hand.complete_load()
    hand.step()
    assert hand.lookup(A, hand.request()) is not HIT
    assert not hand.primary._held_back


def test_a_tier_that_does_not_come_to_rest_holds_up_no_reset(
    hand: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsafe.engine.tiers.proving._DRAIN_S", 0.1)
    stuck = threading.Event()
    monkeypatch.setattr(hand.hand, "drain_jobs", lambda: stuck.wait(20) and None)
    context = hand.request()
    hand.lookup(A, context)
    hand.step()
    row = hand.primary.row_of(A)
    assert hand.epochs.raise_epoch("reset")
    hand.manager.reset_cache()
    assert hand.chunks() == {} and hand.primary._held_back == {row}
    # Not used while it is like that: no hit, a store that fails at once, no row of its load.
    assert hand.lookup(B) is MISS and hand.hand.stores == []
    for number in range(30, 40):
        hand.store(key_of(number))
        hand.step()
        assert row not in {int(chunk.chunk_id) for chunk in hand.chunks().values()}
    hand.recount()
    hand.manager.reset_cache()
    # It has come to rest: used again, and the row is back.
    stuck.set()
    hand.hand.complete_load()
    hand.step()
    assert not hand.primary._held_back and hand.lookup(B) is PENDING
    hand.recount()


def test_a_tier_that_does_not_stop_is_left_behind(
    hand: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsafe.engine.tiers.proving._DRAIN_S", 0.1)
    monkeypatch.setattr(hand.hand, "shutdown", lambda: time.sleep(30), raising=False)
    started = time.monotonic()
    hand.tier.shutdown()
    assert time.monotonic() - started < 10


def test_a_reset_waits_for_transfers_and_proofs(hand: World) -> None:
    context = hand.request()
    hand.lookup(A, context)
    hand.step()
    hand.lookup(B, context)
    assert hand.epochs.raise_epoch("reset")
    hand.manager.reset_cache()
    assert hand.hand.loads == [] and hand.threads.waiting == []
    assert hand.chunks() == {}
    assert not hand.tier.has_pending_work()
    assert hand.refusals() == {str(RefusalKind.EPOCH_REVOKED.value): 1}
    hand.recount()
    for key in (A, B):
        hand.store(key)
    hand.hand.complete_store()
    hand.recount()
    hand.prove_offers()


def test_a_reset_during_a_proof_revives_nothing(hand: World) -> None:
    context = hand.request()
    hand.lookup(A, context)
    hand.step()
    hand.hand.complete_load()
    hand.step()
    assert hand.threads.waiting
    assert hand.epochs.raise_epoch("reset")
    hand.manager.reset_cache()
    assert hand.threads.waiting == []
    prove(hand)
    assert hand.offered() == [] and hand.lookup(A, hand.request()) is MISS


def test_a_reset_keeps_completions_of_stores_for_the_manager(hand: World) -> None:
    hand.store(C)
    assert hand.hand.stores
    assert hand.epochs.raise_epoch("reset")
    hand.manager.reset_cache()
    assert hand.manager._jobs == {}
    assert not hand.tier.has_pending_work()
    hand.recount()


def test_a_chunk_that_is_read_after_it_was_refused_is_not_promoted_into_its_row(
    hand: World,
) -> None:
    context = hand.store(C)
    hand.hand.complete_store()
    hand.flush()
    hand.manager.prepare_load([C], context)
    hand.primary.withdraw([C])
    other = hand.request()
    row = hand.primary.row_of(C)
    assert row is not None
    before = bytes(hand.region.row(row))
    hand.hand.asked.clear()
    for _ in range(3):
        assert hand.lookup(C, other) is MISS
        hand.step()
        assert not hand.hand.loads and not hand.hand.asked
        hand.recount()
    assert bytes(hand.region.row(row)) == before
    hand.manager.complete_load([C], context)
    assert C not in hand.chunks()
    assert hand.lookup(C, other) is PENDING
    hand.step()
    hand.hand.complete_load()
    prove(hand)
    assert hand.lookup(C, other) is HIT
    hand.recount()
    hand.prove_offers()


def test_a_chunk_that_is_read_while_its_epoch_ends_is_not_promoted_into_its_row(
    hand: World,
) -> None:
    context = hand.store(C)
    hand.hand.complete_store()
    hand.flush()
    hand.manager.prepare_load([C], context)
    assert hand.desk.epochs._file.raise_epoch("another process")
    hand.epochs._next_poll = 0.0
    hand.step()
    for _ in range(2):
        assert hand.lookup(C) is MISS
        hand.step()
        assert not hand.hand.loads
        hand.recount()
    hand.manager.complete_load([C], context)
    assert hand.lookup(C) is PENDING
    hand.step()
    assert len(hand.hand.loads[0].keys) == 1
    hand.hand.complete_load()
    prove(hand)


@pytest.mark.parametrize("fail", [True, False])
def test_under_the_fail_policy_who_waits_for_a_refused_chunk_fails(
    tmp_path: Path, fail: bool
) -> None:
    threads = HandExecutor()
    with running(World(tmp_path, tiers=["hand"], threads=threads, fail=fail)) as world:
        world.store(A, B)
        world.hand.complete_store()
        world.flush()
        world.primary.reset_cache()
        rotten = bytearray(world.hand.objects[world.names.name(A)])
        rotten[5000] ^= 1
        world.hand.objects[world.names.name(A)] = bytes(rotten)
        waits, late = world.request(), world.request()
        assert world.lookup(A, waits) is PENDING
        world.step()
        world.hand.complete_load()
        prove(world)
        assert world.lookup(A, waits) is (HIT if fail else MISS)
        assert world.lookup(A, late) is MISS
        if fail:
            spec = world.manager.prepare_load([A], waits)
            assert isinstance(spec, SealedRowsSpec) and spec.withheld is not None
            assert spec.withheld.kind is RefusalKind.PAYLOAD_TAG
            assert spec.blamed == []
            world.manager.complete_load([A], waits)
            assert world.lookup(A, waits) is MISS
        world.manager.on_request_finished(waits)
        world.recount()


def test_refused_names_are_remembered_within_a_bound(
    hand: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsafe.engine.tiers.proving._REFUSED_LIMIT", 3)
    refusal = Refusal.of(RefusalKind.KEY, "key", "x", "y")
    for number in range(10, 20):
        hand.tier._refuse(key_of(number), refusal)
    assert len(hand.tier._refused) == 3
    assert hand.tier.lookup(OffloadKey(key_of(19)), hand.request()) is MISS


def test_the_world_itself_tells_right_from_wrong(hand: World) -> None:
    hand.store(C)
    row = hand.primary.row_of(C)
    assert row is not None
    hand.prove_offers()
    hand.recount()
    hand.region.row(row)[5000] ^= 1
    with pytest.raises(AssertionError):
        hand.prove_offers()
    hand.region.row(row)[5000] ^= 1
    hand.primary._num_evictable_cache_chunks += 1
    with pytest.raises(AssertionError):
        hand.recount()
    hand.primary._num_evictable_cache_chunks -= 1
    assert content_of(A) != content_of(B)
