# SPDX-License-Identifier: Apache-2.0
"""Options of a `kvsafe-lmcache` tier: from the JSON, from the environment, and refused together."""

from pathlib import Path
from typing import Any

import pytest

from kvsafe.engine.config import ConfigError, parse_config
from kvsafe.engine.config.lmcache import LmcacheOptions, complete_lmcache
from kvsafe.engine.config.problems import Refused

HERE: dict[str, Any] = {"host": "127.0.0.1"}


def parsed(environ: dict[str, str] | None = None, **tier: Any) -> LmcacheOptions:
    """A tier's options as the engine would complete them; raises `ConfigError`."""
    variables = {"HOME": "/nowhere", **(environ or {})}
    config = parse_config(
        {
            "cpu_bytes_to_use": "1MiB",
            "secondary_tiers": [{"type": "kvsafe-lmcache", **tier}],
        },
        environ=variables,
    )
    return complete_lmcache(config.secondary_tiers[0].options, variables)


def refused(**tier: Any) -> str:
    """The words of a refusal."""
    with pytest.raises(ConfigError) as caught:
        parsed(**tier)
    return str(caught.value)


def test_the_reference_configuration_is_accepted() -> None:
    options = parsed(
        host="10.0.0.7",
        port=65432,
        hash_algo="vllm",
        chunk_tokens=256,
        model_name="some/model",
        world_size=1,
        worker_id=0,
        offload_prompt_only=True,
        save_unfull_chunk=False,
        none_hash_seed="0",
    )
    assert (options.scheme, options.host, options.port) == ("lm", "10.0.0.7", 65432)
    assert (options.hash_algo, options.none_hash_seed) == ("vllm", "0")
    assert (options.trust, options.chunk_tokens) == ("attested", 256)


def test_the_environment_fills_in_and_the_json_goes_first() -> None:
    environ = {
        "VT_LMCACHE_HOST": "10.0.0.8",
        "VT_LMCACHE_PORT": "7000",
        "VT_LMCACHE_HASH_ALGO": "sha256",
    }
    options = parsed(environ)
    assert (options.host, options.port, options.hash_algo) == ("10.0.0.8", 7000, "sha256")
    options = parsed(environ, host="h", port=1, hash_algo="vllm")
    assert (options.host, options.port, options.hash_algo) == ("h", 1, "vllm")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "VT_LMCACHE_HOST"),
        ({"VT_LMCACHE_HOST": "h", "VT_LMCACHE_PORT": "70000"}, "VT_LMCACHE_PORT"),
        ({"VT_LMCACHE_HOST": "h", "VT_LMCACHE_PORT": "x"}, "VT_LMCACHE_PORT"),
        ({"VT_LMCACHE_HOST": "a b"}, "VT_LMCACHE_HOST"),
        ({"VT_LMCACHE_HOST": "h", "VT_LMCACHE_HASH_ALGO": "md5"}, "VT_LMCACHE_HASH_ALGO"),
    ],
)
def test_what_the_environment_says_is_checked_as_well(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(environ)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("lm://127.0.0.1:65432", ("lm", "127.0.0.1", 65432, "vllm")),
        ("resp://kv.internal:6379", ("resp", "kv.internal", 6379, "blake3")),
        ("resp://[::1]:7000", ("resp", "::1", 7000, "blake3")),
    ],
)
def test_urls(url: str, found: tuple[str, str, int, str]) -> None:
    options = parsed(url=url)
    assert (options.scheme, options.host, options.port, options.hash_algo) == found


def test_defaults_of_each_scheme() -> None:
    assert parsed(**HERE).port == 65432
    assert parsed(scheme="resp", **HERE).port == 6379
    assert parsed(**HERE).deadline_s == 10.0


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ({"url": "http://h:1"}, "no such URL"),
        ({"url": "resp://user:secret@h:1"}, "no such URL"),
        ({"url": "lm://h:1", "host": "h"}, "url as well"),
        ({"url": "lm://h:70000"}, "no such port"),
        ({"host": "h:1"}, "host"),
        ({**HERE, "save_unfull_chunk": True}, "whole chunks"),
        ({**HERE, "worker_id": 1}, "worker_id"),
        ({**HERE, "trust": "everyone"}, "attested, peer"),
        ({**HERE, "model_name": "a@b"}, "model_name"),
        ({**HERE, "model_name": " a"}, "model_name"),
        ({**HERE, "hash_algo": "builtin"}, "PYTHONHASHSEED"),
        ({**HERE, "hash_algo": "builtin", "none_hash_seed": "random"}, "PYTHONHASHSEED"),
        ({**HERE, "scheme": "resp", "hash_algo": "sha256"}, "blake3"),
        ({**HERE, "ttl_s": 5}, "an option of resp"),
        ({**HERE, "scheme": "resp", "password_env": "NO_SUCH_VARIABLE"}, "password_env"),
        ({**HERE, "password": "secret"}, "not shown"),
        ({**HERE, "hots": "h"}, "did you mean host"),
        ({**HERE, "chunk_tokens": "256"}, "chunk_tokens"),
    ],
)
def test_what_is_refused_and_how(tier: dict[str, Any], words: str) -> None:
    text = refused(**tier)
    assert words in text
    assert "secret@" not in text


def test_builtin_with_a_seed_and_a_password_by_name() -> None:
    assert parsed(hash_algo="builtin", none_hash_seed=0, **HERE).none_hash_seed == "0"
    options = parsed({"KV_PASSWORD": "x"}, scheme="resp", password_env="KV_PASSWORD", **HERE)
    assert options.password_env == "KV_PASSWORD"


def test_completing_alone_refuses_as_well() -> None:
    with pytest.raises(Refused):
        complete_lmcache({}, {})


def test_the_page_names_every_option() -> None:
    page = (Path(__file__).parents[2] / "spec" / "configuration.md").read_text()
    section = page.split("## A secondary tier of type `kvsafe-lmcache`")[1].split("\n## ")[0]
    for name in LmcacheOptions.__struct_fields__:
        assert f"| `{name}` |" in section
