# SPDX-License-Identifier: Apache-2.0
"""Options of a `kvsafe-lmcache` tier: how they are checked, completed, and what they mean.

Host, port and hash algorithm may come from the environment (`VT_LMCACHE_HOST`,
`VT_LMCACHE_PORT`, `VT_LMCACHE_HASH_ALGO`); what the JSON says goes first. Passwords never stand in
the JSON: it gets logged.
"""

import os
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from kvsafe.engine.config.problems import Problem, Refused, describe, refuse
from kvsafe.engine.config.table import Option
from kvsafe.engine.config.values import (
    check_bool,
    check_seconds,
    int_between,
    matching,
    one_of,
)
from kvsafe.lmcache.hashes import DEFAULT_SEED, hash_chain
from kvsafe.lmcache.keys import check_name

HOST_VARIABLE: Final = "VT_LMCACHE_HOST"
PORT_VARIABLE: Final = "VT_LMCACHE_PORT"
HASH_VARIABLE: Final = "VT_LMCACHE_HASH_ALGO"
HASHES: Final = ("vllm", "sha256_cbor", "sha256", "builtin", "blake3")
_URL: Final = re.compile(
    r"(lm|resp)://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})"
)
_DEFAULT_PORTS: Final = {"lm": 65432, "resp": 6379}


def _check_host(value: object) -> str:
    allowed = "a host name or an address, without port"
    return str(matching(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}", allowed)(value))


def _check_url(value: object) -> str:
    if type(value) is not str or not _URL.fullmatch(value):
        # Not shown: somebody may have put a password into it.
        raise Refused(Problem("", "no such URL (not shown)", "lm://HOST:PORT or resp://HOST:PORT"))
    return value


def _check_model(value: object) -> str:
    if type(value) is not str or check_name("model_name", value) is not None:
        raise refuse(value, "printable ASCII without @ and %, no space at an end")
    return value


def _check_unfull(value: object) -> bool:
    if check_bool(value):
        hint = "rows hold whole chunks only; peers may save theirs, they are not asked for"
        raise refuse(value, "false", hint)
    return False


def _check_seed(value: object) -> str:
    text = str(value) if type(value) is int else value
    if type(text) is not str or not 1 <= len(text) <= 255 or not text.isprintable():
        raise refuse(value, "the PYTHONHASHSEED that the peers share")
    return text


_port: Final = int_between(1, 65535)
_variable: Final = matching(r"[A-Za-z_][A-Za-z0-9_]{0,127}", "a name of a variable", show=False)

KVSAFE_LMCACHE_TIER: Final[Mapping[str, Option]] = {
    "type": Option("text", "`kvsafe-lmcache`", one_of("kvsafe-lmcache"), required=True),
    "url": Option(
        "text", "`lm://HOST:PORT` or `resp://HOST:PORT`, in place of the next three.", _check_url
    ),
    "scheme": Option(
        "text", "`lm` (LMCache's own server) or `resp` (the Redis or Valkey that LMCache's "
        "multiprocess server uses; the way for new deployments).",
        one_of("lm", "resp"), default="`lm`",
    ),
    "host": Option("text", "Where the server listens.", _check_host, default=f"`{HOST_VARIABLE}`"),
    "port": Option(
        "integer", "Its port.", _port, default=f"`{PORT_VARIABLE}`, else 65432 or 6379"
    ),
    "trust": Option(
        "text", "`attested`: only chunks with a companion that a kvsafe engine sealed. `peer`: "
        "also what LMCache wrote, after every check that is possible (spec/lmcache.md).",
        one_of("attested", "peer"), default="`attested`",
    ),
    "hash_algo": Option(
        "text", "The peers' hash: `vllm` (the same as `sha256_cbor`), `sha256`, `builtin`, "
        "`blake3`.",
        one_of(*HASHES), default=f"`{HASH_VARIABLE}`, else `vllm`, with `resp` `blake3`",
    ),
    "none_hash_seed": Option(
        "text", "The peers' PYTHONHASHSEED; `builtin` needs one.", _check_seed,
        default=f"`{DEFAULT_SEED}`",
    ),
    "chunk_tokens": Option(
        "integer", "The peers' chunk size; must be what `block_size` or `blocks_per_chunk` gives.",
        int_between(1, 1 << 20), default="`256`",
    ),
    "model_name": Option(
        "text", "The model's name in keys.", _check_model, default="as vLLM was given it"
    ),
    "world_size": Option(
        "integer", "Workers in keys; must be what this engine has.", int_between(1, 255),
        default="this engine's",
    ),
    "worker_id": Option(
        "integer", "Only 0: worker N of this engine is worker N in keys.", int_between(0, 0),
        default="`0`",
    ),
    "offload_prompt_only": Option(
        "boolean", "Store prompt chunks only, not decoded ones.", check_bool, default="`true`"
    ),
    "save_unfull_chunk": Option(
        "boolean", "Only false: rows hold whole chunks.", _check_unfull, default="`false`"
    ),
    "threads": Option(
        "integer", "Threads that move chunks, one connection each.", int_between(1, 64),
        default="`4`",
    ),
    "deadline_s": Option(
        "seconds", "Longest wait, and longest run, of one operation; then it is a miss.",
        check_seconds, default="`10.0`",
    ),
    "connect_s": Option(
        "seconds", "Longest wait for a connection.", check_seconds, default="`2.0`"
    ),
    "mp_planes": Option(
        "integer", "`resp`: planes of the values that the peers' multiprocess servers keep: 1 with "
        "LMCache 0.5.6, 2 with 0.4.7. Nothing on the server says which: a wrong one serves and "
        "leaves wrong KV (spec/lmcache.md).",
        int_between(1, 2), default="`1`",
    ),
    "username": Option(
        "text", "`resp`: name for AUTH.", matching(r"[!-~]{1,128}", "printable ASCII")
    ),
    "password_env": Option("text", "`resp`: variable that holds the password.", _variable),
    "database": Option("integer", "`resp`: for SELECT.", int_between(0, 1 << 16), default="`0`"),
    "ttl_s": Option(
        "integer", "`resp`: seconds after which the server forgets what we stored.",
        int_between(1, 1 << 30), default="never",
    ),
    "locality": Option("text", "`LOCAL` or `REMOTE`.", one_of("LOCAL", "REMOTE")),
}  # fmt: skip
"""`backpressure` is added by `tiers`, which has its check."""

_RESP_ONLY: Final = ("username", "password_env", "database", "ttl_s", "mp_planes")


class LmcacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A tier's options, completed. Times in seconds; None stands for what only the engine knows."""

    scheme: str
    host: str
    port: int
    trust: str
    hash_algo: str
    none_hash_seed: str | None
    chunk_tokens: int
    model_name: str | None
    world_size: int | None
    offload_prompt_only: bool
    threads: int
    deadline_s: float
    connect_s: float
    username: str | None
    password_env: str | None
    database: int
    ttl_s: int | None
    mp_planes: int


def complete_lmcache(
    options: Mapping[str, object], environ: Mapping[str, str] = os.environ
) -> LmcacheOptions:
    """Fill in what was left out. Raises `Refused` with what cannot be, or not together."""
    values = dict(options)
    problems = [*_take_url(values), *_take_environment(values, environ)]
    scheme = str(values.setdefault("scheme", "lm"))
    values.setdefault("port", _DEFAULT_PORTS[scheme])
    values.setdefault("hash_algo", "blake3" if scheme == "resp" else "vllm")
    problems += [
        Problem(key, "an option of resp", "", "leave it out with lm")
        for key in _RESP_ONLY
        if key in values and scheme != "resp"
    ]
    if "host" not in values:
        hint = f"set host, url or the variable {HOST_VARIABLE}"
        problems.append(Problem("host", "nothing", "where the server listens", hint))
    variable = values.get("password_env")
    if isinstance(variable, str) and not environ.get(variable):
        found = "a name of no variable that is set in this process"
        problems.append(Problem("password_env", found, "the name of a variable with a password"))
    problems += _hash_problems(values, scheme)
    if problems:
        raise Refused(*problems)
    return _struct(values)


def _struct(values: Mapping[str, object]) -> LmcacheOptions:
    defaults: dict[str, object] = {
        "trust": "attested", "none_hash_seed": None, "chunk_tokens": 256, "model_name": None,
        "world_size": None, "offload_prompt_only": True, "threads": 4, "deadline_s": 10.0,
        "connect_s": 2.0, "username": None, "password_env": None, "database": 0, "ttl_s": None,
        "mp_planes": 1,
    }  # fmt: skip
    known = LmcacheOptions.__struct_fields__
    chosen = {name: value for name, value in values.items() if name in known}
    return msgspec.convert({**defaults, **chosen}, LmcacheOptions, strict=True)


def _take_url(values: dict[str, object]) -> list[Problem]:
    match = _URL.fullmatch(str(values.pop("url", "")))
    if match is None:
        return []
    given = {"scheme": match[1], "host": match[2].strip("[]"), "port": int(match[3])}
    twice = [Problem(key, "url as well", "one of the two") for key in given if key in values]
    values.update(given)
    if not 1 <= int(match[3]) <= 65535:
        twice.append(Problem("url", "no such port", "1 to 65535"))
    return twice


def _take_environment(values: dict[str, object], environ: Mapping[str, str]) -> list[Problem]:
    problems = []
    for key, variable in (
        ("host", HOST_VARIABLE),
        ("port", PORT_VARIABLE),
        ("hash_algo", HASH_VARIABLE),
    ):
        text = environ.get(variable, "")
        if key in values or not text:
            continue
        value: object = int(text) if key == "port" and re.fullmatch("[0-9]{1,5}", text) else text
        try:
            values[key] = KVSAFE_LMCACHE_TIER[key].check(value)
        except Refused as refused:
            problems += [
                Problem(key, f"{p.found} in {variable}", p.allowed, p.hint)
                for p in refused.problems
            ]
    return problems


def _hash_problems(values: Mapping[str, object], scheme: str) -> list[Problem]:
    name, seed = str(values["hash_algo"]), values.get("none_hash_seed")
    if scheme == "resp" and name != "blake3":
        hint = "LMCache's multiprocess server hashes with blake3 by default; set hash_algo to it"
        return [Problem("hash_algo", describe(name), "blake3", hint)]
    try:
        hash_chain(name, None if seed is None else str(seed))
    except ValueError as error:
        return [Problem("none_hash_seed", "nothing to begin with", str(error))]
    return []
