# SPDX-License-Identifier: Apache-2.0
"""The targets by name. A module is imported when it is needed: instrumentation comes first."""

from __future__ import annotations

import importlib
from typing import NamedTuple, cast

from fuzz.target import Target


class Place(NamedTuple):
    """Where a target is (module of this folder, class), and what it does, in one line."""

    module: str
    kind: str
    summary: str


PLACES = {
    "header": Place(
        "header",
        "Header",
        "header bytes, CBOR and identity documents, layer names: read, compared, written back",
    ),
    "rows": Place(
        "rows",
        "Rows",
        "open() over whole rows: sealed chunks, edited, tags recomputed behind the edit",
    ),
    "keys": Place(
        "keys",
        "Keys",
        "key files, rings, secrets in the environment, epoch files: damaged, open, rolled back",
    ),
    "config": Place(
        "config",
        "Config",
        "kv_connector_extra_config: texts, objects, near misses, secrets in the wrong place",
    ),
    "disk": Place(
        "disk",
        "Disk",
        "kvsafe-fs over a folder of links, fifos, torn files, bad ledgers, and failing calls",
    ),
    "inspect": Place(
        "look",
        "Look",
        "kvsafe inspect over chunk files and folders that anybody may have left",
    ),
    "plans": Place(
        "plans",
        "Plans",
        "copy plans and geometries: taken or refused, and every byte that moves, one by one",
    ),
    "order": Place(
        "order",
        "Order",
        "order of conflicting copies and answers of lookups, beside a plain second book",
    ),
    "stations": Place(
        "stations",
        "Stations",
        "rows, seals and a tier as one small world: late jobs, reused rows, damaged objects",
    ),
    "machine": Place(
        "machine",
        "Machine",
        "the lifecycle's table: walks by chance in large worlds, every law at every move",
    ),
    "lmkeys": Place(
        "lmkeys",
        "LmKeys",
        "LMCache key texts, frames and companions: one text for one key, both ways",
    ),
    "lm": Place(
        "peers",
        "Lm",
        "lm:// client against a server that says anything, in any pieces, or nothing",
    ),
    "resp": Place(
        "peers",
        "Resp",
        "RESP client against a server that says anything, in any pieces, or nothing",
    ),
    "lifecycle": Place(
        "lifecycle",
        "Lifecycle",
        "vLLM's scheduler over our manager, tiers and seals: any plan of requests and faults",
    ),
}

_SELFTEST = Place("selftest", "SelfTest", "every fault that the runner has to notice")


def kind_of(name: str) -> type[Target]:
    """The class of the target of that name. Raises `KeyError` for another name."""
    place = _SELFTEST if name == "selftest" else PLACES[name]
    module = importlib.import_module(f"fuzz.targets.{place.module}")
    return cast(type[Target], getattr(module, place.kind))


def make(name: str) -> Target:
    """The target of that name, ready to run."""
    return kind_of(name)()
