# SPDX-License-Identifier: Apache-2.0
"""The operations that a test can ask of an engine process: ordinary ones here, faults beside."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from tests.engine import faults
from tests.engine.state import State


def start(state: State, env: dict[str, str], settings: dict[str, Any]) -> None:
    """Build the engine."""
    os.environ.update(env)
    from vllm import LLM

    state.llm = LLM(**settings)
    if env.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") == "0":
        _watch_computing(state)


def _watch_computing(state: State) -> None:
    scheduler = state.core.scheduler
    schedule = scheduler.schedule

    def counted(*values: Any, **named: Any) -> Any:
        output = schedule(*values, **named)
        state.notes["computed"] = state.generated + (output.total_num_scheduled_tokens > 0)
        return output

    scheduler.schedule = counted


def ask(
    state: State, prompts: list[list[int]], count: int, limit: int = 400, **values: Any
) -> list[dict[str, Any]]:
    """Run requests together to their ends."""
    names = [state.add(prompt, count, **values) for prompt in prompts]
    done = state.finish(names, limit)
    return [done[name] for name in names]


def submit(state: State, prompt: list[int], count: int, **values: Any) -> str:
    """Hand a request over without a step; returns its name."""
    return state.add(prompt, count, **values)


def finish(state: State, names: list[str]) -> list[dict[str, Any]]:
    """Step until these requests have ended."""
    done = state.finish(names)
    return [done[name] for name in names]


def step(state: State, count: int = 1) -> list[dict[str, Any]]:
    """Some steps; what ended in them."""
    ended: list[dict[str, Any]] = []
    for _ in range(count):
        ended += state.step()
    return ended


def abort(state: State, name: str) -> None:
    """Abort a request."""
    state.running.pop(name, None)
    state.engine.abort_request([name])


def settle(state: State) -> None:
    """Step until neither requests nor transfers are left."""
    state.settle()


def drop_device(state: State) -> bool:
    """Empty the accelerator's prefix cache."""
    return bool(state.llm.reset_prefix_cache())


def drop_host(state: State) -> int:
    """Withdraw every idle chunk from the host rows; how many there were."""
    primary = state.manager.primary_tier
    keys = {key for status in state.statuses.values() for g in status.group_states
            for key in g.offload_keys}  # fmt: skip
    return len(primary.withdraw(keys))


def reset(state: State) -> bool:
    """Reset including external tiers, as `POST /reset_prefix_cache?reset_external=true` does."""
    return bool(state.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True))


def reset_external(state: State) -> bool:
    """Reset the connector's tiers alone, while requests run."""
    return bool(state.core.scheduler.reset_connector_cache())


def wait_epoch(state: State, epoch: int) -> None:
    """Step (small requests) until this engine has heard of an epoch."""
    deadline = time.monotonic() + 30
    while state.connector._spec.epochs.persistent != epoch:
        state.finish([state.add([5, 6, 7], 1)])
        time.sleep(0.05)
        if time.monotonic() > deadline:
            raise RuntimeError("the epoch never came")


def paths(state: State, prompt: list[int], **values: Any) -> list[str]:
    """The fs tier's file of every chunk of a prompt."""
    names = state.tier._desk.names
    return [state.tier._store.path(names.name(key)) for key in state.keys(prompt, **values)]


def keys(state: State, prompt: list[int], **values: Any) -> list[str]:
    """vLLM's offload keys of a prompt, as hex."""
    return [bytes(key).hex() for key in state.keys(prompt, **values)]


def metrics(state: State) -> dict[str, float]:
    """All kvsafe: samples, after a step that has drained the counters."""
    from prometheus_client import REGISTRY

    state.finish([state.add([5, 6, 7], 1)])
    state.settle()
    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        if not family.name.startswith("kvsafe:"):
            continue
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            text = ",".join(f"{key}={value}" for key, value in labels.items())
            found[f"{sample.name}{{{text}}}"] = sample.value
    return found


def free_blocks(state: State) -> int:
    """Blocks of the accelerator that nobody holds."""
    return int(state.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def resident(state: State, prompt: list[int], **values: Any) -> list[int | None]:
    """The host row of every chunk of a prompt, None where it has none."""
    primary = state.manager.primary_tier
    return [primary.row_of(key) for key in state.keys(prompt, **values)]


def describe(state: State) -> dict[str, Any]:
    """Numbers of this engine that tests plan with."""
    spec = state.connector._spec
    groups = state.connector.connector_scheduler.config.kv_group_configs
    return {
        "chunk_tokens": [group.tokens_per_chunk for group in groups],
        "header_bytes": state.station.seal_setting.layout.header_bytes,
        "row_bytes": spec.kv_bytes_per_chunk,
        "rows": spec.num_chunks,
        "epoch": spec.epochs.persistent,
        "certain": spec.epochs.certain,
        "identity": state.station.identity.digest(state.station.suite).hex(),
    }


def stop(state: State) -> None:
    """Shut the engine down."""
    if state.llm is not None:
        state.engine.engine_core.shutdown()


def restore(state: State) -> None:
    """Take back every fault."""
    state.restore()


_ORDINARY: tuple[Callable[..., Any], ...] = (
    start, ask, submit, finish, step, abort, settle, stop, restore,
    drop_device, drop_host, reset, reset_external, wait_epoch,
    paths, keys, metrics, free_blocks, resident, describe,
)  # fmt: skip

OPERATIONS: dict[str, Callable[..., Any]] = {
    operation.__name__: operation for operation in (*_ORDINARY, *faults.FAULTS)
}
