# SPDX-License-Identifier: Apache-2.0
"""From options and the engine's own facts to what a `kvsafe-lmcache` tier works with.

Everything that has to fit is compared here, once, and what does not fit refuses to start with
both numbers: chunk size, workers, model name, the layout that the workers found.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kvsafe.engine.config.lmcache import LmcacheOptions
from kvsafe.engine.config.problems import ConfigError, Problem
from kvsafe.engine.lmcache.names import LmNaming, Naming, RespNaming
from kvsafe.engine.lmcache.probe import NOTE, PageNote, read_note
from kvsafe.engine.lmcache.rows import PeerForm
from kvsafe.engine.station import Station
from kvsafe.lmcache.answers import ChunkShape, PeerStore
from kvsafe.lmcache.frames import Dtype, Fmt
from kvsafe.lmcache.hashes import HashChain
from kvsafe.lmcache.keys import check_name
from kvsafe.lmcache.layout import ChunkForm, ChunkLayout, page_rules
from kvsafe.lmcache.links import Links, LinkSetting
from kvsafe.lmcache.lmclient import LmClient
from kvsafe.lmcache.respclient import RespClient, RespSetting
from kvsafe.lmcache.wire import Address

_NUMBERS: Final = {
    "bfloat16": Dtype.BFLOAT16,
    "half": Dtype.FLOAT16,
    "float": Dtype.FLOAT32,
}
_IN_TIME: Final = 0.8
"""Of the tier's deadline, what one exchange with the server may take: it ends before its thread
is given up."""


def refuse(key: str, found: object, allowed: str, hint: str = "") -> ConfigError:
    """The error for one thing that does not fit."""
    return ConfigError(
        "kvsafe-lmcache:", [Problem(f"kvsafe-lmcache.{key}", str(found), allowed, hint)]
    )


def check_engine_fits(options: LmcacheOptions, spec: Any) -> None:
    """Raises `ConfigError` when the engine cannot share chunks of the peers' size and kind."""
    groups = spec.config.groups
    if len(groups) != 1:
        raise refuse("type", f"{len(groups)} KV-cache groups", "a model with one")
    if spec.config.replicated_layout or spec.config.canonical_layout:
        raise refuse("type", "a row layout of another kind", "plain slices, one per worker")
    parallel = spec.config.parallel
    if parallel.pp_size * parallel.pcp_size * parallel.dcp_size != 1:
        raise refuse("type", "pipeline or context parallelism", "tensor parallelism alone")
    block, per_chunk = int(groups[0].tokens_per_block), int(spec.blocks_per_chunk)
    if block * per_chunk != options.chunk_tokens:
        raise refuse(
            "chunk_tokens",
            f"{options.chunk_tokens}, but this engine's chunks have {block} x {per_chunk} = "
            f"{block * per_chunk} tokens",
            f"{block * per_chunk}, or blocks_per_chunk that gives {options.chunk_tokens}",
            "peers with another chunk size share nothing",
        )
    workers = int(parallel.world_size)
    if options.world_size not in (None, workers):
        raise refuse("world_size", options.world_size, f"{workers}, the workers of this engine")
    name = model_name(options, spec)
    if check_name("model_name", name) is not None:
        raise refuse("model_name", ascii(name), "a name without @ and %", "set model_name")


def model_name(options: LmcacheOptions, spec: Any) -> str:
    """The model's name in keys."""
    return str(spec.config.model.name) if options.model_name is None else options.model_name


def page_note(station: Station) -> PageNote:
    """What the workers found about their pages. Raises `ConfigError` if it is not one thing."""
    notes = {read_note(document) for document in station.notes(NOTE)}
    note = next(iter(notes), PageNote(problem="no worker has looked at its pages"))
    if len(notes) > 1 or note.problem:
        why = note.problem or "workers with different pages"
        raise refuse("type", why, "pages that can be converted to LMCache's chunks")
    return note


def peer_form(options: LmcacheOptions, note: PageNote, station: Station) -> PeerForm:
    """How chunks look to the peers. Raises `ConfigError` where slices are not made of pages."""
    rows, shape = station.seal_setting.layout, note.shape
    pages = rows.slots * note.parts
    areas = [tensor * pages * shape.nbytes for tensor in note.order]
    if options.scheme == "resp":
        # The multiprocess server sees whole blocks, whatever parts the backend sees.
        shape, pages = replace(shape, tokens=shape.tokens * note.parts), rows.slots
        first, planes = note.heads_first, options.mp_planes
        form = ChunkForm.multiprocess(shape, heads_first=first, planes=planes)
    else:
        rule = next(rule for rule in page_rules(shape) if rule.name == note.rule)
        form = ChunkForm.two_planes(rule, shape)
    layout = ChunkLayout(shape, form, areas, pages)
    lengths = {place.length for place in rows.slices}
    if lengths != {layout.nbytes}:
        raise refuse("type", f"slices of {sorted(lengths)} bytes", f"{layout.nbytes} bytes each")
    dtype = _NUMBERS[note.dtype]
    chunk = ChunkShape(int(Fmt.KV_2LTD), int(dtype), layout.dims, layout.nbytes)
    return PeerForm(layout, chunk, forgets=options.scheme == "resp")


def naming(options: LmcacheOptions, spec: Any, note: PageNote, chain: HashChain) -> Naming:
    """How chunks are named on the server."""
    name, workers = model_name(options, spec), int(spec.config.parallel.world_size)
    if options.scheme == "resp":
        return RespNaming(name, workers)
    return LmNaming(chain, name, workers, note.dtype)


def connect(
    options: LmcacheOptions, environ: Mapping[str, str] = os.environ
) -> tuple[PeerStore, Links]:
    """The client of the server. Nothing is connected before it is needed."""
    limit = options.deadline_s * _IN_TIME
    link = LinkSetting(
        address=Address(options.host, options.port),
        connections=options.threads + 1,
        connect_s=min(options.connect_s, limit),
        deadline_s=limit,
    )
    if options.scheme == "lm":
        client = LmClient(link)
        return client, client.links
    variable = options.password_env
    password = None if variable is None else environ.get(variable, "")
    setting = RespSetting(link, options.username, password, options.database, options.ttl_s)
    store = RespClient(setting)
    return store, store.links
