# SPDX-License-Identifier: Apache-2.0
"""Under `fail`: who was told of a chunk fails with it, however its badness is found out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from vllm.v1.kv_offload.base import LookupResult

from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.engine_unit.sealed_world import World, key_of, running

HIT, MISS = LookupResult.HIT, LookupResult.MISS
A = key_of(1)


def test_everyone_who_was_told_to_ask_again_fails(tmp_path: Path) -> None:
    """The object is refused when it is looked at; both requests had asked for it."""
    with running(World(tmp_path, tiers=["fs"], fail=True)) as world:
        world.store(A)
        world.forget_rows()
        path = world.file(A)
        path.write_bytes(path.read_bytes()[:-1])
        one, two = world.request(), world.request()
        for request in (one, two):
            world.manager.waits.begin(request.req_id)
            assert world.lookup(A, request) is LookupResult.RETRY
        assert world.ask(A, one) is HIT
        assert world.ask(A, two) is HIT
        assert world.verdicts.is_condemned(one.req_id) and world.verdicts.is_condemned(two.req_id)


def test_nobody_fails_for_a_chunk_that_is_good(tmp_path: Path) -> None:
    """The positive control: both are served, and neither is condemned."""
    with running(World(tmp_path, tiers=["fs"], fail=True)) as world:
        world.store(A)
        world.forget_rows()
        one, two = world.request(), world.request()
        for request in (one, two):
            world.manager.waits.begin(request.req_id)
            assert world.lookup(A, request) is LookupResult.RETRY
        assert world.ask(A, one) is HIT and world.ask(A, two) is HIT
        assert not world.verdicts.is_condemned(one.req_id)
        assert not world.verdicts.is_condemned(two.req_id)


def test_an_object_that_the_store_refuses_while_it_is_loaded_fails_who_waits(
    tmp_path: Path,
) -> None:
    """Not the next one who asks: for him it is a miss."""
    with running(World(tmp_path, tiers=["hand"], fail=True)) as world:
        world.store(A)
        world.hand.complete_store()
        world.flush()
        world.primary.reset_cache()
        waiting, following = world.request(), world.request()
        world.manager.waits.begin(waiting.req_id)
        assert world.lookup(A, waiting) is LookupResult.HIT_PENDING
        world.step()
        name = world.names.name(A)
        del world.hand.objects[name]
        world.tier._store = SimpleNamespace(exists=lambda *_: False, quarantine=lambda *_: False)
        bad = Refusal.of(RefusalKind.TIER_OBJECT, "file bytes", 1, 0)
        world.tier._note_object(name, bad, True)
        world.hand.complete_load(count=0)
        world.step()
        answers = []
        for request in (waiting, following):
            world.manager.waits.begin(request.req_id)
            answers.append(world.lookup(A, request))
        assert answers == [HIT, MISS]
