# SPDX-License-Identifier: Apache-2.0
"""Faults at the kernel's own door, for a process that does not know of them.

A seccomp filter hands every read and write of the process on trial to its parent, which
looks at the file behind the descriptor and lets the call pass, fails it, holds it, or kills
the process. So a fault meets Python, C and anything else alike. Linux on x86-64 or aarch64;
I/O by io_uring or mmap passes unseen.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import select
import signal
import socket
import struct
from pathlib import Path
from typing import NamedTuple

PASS, STALL_READS, FAIL_READS, FULL_DISK, KILL_AT_WRITE = range(5)


class _Numbers(NamedTuple):
    """Numbers of the system calls of one kind of machine."""

    seccomp: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


_CALLS = {
    "x86_64": _Numbers(317, (0, 17, 19, 295, 327), (1, 18, 20, 296, 328)),
    "aarch64": _Numbers(277, (63, 65, 67, 69, 286), (64, 66, 68, 70, 287)),
}
_PR_SET_NO_NEW_PRIVS = 38
_SET_FILTER, _NEW_LISTENER = 1, 1 << 3
_USER_NOTIF, _ALLOW = 0x7FC00000, 0x7FFF0000
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_NOTICE = struct.Struct("<QIIiIQ6Q")
_ANSWER = struct.Struct("<QqiI")
_RULE = struct.Struct("<II480s")


class Unsupported(RuntimeError):
    """This machine has no such door."""


class Rule:
    """What is to happen, in memory that the process on trial and its parent share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.set(PASS)

    def set(self, action: int, needle: str | Path = "") -> None:
        """From now on: `action` for calls on files whose path contains `needle`."""
        text = os.fsencode(str(needle))
        if len(text) > 480:
            raise ValueError("a path of more than 480 bytes")
        # The action comes last: a rule is never seen half written.
        self._memory[:4] = struct.pack("<I", PASS)
        _RULE.pack_into(self._memory, 0, PASS, len(text), text)
        self._memory[:4] = struct.pack("<I", action)

    def get(self) -> tuple[int, str]:
        """Action and needle."""
        action, length, text = _RULE.unpack_from(self._memory, 0)
        return action, os.fsdecode(text[:length])


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def _numbers() -> _Numbers:
    found = _CALLS.get(platform.machine())
    if found is None:
        raise Unsupported(f"no system call numbers for {platform.machine()}")
    return found


def hand_over(channel: socket.socket) -> None:
    """In the process on trial, before any thread: install the filter, send its descriptor."""
    numbers = _numbers()
    calls = (*numbers.reads, *numbers.writes)
    code = [_Instruction(0x20, 0, 0, 0)]
    for place, call in enumerate(calls):
        code.append(_Instruction(0x15, len(calls) - place, 0, call))
    code += [_Instruction(0x06, 0, 0, _ALLOW), _Instruction(0x06, 0, 0, _USER_NOTIF)]
    program = _Program(len(code), (_Instruction * len(code))(*code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    fd = libc.syscall(numbers.seccomp, _SET_FILTER, _NEW_LISTENER, ctypes.byref(program))
    if fd < 0:
        raise Unsupported(f"seccomp: {os.strerror(ctypes.get_errno())}")
    # sendmsg is not among the calls that wait for the parent.
    socket.send_fds(channel, [b"."], [fd])
    os.close(fd)


class Doorkeeper:
    """The parent's side: answers one notice at a time."""

    def __init__(self, channel: socket.socket, rule: Rule) -> None:
        numbers = _numbers()
        self._reads = numbers.reads
        self._writes = numbers.writes
        self._rule = rule
        _, fds, _, _ = socket.recv_fds(channel, 1, 1)
        if not fds:
            raise Unsupported("the filter was not installed")
        self.fd = fds[0]
        self.acted = 0

    def answer(self) -> bool:
        """Answer one notice; False when the process has gone."""
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(self.fd, _RECEIVE, notice)
        except OSError as exc:
            return exc.errno in (errno.EINTR, errno.EAGAIN)
        number, thread, _, call, _, _, fd, *_ = _NOTICE.unpack(notice)
        error = self._error(thread, call, fd)
        if error is None:
            return True
        flags = _CONTINUE if error == 0 else 0
        try:
            fcntl.ioctl(self.fd, _SEND, _ANSWER.pack(number, 0, -error, flags))
        except OSError as exc:
            return exc.errno == errno.ENOENT  # the thread was interrupted: it asks again
        return True

    def _error(self, thread: int, call: int, fd: int) -> int | None:
        """0 to let the call pass, an errno, or None to leave it stuck."""
        action, needle = self._rule.get()
        if action == PASS or not self._concerns(action, call):
            return 0
        try:
            path = os.readlink(f"/proc/{thread}/fd/{fd}")
        except OSError:
            return 0
        if needle not in path:
            return 0
        self.acted += 1
        if action == KILL_AT_WRITE:
            os.kill(_process_of(thread), signal.SIGKILL)
            return None
        return {STALL_READS: None, FAIL_READS: errno.EIO, FULL_DISK: errno.ENOSPC}[action]

    def _concerns(self, action: int, call: int) -> bool:
        return call in (self._reads if action in (STALL_READS, FAIL_READS) else self._writes)

    def close(self) -> None:
        """Let go; calls that are stuck end with ENOSYS."""
        os.close(self.fd)


def _process_of(thread: int) -> int:
    text = Path(f"/proc/{thread}/status").read_text(encoding="ascii", errors="replace")
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Tgid:"))


def supported() -> bool:
    """Whether the door can be had here: tried in a child."""
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            hand_over(there)
            code = 0
        except Exception:
            code = 2
        finally:
            os._exit(code)
    there.close()
    try:
        ready, _, _ = select.select([here], [], [], 5.0)
        fds = socket.recv_fds(here, 1, 1)[1] if ready else []
        for fd in fds:
            os.close(fd)
        return os.waitpid(child, 0)[1] == 0 and bool(fds)
    finally:
        here.close()
