# SPDX-License-Identifier: Apache-2.0
"""A scheduler side without an engine whose tier is a peers' server, and prompts for it."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kvsafe.engine.lmcache.probe import NOTE, PageNote, note_document
from kvsafe.engine.lmcache.tier import KVSafeLmcacheTier
from kvsafe.engine.requests.prompts import attach_prompt
from kvsafe.engine.tiers.proving import ProvingTier
from kvsafe.lmcache.frames import OK, Reply
from tests.engine_unit.sealed_world import PAYLOAD, World
from tests.support.peers import LmServer, RespServer, Value

MODEL = "some/model"
TOKENS = 8
NOTE_OF_PAGES = PageNote(
    rule="k-transposed",
    dtype="bfloat16",
    tokens=TOKENS,
    parts=1,
    heads=4,
    head_size=16,
    itemsize=2,
    order=(1, 0),
)
"""Two layers, the second tensor first; one block per chunk, so that a row has one page each."""


def spec_of(station: Any, **changes: Any) -> Any:
    """What the tier asks of vLLM's spec."""
    parallel = {"pp_size": 1, "pcp_size": 1, "dcp_size": 1, "world_size": 1}
    config = SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=TOKENS),) * changes.pop("groups", 1),
        replicated_layout=changes.pop("replicated", False),
        canonical_layout=False,
        parallel=SimpleNamespace(**{**parallel, **changes}),
        model=SimpleNamespace(name=MODEL),
    )
    return SimpleNamespace(station=station, blocks_per_chunk=1, config=config)


def prompt(tokens: Sequence[int], **changes: Any) -> Any:
    """What a tier sees of a request."""
    values: dict[str, Any] = {
        "all_token_ids": list(tokens),
        "num_prompt_tokens": len(tokens),
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "resumable": False,
    }
    return SimpleNamespace(**{**values, **changes})


class PeerWorld(World):
    """A world whose one tier is a `kvsafe-lmcache` tier on `server`."""

    def __init__(
        self,
        folder: Path,
        server: LmServer | RespServer,
        *,
        note: PageNote = NOTE_OF_PAGES,
        tier: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.server = server
        self._note = note
        self._options = tier or {}
        super().__init__(folder, tiers=["kvsafe-lmcache"], **options)

    def _tier(self, index: int, kind: str) -> ProvingTier:
        self.station.register(0, {"invented": True}, {NOTE: note_document(self._note)})
        scheme = "lm" if isinstance(self.server, LmServer) else "resp"
        options = {
            "url": f"{scheme}://{self.server.address}",
            "chunk_tokens": TOKENS,
            "threads": 2,
            **self._options,
        }
        rows = self.primary.get_kv_memoryview()
        inner = KVSafeLmcacheTier(spec_of(self.station), rows, kind, **options)
        return ProvingTier(inner, index, inner.join(self.desk, index), inner.objects)

    @property
    def peer(self) -> KVSafeLmcacheTier:
        """The tier itself."""
        inner = self.tier.inner
        assert isinstance(inner, KVSafeLmcacheTier)
        return inner

    def asks(self, *keys: OffloadKey, **changes: Any) -> ReqContext:
        """A new request whose prompt is made of the chunks of these keys."""
        params = changes.pop("params", None)
        context = self.request()
        context.kv_transfer_params = params
        tokens = [token for key in keys for token in tokens_of(key)]
        attach_prompt(context, prompt(tokens, **changes))
        for count, key in enumerate(keys, 1):
            context.set_offload_key_position(key, count * TOKENS)
        return context

    def kept(self, *keys: OffloadKey, **changes: Any) -> None:
        """Store chunks through to the server, then lose the host rows."""
        context = self.asks(*keys, **changes)
        self.store(*keys, context=context)
        self.flush()
        self.manager.on_request_finished(context)
        self.forget_rows()

    def loaded(self, key: OffloadKey, **changes: Any) -> bool:
        """Whether a new request gets this chunk."""
        context = self.asks(key, **changes)
        hit = self.ask(key, context) is LookupResult.HIT
        self.manager.on_request_finished(context)
        return hit

    @property
    def chunks_there(self) -> list[Any]:
        """The names of chunks on the server, companions left out."""
        return [name for name in self.server.values if not ours(name)]

    @property
    def companions_there(self) -> list[Any]:
        """The names of companions on the server."""
        return [name for name in self.server.values if ours(name)]


def ours(name: str | bytes) -> bool:
    """Whether a name on the server is that of a companion."""
    return b"kvsafe" in name if isinstance(name, bytes) else "kvsafe" in name


def tokens_of(key: OffloadKey) -> list[int]:
    """The tokens of a chunk."""
    return list(bytes(key)[:TOKENS])


def data(server: LmServer | RespServer, name: Any) -> bytes:
    """A value on a server."""
    value = server.values[name]
    return value if isinstance(value, bytes) else value.data


def put(server: LmServer | RespServer, name: Any, value: bytes) -> None:
    """Replace a value on a server."""
    if isinstance(server, RespServer):
        server.values[name] = value
    else:
        old = server.values[name].reply
        server.values[name] = Value(old, value)


def computed_chunk(seed: int = 1) -> bytes:
    """Values that a model could have computed: finite, no token of zeros."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0x3C00, 0x3F80, PAYLOAD // 2, dtype=np.uint16)
    return values.tobytes()


def peers_reply() -> Reply:
    """How LMCache announces a chunk of this world."""
    return Reply(OK, PAYLOAD, 1, 3, (2, 2, TOKENS, 64), 0)


@contextlib.contextmanager
def peer_world(folder: Path, server: LmServer | RespServer, **options: Any) -> Iterator[PeerWorld]:
    """A world over a server, closed at the end."""
    world = PeerWorld(folder, server, **options)
    try:
        yield world
    finally:
        world.close()
