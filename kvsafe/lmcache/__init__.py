# SPDX-License-Identifier: Apache-2.0
"""LMCache as a peer: its keys, hashes, wires and layouts, and clients that trust nothing.

Pure: no vllm, no torch. `layout` and `content` need numpy, everything else only the core
dependencies.

- `keys`: `CacheKey` (lm:// key text), `parse_key`, `request_tags`; `objectkeys`: `ObjectKey`
  (RESP key text of the multiprocess server), `kv_rank`.
- `hashes`: `hash_chain(name, seed)`; `chunking`: `chunks`, `PrefixHashes`.
- `frames`: lm:// frames and the check of replies; `resp`: RESP replies read with bounds.
- `layout`: pages of a row to chunks and back; `content`: values that no model computes;
  `companion`: what attests a chunk beside it.
- `links`, `wire`, `exchange`: pooled connections with deadlines; windows of requests.
- `lmclient.LmClient`, `respclient.RespClient`: both are a `PeerStore` (`answers`): `look`,
  `fetch`, `store`, `remove` take lists and answer in the same order with `Found`, `Lost` or a
  numbered `Refusal` (13xx), never with an exception.
"""

from kvsafe.lmcache.answers import Answer, ChunkShape, Fetch, Found, Lost, Offer, PeerStore
from kvsafe.lmcache.chunking import CHUNK_TOKENS, Chunk, PrefixHashes, chunks
from kvsafe.lmcache.frames import Dtype, Fmt, chunk_shape
from kvsafe.lmcache.hashes import ALGORITHMS, HashChain, hash_chain
from kvsafe.lmcache.keys import CacheKey, parse_key, request_tags
from kvsafe.lmcache.links import LinkSetting
from kvsafe.lmcache.lmclient import LmClient
from kvsafe.lmcache.objectkeys import ObjectKey, kv_rank, parse_object_key
from kvsafe.lmcache.respclient import RespClient, RespSetting
from kvsafe.lmcache.wire import Address

__all__ = [
    "ALGORITHMS",
    "CHUNK_TOKENS",
    "Address",
    "Answer",
    "CacheKey",
    "Chunk",
    "ChunkShape",
    "Dtype",
    "Fetch",
    "Fmt",
    "Found",
    "HashChain",
    "LinkSetting",
    "LmClient",
    "Lost",
    "ObjectKey",
    "Offer",
    "PeerStore",
    "PrefixHashes",
    "RespClient",
    "RespSetting",
    "chunk_shape",
    "chunks",
    "hash_chain",
    "kv_rank",
    "parse_key",
    "parse_object_key",
    "request_tags",
]
