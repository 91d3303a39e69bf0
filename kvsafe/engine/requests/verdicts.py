# SPDX-License-Identifier: Apache-2.0
"""Under `kv_load_failure_policy: fail`, a request that met a refused chunk must fail.

A chunk that is refused at promotion has not been promised to anyone yet: to vLLM it would
look like an ordinary miss, and the request would be recomputed, whatever the operator
chose. So the requests that were told to wait for it are noted here; when it is refused they
are told "hit" once, and the load that follows fails with the refusal.
"""

from collections import defaultdict

from kvsafe.seal.refusal import Refusal, RefusalKind


class Verdicts:
    """Which requests wait for which keys, and which have to fail. One thread (scheduler).

    Does nothing unless `active` (the policy is `fail`).
    """

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self._waiting: defaultdict[bytes, set[str]] = defaultdict(set)
        self._waits_of: defaultdict[str, set[bytes]] = defaultdict(set)
        self._condemned: defaultdict[str, dict[bytes, Refusal]] = defaultdict(dict)

    def waits(self, request: str, key: bytes) -> None:
        """The request was told that this chunk is on its way."""
        if self.active:
            self._waiting[key].add(request)
            self._waits_of[request].add(key)

    def refused(self, key: bytes, refusal: Refusal) -> None:
        """The chunk was refused: everyone who waits for it has to fail.

        Not so for a chunk of a revoked epoch: the operator asked for it to be forgotten, so
        meeting one is an ordinary miss.
        """
        if not self.active or refusal.kind is RefusalKind.EPOCH_REVOKED:
            return
        for request in self._waiting.pop(key, ()):
            self._condemned[request][key] = refusal

    def condemn(self, request: str, key: bytes, refusal: Refusal) -> None:
        """This request met a refused chunk."""
        if self.active:
            self._condemned[request][key] = refusal

    def has_to_fail(self, request: str, key: bytes) -> bool:
        """Whether the request is to be told "hit" for a chunk that was refused."""
        return bool(self._condemned) and key in self._condemned.get(request, ())

    def take(self, request: str) -> Refusal | None:
        """The refusal with which the load of this request fails now, if it has to."""
        refusals = self._condemned.pop(request, None)
        return next(iter(refusals.values())) if refusals else None

    def forget(self, request: str) -> None:
        """The request is over."""
        self._condemned.pop(request, None)
        for key in self._waits_of.pop(request, ()):
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(request)
                if not waiting:
                    del self._waiting[key]
