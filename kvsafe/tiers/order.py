# SPDX-License-Identifier: Apache-2.0
"""Work that whoever ordered it may withdraw while it is being done."""

import ctypes


class Order:
    """An order for work. Any thread may withdraw it; the one that works asks, also in C."""

    __slots__ = ("withdrawn",)

    def __init__(self) -> None:
        self.withdrawn = ctypes.c_int32(0)
        """1 once nobody wants the work any more: memory that was lent for it may be another's."""

    def withdraw(self) -> None:
        """Nobody wants it any more."""
        self.withdrawn.value = 1

    @property
    def wanted(self) -> bool:
        """Whether it is still wanted."""
        return not self.withdrawn.value

    def more(self) -> bool:
        """Begin a part of the work that has a deadline of its own. False if it is not wanted."""
        return self.wanted
