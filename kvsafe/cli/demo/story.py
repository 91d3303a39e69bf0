# SPDX-License-Identifier: Apache-2.0
"""The parts of the demo, in order. Each starts one server, looks, and notes what held."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from kvsafe.cli.demo import chunkfile
from kvsafe.cli.demo.client import Answer
from kvsafe.cli.demo.lab import ANSWER_TOKENS, PROMPT_TOKENS, Lab, StepError
from kvsafe.cli.demo.reading import RefusalLine, read_refusals
from kvsafe.cli.demo.server import Server

__all__ = ["PARTS", "Part"]

PAYLOAD_TAG = 1001
ELSEWHERE = 703
OTHER_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}


@dataclass(frozen=True)
class Part:
    """One part of the story: its short name, its heading, and what it does."""

    name: str
    heading: str
    tell: Callable[[Lab], None]


def store(lab: Lab) -> None:
    """A cold server computes the prompt and stores its chunks."""
    with lab.server("1-store") as server:
        lab.cold = lab.complete(server)
        first = lab.settle(lambda: bool(chunkfile.chunk_files(lab.store)), "waiting for a chunk")
        if not first:
            raise StepError("no chunk came to the disk tier")
        lab.chunk = lab.authentic()[0]
        stored = lab.all_on_disk()
        chunks = lab.authentic()
        lab.chunk = chunks[0]
    lab.screen.say(f"on disk: {len(chunks)} chunk files. One of them:")
    lab.screen.say()
    for line in lab.chunk.lines():
        lab.screen.say(f"  {line}")
    lab.screen.say()
    expected = f"{lab.chunks} chunks on disk, every header authentic"
    lab.check("store", expected, f"{len(chunks)} chunks on disk, every header authentic", stored)


def restart(lab: Lab) -> None:
    """A new process serves the same prompt from disk."""
    with lab.server("2-restart") as server:
        _served_from_disk(lab, server, "restart")


def damage(lab: Lab) -> None:
    """One bit of one stored chunk changes: it is refused and recomputed."""
    victim = _damage_one(lab, 0)
    step = "damaged chunk"
    with lab.server("3-damage") as server:
        answer = lab.complete(server)
        _refused(lab, server, step)
        _recomputed(lab, answer, step)
        _set_aside(lab, victim, step)
        lab.check(step, "the engine is alive", _health(server), server.alive)
        _heal(lab)


def fail(lab: Lab) -> None:
    """The same damage where the operator chose that such a request fails."""
    _damage_one(lab, -1)
    step = "policy fail"
    with lab.server("4-fail", policy="fail") as server:
        outcome = server.client.ask(lab.prompt, ANSWER_TOKENS)
        seen = f"HTTP {outcome.status} {outcome.reason}: {outcome.message}".rstrip(": ")
        lab.check(step, "the request fails: HTTP 500", seen, outcome.status == 500)
        _refused(lab, server, step)
        lab.check(step, "the engine is alive", _health(server), server.alive)
        lab.screen.say("the client asks again:")
        answer = lab.complete(server)
        lab.check(step, "the next request: same tokens", _tokens(lab, answer), lab.same(answer))
        _heal(lab)


def setting(lab: Lab) -> None:
    """Another rope setting: old chunks are other KV, and none is served."""
    step = "changed setting"
    lab.screen.say(f"--hf-overrides '{json.dumps(OTHER_ROPE)}'")
    with lab.server("5-setting", overrides=OTHER_ROPE) as server:
        answer = lab.complete(server)
        hits = _served(server)
        nothing = hits == 0 and answer.cached_tokens == 0
        seen = f"{hits} chunks served, {answer.cached_tokens} cached tokens"
        lab.check(step, "0 chunks served", seen, nothing)
        named = lab.settle(lambda: _counted(server, ELSEWHERE) > 0, "waiting for the reason")
        line = _line(server, ELSEWHERE)
        right = named and line is not None and line.field.startswith("rope.")
        lab.check(step, f"refusal {ELSEWHERE} names rope.*", _told(server, ELSEWHERE), right)


def back(lab: Lab) -> None:
    """The old setting again: the old chunks are found again."""
    with lab.server("6-back") as server:
        _served_from_disk(lab, server, "changed back")


PARTS = (
    Part("store", "A server computes a long prompt, and every chunk of its KV is sealed", store),
    Part(
        "restart", "Another process serves the prompt from disk, each chunk proven first", restart
    ),
    Part("damaged chunk", "One bit flips on disk: refused, set aside, recomputed", damage),
    Part("policy fail", 'The same damage under kv_load_failure_policy "fail"', fail),
    Part(
        "changed setting", "Another rope setting: the stored KV means something else now", setting
    ),
    Part("changed back", "The old setting again: the old chunks are good again", back),
)


def _served_from_disk(lab: Lab, server: Server, step: str) -> None:
    answer = lab.complete(server)
    lab.settle(lambda: _served(server) >= lab.chunks, "waiting for the metrics")
    served, wanted = _served(server), lab.chunks * _chunk_tokens(lab)
    lab.check(
        step,
        f"{lab.chunks} chunks served, {wanted} cached tokens",
        f"{served} chunks served, {answer.cached_tokens} cached tokens; first token "
        f"{lab.cold.first_token_s:.2f} s cold, {answer.first_token_s:.2f} s now",
        served == lab.chunks and answer.cached_tokens == wanted,
    )
    lab.check(step, "the same tokens", _tokens(lab, answer), lab.same(answer))
    lab.screen.say(_proof(server))


def _proof(server: Server) -> str:
    """What the proofs cost, as the server counts it."""
    metrics = server.client.metrics()
    seconds = metrics.value("kvsafe:verify_seconds_sum")
    checks = int(metrics.value("kvsafe:verify_seconds_count"))
    return f"the proofs took {seconds:.3f} s: {checks} checks, from disk and again before the copy"


def _served(server: Server) -> int:
    return server.client.metrics().total("kvsafe:chunks_served")


def _damage_one(lab: Lab, place: int) -> chunkfile.ChunkFile:
    """Flip a bit in the middle of the payload of one chunk.

    `place` is its place in the listing; names are keyed and do not say which part of the prompt
    a chunk holds.
    """
    victim = lab.authentic()[place]
    offset = victim.fixed.header_bytes + victim.fixed.payload_bytes // 2
    before, after = chunkfile.flip_byte(victim.path, offset)
    name = f"{victim.path.name[:16]}..."
    lab.screen.say(f"{name} byte {offset:,} on disk: {before:02x} becomes {after:02x}")
    return victim


def _refused(lab: Lab, server: Server, step: str) -> None:
    """Check that the damage was refused, by metrics and by log."""
    lab.settle(lambda: _counted(server, PAYLOAD_TAG) > 0, "waiting for the metrics")
    line = _line(server, PAYLOAD_TAG)
    right = _counted(server, PAYLOAD_TAG) > 0 and line is not None and line.step == 10
    expected = f"refusal {PAYLOAD_TAG} at step 10, the field named"
    lab.check(step, expected, _told(server, PAYLOAD_TAG), right)


def _recomputed(lab: Lab, answer: Answer, step: str) -> None:
    fewer = answer.cached_tokens < lab.chunks * _chunk_tokens(lab)
    computed = PROMPT_TOKENS - answer.cached_tokens
    seen = f"{answer.cached_tokens} cached tokens, {computed} computed; {_tokens(lab, answer)}"
    lab.check(step, "the rest recomputed, the same tokens", seen, fewer and lab.same(answer))


def _set_aside(lab: Lab, victim: chunkfile.ChunkFile, step: str) -> None:
    wanted = f"{PAYLOAD_TAG}-{victim.path.name}"
    names = [path.name for path in chunkfile.quarantined_files(lab.store)]
    seen = ", ".join(f"moved to {chunkfile.QUARANTINE}/{name[:13]}..." for name in names)
    lab.check(
        step, "the file lies in quarantine", seen or "nothing in quarantine", names == [wanted]
    )


def _heal(lab: Lab) -> None:
    """The recomputed chunk is stored anew; the next part needs it."""
    if lab.all_on_disk():
        lab.screen.say(f"all {lab.chunks} chunks are on disk again, the recomputed one sealed anew")
        return
    raise StepError("the recomputed chunk did not come back to the disk tier")


def _chunk_tokens(lab: Lab) -> int:
    return 0 if lab.chunk is None else lab.chunk.tokens


def _counted(server: Server, number: int) -> int:
    return server.client.metrics().total("kvsafe:refusals", number=str(number))


def _line(server: Server, number: int) -> RefusalLine | None:
    lines = [line for line in read_refusals(server.log) if line.number == number]
    return lines[0] if lines else None


def _told(server: Server, number: int) -> str:
    """A refusal as metrics and log tell it."""
    line, count = _line(server, number), _counted(server, number)
    if line is None:
        return f"{count} x refusal {number}, nothing in the log"
    return (
        f"{count} x refusal {number} at step {line.step} (tier {line.tier}): {line.field}, "
        f"expected {line.expected}, found {line.found}"
    )


def _tokens(lab: Lab, answer: Answer) -> str:
    return "the same tokens" if lab.same(answer) else "OTHER TOKENS"


def _health(server: Server) -> str:
    return "/health answers 200" if server.alive else "no health"
