# SPDX-License-Identifier: Apache-2.0
"""Under `kv_load_failure_policy: fail`, a request that met a refused chunk must fail.

A chunk that is refused at promotion has not been promised to anyone yet: to vLLM it would
look like an ordinary miss, and the request would be recomputed, whatever the operator
chose. So the requests that were told of it are noted here; when it is refused they are
condemned, and whatever they are told next, their next load fails with the refusal (`failing`).
"""

from collections import defaultdict
from collections.abc import Iterable

from kvsafe.seal.refusal import Refusal, RefusalKind

_LAST_STEP = 10
"""Of opening a chunk: a refusal of a later number says nothing against the chunk."""


class Verdicts:
    """Which requests wait for which keys, and which have to fail. One thread (scheduler).

    Does nothing unless `active` (the policy is `fail`).
    """

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self._waiting: defaultdict[bytes, set[str]] = defaultdict(set)
        self._waits_of: defaultdict[str, set[bytes]] = defaultdict(set)
        self._condemned: defaultdict[str, dict[bytes, Refusal]] = defaultdict(dict)
        self._doubted: defaultdict[str, dict[bytes, Refusal]] = defaultdict(dict)

    def waits(self, request: str, key: bytes) -> None:
        """The request was told that this chunk is on its way."""
        if self.active:
            self._waiting[key].add(request)
            self._waits_of[request].add(key)

    def waits_only(self, request: str, keys: Iterable[bytes]) -> None:
        """The request has asked: it was told of these chunks, and cares for no others any more."""
        if not self.active:
            return
        keys = set(keys)
        for key in self._waits_of.pop(request, set()) - keys:
            self._drop(request, key)
        for key in keys:
            self.waits(request, key)

    def refused(self, key: bytes, refusal: Refusal | None) -> None:
        """The chunk was refused (None: it was not): everyone who waits for it has to fail.

        Not so for a chunk of a revoked epoch: the operator asked for it to be forgotten, so
        meeting one is an ordinary miss.
        """
        if not self.active or refusal is None or refusal.kind is RefusalKind.EPOCH_REVOKED:
            return
        for request in self._waiting.pop(key, ()):
            self._condemned[request][key] = refusal

    def doubt(self, key: bytes, refusal: Refusal) -> None:
        """The row of this chunk was refused in another request's load.

        Who was told of it has to fail if the chunk is a miss now: a good one may be in a tier.
        """
        if not self.active or refusal.kind is RefusalKind.EPOCH_REVOKED:
            return
        if refusal.step <= _LAST_STEP:
            for request in self._waiting.get(key, ()):
                self._doubted[request][key] = refusal

    def condemn(self, request: str, key: bytes, refusal: Refusal) -> None:
        """This request met a refused chunk, and with it everyone who waits for the chunk."""
        if self.active:
            self.refused(key, refusal)
            self._condemned[request][key] = refusal

    def has_to_fail(self, request: str, key: bytes) -> bool:
        """Asked at a miss: whether the request is to be told "hit", since the chunk was refused."""
        doubt = self._doubted[request].pop(key, None) if request in self._doubted else None
        if doubt is not None:
            self._condemned[request][key] = doubt
        return bool(self._condemned) and key in self._condemned.get(request, ())

    def is_condemned(self, request: str) -> bool:
        """Whether the next load of the request has to fail."""
        return bool(self._condemned) and request in self._condemned

    def take(self, request: str) -> Refusal | None:
        """The refusal with which the load of this request fails now, if it has to."""
        refusals = self._condemned.pop(request, None)
        return next(iter(refusals.values())) if refusals else None

    def release(self, request: str) -> None:
        """The request loads or computes: what becomes of other chunks is not its concern."""
        self._doubted.pop(request, None)
        for key in self._waits_of.pop(request, ()):
            self._drop(request, key)

    def forget(self, request: str) -> None:
        """The request is over."""
        self._condemned.pop(request, None)
        self.release(request)

    def _drop(self, request: str, key: bytes) -> None:
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.discard(request)
            if not waiting:
                del self._waiting[key]
