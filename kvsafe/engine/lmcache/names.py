# SPDX-License-Identifier: Apache-2.0
"""Under which names a chunk lies on a peers' server: LMCache's for its parts, ours beside them.

LMCache knows a chunk by the tokens up to its end and by little else: nothing of weights, adapters,
images or, on lm://, the cache salt. Requests whose KV depends on more than LMCache's key says are
kept away from such a server: for them every chunk is a miss and nothing is stored.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvsafe.engine.requests.prompts import Prompt, prompt_of
from kvsafe.lmcache.chunking import PrefixHashes
from kvsafe.lmcache.hashes import HashChain, Value
from kvsafe.lmcache.keys import CacheKey, request_tags
from kvsafe.lmcache.objectkeys import ObjectKey, kv_rank
from kvsafe.seal.refusal import Refusal

_SEPARATOR = "\0"
_OURS = "kvsafe"


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """The key texts of one chunk: one part per worker, and the companion."""

    parts: tuple[str, ...]
    companion: str

    @property
    def label(self) -> bytes:
        """All of them in one; no key text holds the separator."""
        return _SEPARATOR.join((*self.parts, self.companion)).encode()

    @classmethod
    def of(cls, label: bytes) -> "ChunkNames":
        """What `label` was made from."""
        *parts, companion = label.decode().split(_SEPARATOR)
        return cls(tuple(parts), companion)


class Naming(Protocol):
    """How one kind of peer names chunks."""

    def prepare(self, prompt: Prompt, context: ReqContext) -> object | Refusal:
        """What of a request goes into every name of it, or why it has none; None: stay away."""
        ...

    def names(self, extra: object, value: Value, ours: bytes) -> ChunkNames | Refusal:
        """The names of the chunk with this hash; `ours` is its object name."""
        ...


@dataclass(frozen=True, slots=True)
class LmNaming:
    """Names on a lm:// server: `CacheEngineKey` texts, tags from the request."""

    chain: HashChain
    model: str
    world_size: int
    dtype: str

    def prepare(self, prompt: Prompt, context: ReqContext) -> object | Refusal:
        """The request's tags. A salted request stays away: LMCache's key has no salt."""
        return None if prompt.salt else request_tags(context.kv_transfer_params)

    def names(self, extra: object, value: Value, ours: bytes) -> ChunkNames | Refusal:
        """One key per worker; the companion is the first one's with a type and a tag of ours."""
        tags = extra if isinstance(extra, tuple) else ()
        first = CacheKey(
            self.model, self.world_size, 0, self.chain.number(value), self.dtype, tags=tags
        )
        tag = (_OURS, ours[:16].hex())
        companion = replace(first, dtype="uint8", tags=(*tags, tag))
        # The longest of all, so what it passes all pass.
        last = replace(first, worker=self.world_size - 1)
        for key in (companion, last):
            if refusal := key.check():
                return refusal
        parts = tuple(replace(first, worker=rank).text() for rank in range(self.world_size))
        return ChunkNames(parts, companion.text())


@dataclass(frozen=True, slots=True)
class RespNaming:
    """Names in the store of LMCache's multiprocess servers: `ObjectKey` texts, with the salt."""

    model: str
    world_size: int

    def prepare(self, prompt: Prompt, context: ReqContext) -> object | Refusal:
        """The salt."""
        return prompt.salt

    def names(self, extra: object, value: Value, ours: bytes) -> ChunkNames | Refusal:
        """One key per worker; the companion has a name that no server of LMCache asks for."""
        size, digest = self.world_size, value if isinstance(value, bytes) else b""
        keys = [
            ObjectKey(self.model, kv_rank(size, rank, size, rank), 0, digest, str(extra))
            for rank in range(size)
        ]
        for key in keys:
            if refusal := key.check():
                return refusal
        return ChunkNames(tuple(key.text() for key in keys), f"{_OURS}:1:{ours.hex()}")


@dataclass(slots=True)
class _Known:
    """What is known of one request: its hashes so far, and what goes into its names."""

    prompt: Prompt
    hashes: PrefixHashes
    extra: object


@dataclass(slots=True)
class NameBook:
    """Names of the chunks of all requests under way. Used by the scheduler's thread.

    `ours` gives the object name of a key; `on_refusal` hears once per request of key material
    that is refused.
    """

    naming: Naming
    chain: HashChain
    chunk_tokens: int
    ours: Callable[[bytes], bytes]
    on_refusal: Callable[[Refusal], None]
    _known: dict[str, _Known | None] = field(default_factory=dict)

    def names(self, key: OffloadKey, context: ReqContext) -> ChunkNames | None:
        """The names of a chunk of this request, or None if it has none."""
        known = self._of(context)
        end = context.get_offload_key_position(key)
        if known is None or end is None:
            return None
        value = known.hashes.value(end, known.prompt.tokens)
        if value is None:
            return None
        found = self.naming.names(known.extra, value, self.ours(key))
        if isinstance(found, Refusal):
            self._stay_away(context, found)
            return None
        return found

    def is_prompt(self, key: OffloadKey, context: ReqContext) -> bool:
        """Whether the chunk ends inside the request's prompt."""
        known, end = self._of(context), context.get_offload_key_position(key)
        return known is not None and end is not None and end <= known.prompt.prompt_tokens

    def forget(self, context: ReqContext) -> None:
        """A request has ended."""
        self._known.pop(context.req_id, None)

    def _of(self, context: ReqContext) -> _Known | None:
        if context.req_id not in self._known:
            self._known[context.req_id] = None
            prompt = prompt_of(context)
            if prompt is not None and prompt.only_tokens:
                extra = self.naming.prepare(prompt, context)
                if isinstance(extra, Refusal):
                    self._stay_away(context, extra)
                elif extra is not None:
                    hashes = PrefixHashes(self.chain, self.chunk_tokens)
                    self._known[context.req_id] = _Known(prompt, hashes, extra)
        return self._known[context.req_id]

    def _stay_away(self, context: ReqContext, refusal: Refusal) -> None:
        self._known[context.req_id] = None
        self.on_refusal(refusal)
