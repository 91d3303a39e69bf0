# SPDX-License-Identifier: Apache-2.0
"""From a plan that finds something to a small one that finds the same: delta debugging."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fuzz.world.plan import Event, Plan, Setting

Finds = Callable[[Plan], bool]


def shrink(plan: Plan, finds: Finds, tries: int = 1500) -> Plan:
    """A plan with fewer events and a plainer setting for which `finds` still holds.

    `finds(plan)` must be true; at most `tries` plans are run.
    """
    budget = _Budget(finds, tries)
    before = None
    while before != plan and budget.left:
        before = plan
        plan = _fewer_events(plan, budget)
        plan = _first(plan, _plainer_settings, budget)
        plan = _first(plan, _smaller_numbers, budget)
    return plan


class _Budget:
    def __init__(self, finds: Finds, tries: int) -> None:
        self._finds = finds
        self.left = tries

    def holds(self, plan: Plan) -> bool:
        """Whether the plan still finds it; False when the budget is spent."""
        if self.left <= 0:
            return False
        self.left -= 1
        return self._finds(plan)


def _fewer_events(plan: Plan, budget: _Budget) -> Plan:
    width = max(1, len(plan.events) // 2)
    while True:
        start = 0
        while start < len(plan.events):
            smaller = plan.without(start, start + width)
            if budget.holds(smaller):
                plan = smaller
            else:
                start += width
        if width == 1:
            return plan
        width //= 2


def _first(plan: Plan, options: Callable[[Plan], Iterator[Plan]], budget: _Budget) -> Plan:
    """Take the first option that still finds it, as long as there is one."""
    while (better := next(filter(budget.holds, options(plan)), None)) is not None:
        plan = better
    return plan


def _plainer_settings(plan: Plan) -> Iterator[Plan]:
    setting, plain = plan.setting, Setting()
    for name in (
        "pipelined",
        "lagging",
        "second_runner",
        "events",
        "fail",
        "new_weights",
        "policy",
    ):
        yield from _with(plan, name, getattr(plain, name))
    yield from _with(plan, "no_prefix_cache", False)
    yield from _with(plan, "whole", True)
    for index in range(len(setting.tiers)):
        yield from _with(plan, "tiers", setting.tiers[:index] + setting.tiers[index + 1 :])
    if any(setting.tiers):
        yield from _with(plan, "tiers", (False,) * len(setting.tiers))
    for index in range(1, len(setting.windows)):
        yield from _with(plan, "windows", setting.windows[:index] + setting.windows[index + 1 :])
    if setting.blocks_per_chunk > 1:
        yield from _with(plan, "blocks_per_chunk", setting.blocks_per_chunk - 1)
    for name, least in (("rows", 1), ("seats", 1)):
        if getattr(setting, name) > least:
            yield from _with(plan, name, getattr(setting, name) - 1)


def _with(plan: Plan, name: str, value: Any) -> Iterator[Plan]:
    if getattr(plan.setting, name) != value:
        yield replace(plan, setting=replace(plan.setting, **{name: value}))


def _smaller_numbers(plan: Plan) -> Iterator[Plan]:
    for index, event in enumerate(plan.events):
        for field in ("a", "b", "c"):
            number = getattr(event, field)
            for less in {0, number // 2} - {number}:
                changed: Event = event._replace(**{field: less})
                events = (*plan.events[:index], changed, *plan.events[index + 1 :])
                yield replace(plan, events=events)
