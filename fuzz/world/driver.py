# SPDX-License-Identifier: Apache-2.0
"""The driver: what each event of a plan does to the world, and how a world comes to rest."""

from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.request import RequestStatus

from fuzz.world import bench
from fuzz.world.checks import chunks_of, primary_of
from fuzz.world.content import Script, prompt_of
from fuzz.world.engine import Engine
from fuzz.world.outcome import WrongWorld
from fuzz.world.parts import Parts
from fuzz.world.plan import BLOCK_TOKENS, Event
from fuzz.world.tier import HandTier

_FAMILIES = 2
_MOST_REQUESTS = 24
_REST_STEPS = 300
_DISTURBING = (
    "copy_fault",
    "damage_row",
    "damage_object",
    "foreign_epoch",
    "hang",
    "clock",
    "reset_running",
    "reset_connector",
    "reset_all",
    "reset_twice",
    "pause",
)
_STEPS_PER_REQUEST = 60


class Driver:
    """Turns events into calls. What an event cannot do at its moment it leaves undone."""

    def __init__(self, parts: Parts, engine: Engine, half: Any, *, ours: bool) -> None:
        self.parts = parts
        self.engine = engine
        self.scheduler = engine.scheduler
        self.half = half
        self._ours = ours
        self._asked: dict[str, tuple[int, int]] = {}
        self._aborted: set[str] = set()

    def act(self, event: Event) -> str:
        """Do one event; the answer goes to the log."""
        done = getattr(self, f"_{event.name}")(event)
        self.parts.counts[f"tried_{event.name}"] += 1
        if done:
            self.parts.counts[f"did_{event.name}"] += 1
        return f"{event.name}:{done};"

    # Requests

    def _step(self, event: Event) -> bool:
        busy = self.engine.busy
        self.engine.iterate()
        return busy

    def _execute(self, event: Event) -> bool:
        return self.engine.execute()

    def _eager(self, event: Event) -> bool:
        self.parts.eager = 1 + event.a % 3
        return True

    def _go(self, event: Event) -> bool:
        """A few steps in which everything else gets done at once."""
        for _ in range(1 + event.a % 4):
            self._settle_once(0)
        return True

    def _idle(self, event: Event) -> bool:
        """Everything gets done, then the accelerator forgets: what comes next must be loaded."""
        for _ in range(12 + event.a % 20):
            if not self.engine.busy:
                break
            self._settle_once(0)
        return self._reset(running=False, connector=False)

    def _arrive(self, event: Event) -> bool:
        if len(self._asked) >= _MOST_REQUESTS:
            return False
        room = self._most_tokens()
        length = 2 + event.a % (room - 6)
        shared = length if event.b % 3 else event.b % length
        answer = 1 + event.c % 9
        tokens = prompt_of(event.b % _FAMILIES, shared, length, len(self._asked))
        self._add(tokens, answer, self._params(event))
        return True

    def _ask(self, event: Event) -> bool:
        """Written by hand: `b` tokens of family `a`, `c` tokens to be answered."""
        self._add(prompt_of(event.a, event.b, event.b, 0), event.c, None)
        return True

    def _plant(self, event: Event) -> bool:
        """Written by hand, stock: chunk `b` of family `a`; `c` is its group, 10 more: in a tier."""
        length = (event.b + 1) * BLOCK_TOKENS * self.parts.setting.blocks_per_chunk
        script = Script(prompt_of(event.a, length, length, 0), length)
        hashes = list(bench.request("plant", script, length, 1).block_hashes)
        self.parts.keys.learn(script, hashes)
        key = make_offload_key(hashes[-1], event.c % 10)
        numbers = self.parts.keys.numbers(key, self.parts.model.weights)
        body = b"" if numbers is None else numbers.tobytes()
        if event.c >= 10:
            self.parts.tiers[0].objects[key] = body
            return True
        context, manager = ReqContext(req_id="plant"), self.half.manager
        manager.on_new_request(context)
        spec = manager.prepare_store([key], context).store_spec
        row = int(spec.block_ids[0])
        primary_of(manager).get_kv_memoryview()[row : row + 1].cast("B")[:] = body
        manager.complete_store([key], context)
        manager.on_request_finished(context)
        return True

    def _add(self, prompt: list[int], answer: int, params: dict[str, int] | None) -> None:
        name, length = f"r{len(self._asked)}", len(prompt)
        script = Script(prompt, length + answer + 4)
        self.parts.scripts[name] = script
        self._asked[name] = (length, answer)
        self.scheduler.add_request(bench.request(name, script, length, answer, params))

    def _most_tokens(self) -> int:
        """What one request may need at most, so that it fits into the accelerator alone."""
        setting = self.parts.setting
        blocks = (setting.blocks - 1) // len(setting.windows) - 1
        return min(blocks * BLOCK_TOKENS, 80)

    def _params(self, event: Event) -> dict[str, int] | None:
        if event.c < 232:
            return None
        return {("max_load_tokens", "max_offload_tokens")[event.c % 2]: 4 * (event.b % 8)}

    def _abort(self, event: Event) -> bool:
        name = self._pick(list(self.scheduler.requests), event.a)
        if name is None:
            return False
        self._aborted.add(name)
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        return True

    def _abort_late(self, event: Event) -> bool:
        name = self._pick(list(self.scheduler.requests), event.a)
        if name is None:
            return False
        self._aborted.add(name)
        self.engine.late_aborts.append(name)
        return True

    @staticmethod
    def _pick(names: list[str], number: int) -> str | None:
        return names[number % len(names)] if names else None

    # Transfers and proofs

    def _copy(self, event: Event) -> bool:
        copies = self.parts.copies
        waiting: int = min(copies.waiting, 1 + event.a % 6)
        for _ in range(waiting):
            copies.run(0)
        return bool(waiting)

    def _copy_one(self, event: Event) -> bool:
        copies = self.parts.copies
        if copies.waiting:
            copies.run(event.a % copies.waiting)
            return True
        return False

    def _copy_fault(self, event: Event) -> bool:
        copies = self.parts.copies
        if copies.waiting:
            copies.run(event.a % copies.waiting, fault=True)
            return True
        return False

    def _proofs(self, event: Event) -> bool:
        waiting = bool(self.parts.threads.waiting)
        self.parts.threads.run(1 + event.a % 8)
        return waiting

    def _damage_row(self, event: Event) -> bool:
        region = self.parts.spec.spec.station.region
        number = event.a % region.shape.num_rows
        chunks = chunks_of(self.half.manager).values()
        written = any(chunk.ref_cnt == -1 and int(chunk.chunk_id) == number for chunk in chunks)
        if written or self.parts.copies.hand.between[number]:
            # Nobody can find what happens to bytes between their copy and their tag, or between
            # their proof and their copy.
            return False
        row = region.row(number)
        row[self._struck(event, len(row))] ^= 1 << (event.b % 8)
        return True

    def _struck(self, event: Event, size: int) -> int:
        """Which byte is damaged: any, or one of the payload, which is a small part."""
        layout = self.parts.spec.spec.station.seal_setting.layout
        if event.b & 8:
            return int(layout.header_bytes + event.c % layout.payload_bytes)
        return (event.b * 256 + event.c) * 7 % size

    # Tiers

    def _tier(self, number: int) -> HandTier | None:
        tiers = self.parts.tiers
        return tiers[number % len(tiers)] if tiers else None

    def _end_job(self, event: Event, *, success: bool, count: int | None = None) -> bool:
        tier = self._tier(event.a)
        if tier is None or tier.hung or not tier.jobs:
            return False
        tier.end(event.b % len(tier.jobs), success=success and not tier.dead, count=count)
        return True

    def _tier_ok(self, event: Event) -> bool:
        done = False
        for _ in range(1 + event.c % 4):
            done = self._end_job(event, success=True) or done
        return done

    def _tier_fail(self, event: Event) -> bool:
        return self._end_job(event, success=False)

    def _tier_part(self, event: Event) -> bool:
        return self._end_job(event, success=False, count=event.c % 3)

    def _shrug(self, event: Event) -> bool:
        tier = self._tier(event.a)
        if tier is not None:
            tier.shrugs += 1 + event.b % 6
        return tier is not None

    def _lose(self, event: Event) -> bool:
        tier = self._tier(event.a)
        if tier is None or not tier.objects:
            return False
        del tier.objects[list(tier.objects)[event.b % len(tier.objects)]]
        return True

    def _damage_object(self, event: Event) -> bool:
        tier = self._tier(event.a)
        if tier is None or not tier.objects:
            return False
        key = list(tier.objects)[event.b % len(tier.objects)]
        body = bytearray(tier.objects[key])
        body[self._struck(event, len(body))] ^= 1 << (event.b % 8)
        tier.objects[key] = bytes(body)
        return True

    def _kill(self, event: Event) -> bool:
        tier = self._tier(event.a)
        if tier is not None:
            tier.dead = event.b % 2 == 0
        return tier is not None

    def _hang(self, event: Event) -> bool:
        tier = self._tier(event.a)
        if tier is not None:
            tier.hung = True
        return tier is not None

    def _lie(self, event: Event) -> bool:
        tier = self._tier(event.a)
        if tier is not None:
            tier.lying = event.b % 2 == 0
        return tier is not None

    def _mute(self, event: Event) -> bool:
        tier = self._tier(event.a)
        if tier is not None:
            tier.mute = True
        return tier is not None

    def _revive(self, event: Event) -> bool:
        tier = self._tier(event.a)
        if tier is not None:
            tier.hung = tier.dead = tier.lying = tier.mute = False
        return tier is not None

    def _clock(self, event: Event) -> bool:
        self.parts.clock.now += 1 + event.a % 60
        return True

    # Resets

    def _reset(self, *, running: bool, connector: bool) -> bool:
        try:
            return bool(self.scheduler.reset_prefix_cache(running, connector))
        except RuntimeError as exc:
            # vLLM's own answer while requests wait for remote KV; the caller gets it.
            if "Failed to reset KV cache" not in str(exc):
                raise
            return False

    def _reset_blocks(self, event: Event) -> bool:
        return self._reset(running=False, connector=False)

    def _reset_running(self, event: Event) -> bool:
        return self._reset(running=True, connector=False)

    def _reset_connector(self, event: Event) -> bool:
        return self._reset(running=False, connector=True)

    def _reset_all(self, event: Event) -> bool:
        done = self._reset(running=True, connector=True)
        if done and self.parts.setting.new_weights and event.a % 2 and not self.engine.batches:
            self.parts.model.weights += 1
            self.parts.counts["new_weights"] += 1
        return done

    def _reset_twice(self, event: Event) -> bool:
        done = [bool(self.scheduler.reset_connector_cache()) for _ in range(2)]
        return all(done)

    def _pause(self, event: Event) -> bool:
        """Abort everything, as a pause does, and clear the caches."""
        self._aborted.update(self.scheduler.requests)
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        return self._reset_all(event)

    def _foreign_epoch(self, event: Event) -> bool:
        epochs = self.parts.spec.spec.epochs
        epochs._file.raise_epoch("another process")
        self.parts.clock.now += 2
        return True

    # Rest

    def settle(self, look: Callable[[], None]) -> None:
        """No more faults: everything must come to rest. Raises `WrongWorld` if it does not."""
        limit = _REST_STEPS + _STEPS_PER_REQUEST * len(self.scheduler.requests)
        for tier in self.parts.tiers:
            tier.shrugs = 0
        for _ in range(limit):
            if not self.scheduler.requests:
                break
            self._settle_once()
            look()
        else:
            raise WrongWorld("starved", "requests that no fault holds back do not end")
        for tier in self.parts.tiers:
            tier.hung = False
        self._rest(look)
        if any(tier.jobs or tier.results for tier in self.parts.tiers):
            # An idle engine waits for them no longer; the next request's steps hear of them.
            for tier in self.parts.tiers:
                tier.end_all()
            self._add(prompt_of(0, 2, 2, 0), 1, None)
            self._rest(look)
        self._judge_answers()

    def _rest(self, look: Callable[[], None]) -> None:
        for _ in range(_REST_STEPS):
            if not self.engine.busy:
                return
            self._settle_once()
            look()
        raise WrongWorld("starved", "the engine does not come to rest")

    def _settle_once(self, seconds: int = 5) -> None:
        self.engine.iterate()
        while self.parts.copies.waiting:
            self.parts.copies.run(0)
        self.parts.threads.run()
        for tier in self.parts.tiers:
            tier.end_all()
        self.parts.clock.now += seconds

    def _disturbed(self) -> bool:
        """Whether anything happened that a load may fail of."""
        return any(self.parts.counts[f"tried_{name}"] for name in _DISTURBING)

    def _judge_answers(self) -> None:
        if self.parts.counts["load_failed"] and not self._disturbed():
            raise WrongWorld("needless", "a load failed although nothing was damaged")
        for name, (length, answer) in self._asked.items():
            got = self.engine.answers.get(name, [])
            script = self.parts.scripts[name].tokens
            if got != script[length : length + len(got)]:
                raise WrongWorld("wrong-output", f"{name} answered with other tokens")
            end = self.engine.ends.get(name)
            failed = self.parts.setting.fail and end == "error"
            if failed and not self._disturbed():
                raise WrongWorld("needless", "a request failed although nothing was damaged")
            if name not in self._aborted and not failed and len(got) != answer:
                raise WrongWorld("wrong-output", f"{name} ended with {end} after {len(got)} tokens")
