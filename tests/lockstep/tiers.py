# SPDX-License-Identifier: Apache-2.0
"""The machine behind the calls of a tiering manager, and what it has to tell each tier.

Transfers go to tiers in jobs; a tier ends a job at any time and the manager hears of it at its
next poll, once per step. `said` is everything that each tier has to be told, in order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from kvsafe.lifecycle import transfers as way
from kvsafe.lifecycle.policy import Policy
from kvsafe.lifecycle.requests import with_request
from kvsafe.lifecycle.words import BUILDING, ENDED, FETCHING, GOOD, NONE, QUEUED
from tests.lockstep.book import DIVERGENCES, Book, Note, Stored


class Job(NamedTuple):
    """A transfer that a tier has been given."""

    number: int
    tier: int
    who: int
    keys: tuple[int, ...]
    load: bool


class Report(NamedTuple):
    """What a tier says of a job: the keys that arrived (all of them for a store that worked)."""

    job: Job
    good: tuple[int, ...]


class TieredBook(Book):
    """A primary tier and others behind it."""

    def __init__(
        self,
        policy: Policy,
        *,
        keys: int,
        rows: int,
        requests: int,
        tiers: int,
        as_vllm: Collection[str] = tuple(DIVERGENCES),
    ) -> None:
        super().__init__(
            policy,
            keys=keys,
            rows=rows,
            requests=requests,
            tiers=tiers,
            features={"promote", "cascade"},
            as_vllm=as_vllm,
        )
        self.said: list[list[tuple[Any, ...]]] = [[] for _ in range(tiers)]
        self.jobs: dict[int, Job] = {}
        self.parked: dict[int, list[int]] = {}
        self.wishes: set[int] = set()
        self.sources: dict[int, dict[int, int]] = {}
        self._present: list[int] = []
        self._queued: dict[int, dict[int, list[int]]] = {}
        self._reports: list[list[Report]] = [[] for _ in range(tiers)]
        self._polled = False
        self._next = 0

    # Requests

    def arrive(self, who: int, wish: bool = False) -> None:
        """`on_new_request`; with a `wish` the first tier wants whole requests."""
        super().arrive(who)
        self._present.append(who)
        self.parked[who] = []
        (self.wishes.add if wish else self.wishes.discard)(who)
        self._say(("arrive", who))

    def leave(self, who: int) -> None:
        """Tiers are told once no store of the request can be submitted to them any more."""
        ended = self.state.requests[who].phase == ENDED
        if ended and who in self._present and not self.writing(who) and not self.parked[who]:
            self._present.remove(who)
            self.sources.pop(who, None)
            self._say(("finished", who))
        super().leave(who)

    def writing(self, who: int) -> bool:
        """Whether a store of this request has not been completed."""
        return bool(self.pending(who))

    def _say(self, what: tuple[Any, ...]) -> None:
        for said in self.said:
            said.append(what)

    def busy(self) -> bool:
        """`has_pending_work`."""
        return bool(self.jobs) or any(self.parked.values())

    # Lookups and promotions

    def lookup(self, who: int, key: int) -> str:
        """`lookup`: reports first; a promotion is queued until the step ends."""
        self.poll()
        before = self.resident()
        answer = super().lookup(who, key)
        gone = tuple(before.keys() - self.resident().keys())
        if gone:
            self.notes.append(Note(True, gone))
        return answer

    def _answers(self) -> Any:
        yield "hit", (), "HIT"
        yield "pend", (), "HIT_PENDING"
        for tier in range(self.world.tiers):
            yield "promote", (tier,), "HIT_PENDING"
            yield "no room", (tier,), "MISS"
        yield "miss", (), "MISS"

    def fire(self, event: str, *who: int) -> None:
        """As before; a promotion is put on the list of its tier and request."""
        key = self.state.requests[who[0]].keys[0] if event == "promote" else -1
        super().fire(event, *who)
        if event == "promote":
            self._queued.setdefault(who[1], {}).setdefault(who[0], []).append(key)
            self.sources.setdefault(who[0], {})[key] = who[1]

    def promoting(self, who: int) -> bool:
        """Whether a promotion of this request has not been submitted yet."""
        chunks = self.state.chunks
        return any(c is not None and c.by == who and c.stage == QUEUED for c in chunks)

    # Stores and cascades

    def prepare_store(self, who: int, keys: Sequence[int]) -> Stored | None:
        """`prepare_store`; a tier that wants whole requests gets what was there before."""
        self.poll()
        stored = super().prepare_store(who, keys)
        if stored is not None and who in self.wishes:
            self._cascade_old(who, [key for key in keys if key not in stored.new])
        return stored

    def _cascade_old(self, who: int, keys: Sequence[int]) -> None:
        sent = []
        for key in keys:
            hidden = self.state.cascades if "sends again" in self.as_vllm else ()
            cascades = () if hidden else self.state.cascades
            self.state = self.state._replace(cascades=cascades)
            state = way.cascade_old(self.world, self.state, who, (key,))
            if len(state.cascades) > len(cascades):
                sent.append(key)
            if key in state.requests[who].parked:
                self.parked[who].append(key)
            self.state = state._replace(cascades=tuple(sorted((*hidden, *state.cascades))))
        self._park(who)
        if sent:
            self._submit(0, who, sent, load=False)

    def _park(self, who: int) -> None:
        self.state = with_request(self.state, who, parked=frozenset(self.parked.get(who, ())))

    def complete_store(self, who: int, keys: Collection[int], success: bool = True) -> None:
        """`complete_store`: what is ready goes to every tier."""
        super().complete_store(who, keys, success)
        if success:
            for tier in range(self.world.tiers):
                self._submit(tier, who, keys, load=False)
        self.leave(who)

    def _forget_promises(self) -> None:
        super()._forget_promises()
        for who in self._present:
            if "parks on" not in self.as_vllm:
                kept = self.state.requests[who].parked
                self.parked[who] = [key for key in self.parked[who] if key in kept]
            self._park(who)

    def _submit(self, tier: int, who: int, keys: Collection[int], *, load: bool) -> None:
        job = Job(self._next, tier, who, tuple(keys), load)
        self._next += 1
        self.jobs[job.number] = job
        self.said[tier].append(("load" if load else "store", job.number, who, job.keys))

    # What tiers do

    def put(self, tier: int, key: int, value: int) -> None:
        """A tier has this under a key now."""
        self.state = way.set_object(self.state, tier, key, value)

    def end_job(self, number: int, good: Collection[int]) -> None:
        """A tier ends a job; these keys arrived. The manager does not know yet."""
        job = self.jobs[number]
        for key in good:
            if not job.load:
                self.put(job.tier, key, GOOD)
        self._reports[job.tier].append(Report(job, tuple(good)))

    def unreported(self) -> list[Job]:
        """Jobs that no tier has ended yet."""
        ended = {report.job.number for reports in self._reports for report in reports}
        return [job for job in self.jobs.values() if job.number not in ended]

    # Steps

    def poll(self) -> None:
        """Hear what tiers have ended; once per step."""
        if not self._polled:
            self._polled = True
            self._hear()

    def _hear(self) -> None:
        for tier, reports in enumerate(self._reports):
            self._reports[tier] = []
            for job, good in reports:
                del self.jobs[job.number]
                (self._promoted if job.load else self._cascaded)(job, good)

    def _promoted(self, job: Job, good: tuple[int, ...]) -> None:
        for key in good:
            self.fetch(job, key)
            self.fire("proven", key)
        for key in job.keys:
            if key not in good:
                self.fire("fetch failed", key)
                self.sources.get(job.who, {}).pop(key, None)
        if good:
            self.notes.append(Note(False, good))

    def fetch(self, job: Job, key: int) -> None:
        """The row has what the tier had when it was read."""
        self.fire("fetched", key)

    def fetch_as(self, tier: int, key: int, value: int) -> None:
        """As `fetch`, where the object may have changed since it was read."""
        objects = self.state.objects
        self.put(tier, key, value)
        self.fire("fetched", key)
        self.state = self.state._replace(objects=objects)

    def _cascaded(self, job: Job, good: tuple[int, ...]) -> None:
        for key in job.keys:
            self.state = way.end_cascade(self.world, self.state, job.tier, key)

    def step(self) -> None:
        """`on_schedule_end`."""
        self.poll()
        self._polled = False
        for tier, lists in self._queued.items():
            for who, keys in lists.items():
                self._submit(tier, who, keys, load=True)
        self._queued.clear()
        for who in self._present:
            self.state = with_request(self.state, who, parked=NONE)
        self.state = self.state._replace(half=BUILDING)
        self.fire("step")
        self._flush()
        for said in self.said:
            said.append(("step",))

    def _flush(self) -> None:
        """Look at parked keys again."""
        for who in list(self._present):
            keys, self.parked[who] = self.parked[who], []
            if keys:
                self._cascade_old(who, keys)
                self.leave(who)

    def reset(self) -> None:
        """`reset_cache`, after the tiers were drained: `end_job` was called for all."""
        self._hear()
        self._polled = False
        self._queued.clear()
        self.sources.clear()
        for who in self._present:
            self.parked[who] = []
            self._park(who)
        objects = self.state.objects
        super().reset()
        if "revokes nothing" in self.as_vllm:
            self.state = self.state._replace(objects=objects)

    def order(self) -> list[int]:
        """As they arrived; those last whose tiers were told already."""
        return sorted(super().order(), key=lambda who: (*self._present, who).index(who))

    def fetching(self) -> list[int]:
        """Keys that tiers write into rows."""
        chunks = enumerate(self.state.chunks)
        return [key for key, c in chunks if c is not None and c.stage == FETCHING]
