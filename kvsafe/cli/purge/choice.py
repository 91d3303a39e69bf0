# SPDX-License-Identifier: Apache-2.0
"""Which chunks are to go: the criteria, and whether one file meets all of them."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass

from kvsafe.cli import UsageError
from kvsafe.cli.inspect.judge import namespace_of
from kvsafe.cli.inspect.outline import Outline
from kvsafe.cli.inspect.reading import Examined
from kvsafe.cli.inspect.tree import Entry, Role
from kvsafe.engine.rows.epochs import PRIVATE_EPOCH

__all__ = ["Choice", "add_choice_arguments", "choice_of", "seconds_of"]

_AGE = re.compile(r"([0-9]{1,9})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Choice:
    """The criteria; a file goes if it meets every one that is set.

    Attributes:
        before: Unix seconds; only files that were written earlier.
        unreadable: also files whose header cannot be read, whatever the other criteria say
            about headers; `before` counts for them too.
    """

    before: float | None = None
    namespace: str | None = None
    epoch_below: int | None = None
    private_epochs: bool = False
    key_id: bytes | None = None
    identity: bytes | None = None
    unreadable: bool = False

    @property
    def needs_header(self) -> bool:
        """Whether anything but the time of writing decides."""
        values = (self.namespace, self.epoch_below, self.key_id, self.identity)
        return self.private_epochs or any(value is not None for value in values)

    def meets(self, entry: Entry, found: Examined) -> bool:
        """Whether this file is to go."""
        if found.info is None or found.gone:
            return False
        if self.before is not None and found.info.st_mtime >= self.before:
            return False
        outline = None if found.verdict is None else found.verdict.outline
        if outline is not None:
            # `--unreadable` alone chooses nothing that can be read.
            return (self.before is not None or self.needs_header) and self._meets_header(outline)
        # In quarantine everything was refused: there the time of writing alone is enough.
        aged = entry.role is Role.QUARANTINED and not self.needs_header
        return self.unreadable or aged

    def _meets_header(self, found: Outline) -> bool:
        fixed = found.fixed
        private = bool(fixed.epoch & PRIVATE_EPOCH)
        if self.epoch_below is not None or self.private_epochs:
            below = self.epoch_below is not None and fixed.epoch < self.epoch_below
            if not (below or (self.private_epochs and private)):
                return False
        if self.namespace is not None and namespace_of(found) != self.namespace:
            return False
        if self.identity is not None and not fixed.identity_digest.startswith(self.identity):
            return False
        return self.key_id in (None, fixed.key_id)


def add_choice_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the criteria."""
    group = parser.add_argument_group("what to remove: all that are given must hold")
    group.add_argument("--older-than", metavar="AGE", help="written longer ago: 90s 15m 12h 30d 8w")
    group.add_argument("--namespace", metavar="NAME", help="of this namespace")
    group.add_argument("--epoch-below", metavar="N", help="sealed in an epoch below N")
    group.add_argument(
        "--private-epochs", action="store_true",
        help="sealed by a launch that was reset (of use to no later one)",
    )  # fmt: skip
    group.add_argument("--key-id", metavar="HEX", help="sealed with this key (16 hex digits)")
    group.add_argument(
        "--identity", metavar="HEX", help="digest of the identity, or 8+ digits of it"
    )
    group.add_argument(
        "--unreadable",
        action="store_true",
        help="also what is no chunk or has no readable header; alone, only that",
    )


def choice_of(args: argparse.Namespace) -> Choice:
    """The criteria that were given. Raises `UsageError` if there is none, or one is no value."""
    if args.namespace is not None and _NAMESPACE.fullmatch(args.namespace) is None:
        raise UsageError("--namespace: 1 to 64 of A-Z a-z 0-9 . _ -")
    before = None if args.older_than is None else time.time() - seconds_of(args.older_than)
    choice = Choice(
        before=before,
        namespace=args.namespace,
        epoch_below=_number(args.epoch_below),
        private_epochs=args.private_epochs,
        key_id=_hex("--key-id", args.key_id, 16, 16),
        identity=_hex("--identity", args.identity, 8, 64),
        unreadable=args.unreadable,
    )
    if choice.before is None and not choice.needs_header and not choice.unreadable:
        raise UsageError(
            "nothing says what to remove: give --older-than, --namespace, --epoch-below, "
            "--private-epochs, --key-id, --identity or --unreadable"
        )
    return choice


def seconds_of(text: str) -> int:
    """Seconds of an age such as `12h`. Raises `UsageError`."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise UsageError(f"--older-than {text!r}: a number and one of s m h d w, such as 30d")
    return int(match[1]) * _SECONDS[match[2]]


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) < PRIVATE_EPOCH):
        raise UsageError(f"--epoch-below {text!r}: a whole number below 2**63")
    return int(text)


def _hex(option: str, text: str | None, low: int, high: int) -> bytes | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9a-fA-F]+", text) or not low <= len(text) <= high or len(text) % 2:
        wanted = f"{low}" if low == high else f"{low} to {high}, an even number,"
        raise UsageError(f"{option} {text!r}: {wanted} hex digits")
    return bytes.fromhex(text)
