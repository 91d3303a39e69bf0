# SPDX-License-Identifier: Apache-2.0
"""The findings of the world as scenes: short sequences, each with a twin that lacks one act.

A scene runs on plain vLLM (`stock`), where it has to fail, and on kvsafe, where it has to be clean.
The twin is the positive control: it is clean on plain vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from fuzz.world import Event, Finding, Outcome, Plan, Setting, WrongWorld, run

_STEP = Event("step")
_GO = Event("go")
_IDLE = Event("idle", 19)
_ONE_TIER = (False,)


def _ask(family: int, prompt: int, answer: int = 1) -> Event:
    """A request: tokens of a family as its prompt, and how many tokens it wants."""
    return Event("ask", family, prompt, answer)


def _plant(chunk: int, group: int, *, in_tier: bool = False) -> Event:
    return Event("plant", 0, chunk, group + 10 * in_tier)


class Scene(NamedTuple):
    """One finding: the acts, the place of the act that the twin lacks, what is seen."""

    setting: Setting
    acts: tuple[Event, ...]
    decisive: int
    kind: str

    def plan(self, flavour: str) -> Plan:
        """The scene on one of the two flavours."""
        return Plan(flavour, self.setting, self.acts)

    def in_setting(self, **changes: Any) -> Scene:
        """The scene in another setting."""
        return self._replace(setting=replace(self.setting, **changes))

    def twin(self) -> Plan:
        """The scene on plain vLLM without its decisive act."""
        return self.plan("stock").without(self.decisive, self.decisive + 1)


A2 = Scene(
    Setting(windows=(0, 8), rows=4, blocks=40, tiers=_ONE_TIER),
    (
        # Three chunks of full attention and the first of the window fill the rows; the window's
        # third is in a tier, its second nowhere.
        *(_plant(chunk, 0) for chunk in range(3)),
        _plant(0, 1),
        Event("tier_ok", 0, 0, 3),
        _STEP,
        _STEP,
        _plant(2, 1, in_tier=True),
        _ask(0, 13),
        _STEP,
    ),
    decisive=7,
    kind="died",
)
B = Scene(
    Setting(rows=4, tiers=_ONE_TIER),
    # Five chunks come to the tier in two goes, since no store of five fits into four rows.
    (_ask(0, 13), _IDLE, _ask(0, 21), _IDLE, _ask(0, 21)),
    decisive=4,
    kind="starved",
)
C = Scene(
    Setting(),
    (_ask(0, 8), _STEP, Event("reset_connector"), Event("reset_connector")),
    decisive=3,
    kind="died",
)
E = Scene(
    Setting(rows=4, events=True, tiers=_ONE_TIER),
    (_ask(0, 12), _IDLE, _ask(1, 16), _IDLE, _ask(0, 13), _STEP, Event("pause")),
    decisive=4,
    kind="announced",
)
N = Scene(
    Setting(rows=12),
    (_ask(0, 24, 9), *[_GO] * 4, Event("reset_running")),
    decisive=5,
    kind="died",
)
Q = Scene(
    Setting(windows=(6,), blocks_per_chunk=2, rows=10, blocks=14),
    (_ask(1, 38, 5), _ask(1, 16, 2), _IDLE, _ask(1, 20)),
    decisive=3,
    kind="wrong-load",
)
R = Scene(
    Setting(rows=2, tiers=_ONE_TIER),
    (
        *(_ask(0, 8), _IDLE, _ask(1, 8), _IDLE),
        # The load of the third request is under way when everything is forgotten.
        *(_ask(0, 9), _STEP, Event("tier_ok"), _STEP, Event("reset_connector")),
        # The fourth is promoted; the tier does not wait for the workers.
        *(Event("eager"), _ask(1, 9), _STEP),
    ),
    decisive=9,
    kind="wrong-load",
)
S = Scene(
    Setting(windows=(6,), rows=12, blocks=11),
    (_ask(0, 16, 6), _ask(1, 26, 7), *[_GO] * 4, Event("reset_connector")),
    decisive=6,
    kind="wrong-store",
)
T = Scene(
    Setting(rows=4, tiers=_ONE_TIER),
    (_ask(0, 8), _IDLE, _ask(1, 16), _IDLE, Event("lie"), _ask(0, 9)),
    decisive=4,
    kind="starved",
)
SCENES = {"A2": A2, "B": B, "C": C, "E": E, "N": N, "Q": Q, "R": R, "S": S, "T": T}


def demand(plan: Plan, kind: str) -> Outcome:
    """Raises `WrongWorld` if the plan has a finding of this kind, `LookupError` for another."""
    outcome = run(plan)
    finding = outcome.finding
    if finding is not None and finding.kind != kind:
        raise LookupError(f"another finding: {_said(finding)}")
    outcome.demand_clean()
    return outcome


def demand_clean(plan: Plan) -> Outcome:
    """Raises `LookupError` if the plan finds anything."""
    outcome = run(plan)
    if outcome.finding is not None:
        raise LookupError(f"a finding: {_said(outcome.finding)}")
    return outcome


def _said(finding: Finding) -> str:
    return f"{finding.kind}: {finding.detail}"


__all__ = ["SCENES", "Scene", "WrongWorld", "demand", "demand_clean"]
