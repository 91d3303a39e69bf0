# SPDX-License-Identifier: Apache-2.0
"""What can be done to a tier: one function per attack, by name, with the options of a case.

A function gets a `Bench` and the case's options and returns what was seen, the worst of all
that it tried. A case is a folder (`cases/`): most new ones need no code.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.tier.bench import CONTROL, Bench, NotRun, ended
from conformance.tier.kernel import FAIL_READS, FULL_DISK, KILL_AT_WRITE, PASS, STALL_READS
from conformance.tier.subject import OTHER, Seen, Span, Subject, content_of, worst

Attack = Callable[[Bench, dict[str, Any]], Seen]
ATTACKS: dict[str, Attack] = {}
PROBES = 24
_SETTLE_S = 10.0


def attack(function: Attack) -> Attack:
    """Register an attack under its name, with dashes."""
    ATTACKS[function.__name__.replace("_", "-")] = function
    return function


def with_control(subject: Subject, seen: Seen) -> Seen:
    """What was seen, unless the untouched chunk is not served: then nothing was shown."""
    control = subject.load(CONTROL)
    return seen if control is Seen.HIT else worst(seen, Seen.LOST, control)


# ---- controls ---------------------------------------------------------------------------


@attack
def nothing(bench: Bench, options: dict[str, Any]) -> Seen:
    """Store and load; with `restart`, a new start lies between."""
    subject = bench.ready(0, 1, 2)
    if options.get("restart"):
        bench.close(subject)
        subject = bench.open()
    if subject.load(7) is not Seen.MISS:
        return Seen.WRONG  # a chunk that nobody has stored
    return with_control(subject, worst(*(subject.load(number) for number in range(3))))


@attack
def stored_anew(bench: Bench, options: dict[str, Any]) -> Seen:
    """A damaged file is met, then the chunk is stored again: it must be served again."""
    subject = bench.ready(0)
    _flip(bench.place(0).path, bench.place(0).begin + 100)
    if subject.load(0) is Seen.WRONG:
        return Seen.WRONG
    subject.store(0)
    return with_control(subject, subject.load(0))


# ---- bytes ------------------------------------------------------------------------------


@attack
def flip(bench: Bench, options: dict[str, Any]) -> Seen:
    """One bit: `where` is header, payload, tail or anywhere."""
    numbers = list(range(PROBES if options["where"] == "anywhere" else 4))
    subject = bench.ready(*numbers)
    seen = []
    for number in numbers:
        span = bench.place(number)
        places = _places(span, options["where"], len(numbers))
        _flip(span.path, places[number])
        seen.append(subject.load(number))
    return with_control(subject, worst(*seen))


def _places(span: Span, where: str, count: int) -> list[int]:
    size = span.path.stat().st_size
    begin, end = {
        "header": (0, span.begin),
        "payload": (span.begin, span.end),
        "tail": (span.end if span.end < size else size - 1, size),
        "anywhere": (0, size),
    }[where]
    if end <= begin:
        raise NotRun(f"its files have no {where}")
    return [begin + (end - 1 - begin) * place // max(1, count - 1) for place in range(count)]


def _flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << offset % 8]))


@attack
def zero(bench: Bench, options: dict[str, Any]) -> Seen:
    """A file of the right length, filled with zeros: `what` is file, payload or page."""
    subject = bench.ready(0)
    span = bench.place(0)
    begin, end = {
        "file": (0, span.path.stat().st_size),
        "payload": (span.begin, span.end),
        "page": (span.begin + 4096, span.begin + 8192),
    }[options["what"]]
    with open(span.path, "r+b") as file:
        file.seek(begin)
        file.write(bytes(end - begin))
    return with_control(subject, subject.load(0))


@attack
def resize(bench: Bench, options: dict[str, Any]) -> Seen:
    """Longer or shorter by `by` bytes; `empty` leaves nothing."""
    subject = bench.ready(0)
    path = bench.place(0).path
    size = 0 if options.get("empty") else path.stat().st_size + options["by"]
    os.truncate(path, size)
    return with_control(subject, subject.load(0))


# ---- place ------------------------------------------------------------------------------


@attack
def swap_files(bench: Bench, options: dict[str, Any]) -> Seen:
    """Two good files change places."""
    subject = bench.ready(0, 1)
    one, other = bench.place(0).path, bench.place(1).path
    aside = bench.folder / "aside"
    shutil.copy2(one, aside)
    shutil.copy2(other, one)
    shutil.copy2(aside, other)
    return with_control(subject, worst(subject.load(0), subject.load(1)))


@attack
def swap_bodies(bench: Bench, options: dict[str, Any]) -> Seen:
    """Two payloads change places, each under the other's header."""
    subject = bench.ready(0, 1)
    one, other = bench.place(0), bench.place(1)
    if one.begin == 0 and one.end == one.path.stat().st_size:
        raise NotRun("its files have no header")
    first, second = _body(one), _body(other)
    _write(one, second)
    _write(other, first)
    return with_control(subject, worst(subject.load(0), subject.load(1)))


def _body(span: Span) -> bytes:
    return span.path.read_bytes()[span.begin : span.end]


def _write(span: Span, body: bytes) -> None:
    with open(span.path, "r+b") as file:
        file.seek(span.begin)
        file.write(body)


# ---- meaning ----------------------------------------------------------------------------


@attack
def forge(bench: Bench, options: dict[str, Any]) -> Seen:
    """A file with another payload and every hash recomputed that needs no secret."""
    subject = bench.ready(0)
    if not subject.forge(bench.place(0), 0, content_of("an attacker", 0)):
        raise NotRun("the driver cannot forge this format")
    return with_control(subject, subject.load(0))


@attack
def older_file(bench: Bench, options: dict[str, Any]) -> Seen:
    """An authentic file from before the weights changed is put back."""
    subject = bench.ready(0)
    path = bench.place(0).path
    kept = bench.folder / "kept"
    shutil.copy2(path, kept)
    if subject.load(0) is not Seen.HIT:
        return Seen.LOST
    if not subject.raise_epoch():
        return Seen.SERVED  # there is no way to say that it is old
    if subject.load(0) is Seen.HIT:
        return Seen.SERVED
    path.unlink(missing_ok=True)
    shutil.copy2(kept, path)
    seen = subject.load(0)
    subject.store(1)
    return worst(seen if seen is not Seen.HIT else Seen.SERVED, _must_hit(subject.load(1)))


def _must_hit(seen: Seen) -> Seen:
    return Seen.MISS if seen is Seen.HIT else worst(seen, Seen.LOST)


@attack
def other_model(bench: Bench, options: dict[str, Any]) -> Seen:
    """A file of another model, of the same shapes, in the place of ours."""
    subject = bench.ready(0)
    stranger = bench.open(OTHER)
    stranger.store(0)
    if stranger.load(0) is not Seen.HIT:
        return Seen.LOST
    shutil.copy2(bench.place(0, OTHER).path, bench.place(0).path)
    return with_control(subject, subject.load(0))


# ---- kind -------------------------------------------------------------------------------


@attack
def replace_by(bench: Bench, options: dict[str, Any]) -> Seen:
    """Something else stands at the name: `kind` is symlink, fifo or directory."""
    subject = bench.ready(0, 1)
    path, other = bench.place(0).path, bench.place(1).path
    outside = bench.folder / "outside"
    shutil.copy2(other, outside)
    path.unlink()
    if options["kind"] == "symlink":
        path.symlink_to(outside)
    elif options["kind"] == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    return with_control(subject, subject.load(0))


@attack
def open_to_all(bench: Bench, options: dict[str, Any]) -> Seen:
    """The file may be read and written by everybody: anybody may have."""
    subject = bench.ready(0)
    bench.place(0).path.chmod(0o666)
    seen = subject.load(0)
    return with_control(subject, Seen.SERVED if seen is Seen.HIT else seen)


@attack
def made_private(bench: Bench, options: dict[str, Any]) -> Seen:
    """What the tier itself makes: may others read it (umask 022)?"""
    before = os.umask(0o022)
    try:
        subject = bench.ready(0)
    finally:
        os.umask(before)
    path = bench.place(0).path
    if not path.stat().st_mode & 0o077:
        return with_control(subject, subject.load(0))
    inside = [path, *(one for one in path.parents if bench.root in one.parents)]
    closed = any(not one.stat().st_mode & 0o077 for one in inside[1:])
    return with_control(subject, subject.load(0)) if closed else Seen.SERVED


# ---- faults -----------------------------------------------------------------------------


@attack
def killed_writer(bench: Bench, options: dict[str, Any]) -> Seen:
    """A writer is killed in mid-store; another stores the same chunk. With `sweep`: what it left
    is gone some seconds after the next start."""
    door = bench.door

    def first() -> None:
        subject = bench.open()
        subject.store(CONTROL)
        subject.close()

    def second() -> None:
        subject = bench.open()
        door.set(KILL_AT_WRITE, bench.root)
        subject.store(0)

    bench.in_child(first)
    clean = set(bench.files())
    if not bench.in_child(second):
        raise NotRun("no write of a store was seen")
    door.set(PASS)
    left = set(bench.files()) - clean
    subject = bench.open()
    subject.store(0)
    seen = with_control(subject, subject.load(0))
    if not options.get("sweep"):
        return seen
    with contextlib.suppress(NotRun):  # where the second store failed, nothing of it is there
        left.discard(bench.place(0).path)
    end = time.monotonic() + _SETTLE_S
    while any(path.exists() for path in left):
        if time.monotonic() > end:
            return worst(seen, Seen.LEFT)
        time.sleep(0.1)
    return seen


@attack
def stalled_read(bench: Bench, options: dict[str, Any]) -> Seen:
    """Reads of one file never return: that load must end, and others must be served."""
    door, subject = bench.door, bench.ready(0, 1)
    door.set(STALL_READS, bench.place(0).path)
    seen = subject.load(0)
    control = worst(subject.load(1), subject.load(CONTROL))
    return seen if control is Seen.HIT else worst(seen, Seen.HANG)


@attack
def read_error(bench: Bench, options: dict[str, Any]) -> Seen:
    """EIO for a while: a miss then, and a hit again afterwards."""
    door, subject = bench.door, bench.ready(0)
    path = bench.place(0).path
    door.set(FAIL_READS, path)
    during = subject.load(0)
    door.set(PASS)
    if during in (Seen.WRONG, Seen.HANG, Seen.HIT):
        return Seen.WRONG if during is Seen.HIT else during
    after = subject.load(0)
    return with_control(subject, Seen.LOST if after in (Seen.MISS, Seen.REFUSED) else after)


@attack
def full_disk(bench: Bench, options: dict[str, Any]) -> Seen:
    """ENOSPC for a while: nothing partial is seen, and with room the store succeeds."""
    door, subject = bench.door, bench.ready(1)
    door.set(FULL_DISK, bench.root)
    subject.store(0)
    during = worst(subject.load(0), Seen.MISS)
    door.set(PASS)
    if during in (Seen.WRONG, Seen.HANG, Seen.HIT):
        return Seen.WRONG if during is Seen.HIT else during
    subject.store(0)
    after = subject.load(0)
    return with_control(subject, Seen.LOST if after in (Seen.MISS, Seen.REFUSED) else after)


@attack
def two_writers(bench: Bench, options: dict[str, Any]) -> Seen:
    """Two processes store the same chunks while a third loads them."""

    def work() -> None:
        subject = bench.open()
        for number in range(PROBES):
            subject.store(number)
        subject.close()

    bench.in_child(lambda: bench.open().close())  # a folder that is being made is another story
    children = [bench.start_child(work) for _ in range(2)]
    subject = bench.open()
    subject.store(CONTROL)
    seen = [subject.load(number) for number in range(PROBES)]
    for child in children:
        ended(child)
    after = [subject.load(number) for number in range(PROBES)]
    bad = [one for one in seen if one in (Seen.WRONG, Seen.HANG)]
    late = [Seen.LOST if one in (Seen.MISS, Seen.REFUSED) else one for one in after]
    return with_control(subject, worst(*bad, *late))
