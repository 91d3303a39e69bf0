# SPDX-License-Identifier: Apache-2.0
"""Proof with real peers: vLLM engines with LMCache and with kvsafe share chunks, both ways.

    conformance/lmcache/setup && python -m conformance.lmcache.interop [--part a]... [--json]
        [--version 0.4.7] [--record]

Every part starts real engines on a tiny model, one at a time, and compares tokens with those of
an engine without any connector. A line per promise; exit status 1 when one does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from conformance.lmcache import client_suite, server_suite
from conformance.lmcache.driver import Driver
from conformance.lmcache.hostile import HostileServer
from conformance.lmcache.peers.lab import CHUNK, PROMPT, Engine, EngineFailed, Lab, Said
from conformance.lmcache.peers.servers import NotHere, lm_server, mp_server, redis_server
from conformance.lmcache.record import keep

HITS = len(PROMPT) // CHUNK * CHUNK
SETTLE_S = 3.0
STORED_S = 60.0
BUILTIN = {"hash_algo": "builtin", "none_hash_seed": "0"}
MP_PLANES = {"0.4.7": 2}
LIES = ("bit-flip", "other-key", "old-answer", "short-length", "cut-payload", "silent")


@dataclass(frozen=True)
class Line:
    """One promise: which part, what was promised, whether it held, what was seen."""

    part: str
    promise: str
    held: bool
    seen: str


@dataclass
class Proof:
    """The lines so far, and the tokens that every engine must give."""

    lab: Lab
    tokens: tuple[int, ...]
    lines: list[Line] = field(default_factory=list)
    quiet: bool = False

    def note(self, part: str, promise: str, held: bool, seen: object) -> None:
        """Write one promise down and show it."""
        line = Line(part, promise, held, str(seen))
        self.lines.append(line)
        if not self.quiet:
            print(f"{'ok ' if held else 'NOT'} ({part}) {promise}: {line.seen}", flush=True)

    def of(self, part: str) -> list[Line]:
        """The lines of one part."""
        return [line for line in self.lines if line.part == part]

    def same(self, part: str, who: str, said: Said, cached: int | None = None) -> None:
        """Tokens as without a connector, and so many of the prompt's tokens not computed."""
        self.note(part, f"{who}: tokens equal", said.tokens == self.tokens, self._seen(said))
        if cached is not None:
            self.note(part, f"{who}: {cached} tokens cached", said.cached == cached, said.cached)

    def _seen(self, said: Said) -> str:
        if said.tokens == self.tokens:
            return f"{said.tokens[:4]}..."
        return f"{list(said.tokens)}, not {list(self.tokens)}"


def _write(engine: Engine) -> Said:
    said = engine.say(PROMPT, linger_s=SETTLE_S)[0]
    # Ours says when it has stored; of LMCache's nothing can be told from outside.
    end = time.monotonic() + STORED_S
    while engine.counters and time.monotonic() < end:
        if engine.counted("kvsafe:peer_operations") >= HITS // CHUNK:
            break
        engine.say(linger_s=1.0)
    return said


def _read(engine: Engine) -> Said:
    return engine.say(PROMPT, linger_s=1.0)[0]


def part_a(proof: Proof) -> None:
    """LMCache writes, kvsafe reads with trust: peer; with trust: attested it must not."""
    with lm_server(proof.lab.version) as address:
        url = f"lm://{address[0]}:{address[1]}"
        with proof.lab.lmcache(address) as engine:
            proof.same("a", "LMCache writes", _write(engine), 0)
        with proof.lab.kvsafe(url, "a-peer", trust="peer", **BUILTIN) as engine:
            proof.same("a", "kvsafe reads, trust peer", _read(engine), HITS)
        with proof.lab.kvsafe(url, "a-attested", **BUILTIN) as engine:
            proof.same("a", "kvsafe reads, attested, nobody attests", _read(engine), 0)


def part_b(proof: Proof) -> None:
    """kvsafe writes, LMCache reads; hashes of the other kind than in part a."""
    with lm_server(proof.lab.version) as address:
        url = f"lm://{address[0]}:{address[1]}"
        with proof.lab.kvsafe(url, "b") as engine:
            proof.same("b", "kvsafe writes, attested", _write(engine), 0)
        hashes = {"LMCACHE_PRE_CACHING_HASH_ALGORITHM": "sha256_cbor"}
        # kvsafe's default seed is what LMCache takes where PYTHONHASHSEED is not set.
        with proof.lab.lmcache(address, **hashes, PYTHONHASHSEED="") as engine:
            proof.same("b", "LMCache reads", _read(engine), HITS)


def part_c(proof: Proof) -> None:
    """Two kvsafe engines through an lm:// server, attested; and one without the key.

    Key file and epoch file are what attesting needs in common; state folders are their own.
    """
    with lm_server(proof.lab.version) as address:
        url = f"lm://{address[0]}:{address[1]}"
        with proof.lab.kvsafe(url, "c") as engine:
            proof.same("c", "the first kvsafe writes", _write(engine), 0)
        with proof.lab.kvsafe(url, "c-second") as engine:
            proof.same("c", "the second kvsafe reads, attested", _read(engine), HITS)
        with proof.lab.kvsafe(url, "c-stranger", keys="stranger.json") as engine:
            proof.same("c", "a kvsafe with another key", _read(engine), 0)


def part_d(proof: Proof) -> None:
    """LMCache's multiprocess server and kvsafe share a Redis, both ways."""
    lab = proof.lab
    planes: dict[str, Any] = {"mp_planes": MP_PLANES.get(lab.version, 1)}
    with redis_server() as redis:
        url = f"resp://{redis[0]}:{redis[1]}"
        with mp_server(redis, lab.version) as port, lab.lmcache_mp(port) as engine:
            proof.same("d", "LMCache MP writes", _write(engine), 0)
        with lab.kvsafe(url, "d-peer", trust="peer", **planes) as engine:
            proof.same("d", "kvsafe reads from the Redis, trust peer", _read(engine), HITS)
    with redis_server() as redis:
        url = f"resp://{redis[0]}:{redis[1]}"
        with lab.kvsafe(url, "d", **planes) as engine:
            proof.same("d", "kvsafe writes to the Redis", _write(engine), 0)
        with mp_server(redis, lab.version) as port, lab.lmcache_mp(port) as engine:
            proof.same("d", "LMCache MP reads", _read(engine), HITS)
        with lab.kvsafe(url, "d", **planes) as engine:
            proof.same("d", "a second kvsafe reads, attested", _read(engine), HITS)


def part_e(proof: Proof) -> None:
    """Servers that lie: every temper against our clients, the worst against an engine."""
    for wire in ("lm", "resp"):
        driver = Driver([sys.executable, "-m", "conformance.lmcache.drivers.kvsafe_peer"], 10.0)
        try:
            chosen = [c for c in server_suite.choose(f"{wire}-client", None) if c.level != "proof"]
            found = client_suite.examine(wire, ("127.0.0.1", 0), driver, chosen)
            failed = [f"{r.case}: {r.found}" for r in found if r.verdict == "fail"]
        finally:
            driver.close()
        seen = "; ".join(failed) or "none failed"
        proof.note("e", f"{len(chosen)} tempers of a {wire} server", not failed, seen)
    with HostileServer() as server:
        _lie_to_an_engine(proof, server)


def _lie_to_an_engine(proof: Proof, server: HostileServer) -> None:
    """One engine fills the server, a second one reads while the server lies: a prompt per lie."""
    url = f"lm://{server.host}:{server.port}"
    prompts = {lie: _prompt(number) for number, lie in enumerate((*LIES, "good"), 1)}
    with proof.lab.kvsafe(url, "e") as engine:
        written = engine.say(*prompts.values(), linger_s=SETTLE_S)
    right = dict(zip(prompts, (said.tokens for said in written), strict=True))
    with proof.lab.kvsafe(url, "e", deadline_s=4.0) as engine:
        for lie, prompt in prompts.items():
            server.play(lie)
            said = engine.say(prompt, linger_s=1.0)[0]
            wanted = HITS if lie == "good" else 0
            held = said.tokens == right[lie] and said.cached == wanted
            refused = engine.counted("kvsafe:refusals_total")
            seen = f"{said.cached} cached, {refused:.0f} refusals so far"
            proof.note("e", f"an engine, attested, the server plays {lie}", held, seen)
            server.play("good")


def _prompt(number: int) -> list[int]:
    return [(7 * i + 3 + 13 * number) % 500 + 2 for i in range(len(PROMPT))]


PARTS: dict[str, Callable[[Proof], None]] = {
    "a": part_a,
    "b": part_b,
    "c": part_c,
    "d": part_d,
    "e": part_e,
}


def main() -> int:
    """Run the parts that were asked for; 0 all held, 1 not all, 2 something is missing here."""
    options = _options()
    try:
        with Lab.open(options.version) as lab:
            proof = _baseline(lab, options.json)
            for name in options.part or PARTS:
                _run(proof, name)
                if options.record:
                    keep(options.version, name, [asdict(one) for one in proof.of(name)])
    except NotHere as error:
        print(f"interop: {error}", file=sys.stderr)
        return 2
    failed = [line for line in proof.lines if not line.held]
    if options.json:
        document: dict[str, Any] = {"version": options.version}
        print(json.dumps({**document, "lines": [asdict(line) for line in proof.lines]}, indent=1))
    else:
        print(f"{len(proof.lines)} promises, {len(failed)} not held")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="repeatable")
    parser.add_argument("--version", default="0.5.6", help="LMCache's version")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help="keep it for the published table")
    return parser.parse_args()


def _baseline(lab: Lab, quiet: bool) -> Proof:
    with lab.plain() as engine:
        first, second = (engine.say(PROMPT)[0] for _ in range(2))
    if first.tokens != second.tokens:
        raise NotHere(f"an engine that repeats itself: {first.tokens}, then {second.tokens}")
    if not quiet:
        print(f"without a connector: {list(first.tokens)}", flush=True)
    return Proof(lab, first.tokens, quiet=quiet)


def _run(proof: Proof, name: str) -> None:
    try:
        PARTS[name](proof)
    except EngineFailed as error:
        print(error, file=sys.stderr)
        proof.note(name, "engines start and answer", False, str(error).splitlines()[0])


if __name__ == "__main__":
    sys.exit(main())
