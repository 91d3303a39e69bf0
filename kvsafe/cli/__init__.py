# SPDX-License-Identifier: Apache-2.0
"""The `kvsafe` command: one module per subcommand, and what they share."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ExitCode", "UsageError"]


class ExitCode(IntEnum):
    """What every command's exit status means."""

    FINE = 0
    FOUND = 1
    MISUSED = 2


class UsageError(Exception):
    """A command was asked for something it cannot do; its message is shown, the exit code is 2."""
