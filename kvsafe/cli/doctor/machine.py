# SPDX-License-Identifier: Apache-2.0
"""The machine: memory for the rows, limits of the process, the clock."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from kvsafe.cli.doctor.finding import Finding, bad, ok, unknown, warn
from kvsafe.cli.inspect.screen import amount, moment
from kvsafe.host.region import SHARED_MEMORY

__all__ = ["examine_clock", "examine_limits", "examine_memory", "judge_memory"]

ENOUGH_FILES = 8192
FEW_FILES = 512
_BUILT = 1_735_689_600  # 2025-01-01: no clock is right that shows less
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def examine_memory(wanted: int | None) -> Iterator[Finding]:
    """Whether the rows fit into shared memory (bytes; None if it is not known how many)."""
    name = "shared memory"
    try:
        info = os.statvfs(SHARED_MEMORY)
    except OSError as exc:
        todo = "mount a tmpfs there; in a container see --shm-size or an emptyDir of medium Memory"
        yield bad(name, f"{SHARED_MEMORY}: {exc.strerror}", todo)
        return
    free = info.f_bavail * info.f_frsize
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        yield bad(name, f"{SHARED_MEMORY} is not writable for this user", "correct its mode")
    yield judge_memory(name, wanted, free, "free there; a container needs a larger --shm-size")
    total = _number_in(_MEMINFO, "MemTotal:")
    available = _number_in(_MEMINFO, "MemAvailable:")
    if total is None or available is None:
        yield unknown("memory", f"{_MEMINFO} does not tell how much there is")
    else:
        yield _judge_ram(wanted, total * 1024, available * 1024)
    limit = _number_in(_CGROUP, "")
    if limit is not None:
        yield judge_memory("memory limit", wanted, limit, "in this cgroup, rows included; raise it")


def judge_memory(name: str, wanted: int | None, room: int, what: str) -> Finding:
    """Whether `wanted` bytes fit into `room`."""
    where, _, todo = what.partition("; ")
    if wanted is None:
        return ok(name, f"{amount(room)} {where} (--config tells how much is needed)")
    said = f"cpu_bytes_to_use {amount(wanted)}, {amount(room)} {where}"
    return (
        ok(name, said) if wanted <= room else bad(name, said, f"less cpu_bytes_to_use, or {todo}")
    )


def _judge_ram(wanted: int | None, total: int, available: int) -> Finding:
    said = f"{amount(total)}, {amount(available)} of it available now"
    if wanted is None or wanted <= available:
        return ok("memory", said)
    said += f"; cpu_bytes_to_use is {amount(wanted)}"
    todo = "set cpu_bytes_to_use lower: rows that are swapped are slower than no rows"
    return bad("memory", said, todo) if wanted > total else warn("memory", said, todo)


def _number_in(path: Path, label: str) -> int | None:
    """The first number on the line that begins with `label`; None if there is none."""
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            for line in file.read(65536).splitlines():
                words = line.removeprefix(label).split()
                if line.startswith(label) and words and words[0].isdigit():
                    return int(words[0])
    except OSError:
        return None
    return None


def examine_limits(wanted: int | None) -> Iterator[Finding]:
    """Limits of a process that is started from here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        yield ok("open files", f"{_limit(soft)} allowed")
    else:
        said = f"{soft} allowed (at most {_limit(hard)}); a kvsafe-fs store keeps up to 4096 open"
        todo = f"ulimit -n {ENOUGH_FILES}, or LimitNOFILE in the service"
        yield (bad if soft < FEW_FILES else warn)("open files", said, todo)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or not Path("/dev/nvidia0").exists():
        room = "any amount" if soft == resource.RLIM_INFINITY else amount(soft)
        yield ok("locked memory", f"{room} allowed")
    elif soft < (wanted or 0):
        todo = "ulimit -l unlimited; without pinned rows copies are slower, and as safe"
        yield warn("locked memory", f"{amount(soft)} allowed, less than cpu_bytes_to_use", todo)
    else:
        yield ok("locked memory", f"{amount(soft)} allowed")
    yield _core()
    size = os.sysconf("SC_PAGESIZE")
    if size == 4096:
        yield ok("page size", "4096 bytes")
    else:
        yield warn(
            "page size", f"{size} bytes: only 4096 is tested", "run the tests on this machine"
        )


def _core() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    if soft == 0:
        return ok("core dumps", "none")
    todo = "ulimit -c 0, or LimitCORE=0 in the service"
    return warn("core dumps", "allowed: a crash would write keys and KV to a disk", todo)


def _limit(value: int) -> str:
    return "any number" if value == resource.RLIM_INFINITY else str(value)


def examine_clock(epoch: int | None, now: float | None = None) -> Finding:
    """Whether the clock is behind what was written with it before.

    A state folder's first epoch is the time in seconds; with a clock that goes back a folder
    that is lost and made anew would begin below the lost one.
    """
    now = time.time() if now is None else now
    todo = "set the clock (NTP) before the engine starts"
    if now < _BUILT:
        return bad("clock", f"shows {moment(now)} UTC", todo)
    if epoch is not None and now < epoch:
        return bad("clock", f"shows {moment(now)} UTC, before the epoch in use ({epoch})", todo)
    said = f"{moment(now)} UTC"
    return ok("clock", said if epoch is None else f"{said}, behind it the epoch {epoch}")
