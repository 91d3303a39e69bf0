# SPDX-License-Identifier: Apache-2.0
"""Object names, and the buckets and files that they stand for."""

from collections.abc import Sequence
from dataclasses import dataclass

SUFFIX = ".chunk"
HIDDEN = "."
"""First character of the name of a file that is being written."""
MAX_NAME_BYTES = 120
# Many folders: ext4 is slow to make a file where many were removed in the last minutes.
_BUCKET_DIGITS = 3
BUCKETS = 1 << 4 * _BUCKET_DIGITS


def place_of(name: bytes) -> tuple[str, str]:
    """Bucket and file name of an object name (1 to 120 bytes)."""
    _check(len(name))
    text = name.hex()
    return text[:_BUCKET_DIGITS], text + SUFFIX


@dataclass(frozen=True, slots=True)
class Names:
    """Object names of one length, one after the other.

    Attributes:
        digits: of all of them, without a gap.
        each: how many digits are one name.
        buckets: the bucket of each.
    """

    digits: str
    each: int
    buckets: list[str]

    @classmethod
    def of(cls, names: Sequence[bytes]) -> "Names | None":
        """None for names of several lengths. Raises `ValueError` as `place_of`."""
        lengths = set(map(len, names))
        for length in lengths:
            _check(length)
        if len(lengths) != 1:
            return None
        each = 2 * lengths.pop()
        digits = b"".join(names).hex()
        return cls(digits, each, cls._buckets_of(digits, each))

    @staticmethod
    def _buckets_of(digits: str, each: int) -> list[str]:
        return [digits[at : at + _BUCKET_DIGITS] for at in range(0, len(digits), each)]

    def __len__(self) -> int:
        return len(self.buckets)

    def file(self, at: int) -> str:
        """The name of one file."""
        return self.digits[at * self.each : (at + 1) * self.each] + SUFFIX

    def some(self, places: Sequence[int]) -> "Names":
        """Those at these places."""
        if len(places) == len(self):
            return self
        each = self.each
        digits = "".join([self.digits[at * each : (at + 1) * each] for at in places])
        return Names(digits, each, self._buckets_of(digits, each))


def _check(length: int) -> None:
    if not 1 <= length <= MAX_NAME_BYTES:
        raise ValueError(f"an object name of {length} bytes")
