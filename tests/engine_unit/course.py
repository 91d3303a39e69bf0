# SPDX-License-Identifier: Apache-2.0
"""A world under vLLM's real scheduler that a test drives act by act, with copies that can hang."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fuzz.world import Event, Plan, Setting, parts
from fuzz.world import world as world_module
from fuzz.world.checks import at_rest
from fuzz.world.world import World


class Course:
    """A world, driven act by act; copies that are `held` have begun and do not end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.held: list[Any] = []
        self.answers = world.engine.answers

    def act(self, name: str, *numbers: int) -> None:
        """One event."""
        self.world.driver.act(Event(name, *numbers))
        self.world.look()

    @contextlib.contextmanager
    def stuck(self) -> Iterator[None]:
        """What begins meanwhile never ends."""
        pool = self.world.parts.copies.hand.pool
        pool.submit = self.held.append
        yield
        del pool.submit

    def let_go(self) -> None:
        """They end after all."""
        pool = self.world.parts.copies.hand.pool
        pool.waiting.extend(self.held)
        self.held.clear()

    def go(self, steps: int = 6) -> None:
        """Steps in which everything else gets done at once, and no time passes."""
        for _ in range(steps):
            self.world.driver._settle_once(0)
            self.world.look()

    def pass_deadline(self) -> None:
        """More than the world's deadline of a minute."""
        self.act("clock", 59)
        self.act("clock", 59)

    @property
    def manager(self) -> Any:
        """Ours."""
        return self.world.half.manager

    def finished(self, name: str) -> bool:
        """Whether the request has ended."""
        return name in self.world.engine.ends

    def end(self, name: str) -> str | None:
        """How the request has ended: `length`, `error`, or not yet."""
        return self.world.engine.ends.get(name)


@contextlib.contextmanager
def course(setting: Setting) -> Iterator[Course]:
    """A world that is settled and judged at the end."""
    with world_module._by_hand() as clock_of:
        world = World(Plan("kvsafe", setting, ()))
        try:
            with parts.at_work(world.parts), clock_of(world.parts.clock):
                found = Course(world)
                yield found
                found.let_go()
                world.driver.settle(world.look)
                at_rest(world.scheduler, world.half, world.parts)
        finally:
            world.close()
