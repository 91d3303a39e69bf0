# SPDX-License-Identifier: Apache-2.0
"""Small real file systems that run full under three writers at once.

    python -m fuzz.campaigns.full [--rounds 20] [--seed 0] [--json]

A tmpfs, an ext4 on a loop device, an ext4 with hardly any inodes, and a btrfs subvolume with
a quota, where the errors are EDQUOT while the file system has space; without the right to
mount, a tmpfs in a user namespace, and without that nothing (it is said). Writers store
until nothing more fits, somebody else's file comes and goes, a reserve is set. What was
reported as stored is there, nothing partial is seen, and with room stores go on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from fuzz.campaigns.aftermath import HEAL, Findings, Known, opened, reopen, temporaries
from fuzz.campaigns.command import Progress, finish, parser
from fuzz.campaigns.rows import ROW, is_content_of, judge_of, name_of, row_of
from kvsafe.tiers import Answer, ChunkStore, Outcome

WRITERS = 3
WAIT_S = 120
HUGE = 1 << 30
DISK_BYTES = 4 << 20
QUOTA = "btrfs with a quota"
KINDS = ("tmpfs", "ext4", "ext4 with few inodes", QUOTA)
_INSIDE = "KVSAFE_CAMPAIGN_INSIDE"


@contextlib.contextmanager
def small_disk(kind: str, folder: Path) -> Iterator[Path | None]:
    """A mounted file system of about 4 MiB, or None where this user may not have one."""
    point, image = folder / "disk", folder / "image"
    point.mkdir()
    mounted = _mounted(kind, point, image)
    try:
        if kind == QUOTA:
            limited = point / "limited"
            yield limited if mounted and _with_a_quota(point, limited) else None
        else:
            yield point if mounted else None
    finally:
        if mounted:
            _runs("umount", str(point))


def _mounted(kind: str, point: Path, image: Path) -> bool:
    if kind == "tmpfs":
        return _runs("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(point))
    inodes = ["-N", "64"] if "inodes" in kind else []
    make = ["mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "^has_journal", *inodes]
    if kind == QUOTA:
        make = ["mkfs.btrfs", "-q", "-f", "--mixed", "-m", "single", "-d", "single"]
    with open(image, "wb") as file:
        file.truncate((16 if kind == QUOTA else 2) * DISK_BYTES)
    return _runs(*make, str(image)) and _runs("mount", "-o", "loop", str(image), str(point))


def _with_a_quota(point: Path, limited: Path) -> bool:
    """A subvolume that may hold `DISK_BYTES`, on a file system with much more space."""
    return (
        _runs("btrfs", "subvolume", "create", str(limited))
        and _runs("btrfs", "quota", "enable", str(point))
        and _runs("btrfs", "qgroup", "limit", str(DISK_BYTES), str(limited))
    )


def _runs(*words: str) -> bool:
    if shutil.which(words[0]) is None:
        return False
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def _put(store: ChunkStore, number: int) -> Outcome:
    return store.put(name_of(number), memoryview(bytearray(row_of(number))))


def _holds(store: ChunkStore, number: int) -> bool:
    buffer = memoryview(bytearray(ROW))
    return store.get(name_of(number), buffer, judge_of(number)).good and is_content_of(
        number, buffer
    )


def _write_until_full(root: Path, first: int, pipe: int, met: int, go: int) -> None:
    """One writer: stores until three in a row find no room; reports what was stored."""
    signal.alarm(WAIT_S)
    store = opened(root, HUGE)
    os.write(met, b".")
    os.read(go, 1)  # all begin together, while there is space
    refused, number = 0, first
    while refused < 3 and number < first + 10_000:
        outcome = _put(store, number)
        os.write(pipe, f"{outcome.answer.name}\t{number}\t{outcome.why}\n".encode())
        refused = 0 if outcome.answer is Answer.DONE else refused + 1
        number += 1
    store.close()


def writers(root: Path) -> tuple[set[int], Counter[str]]:
    """Three processes at once; the numbers that were reported as stored, all answers and whys."""
    (reading, writing), (here, met), (go, going) = os.pipe(), os.pipe(), os.pipe()
    children = []
    for place in range(WRITERS):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _write_until_full(root, 100_000 * place, writing, met, go)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    os.close(writing)
    os.close(met)
    ready = 0
    while ready < WRITERS and (came := os.read(here, WRITERS)):
        ready += len(came)
    os.write(going, b"." * WRITERS)
    for fd in (here, go, going):
        os.close(fd)
    with open(reading, encoding="ascii") as lines:
        told = [line.rstrip("\n").split("\t") for line in lines]
    for child in children:
        if os.waitpid(child, 0)[1]:
            raise RuntimeError("a writer failed")
    stored = {int(number) for word, number, _ in told if word == "DONE"}
    answers = Counter(word for word, _, _ in told)
    answers.update(why for word, _, why in told if word == "NO_ROOM")
    return stored, answers


def run(kind: str, disk: Path, rng: random.Random, found: Findings, met: Counter[str]) -> None:
    """Fill one disk, go on, and judge."""
    root = disk / "s"
    opened(root, HUGE).close()
    stored, answers = writers(root)
    for word, count in answers.items():
        said = word if word in errno.errorcode.values() else word.lower().replace("_", " ")
        met[f"{said}, {kind}"] += count
    if not stored or "NO_ROOM" not in answers or (kind == QUOTA and "EDQUOT" not in answers):
        found.other.append(f"{kind}: it did not run full: {dict(answers)}")
    if left := temporaries(root):
        found.leftover.append(f"{kind}: {len(left)} temporaries on a full disk")
    store = opened(root, HUGE)
    lost = [number for number in stored if not _holds(store, number)]
    found.lost += [f"{kind}: chunk {number}" for number in lost]
    _go_on(kind, disk, store, rng.choice(sorted(stored)), found)
    store.close()
    _with_a_reserve(kind, disk, root, found)
    store = opened(root, HUGE)
    freed = 0
    for number in sorted(stored):  # inodes as well as bytes: some have been evicted already
        freed += freed < 4 and store.discard(name_of(number))
    store.close()
    begun = stored | {HEAL, 5_000_000, 5_000_001}
    begun |= set(range(6_000_000, 6_000_010))
    reopen(root, Known(begun, capacity=HUGE, label=kind), found)


def _go_on(kind: str, disk: Path, store: ChunkStore, victim: int, found: Findings) -> None:
    """A little room comes back, is taken by somebody else, and comes back again."""
    store.discard(name_of(victim))
    other = disk / "other"
    with contextlib.suppress(OSError), open(other, "wb", buffering=0) as file:
        while file.write(bytes(ROW)):
            pass
    outcome = _put(store, 5_000_000)
    if outcome.answer not in (Answer.NO_ROOM, Answer.DONE):
        found.other.append(f"{kind}: full again: {outcome}")
    other.unlink(missing_ok=True)
    if _put(store, 5_000_001).answer is not Answer.DONE or not _holds(store, 5_000_001):
        # Without room for a folder of its own a chunk may need a second one to go.
        store.room.evict(4 * ROW)
        if _put(store, 5_000_001).answer is not Answer.DONE:
            found.other.append(f"{kind}: with room again, it does not store")


def _with_a_reserve(kind: str, disk: Path, root: Path, found: Findings) -> None:
    """A reserve is restored by eviction, and held by every store after it."""
    reserve = 40 * ROW
    store = opened(root, HUGE, reserve_bytes=reserve)
    for _ in range(3):
        store.keeper.tick()
        store.room.relieve()
    for number in range(6_000_000, 6_000_010):
        _put(store, number)
        info = os.statvfs(disk)
        if info.f_bavail * info.f_frsize < reserve:
            found.account.append(f"{kind}: {info.f_bavail * info.f_frsize} bytes free")
    store.close()


def campaign(
    rounds: int,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
    kinds: Collection[str] = KINDS,
) -> tuple[Findings, Counter[str]]:
    """So many rounds on each kind of disk that can be had."""
    found, met, rng = Findings(), Counter[str](), random.Random(seed)
    for _ in range(rounds):
        for kind in kinds:
            with (
                tempfile.TemporaryDirectory(prefix="kvsafe-full-") as name,
                small_disk(kind, Path(name)) as disk,
            ):
                if disk is None:
                    lacking = "" if kind == "tmpfs" else " or no tool"
                    met[f"no right to mount{lacking}, {kind}"] += 1
                else:
                    run(kind, disk, rng, found, met)
                    met[f"rounds, {kind}"] += 1
            tick()
    return found, met


def main(argv: list[str]) -> int:
    """The command."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=20)
    args = options.parse_args(argv)
    if os.geteuid() and _INSIDE not in os.environ and shutil.which("unshare"):
        words = ["unshare", "-Urm", sys.executable, "-m", "fuzz.campaigns.full", *argv]
        return subprocess.run(words, check=False, env={**os.environ, _INSIDE: "1"}).returncode
    with Progress("full", args.rounds * len(KINDS), args.json) as progress:
        found, met = campaign(args.rounds, args.seed, progress.tick)
    return finish([("full disks", found, met)], args.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
