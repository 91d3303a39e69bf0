# SPDX-License-Identifier: Apache-2.0
"""Turns: requests that have loaded and do not run yet must leave each other room to run (V).

A load has its blocks before its request runs, and a request that waits is not preempted. vLLM
keeps free what loaded requests still need, but for a group with a sliding window it takes the
places before the window for blocks that are held, and may keep free too few. Then the first of
them is not admitted, and the others are not asked; nor are they if the first is one whose load
has failed, and which holds nothing. With full attention alone vLLM's sum is right, and nothing
is noted here.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    SchedulerOffloadConfig,
)
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from kvsafe.engine.requests.windows import first_kept_token


class _Place(NamedTuple):
    """A request with a load: blocks it holds once loaded, and blocks it needs to run at most."""

    request: Any
    held: int
    whole: int

    @property
    def rest(self) -> int:
        """Blocks that it needs beyond those it holds, at most."""
        return self.whole - self.held

    @property
    def waits(self) -> bool:
        """Whether the request has neither run nor ended."""
        status = self.request.status
        return not (status == RequestStatus.RUNNING or RequestStatus.is_finished(status))

    @property
    def holds(self) -> bool:
        """Whether it has blocks: until vLLM looks at it, even if its load has failed."""
        request = self.request
        loads = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        return loads or bool(request.num_computed_tokens)


class Turns:
    """Who has loaded and waits for its turn. One thread (scheduler).

    Every one of them can run as soon as nobody else does, in whatever order they come: what
    they hold together, and the most that one of them needs more, is never more than there is.
    Requests that run do not count: they end, or are preempted.
    """

    def __init__(
        self,
        config: SchedulerOffloadConfig,
        blocks: int,
        caps: dict[int, int],
        ahead: int,
        note: Callable[[str], None],
    ) -> None:
        """The accelerator's blocks, the null block left out; what one request holds at most.

        `caps`: blocks per request, for the groups that give up blocks. `ahead`: tokens beyond
        its own that a request needs slots for. `note` is told why a request is held back, once
        for each of its waits: `room`, `behind` (the first one that found no room) or `failed`.
        """
        self._groups = config.kv_group_configs
        self._blocks = blocks
        self._caps = caps
        self._ahead = ahead
        self._loaded: dict[str, _Place] = {}
        self._first: str | None = None
        self._note = note
        self._held: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._loaded)

    def __contains__(self, req_id: str) -> bool:
        """If it asks what there is to load, its load has failed."""
        return req_id in self._loaded

    def fits(self, request: Any, computed: int) -> bool:
        """Whether a load of everything up to `computed` tokens leaves room for everybody.

        Who was told no first is first: others with a load do not overtake it.
        """
        others = self._others(request) if self._loaded else ()
        if not others:
            self._first = None
            return True
        if self._first not in (None, request.request_id):
            self._hold(request, "behind")
            return False
        places = [*others, self._place(request, computed)]
        held = sum(place.held for place in places)
        fits = held + max(place.rest for place in places) <= self._blocks
        self._first = None if fits else request.request_id
        if not fits:
            self._hold(request, "room")
        return fits

    def stands_back(self, request: Any, free: int) -> bool:
        """Whether the request, whose load has failed, is to let others that have loaded pass.

        `free`: blocks that are free now. vLLM may demand them twice for such a request (U).
        """
        others = self._others(request)
        needs = 2 * self._place(request, 0).whole + sum(place.rest for place in others)
        back = bool(others) and needs > free
        if back:
            self._hold(request, "failed")
            self._first = self._first or request.request_id
        return back

    def _hold(self, request: Any, reason: str) -> None:
        if request.request_id not in self._held:
            self._held.add(request.request_id)
            self._note(reason)

    def _others(self, request: Any) -> list[_Place]:
        self.pass_on()
        req_id = request.request_id
        return [place for other, place in self._loaded.items() if other != req_id and place.holds]

    def admit(self, request: Any, local: int, loaded: int) -> None:
        """The request was given its blocks: it loads so many tokens after the local ones."""
        if not self._caps:
            return
        self._held.discard(request.request_id)
        if loaded:
            self._loaded[request.request_id] = self._place(request, local + loaded)
        elif self._first == request.request_id:
            # It computes: nobody waits behind it.
            self._first = None

    def pass_on(self, scheduled: Collection[str] = ()) -> None:
        """Forget those that have ended or run, as the scheduled do."""
        self._loaded = {
            req_id: place
            for req_id, place in self._loaded.items()
            if req_id not in scheduled and place.waits
        }

    def forget(self, ended: Collection[str]) -> None:
        """These requests are over: nobody waits behind them."""
        self._held.difference_update(ended)
        if self._first in ended:
            self._first = None

    def _place(self, request: Any, computed: int) -> _Place:
        held = whole = 0
        for index, group in enumerate(self._groups):
            size = int(group.tokens_per_block)
            given_up = first_kept_token(group, computed) // size
            most = -(-(int(request.num_tokens) + self._ahead) // size) - given_up
            most = min(most, self._caps.get(index, most))
            whole += most
            held += min(most, -(-computed // size) - given_up)
        return _Place(request, held, whole)


def turns_for(
    config: SchedulerOffloadConfig,
    vllm_config: Any,
    kv_cache_config: Any,
    note: Callable[[str], None],
) -> Turns:
    """Of use only where a group gives up blocks behind a window, or all before its chunk."""
    caps = {
        index: group.kv_cache_spec.max_admission_blocks_per_request(
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            max_model_len=vllm_config.model_config.max_model_len,
        )
        for index, group in enumerate(config.kv_group_configs)
        if isinstance(group.kv_cache_spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
    }
    drafts = vllm_config.speculative_config
    # A token to come, the drafts for it, and slots for as many drafts again.
    ahead = 1 + 2 * int(drafts.num_speculative_tokens) if drafts is not None else 0
    return Turns(config, int(kv_cache_config.num_blocks) - 1, caps, ahead, note)
