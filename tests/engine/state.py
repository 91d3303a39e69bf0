# SPDX-License-Identifier: Apache-2.0
"""What an engine process of the tests holds: the engine, its parts, and what was asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

STEP_LIMIT = 400
SETTLE_S = 60.0


@dataclass
class State:
    """One engine in this process (in-process: `VLLM_ENABLE_V1_MULTIPROCESSING=0`)."""

    llm: Any = None
    count: int = 0
    running: dict[str, dict[str, Any]] = field(default_factory=dict)
    statuses: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def engine(self) -> Any:
        """`LLMEngine`."""
        return self.llm.llm_engine

    @property
    def core(self) -> Any:
        """`EngineCore`."""
        return self.engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        """The scheduler side's `KVSafeConnector` (None without one)."""
        return self.core.scheduler.connector

    @property
    def manager(self) -> Any:
        """`KVSafeManager`."""
        return self.connector.connector_scheduler.manager

    @property
    def tier(self) -> Any:
        """The first `ProvingTier`."""
        return self.manager.secondary_tiers[0]

    @property
    def station(self) -> Any:
        """The scheduler side's station."""
        return self.connector._spec.station

    @property
    def worker_connector(self) -> Any:
        """The worker side's `KVSafeConnector` (in this process)."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def proof(self) -> Any:
        """The worker's `RowProof`."""
        return self.worker_connector.connector_worker.worker._proof

    @property
    def copier(self) -> Any:
        """The worker's copier."""
        return self.worker_connector.connector_worker.worker._copier

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Set an attribute until `restore`; returns what was there."""
        missing = object()
        own = owner.__dict__.get(name, missing) if hasattr(owner, "__dict__") else missing
        before = getattr(owner, name)

        def back() -> None:
            if own is missing and not hasattr(type(owner), "__slots__"):
                delattr(owner, name)
            else:
                setattr(owner, name, before if own is missing else own)

        setattr(owner, name, value)
        self.undo.append(back)
        return before

    def restore(self) -> None:
        """Take back every replacement, last first."""
        while self.undo:
            self.undo.pop()()

    def add(self, prompt: list[int], count: int, **values: Any) -> str:
        """Hand one request to the engine; it is not stepped yet."""
        from vllm import SamplingParams

        self.count += 1
        name = f"r{self.count}"
        question: dict[str, Any] = {"prompt_token_ids": prompt}
        if values.get("salt"):
            question["cache_salt"] = values["salt"]
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        internal = self.engine.add_request(
            name, question, sampling, lora_request=_adapter(values.get("lora"))
        )
        self.running[name] = {"steps": 0, "internal": internal}
        if self.connector is not None:
            status = self.connector.connector_scheduler._req_status[internal]
            self.statuses[self.mark(prompt, values)] = status
        return name

    @staticmethod
    def mark(prompt: list[int], values: dict[str, Any]) -> tuple[Any, ...]:
        """By what a request is found again."""
        lora = values.get("lora") or {}
        return (*prompt, values.get("salt"), lora.get("name"), lora.get("id"))

    def step(self) -> list[dict[str, Any]]:
        """One engine step; the requests that ended in it."""
        for entry in self.running.values():
            entry["steps"] += 1
        ended = []
        for output in self.engine.step():
            if output.finished and output.request_id in self.running:
                entry = self.running.pop(output.request_id)
                ended.append({"name": output.request_id, **_ended(output, entry["steps"])})
        return ended

    def finish(self, names: list[str], limit: int = STEP_LIMIT) -> dict[str, dict[str, Any]]:
        """Step until these requests have ended; raises when that takes too many steps."""
        unknown = set(names) - set(self.running)
        if unknown:
            raise RuntimeError(f"these have ended already or never began: {sorted(unknown)}")
        done: dict[str, dict[str, Any]] = {}
        idle_until = time.monotonic() + SETTLE_S
        while len(done) < len(names):
            before = self.generated
            done.update({entry["name"]: entry for entry in self.step() if entry["name"] in names})
            if self.generated == before:
                # Waiting for a transfer: steps without work do not count, time does.
                time.sleep(0.001)
                if time.monotonic() > idle_until:
                    raise RuntimeError(f"no progress for {SETTLE_S:.0f} s: {sorted(names)}")
            else:
                idle_until = time.monotonic() + SETTLE_S
                limit -= 1
            if limit < 0:
                raise RuntimeError(f"too many steps: {sorted(names)}")
        return done

    @property
    def generated(self) -> int:
        """A number that grows whenever the engine computes."""
        return int(self.notes.get("computed", 0))

    def settle(self) -> None:
        """Step until neither requests nor transfers are left."""
        deadline = time.monotonic() + SETTLE_S
        while self.core.scheduler.has_requests():
            self.step()
            time.sleep(0.001)
            if time.monotonic() > deadline:
                raise RuntimeError("transfers or requests never ended")

    def keys(self, prompt: list[int], **values: Any) -> Iterator[Any]:
        """The offload keys of a prompt that was asked before, group by group."""
        for group in self.statuses[self.mark(prompt, values)].group_states:
            yield from group.offload_keys


def _adapter(value: dict[str, Any] | None) -> Any:
    if value is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(
        value["name"], value["id"], value["path"], load_inplace=value.get("inplace", False)
    )


def _ended(output: Any, steps: int) -> dict[str, Any]:
    first = output.outputs[0]
    return {
        "tokens": list(first.token_ids),
        "cached": int(output.num_cached_tokens or 0),
        "finish": str(first.finish_reason),
        "steps": steps,
    }
