# SPDX-License-Identifier: Apache-2.0
"""Faults that a test can put into a running engine, by name; `restore` takes them back."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.state import State

GATE_S = 40.0


def damage_row(state: State, prompt: list[int], chunk: int, at: int, **values: Any) -> int:
    """Flip one bit of a chunk's host row, as a broken memory would; returns the row."""
    row, view = _row(state, prompt, chunk, **values)
    view[at] ^= 1
    return row


def row_digest(state: State, prompt: list[int], chunk: int, **values: Any) -> str:
    """SHA-256 of the payload of a chunk's host row."""
    import hashlib

    _, view = _row(state, prompt, chunk, **values)
    return hashlib.sha256(view[state.station.seal_setting.layout.header_bytes :]).hexdigest()


def _row(state: State, prompt: list[int], chunk: int, **values: Any) -> tuple[int, Any]:
    row = state.manager.primary_tier.row_of(list(state.keys(prompt, **values))[chunk])
    if row is None:
        raise RuntimeError("that chunk is in no row")
    return int(row), state.station.region.row(row)


def blocks_digest(state: State, prompt: list[int], count: int, **values: Any) -> list[str]:
    """SHA-256 of the first accelerator blocks that the last request of a prompt had."""
    import hashlib

    blocks = state.statuses[state.mark(prompt, values)].group_states[0].block_ids[:count]
    tensors = [item.view.numpy() for item in state.copier._geometry.tensors]
    return [
        hashlib.sha256(b"".join(tensor[block].tobytes() for tensor in tensors)).hexdigest()
        for block in blocks
    ]


def reallocate(state: State, prompt: list[int], chunk: int, **values: Any) -> None:
    """Begin a new allocation of a chunk's row, as if it were given to another chunk."""
    row, _ = _row(state, prompt, chunk, **values)
    state.station.region.ledger.allocate(row)


def open_as_other_layouts(state: State, prompt: list[int], chunk: int) -> dict[str, Any]:
    """Open a chunk's real file as readers that differ in one thing each: accepted, or number."""
    from dataclasses import replace

    from kvsafe.seal.cbor import decode, encode
    from kvsafe.seal.layout import Slice
    from kvsafe.seal.opening import Expectation, Opener
    from kvsafe.seal.refusal import Refusal

    key = list(state.keys(prompt))[chunk]
    data = memoryview(Path(state.tier._store.path(state.tier._desk.names.name(key))).read_bytes())
    setting, geometry = state.station.seal_setting, state.station.geometry()
    base: dict[str, Any] = {
        "suite": setting.suite,
        "keyring": setting.keyring,
        "layout": setting.layout,
        "identity_document": setting.identity_document,
        "identity_digest": setting.identity_digest,
        "geometry_document": geometry,
    }

    def judge(**changes: Any) -> Any:
        epoch = state.connector._spec.epochs.epoch
        answer = Opener(Expectation(**{**base, **changes})).open(data, key, epoch)
        return answer.number if isinstance(answer, Refusal) else "accepted"

    def geometry_with(change: Callable[[dict[str, Any]], None]) -> bytes:
        document: Any = decode(geometry, limit=1 << 16)
        owners, inner = document["workers"][0]
        worker: Any = decode(inner, limit=1 << 16)
        change(worker)
        document["workers"][0] = [owners, encode(worker)]
        return encode(document)

    half = setting.layout.payload_bytes // 2
    two = (Slice(0, 0, half), Slice(1, half, half))
    values: Any = decode(setting.identity_document, limit=1 << 16)
    other = "LBNHC" if values["kv_layout"] == "LBHNC" else "LBHNC"
    identity = encode({**values, "kv_layout": other})
    return {
        "same": judge(),
        "page bytes": judge(geometry_document=geometry_with(_grow_page)),
        "layer order": judge(geometry_document=geometry_with(_swap_layers)),
        "slices": judge(layout=replace(setting.layout, slices=two)),
        "row bytes": judge(layout=replace(setting.layout, payload_bytes=half, slices=two[:1])),
        "identity": judge(
            identity_document=identity, identity_digest=setting.suite.digest(identity)
        ),
    }


def _grow_page(worker: dict[str, Any]) -> None:
    worker["groups"][0]["refs"][0]["page_bytes"] += 4096


def _swap_layers(worker: dict[str, Any]) -> None:
    run = worker["groups"][0]["refs"][0]
    run.update(tensor=run["count"] - 1, step=-1)


# Transfers


def _steps(state: State, direction: str) -> list[tuple[str, Callable[[Any], Any]]]:
    from kvsafe.device import Direction

    steps: dict[Any, list[tuple[str, Callable[[Any], Any]]]] = state.copier._engine._steps
    return steps[Direction[direction.upper()]]


def hold(state: State, direction: str, release_after_s: float | None = None) -> None:
    """Let no row of this direction begin until `release` (or, with a time, until then)."""
    gate = threading.Event()
    state.notes["gate"] = gate
    entered = state.notes["entered"] = threading.Event()

    def wait(_row: Any) -> None:
        entered.set()
        if release_after_s is not None:
            gate.wait(release_after_s)
        elif not gate.wait(GATE_S):
            raise RuntimeError("the gate was never opened")

    steps = _steps(state, direction)
    step = ("gate", wait)
    steps.insert(0, step)
    state.undo.append(lambda: steps.remove(step))


def slow(state: State, direction: str, seconds: float) -> None:
    """Let every row of this direction take so much longer."""
    steps = _steps(state, direction)
    step = ("slow", lambda _row: time.sleep(seconds))
    steps.insert(0, step)
    state.undo.append(lambda: steps.remove(step))


def release(state: State, after_s: float = 0.0) -> None:
    """Let held rows go, from another thread when a time is given."""
    gate = state.notes["gate"]
    if after_s:
        threading.Timer(after_s, gate.set).start()
    else:
        gate.set()


def entered(state: State) -> bool:
    """Whether a row has come to the gate."""
    return bool(state.notes["entered"].is_set())


def finish_copies(state: State) -> None:
    """Wait until every copy has ended, without telling the scheduler."""
    jobs = set(state.copier._jobs)
    if not state.copier.wait(jobs, GATE_S):
        raise RuntimeError("copies still run")


def jobs(state: State) -> int:
    """Jobs that the copier has in hand."""
    return len(state.copier._jobs)


def refuse_store(state: State, at: int) -> None:
    """The `at`-th row that is stored from now on fails when it is to be tagged."""
    from kvsafe.seal.refusal import Refusal, RefusalKind

    steps = _steps(state, "store")
    name, real = steps[-1]
    lock, seen = threading.Lock(), [0]

    def after_store(row: Any) -> Any:
        with lock:
            mine, seen[0] = seen[0], seen[0] + 1
        if mine == at:
            return Refusal.of(RefusalKind.COPY_FAULT, "test", "a tag", "none")
        return real(row)

    _swap_last(state, steps, (name, after_store))


def skip_tagging(state: State) -> None:
    """Workers copy and say that they are done, but leave no record."""
    steps = _steps(state, "store")
    _swap_last(state, steps, (steps[-1][0], lambda row: None))


def _swap_last(state: State, steps: list[Any], step: tuple[str, Callable[[Any], Any]]) -> None:
    before = steps[-1]
    steps[-1] = step
    state.undo.append(lambda: steps.__setitem__(-1, before))


# Checks switched off, for the canaries


def accept_payloads(state: State) -> None:
    """Step 10 of opening says yes to everything."""
    from kvsafe.seal.opening import Opener

    state.replace(Opener, "open_slice", lambda *_: None)


def accept_epochs(state: State) -> None:
    """Step 6 of opening says yes to everything, and the tag of a slice is taken as it is."""
    from kvsafe.seal import opening

    state.replace(opening, "_check_epoch", lambda *_: None)


def accept_late_rows(state: State) -> None:
    """The fence says yes to everything, where it is called and where it is captured."""
    from kvsafe.engine.rows.proof import RowProof

    state.replace(RowProof, "fence", lambda *_: None)
    steps = _steps(state, "store")
    place = next(index for index, (name, _) in enumerate(steps) if name == "fence")
    before = steps[place]
    steps[place] = ("fence", lambda row: None)
    state.undo.append(lambda: steps.__setitem__(place, before))


# Tiers


def before_read(state: State, what: str, path: str) -> None:
    """Once, between a lookup and the read that follows it: do something to a file."""
    inner = state.tier.inner
    submit = inner.submit_load
    done = [False]

    def submit_load(job: Any) -> None:
        if not done[0]:
            done[0] = True
            _MISHAPS[what](Path(path))
        submit(job)

    state.replace(inner, "submit_load", submit_load)


def _shorten(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)


_MISHAPS: dict[str, Callable[[Path], Any]] = {"remove": Path.unlink, "shorten": _shorten}


def fail_reads(state: State, times: int) -> None:
    """The next `times` batches that the fs tier reads end with EIO."""
    from vllm.v1.kv_offload.tiering.fs import manager

    real = manager.batch_load_block
    left = [times]

    def batch_load_block(*values: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*values)

    state.replace(manager, "batch_load_block", batch_load_block)


def stall_reads(state: State) -> None:
    """The next batch that the fs tier reads does not return until `release`."""
    from vllm.v1.kv_offload.tiering.fs import manager

    real = manager.batch_load_block
    gate = state.notes["gate"] = threading.Event()
    entered = state.notes["entered"] = threading.Event()

    def batch_load_block(*values: Any) -> Any:
        if not entered.is_set():
            entered.set()
            gate.wait(GATE_S)
        return real(*values)

    state.replace(manager, "batch_load_block", batch_load_block)


def stalled(state: State) -> bool:
    """Whether a read hangs."""
    return bool(state.notes["entered"].is_set())


# Preemption and the end of processes


def count_preemptions(state: State) -> None:
    """Count preemptions from now on (`preemptions` tells)."""
    scheduler = state.core.scheduler
    real = scheduler._preempt_request
    state.notes["preemptions"] = 0

    def preempt(*values: Any, **named: Any) -> Any:
        state.notes["preemptions"] += 1
        if state.copier._jobs:
            state.notes["preempted_in_flight"] = state.notes.get("preempted_in_flight", 0) + 1
        return real(*values, **named)

    state.replace(scheduler, "_preempt_request", preempt)


def preemptions(state: State) -> list[int]:
    """How many there were, and how many of them while a transfer was in flight."""
    return [state.notes["preemptions"], state.notes.get("preempted_in_flight", 0)]


def kill_at(state: State, phase: str) -> None:
    """Let the process kill itself (SIGKILL) when its start comes to this point."""
    from kvsafe.engine.manager import KVSafeManager
    from kvsafe.host.region import HostRegion

    owner, name = {
        "created": (HostRegion, "_write_front"),
        "registered": (HostRegion, "register_worker"),
        "unlinked": (HostRegion, "forget_name"),
        "managed": (KVSafeManager, "__init__"),
    }[phase]
    real = getattr(owner, name)

    def last_words(self: Any, *values: Any, **named: Any) -> None:
        if phase in ("registered", "unlinked"):
            real(self, *values, **named)
        print(f"\nREGION {getattr(self, 'path', '')}\n", flush=True)
        die(state)

    setattr(owner, name, last_words)


def die(state: State) -> None:
    """SIGKILL, here and now."""
    import signal

    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(GATE_S)


FAULTS: tuple[Callable[..., Any], ...] = (
    # what is there
    open_as_other_layouts, row_digest, blocks_digest, entered, stalled, jobs,
    preemptions,
    # what goes wrong
    damage_row, reallocate, hold, slow, release, finish_copies, refuse_store, skip_tagging,
    before_read, fail_reads, stall_reads, count_preemptions, kill_at, die,
    # what is switched off
    accept_payloads, accept_late_rows, accept_epochs,
)  # fmt: skip
