# SPDX-License-Identifier: Apache-2.0
"""Our manager over proven tiers, driven in lockstep with the machine.

Sealing and proving run when the dice say so; rows are really sealed and really opened, objects
are really damaged. What the machine calls sealing and proving is compared with what our classes
do; what is left of vLLM's differences is `STILL`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kvsafe.engine.manager import IssuedStore
from kvsafe.engine.requests.waits import CLAIM_STEPS
from kvsafe.engine.rows.transfer import ChunkFailure, SealedRowsSpec
from kvsafe.engine.tiers.proving import ProvingTier
from kvsafe.lifecycle import rows
from kvsafe.lifecycle import transfers as way
from kvsafe.lifecycle.requests import remember, with_request
from kvsafe.lifecycle.table import RULES
from kvsafe.lifecycle.words import ABSENT, DAMAGED, GOOD, OLD, SEALING, WRITING, State
from kvsafe.lifecycle.world import World as Small
from kvsafe.seal.header import bitmap
from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.engine_unit.sealed_world import HandExecutor, HandFuture, World
from tests.lockstep.book import DIVERGENCES, Note, Stored
from tests.lockstep.compare import differ
from tests.lockstep.hand import NotingTier, Tiered
from tests.lockstep.primary import KEYS, ROWS, SLOTS
from tests.lockstep.runs import Dice, Make
from tests.lockstep.tiers import Job, TieredBook

# Differences that our manager does not take away yet.
STILL = tuple(name for name in DIVERGENCES if name != "revokes nothing")
REFUSAL = Refusal.of(RefusalKind.COPY_FAULT, "copy", "whole", "torn")


class Promotion:
    """A load that a tier has ended: which of its keys have been judged, and how."""

    def __init__(self, job: Job, arrived: tuple[int, ...]) -> None:
        self.job = job
        self.waiting = {key for key in job.keys if key in arrived}
        self.proven: list[int] = []
        self.refused: list[int] = []


class Wait:
    """What a request was told since it last computed, and the promotions that it began."""

    def __init__(self) -> None:
        self.told: set[int] = set()
        self.now: set[int] = set()
        self.begun: set[int] = set()


class SealBook(TieredBook):
    """The machine where stores are sealed and promotions proven before they are ready.

    The machine's three rules for promotions, as our manager keeps them: nothing that a request
    was told hit or pending is evicted (`shielded`, from the step's first promotion on); a
    request begins the promotion of a key once; a store that found no room keeps promotions away
    (for some steps).
    """

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.waits: dict[int, Wait] = {}
        self.claims: dict[int, int] = {}
        self._up = False
        # For each request and parked key, which write of the key it waits for.
        self._parked_for: dict[tuple[int, int], int] = {}
        self.store_room = self._store_room
        rooms: dict[str, way.Room] = {"store": self._store_room, "no store": self._store_room}
        rooms |= {"promote": self._promotion_room, "no room": self._promotion_room}
        table = {rule.event: rule for rule in RULES}
        for event, room in rooms.items():
            rule = table[event]
            effect = partial(rule.effect, room=room) if event in ("store", "promote") else None
            self._rules[event] = rule.changed(
                guard=partial(rule.guard, room=room), effect=effect or rule.effect
            )
        # What waits for a thread, oldest first: a batch to seal, or one row to open.
        self.tasks: list[tuple[str, Any]] = []
        self._batches: list[list[Any]] = []
        self._loads: list[dict[int, Promotion]] = [{} for _ in range(self.world.tiers)]
        # Objects that were refused: there, and not offered until stored anew.
        self.hidden: list[dict[int, int]] = [{} for _ in range(self.world.tiers)]

    def writing(self, who: int) -> bool:
        """A store counts until it is sealed."""
        stages = (WRITING, SEALING)
        return any(c is not None and c.by == who and c.stage in stages for c in self.state.chunks)

    def busy(self) -> bool:
        """Sealing is work under way."""
        return bool(self._batches) or super().busy()

    # Who waits for what

    def _store_room(self, world: Small, state: State, who: int) -> tuple[int, ...] | None:
        keys = state.requests[who].keys
        new = way.wanted(state, who)
        return rows.victims(world, state, len(new), {*keys, *self.shielded})

    def _promotion_room(self, world: Small, state: State, key: int) -> tuple[int, ...] | None:
        return rows.victims(world, state, 1, self.shielded | {key})

    def begin(self, who: int) -> None:
        """A request looks its keys up, from the first on."""
        self.waits.setdefault(who, Wait()).now = set()

    def end(self, who: int) -> None:
        """Its lookups of this step are over."""
        self.waits[who].told &= self.waits[who].now

    def loads(self, who: int) -> None:
        """What it was told is pinned now."""
        if who in self.waits:
            self.waits[who].told.clear()

    def forget(self, who: int) -> None:
        """It computes, or has ended."""
        self.waits.pop(who, None)

    def _lift(self) -> None:
        if not self._up:
            self._up = True
            told = {key for wait in self.waits.values() for key in wait.told}
            self.shielded = {key for key in told if rows.evictable(self.state, key)}

    def settle(self) -> None:
        """What was pinned or is gone needs no shield."""
        self.shielded = {key for key in self.shielded if rows.evictable(self.state, key)}

    def lookup(self, who: int, key: int) -> str:
        """`lookup`."""
        self.poll()
        answer = self._look(who, key)
        wait = self.waits.get(who)
        if answer in ("HIT", "HIT_PENDING"):
            if wait is not None:
                wait.now.add(key)
                wait.told.add(key)
            if self._up and rows.evictable(self.state, key):
                self.shielded.add(key)
        return answer

    def _look(self, who: int, key: int) -> str:
        chunk, wait = self.state.chunks[key], self.waits.get(who)
        spent = wait is not None and key in wait.begun
        tiers = [] if spent else self._having(who, key)
        if chunk is not None or not tiers or spent or any(self.claims.values()):
            gone = frozenset({key} if chunk is None and (spent or tiers) else ())
            self.state = with_request(self.state, who, spent=gone)
            self._keep_spent = True
            answer = super().lookup(who, key)
            self._keep_spent = False
            self._forget_promises()
            return answer
        self._lift()
        answer = super().lookup(who, key)
        if answer == "HIT_PENDING" and wait is not None:
            wait.begun.add(key)
        return answer

    def _having(self, who: int, key: int) -> list[int]:
        """Tiers that say that they have the key."""
        return [tier for tier in range(self.world.tiers) if self.state.objects[tier][key]]

    _keep_spent = False

    def _forget_promises(self) -> None:
        spent = [request.spent for request in self.state.requests]
        super()._forget_promises()
        if self._keep_spent:
            for who, keys in enumerate(spent):
                self.state = with_request(self.state, who, spent=keys)

    def _cascade_old(self, who: int, keys: Sequence[int]) -> None:
        super()._cascade_old(who, keys)
        for key in self.parked[who]:
            self._parked_for.setdefault((who, key), self.given[key])

    def _flush(self) -> None:
        """A key is parked for the write in flight then, and let go at the next flush after it."""
        for who in list(self._present):
            if self.parked[who]:
                self.parked[who] = [key for key in self.parked[who] if self._same_write(who, key)]
                self.leave(who)
        super()._flush()
        live = {(who, key) for who in self._present for key in self.parked[who]}
        self._parked_for = {at: time for at, time in self._parked_for.items() if at in live}

    def _same_write(self, who: int, key: int) -> bool:
        there = self.state.chunks[key] is not None
        return there and self.given[key] == self._parked_for[who, key]

    def finish(self, who: int) -> None:
        """`on_request_finished`."""
        self.forget(who)
        self.claims.pop(who, None)
        super().finish(who)

    def step(self) -> None:
        """`on_schedule_end`."""
        super().step()
        self._up = False
        self.shielded.clear()
        self.claims = {who: max(0, left - 1) for who, left in self.claims.items()}

    # Stores

    def prepare_store(self, who: int, keys: Sequence[int]) -> Stored | None:
        """`prepare_store`. A withdrawn chunk counts as met, though nobody is offered it.

        To the machine it is not there. It is pinned and leaves with its last reader, so that
        no eviction can depend on what its policy thinks of it.
        """
        self.poll()
        chunks = self.state.chunks
        withdrawn = [key for key in keys if (c := chunks[key]) is not None and c.withdrawn]
        met = {"seen": withdrawn, "reused": withdrawn}
        self.state = remember(self.world, self.state, who, **met)
        stored = super().prepare_store(who, keys)
        if stored is None:
            self.claims.setdefault(who, CLAIM_STEPS)
        else:
            self.claims.pop(who, None)
        return stored

    def complete_store(
        self,
        who: int,
        keys: Collection[int],
        success: bool = True,
        unsealable: Collection[int] = (),
    ) -> None:
        """`complete_store`: on to the threads that seal."""
        if not success:
            super().complete_store(who, keys, False)
            return
        for key in keys:
            self.fire("written", key)
        batch = [who, tuple(keys), tuple(unsealable), False]
        self._batches.append(batch)
        self.tasks.append(("seal", batch))

    def _collect_seals(self, overtaken: bool = False) -> None:
        while self._batches and self._batches[0][3]:
            who, keys, bad, _ = self._batches.pop(0)
            good = [key for key in keys if key not in bad and not overtaken]
            for key in keys:
                self.fire("sealed" if key in good else "seal refused", key)
            if good:
                self.notes.append(Note(False, tuple(good)))
                for tier in range(self.world.tiers):
                    self._submit(tier, who, good, load=False)
            self.leave(who)

    def _submit(self, tier: int, who: int, keys: Collection[int], *, load: bool) -> None:
        super()._submit(tier, who, keys, load=load)
        for key in keys:
            if not load and key in self.hidden[tier]:
                self.put(tier, key, self.hidden[tier].pop(key))

    # Threads

    def run(self, count: int) -> None:
        """The oldest tasks are done; nobody knows yet."""
        done, self.tasks = self.tasks[:count], self.tasks[count:]
        for kind, what in done:
            if kind == "seal":
                what[3] = True
            else:
                promotion, key = what
                good = self.holds("proven", key)
                (promotion.proven if good else promotion.refused).append(key)
                promotion.waiting.discard(key)
                if not good:
                    self.quarantine(promotion.job.tier, key)

    def quarantine(self, tier: int, key: int) -> None:
        """A tier by hand keeps what was refused."""

    def run_revoked(self) -> None:
        """All tasks are done after the epoch was raised: nothing opens any more."""
        tasks, self.tasks = self.tasks, []
        for kind, what in tasks:
            if kind == "seal":
                what[3] = True
            else:
                what[0].refused.append(what[1])
                what[0].waiting.discard(what[1])
                self.quarantine(what[0].job.tier, what[1])

    # Tiers

    def poll(self) -> None:
        """What was sealed, then what tiers have ended."""
        if not self._polled:
            self._collect_seals()
        super().poll()

    def _hear(self) -> None:
        for tier, reports in enumerate(self._reports):
            self._reports[tier] = []
            for report in reports:
                if report.job.load:
                    self._arrived(report.job, report.good)
                else:
                    del self.jobs[report.job.number]
                    self._cascaded(report.job, report.good)
            self._judge(tier)

    def unreported(self) -> list[Job]:
        """What is being opened has been ended by its tier."""
        opening = {number for loads in self._loads for number in loads}
        return [job for job in super().unreported() if job.number not in opening]

    def _arrived(self, job: Job, good: tuple[int, ...]) -> None:
        promotion = Promotion(job, good)
        self._loads[job.tier][job.number] = promotion
        for key in job.keys:
            if key in good:
                self.fetch(job, key)
                self.tasks.append(("proof", (promotion, key)))

    def _judge(self, tier: int) -> None:
        for number in sorted(self._loads[tier]):
            promotion = self._loads[tier][number]
            if not promotion.waiting:
                del self._loads[tier][number], self.jobs[number]
                self._judged(promotion)

    def _judged(self, promotion: Promotion) -> None:
        job, good = promotion.job, promotion.proven
        for key in job.keys:
            if key in good:
                self.state = rows.make_ready(self.state, key)
                continue
            if key in promotion.refused:
                self.hidden[job.tier][key] = self.state.objects[job.tier][key]
                self._refuse(key)
            else:
                self.fire("fetch failed", key)
            self.sources.get(job.who, {}).pop(key, None)
        if good:
            whole = len(good) == len(job.keys)
            self.notes.append(Note(False, job.keys if whole else tuple(good)))

    def _refuse(self, key: int) -> None:
        if self.holds("refused", key):
            self.fire("refused", key)
        else:
            # Good when it was fetched, and revoked before it was opened.
            chunk = rows.chunk_of(self.state, key)
            self.state = rows.drop(self.world, self.state, key)
            self.put(chunk.tier, key, ABSENT)
            self._forget_promises()

    # Refusals by workers

    def refuse_load(self, who: int, key: int) -> None:
        """`fail_chunks` for one key of a load, and the load's end."""
        keys = sorted(self.state.requests[who].loading)
        before = self.resident()
        self.fire("load refused", who, key)
        self._gone(before, keys)
        self.leave(who)

    def complete_load(self, who: int) -> None:
        """A withdrawn chunk goes with its last reader."""
        before, keys = self.resident(), sorted(self.state.requests[who].loading)
        super().complete_load(who)
        self._gone(before, keys)

    def _cascaded(self, job: Job, good: tuple[int, ...]) -> None:
        before = self.resident()
        super()._cascaded(job, good)
        self._gone(before, job.keys)

    def _gone(self, before: dict[int, int], keys: Collection[int]) -> None:
        after = self.resident()
        gone = tuple(key for key in keys if key in before and key not in after)
        if gone:
            self.notes.append(Note(True, gone))

    def reset(self) -> None:
        """`reset_cache` after the epoch was raised."""
        sealing = bool(self._batches)
        if sealing:
            self.run_revoked()
            self._collect_seals(overtaken=True)
        # Jobs that were submitted by the lines above are none: nothing was sealed.
        for reports in self._reports:
            for report in reports:
                if report.job.load:
                    self._arrived(report.job, report.good)
        self._reports = [[r for r in reports if not r.job.load] for reports in self._reports]
        self.run_revoked()
        super().reset()
        self.waits.clear()
        self._parked_for.clear()
        self.claims.clear()
        self._up = False
        self.shielded.clear()
        # What nobody has heard of yet would be announced although it is gone (finding E).
        self.notes.clear()
        for hidden in self.hidden:
            for key, value in hidden.items():
                hidden[key] = OLD if value == GOOD else value


class PatientFuture(HandFuture):
    """A future that makes others run only when its own answer is not there yet."""

    def result(self, timeout: float | None = None) -> Any:
        """The answer, after everything that was submitted has run."""
        return Future.result(self, timeout) if self.done() else super().result(timeout)


class Threads(HandExecutor):
    """As `HandExecutor`: nothing runs before it is told to, or waited for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Take a task."""
        future = PatientFuture(self)
        self.waiting.append((future, partial(fn, *args, **kwargs)))
        return future


class LockstepWorld(World):
    """`World` whose tiers by hand note what they are told."""

    def _tier(self, index: int, kind: str) -> ProvingTier:
        if kind == "hand":
            tier = NotingTier(self.primary.get_kv_memoryview())
            return ProvingTier(tier, index, self.desk, None)
        return super()._tier(index, kind)


class Ours(Tiered):
    """As `Tiered`, with sealing, proofs, damage and refusals."""

    weights: ClassVar[dict[str, int]] = {
        **Tiered.weights,
        "run": 10,
        "damage": 2,
        "refuse_load": 1,
    }
    book: SealBook
    book_type: ClassVar[type[SealBook]] = SealBook
    world_type: ClassVar[type[LockstepWorld]] = LockstepWorld
    kind, most_tiers = "hand", 2
    doubled = False

    def __init__(
        self,
        dice: Dice,
        policy: str,
        folder: Path,
        as_vllm: tuple[str, ...] = STILL,
    ) -> None:
        super().__init__(dice, policy, as_vllm=as_vllm)
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        tiers = min(len(self.tiers), self.most_tiers)
        self.book = self._new_book(self.book_type, policy, tiers=tiers, as_vllm=as_vllm)
        self.threads = Threads()
        self.world = self.world_type(
            folder,
            rows=ROWS,
            policy=policy,
            tiers=[self.kind] * tiers,
            events=True,
            threads=self.threads,
            # Not enforced: see `doubled`.
            monitor="log",
        )
        self.tiers = [tier.inner for tier in self.world.tiers]
        self.real = self.world.manager
        self.eye.real, self.eye.book = self.world.primary, self.book
        self.specs: dict[int, SealedRowsSpec] = {}

    def lookup(self, dice: Dice) -> None:
        """Lookups of one request, between the calls that our scheduler half puts around them."""
        who = self._somebody(dice)
        if who is None:
            return
        name = self.contexts[who].req_id
        self.real.waits.begin(name)
        self.book.begin(who)
        self._look_up(who, dice.few(range(KEYS), 4))
        self.real.waits.end(name)
        self.book.end(who)

    def _begin_load(self, who: int, keys: list[int]) -> None:
        super()._begin_load(who, keys)
        self.real.waits.loads(self.contexts[who].req_id)
        self.book.loads(who)

    def prepare_store(self, dice: Dice) -> None:
        """An offer; a store that gets rows is issued, as our scheduler half does it."""
        who, keys = self._somebody(dice), dice.few(range(KEYS), ROWS)
        if who is None:
            return
        self.real.waits.forget(self.contexts[who].req_id)
        self.book.forget(who)
        output = self.real.prepare_store(self.names.real(keys), self.contexts[who])
        told = None
        if output is not None:
            new = self.names.numbers(output.keys_to_store)
            told = Stored(new, self.names.numbers(output.evicted_keys))
            self._issue(output)
        differ("prepare_store", self.book.prepare_store(who, keys), told)
        if told is not None and told.new:
            self.stores.append((who, list(told.new)))

    def _issue(self, output: Any) -> None:
        spec = output.store_spec
        for key, row, generation in zip(
            output.keys_to_store, spec.chunk_ids, spec.generations, strict=True
        ):
            issued = IssuedStore(generation, spec.epoch, bitmap(1, [0]))
            self.real.issue_store(key, issued)
            number = self.names.numbers([key])[0]
            self.specs[number] = SealedRowsSpec([int(row)], [key], [generation], spec.epoch)

    def complete_store(self, dice: Dice) -> None:
        """A store ends: written, or failed; now and then a row cannot be sealed."""
        if not self.stores:
            return
        who, keys = self.stores.pop(dice.number(0, len(self.stores) - 1))
        success = not dice.rarely(4)
        bad = [key for key in keys if success and dice.rarely(6)]
        for key in keys:
            if success and key not in bad:
                self.world.work(self.specs[key])
        self.real.complete_store(self.names.real(keys), self.contexts[who], success)
        self.book.complete_store(who, keys, success, bad)

    def run(self, dice: Dice) -> None:
        """Threads do the oldest of their tasks."""
        if self.threads.waiting:
            count = dice.number(1, len(self.threads.waiting))
            self.threads.run(count)
            self.book.run(count)

    def damage(self, dice: Dice) -> None:
        """An object in a tier changes behind our back."""
        places = [
            (tier, key)
            for tier in range(len(self.tiers))
            for key in range(KEYS)
            if self.book.state.objects[tier][key] == GOOD
        ]
        if places:
            tier, key = dice.pick(places)
            name = self._name(key)
            objects = self.tiers[tier].objects
            at = dice.number(0, len(objects[name]) - 1)
            changed = bytearray(objects[name])
            changed[at] ^= 1
            objects[name] = bytes(changed)
            self.book.put(tier, key, DAMAGED)

    def _name(self, key: int) -> bytes:
        return bytes(self.world.names.name(self.names.keys[key]))

    def refuse_load(self, dice: Dice) -> None:
        """A worker refuses one chunk of its load; the load ends."""
        loading = [who for who in range(SLOTS) if self.book.state.requests[who].loading]
        if loading:
            who = dice.pick(loading)
            keys = sorted(self.book.state.requests[who].loading)
            key = dice.pick(keys)
            self.real.fail_chunks([ChunkFailure(1, True, self.names.keys[key], REFUSAL)])
            self.real.complete_load(self.names.real(keys), self.contexts[who])
            self.book.refuse_load(who, key)

    def reset(self, dice: Dice) -> None:
        """The epoch is raised, then the cache is reset, as the connector does it."""
        if not dice.rarely(4):
            return
        self.world.epochs.raise_epoch("lockstep")
        for job in sorted(self.book.unreported(), key=lambda job: job.load):
            self.book.end_job(job.number, job.keys)
        self.real.reset_cache()
        self.book.reset()
        self.stores.clear()

    def _plain(self, what: tuple[Any, ...]) -> tuple[Any, ...]:
        match what:
            case (("load" | "store") as kind, number, name, keys):
                known = {self._name(key): key for key in range(KEYS)}
                return (kind, number, self.ids[name], tuple(known[bytes(key)] for key in keys))
        return super()._plain(what)

    def look(self) -> None:
        """All that can be compared is the same."""
        self.book.settle()
        super().look()

    def _look_at_bytes(self) -> None:
        jobs = [job.keys for job in self.book.jobs.values()]
        self.doubled = self.doubled or any(len(set(keys)) < len(keys) for keys in jobs)
        if not self.doubled:
            # A key that was parked twice goes out twice in one job, as vLLM has it; a recount by
            # sets of keys would not find its second pin.
            self.world.recount()
        self.world.prove_offers()

    def close(self) -> None:
        """Let go of the region."""
        self.world.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def ours(policy: str, folder: Path, **parts: Any) -> Make:
    """How to begin such a world in a folder of its own."""
    return partial(Ours, policy=policy, folder=folder, **parts)
