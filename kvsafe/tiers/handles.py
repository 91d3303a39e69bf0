# SPDX-License-Identifier: Apache-2.0
"""Folders that stay open: what is kept of one, and how many there may be."""

import resource

_FEWEST = 32


class Handle:
    """An open bucket; it is closed when it is forgotten and nobody uses it any more."""

    __slots__ = ("fd", "forgotten", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.forgotten = False

    @classmethod
    def of_none(cls) -> "Handle":
        """In place of a folder that is not there: it has one user and nothing to close."""
        handle = cls(-1)
        handle.users = 1
        return handle


def handle_limit(most: int) -> int:
    """How many buckets stay open: a part of what this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(_FEWEST, min(most, soft // 2))
