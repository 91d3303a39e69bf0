# SPDX-License-Identifier: Apache-2.0
"""The option and engine tables: what is accepted, what is refused, and with which words."""

import ast
import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvsafe.engine import config as module
from kvsafe.engine.config import (
    MAX_SIZE,
    OPTIONS,
    OVERRIDES,
    ConfigError,
    EngineFacts,
    KVSafeConfig,
    check_engine,
    options_markdown,
    parse_config,
    parse_size,
    refuse_unsafe,
    to_vllm_extra,
)
from kvsafe.engine.config.__main__ import main

ENVIRON = {"HOME": "/home/someone", "KV_KEY": "set"}
SIZE = {"cpu_bytes_to_use": 1 << 30}
FS = {"type": "fs", "root_dir": "/srv/kv"}
PRESSURE = {"backpressure_cls": "EMABackpressureDetector"}


def parsed(environ: Mapping[str, str] = ENVIRON, /, **extra: object) -> KVSafeConfig:
    return parse_config({**SIZE, **extra}, environ=environ)


def refusal(environ: Mapping[str, str] = ENVIRON, /, **extra: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parsed(environ, **extra)
    return caught.value


def keys(error: ConfigError) -> list[str]:
    return [problem.key for problem in error.problems]


def test_defaults() -> None:
    config = parsed()
    assert config.cpu_bytes_to_use == 1 << 30
    assert config.suite == "aes256-gmac"
    assert config.state_dir == "/home/someone/.local/state/kvsafe"
    assert config.key_file == "/home/someone/.local/state/kvsafe/keys.json"
    assert config.key_env is None
    assert config.verify_loads == "always"
    assert config.monitor == "log"
    assert 1 <= config.copy_threads <= 4
    assert config.active_overrides == ()


def test_the_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        parsed().suite = "blake3"  # type: ignore[misc]


GOOD: list[tuple[str, object, object]] = [
    ("cpu_bytes_to_use", "8GiB", 8 << 30),
    ("cpu_bytes_to_use", "512 MiB", 512 << 20),
    ("cpu_bytes_to_use", "10GB", 10**10),
    ("cpu_bytes_to_use", "1.5GiB", 3 << 29),
    ("block_size", 256, 256),
    ("blocks_per_chunk", 4, 4),
    ("eviction_policy", "arc", "arc"),
    ("offload_prompt_only", False, False),
    ("self_describing_kv_events", True, True),
    ("canonical_layout", False, False),
    ("store_threshold", 1, 1),
    ("spec_name", "KVSafeSpec", "KVSafeSpec"),
    ("spec_module_path", "kvsafe.engine.spec", "kvsafe.engine.spec"),
    ("suite", "hmac-sha256", "hmac-sha256"),
    ("key_file", "/etc/kv/keys.json", "/etc/kv/keys.json"),
    ("key_file", "~/keys.json", "/home/someone/keys.json"),
    ("epoch_file", "/srv/kv/epoch-all.json", "/srv/kv/epoch-all.json"),
    ("key_env", "KV_KEY", "KV_KEY"),
    ("state_dir", "/var/lib/kv//state/", "/var/lib/kv/state"),
    ("namespace", "team-a.1", "team-a.1"),
    ("weights_digest", "sha256:" + "0a" * 32, "sha256:" + "0a" * 32),
    ("quarantine", "keep", "keep"),
    ("verify_loads", "once", "once"),
    ("monitor", "enforce", "enforce"),
    ("copy_threads", 3, 3),
    ("verify_threads", 1, 1),
    ("explain_misses", False, False),
    ("weights_survive_reset", True, True),
    ("load_deadline_s", 5, 5.0),
    ("load_deadline_s", 0.01, 0.01),
    ("store_deadline_s", 1, 1.0),
    *[(name, True, True) for name in OVERRIDES],
]


@pytest.mark.parametrize(("key", "value", "expected"), GOOD)
def test_good_value_is_taken(key: str, value: object, expected: object) -> None:
    found = getattr(parsed(**{key: value}), key)
    assert found == expected
    assert type(found) is type(expected)


def test_every_option_has_a_good_value_in_these_tests() -> None:
    tested = {key for key, _, _ in GOOD}
    elsewhere = {"secondary_tiers", "backpressure", "cache_policy_module_path"}
    assert set(OPTIONS) == tested | elsewhere


NOT_BOOLEANS: tuple[object, ...] = ("true", 1, 0, None, [])
BAD: list[tuple[str, object]] = [
    *[(name, value) for name in OVERRIDES for value in NOT_BOOLEANS],
    *[(name, None) for name in OPTIONS],
    *[(name, {}) for name in OPTIONS if name != "backpressure"],
    ("cpu_bytes_to_use", True),
    ("cpu_bytes_to_use", 0),
    ("cpu_bytes_to_use", -1),
    ("cpu_bytes_to_use", 8e9),
    ("cpu_bytes_to_use", "8589934592"),
    ("cpu_bytes_to_use", "8G"),
    ("cpu_bytes_to_use", "8gib"),
    ("cpu_bytes_to_use", "0GiB"),
    ("cpu_bytes_to_use", "-1GiB"),
    ("cpu_bytes_to_use", "0.3B"),
    ("cpu_bytes_to_use", "٨GiB"),
    ("cpu_bytes_to_use", "1e3GB"),
    ("cpu_bytes_to_use", MAX_SIZE + 1),
    ("block_size", True),
    ("block_size", "16"),
    ("block_size", 16.0),
    ("blocks_per_chunk", 0),
    ("offload_prompt_only", "true"),
    ("canonical_layout", True),
    ("store_threshold", 2),
    ("store_threshold", False),
    ("spec_name", "TieringOffloadingSpec"),
    ("spec_module_path", "somebody.elses"),
    ("suite", "sha256"),
    ("state_dir", "state"),
    ("state_dir", "/srv/../etc"),
    ("state_dir", "/srv/a\0b"),
    ("state_dir", "/srv/\udc80"),
    ("state_dir", "/" + "a" * 5000),
    ("namespace", ""),
    ("namespace", "a/b"),
    ("namespace", "a" * 65),
    ("namespace", ".hidden"),
    ("namespace", "a\n"),
    ("weights_digest", "blake3:" + "0A" * 32),
    ("weights_digest", "md5:" + "00" * 16),
    ("quarantine", "delete"),
    ("verify_loads", "never"),
    ("monitor", "on"),
    ("copy_threads", 0),
    ("copy_threads", True),
    ("copy_threads", 2.0),
    ("load_deadline_s", 0),
    ("load_deadline_s", float("inf")),
    ("load_deadline_s", float("nan")),
    ("load_deadline_s", True),
    ("load_deadline_s", 10**400),
    ("load_deadline_s", 0.009),
    ("load_deadline_s", 5e-324),
    ("load_deadline_s", 3600.1),
    ("store_deadline_s", 0),
    ("store_deadline_s", 0.999),
    ("store_deadline_s", float("nan")),
    ("store_deadline_s", 3600.1),
]


def _bad_id(value: object) -> str | None:
    return "long-integer" if type(value) is int and value.bit_length() > 64 else None


@pytest.mark.parametrize(("key", "value"), [*BAD, ("cpu_bytes_to_use", 10**5000)], ids=_bad_id)
def test_bad_value_is_refused_under_its_own_key(key: str, value: object) -> None:
    error = refusal(**{key: value})
    assert key in keys(error)
    problem = next(p for p in error.problems if p.key == key)
    assert problem.found
    assert problem.allowed


def test_required_key() -> None:
    with pytest.raises(ConfigError, match="cpu_bytes_to_use: found nothing"):
        parse_config({}, environ=ENVIRON)


@pytest.mark.parametrize("extra", [None, [], "text", 3])
def test_whole_document_of_another_type(extra: object) -> None:
    with pytest.raises(ConfigError, match="an object"):
        parse_config(extra, environ=ENVIRON)  # type: ignore[arg-type]


def test_all_problems_are_reported_together() -> None:
    error = refusal(block_size=0, suit="x", suite="none", secondary_tiers=[{"type": "fs"}, 3])
    expected = {
        "block_size",
        "suit",
        "suite",
        "secondary_tiers[0].root_dir",
        "secondary_tiers[1]",
    }
    assert set(keys(error)) == expected
    assert all(key in str(error) for key in expected)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("cpu_bytes_to_us", "cpu_bytes_to_use"),
        ("blocks-per-chunk", "blocks_per_chunk"),
        ("Quarantine", "quarantine"),
        ("key_fil", "key_file"),
        ("allow_untested_vlm", "allow_untested_vllm"),
    ],
)
def test_unknown_key_gets_the_nearest(typo: str, meant: str) -> None:
    error = refusal(**{typo: "some-private-value"})
    assert f"did you mean {meant}?" in str(error)
    assert "some-private-value" not in str(error)


@given(st.sampled_from(sorted(OPTIONS)), st.data())
@settings(max_examples=60, deadline=None)
def test_any_one_letter_slip_is_refused_with_a_hint(name: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(name) - 1))
    typo = name[:place] + "x" + name[place + 1 :]
    assume(typo not in OPTIONS)
    error = refusal(**{typo: 1})
    assert any(p.key == typo and "did you mean" in p.hint for p in error.problems)


@pytest.mark.parametrize(
    "name", ["key", "secret", "hmac_key", "SECRET", "seal-key", "password", "key_hex", "token"]
)
def test_a_key_itself_is_refused_and_not_shown(name: str) -> None:
    error = refusal(**{name: "c2VjcmV0LWJ5dGVz"})
    assert "keys never come from this JSON, it gets logged" in str(error)
    assert "c2VjcmV0" not in str(error)


@pytest.mark.parametrize("name", ["key_env", "key_file"])
def test_a_key_put_where_its_place_belongs_is_not_shown(name: str) -> None:
    for secret in ("c2VjcmV0LWJ5dGVz", "c2VjcmV0+bytes/="):
        error = refusal(**{name: secret})
        assert keys(error) == [name]
        assert "c2VjcmV0" not in str(error)


def test_key_sources() -> None:
    assert parsed(key_env="KV_KEY").key_file is None
    assert keys(refusal(key_env="KV_KEY", key_file="/etc/kv/k")) == ["key_env"]
    assert keys(refusal({**ENVIRON, "KV_KEY": " "}, key_env="KV_KEY")) == ["key_env"]
    unkeyed = parsed(suite="blake3")
    assert unkeyed.key_file is unkeyed.key_env is None
    assert keys(refusal(suite="blake3", key_file="/etc/kv/k")) == ["key_file"]


def test_state_dir_follows_the_environment() -> None:
    assert parsed({"XDG_STATE_HOME": "/xdg"}).state_dir == "/xdg/kvsafe"
    relative = {"XDG_STATE_HOME": "xdg", "HOME": "/h"}
    assert parsed(relative).state_dir == "/h/.local/state/kvsafe"
    assert "set state_dir or HOME" in str(refusal({}))
    assert "set state_dir or HOME" in str(refusal({"HOME": "relative"}))
    assert parsed({}, state_dir="/s").key_file == "/s/keys.json"


def test_chunk_size_is_given_once() -> None:
    assert keys(refusal(block_size=16, blocks_per_chunk=2)) == ["block_size"]


def test_eviction_policy_and_its_module() -> None:
    theirs = {"eviction_policy": "MyPolicy", "cache_policy_module_path": "my.policies"}
    config = parsed(**theirs, allow_unproven_tier=True)
    assert config.cache_policy_module_path == "my.policies"
    assert keys(refusal(eviction_policy="MyPolicy")) == ["eviction_policy"]
    assert "did you mean lru?" in str(refusal(eviction_policy="lru2"))
    assert keys(refusal(cache_policy_module_path="my.policies")) == ["cache_policy_module_path"]
    bad = refusal(eviction_policy="MyPolicy", cache_policy_module_path="not a module")
    assert "cache_policy_module_path" in keys(bad)


def test_an_unproven_eviction_policy_needs_its_override() -> None:
    theirs = {"eviction_policy": "MyPolicy", "cache_policy_module_path": "my.policies"}
    error = refusal(**theirs)
    assert keys(error) == ["eviction_policy"]
    assert "allow_unproven_tier" in str(error)
    assert keys(refusal(**theirs, allow_unproven_tier=False)) == ["eviction_policy"]
    assert parsed(**theirs, allow_unproven_tier=True).active_overrides == ("allow_unproven_tier",)
    for built_in in ("lru", "arc"):
        assert parsed(eviction_policy=built_in).eviction_policy == built_in


@pytest.mark.parametrize(
    ("theirs", "key"),
    [
        ({"backpressure_cls": "my.pressure.Detector", "n": 1}, "backpressure_cls"),
        ({**PRESSURE, "policy_cls": "my.pressure.Policy"}, "policy_cls"),
    ],
)
def test_an_unproven_backpressure_class_needs_its_override(
    theirs: dict[str, object], key: str
) -> None:
    ours = {**PRESSURE, "policy_cls": "DropStorePolicy"}
    for extra, path, good in (
        ({"backpressure": theirs}, "", {"backpressure": ours}),
        (
            {"secondary_tiers": [{**FS, "backpressure": theirs}]},
            "secondary_tiers[0].",
            {"secondary_tiers": [{**FS, "backpressure": ours}]},
        ),
    ):
        error = refusal(**extra)
        assert keys(error) == [f"{path}backpressure.{key}"]
        assert "allow_unproven_tier" in str(error)
        assert parsed(**extra, allow_unproven_tier=True)
        assert parsed(**good).active_overrides == ()


def test_fs_tier() -> None:
    full = {
        **FS,
        "n_read_threads": 2,
        "n_write_threads": 3,
        "enable_kv_events": True,
        "locality": "REMOTE",
        "backpressure": {**PRESSURE, "alpha": 1},
    }
    (tier,) = parsed(secondary_tiers=[full]).secondary_tiers
    assert tier.proven
    assert tier.root_dir == "/srv/kv"
    assert tier.to_vllm() == {**full, "backpressure": {**PRESSURE, "alpha": 1.0}}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"root_dir": "relative"}, ".root_dir"),
        ({"root_dri": "/x"}, ".root_dri"),
        ({"n_read_threads": 0}, ".n_read_threads"),
        ({"n_write_threads": True}, ".n_write_threads"),
        ({"enable_kv_events": "yes"}, ".enable_kv_events"),
        ({"locality": "local"}, ".locality"),
        ({"type": 3}, ".type"),
        ({"type": "sf"}, ".type"),
        ({"module_path": "x.y"}, ".module_path"),
        ({"backpressure": {}}, ".backpressure"),
        ({"backpressure": {**PRESSURE, "alpa": 1}}, ".backpressure.alpa"),
        ({"backpressure": {**PRESSURE, "alpha": 2}}, ".backpressure.alpha"),
        ({"backpressure": {"backpressure_cls": "EMA"}}, ".backpressure.backpressure_cls"),
        ({"backpressure": {**PRESSURE, "low_water_s": 2, "high_water_s": 1}}, ".backpressure"),
        ({"secret": "x"}, ".secret"),
    ],
)
def test_fs_tier_is_strict(change: dict[str, object], path: str) -> None:
    assert "secondary_tiers[0]" + path in keys(refusal(secondary_tiers=[{**FS, **change}]))


@pytest.mark.parametrize("tiers", [None, {}, "fs", [3], [[]], [{}], [None]])
def test_tiers_of_another_shape(tiers: object) -> None:
    assert refusal(secondary_tiers=tiers).problems[0].key.startswith("secondary_tiers")


def test_backpressure_is_merged_before_it_is_judged() -> None:
    tiers = [{**FS, "backpressure": {"high_water_s": 0.5}}]
    assert parsed(secondary_tiers=tiers, backpressure=PRESSURE).backpressure == PRESSURE
    assert keys(refusal(secondary_tiers=tiers)) == ["secondary_tiers[0].backpressure"]
    theirs = {"backpressure_cls": "my.pressure.Detector", "whatever": [1]}
    assert parsed(backpressure=theirs, allow_unproven_tier=True).backpressure == theirs


@pytest.mark.parametrize(
    "tier",
    [
        {"type": "example", "custom": 1},
        {"type": "obj", "store_config": {"secret_key": "hidden-value"}},
        {"type": "p2p", "host": "127.0.0.1"},
        {"type": "kvcr"},
        {"type": "MyTier", "module_path": "my.tiers", "options": {"a": [1, None, 2.5]}},
    ],
)
def test_unproven_tiers_need_their_override(tier: dict[str, object]) -> None:
    error = refusal(secondary_tiers=[tier])
    assert keys(error) == ["secondary_tiers[0].type"]
    assert "allow_unproven_tier" in str(error)
    config = parsed(secondary_tiers=[tier], allow_unproven_tier=True)
    assert config.secondary_tiers[0].to_vllm() == tier
    assert config.unproven_tiers == (tier["type"],)
    assert "hidden-value" not in repr(config)


@pytest.mark.parametrize(
    ("tier", "path"),
    [
        ({"type": "MyTier"}, ".type"),
        ({"type": "MyTier", "module_path": "a b"}, ".module_path"),
        ({"type": "obj", "module_path": "a"}, ".module_path"),
        ({"type": "obj", "x": object()}, ""),
        ({"type": "obj", "x": {1: 2}}, ""),
        ({"type": "obj", "x": float("nan")}, ""),
        ({"type": "obj", "backpressure": 3}, ".backpressure"),
    ],
)
def test_other_tiers_are_still_checked(tier: dict[str, object], path: str) -> None:
    error = refusal(secondary_tiers=[tier], allow_unproven_tier=True)
    assert keys(error) == ["secondary_tiers[0]" + path]


def test_deep_and_wide_json_is_refused() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    looped: list[object] = []
    looped.extend([looped, looped, looped])
    for value in (deep, looped, [0] * 5000):
        tier = {"type": "obj", "x": value}
        error = refusal(secondary_tiers=[tier], allow_unproven_tier=True)
        assert "too deep or too large" in str(error)


@pytest.mark.parametrize(
    ("ours", "root"),
    [
        ({"state_dir": "/srv/kv"}, "/srv/kv"),
        ({"state_dir": "/srv/kv/state"}, "/srv/kv"),
        ({"state_dir": "/srv"}, "/srv/kv"),
        ({"key_file": "/srv/kv/keys.json"}, "/srv/kv"),
        ({"key_file": "/srv/kv"}, "/srv/kv/deep"),
        ({"epoch_file": "/srv/kv/epoch-all.json"}, "/srv/kv"),
        ({}, "/"),
        ({}, "~/.local/state/kvsafe/store"),
    ],
)
def test_key_and_state_lie_outside_every_store(ours: dict[str, object], root: str) -> None:
    error = refusal(secondary_tiers=[{**FS, "root_dir": root}], **ours)
    assert set(keys(error)) == {"secondary_tiers[0].root_dir"}


def test_places_apart_are_fine() -> None:
    tiers = [{**FS, "root_dir": "/srv/kv"}, {**FS, "root_dir": "/srv/kv2"}]
    config = parsed(state_dir="/srv/kv-state", key_file="/srv/keys.json", secondary_tiers=tiers)
    assert len(config.secondary_tiers) == 2


def test_symlinks_do_not_hide_that_a_key_is_in_a_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "apart").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "store")
    tiers = [{**FS, "root_dir": str(tmp_path / "store")}]
    assert keys(refusal(state_dir=str(tmp_path / "link"), secondary_tiers=tiers))
    apart = str(tmp_path / "apart")
    assert parsed(state_dir=apart, secondary_tiers=tiers).state_dir == apart


OWN_FS = {"type": "kvsafe-fs", "root_dir": "/srv/kv", "capacity_bytes": 1 << 30}


def test_the_home_folder_is_seen_in_every_tier_of_ours() -> None:
    for tier in (FS, OWN_FS):
        inside = {**tier, "root_dir": "~/.local/state/kvsafe/store"}
        assert keys(refusal(secondary_tiers=[inside])) == ["secondary_tiers[0].root_dir"]
        config = parsed(secondary_tiers=[{**tier, "root_dir": "~/store"}])
        assert config.secondary_tiers[0].root_dir == "/home/someone/store"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("/srv/kv", "/srv/kv"),
        ("/srv/kv", "/srv//kv/"),
        ("/srv/kv", "/srv/kv/inner"),
        ("/srv/kv/inner/most", "/srv/kv"),
        ("~/kv", "/home/someone/kv/inner"),
    ],
)
def test_no_tier_writes_into_the_folder_of_another(first: str, second: str) -> None:
    for one, two in ((FS, FS), (FS, OWN_FS), (OWN_FS, FS), (OWN_FS, OWN_FS)):
        tiers = [{**one, "root_dir": first}, {**two, "root_dir": second}]
        assert keys(refusal(secondary_tiers=tiers)) == ["secondary_tiers[1].root_dir"]
    tiers = [{**FS, "root_dir": "/srv/kv"}, {**OWN_FS, "root_dir": "/srv/kv-inner"}]
    assert len(parsed(secondary_tiers=tiers).secondary_tiers) == 2


def test_symlinks_do_not_hide_that_tiers_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "store")
    for second in ("link", "link/inner"):
        tiers = [{**FS, "root_dir": str(tmp_path / name)} for name in ("store", second)]
        assert keys(refusal(secondary_tiers=tiers)) == ["secondary_tiers[1].root_dir"]
    tiers = [{**FS, "root_dir": str(tmp_path / name)} for name in ("store", "other")]
    assert len(parsed(secondary_tiers=tiers).secondary_tiers) == 2


STATE_FILES = [
    "adapters.json",
    "weights.json",
    "code.json",
    "epoch-default.json",
    "epoch-another.json",
    "epoch-default.json.used",
    "epoch-default.json.lock",
    "epoch-default.json.new",
    "adapters.json.lock",
    ".weights.json.0123456789abcdef",
    "identities",
    "identities/keys.json",
    "identities/deeper/keys.json",
]


@pytest.mark.parametrize("name", STATE_FILES)
def test_the_key_file_is_no_other_file_of_the_state_folder(name: str) -> None:
    for state_dir in ("/s", "~/s"):
        error = refusal(state_dir=state_dir, key_file=f"{state_dir}/{name}")
        assert keys(error) == ["key_file"]
        assert "leave key_file out" in str(error) and name not in str(error)
    # The same name elsewhere is nobody's.
    assert parsed(state_dir="/s", key_file=f"/other/{name}").key_file == f"/other/{name}"


@pytest.mark.parametrize(
    "name",
    ["keys.json", "my-adapters.json", "epoch.json", "code.jsonl", "identities.json", "a/code.json"],
)
def test_other_names_in_the_state_folder_are_fine_for_a_key(name: str) -> None:
    assert parsed(state_dir="/s", key_file=f"/s/{name}").key_file == f"/s/{name}"


def test_an_epoch_file_of_several_engines_has_a_name_of_its_own() -> None:
    assert parsed().epoch_file is None
    place = "/srv/kv-epochs/epoch-all.json"
    assert parsed(epoch_file=place).epoch_file == place
    assert parsed(epoch_file="~/e/epoch-1.json").epoch_file == "/home/someone/e/epoch-1.json"
    for name in ("keys.json", "weights.json", "epoch-all.json.lock", "epoch.json", "epoch-/.json"):
        assert keys(refusal(epoch_file=f"/srv/kv-epochs/{name}")) == ["epoch_file"]
    for name in ("epoch-all.json", "epoch-all.json.lock"):
        both = {"epoch_file": place, "key_file": f"/srv/kv-epochs/{name}"}
        assert keys(refusal(**both)) == ["key_file"]
    apart = parsed(epoch_file=place, key_file="/srv/kv-epochs/keys.json")
    assert apart.key_file == "/srv/kv-epochs/keys.json"


def test_symlinks_do_not_hide_that_the_key_is_a_state_file(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (tmp_path / "link").symlink_to(state)
    (tmp_path / "key").symlink_to(state / "code.json")
    (tmp_path / "far").mkdir()
    (state / "identities").symlink_to(tmp_path / "far")
    (state / "adapters.json").symlink_to(tmp_path / "far-away")
    for name in ("link/code.json", "key", "far/k", "link/identities/k", "state/adapters.json"):
        error = refusal(state_dir=str(state), key_file=str(tmp_path / name))
        assert keys(error) == ["key_file"], name
    for name in ("link/keys.json", "key2", "farther/k"):
        place = str(tmp_path / name)
        assert parsed(state_dir=str(state), key_file=place).key_file == place


def test_two_tiers_do_not_share_a_folder() -> None:
    assert keys(refusal(secondary_tiers=[FS, FS])) == ["secondary_tiers[1].root_dir"]


# --- sizes and fuzz ------------------------------------------------------------------------------


@given(
    st.integers(1, 1 << 18),
    st.sampled_from([("B", 1), ("KiB", 1 << 10), ("MB", 10**6), ("GiB", 1 << 30), ("TB", 10**12)]),
    st.sampled_from(["", " ", "  "]),
)
def test_sizes_with_units(number: int, unit: tuple[str, int], gap: str) -> None:
    assert parse_size(f"{number}{gap}{unit[0]}") == number * unit[1]


@given(st.integers(1, MAX_SIZE))
def test_plain_sizes(number: int) -> None:
    assert parse_size(number) == number


@given(st.one_of(st.text(max_size=12), st.integers(max_value=0), st.floats(), st.booleans()))
def test_a_size_is_right_or_refused(value: object) -> None:
    with contextlib.suppress(ConfigError):
        assert 1 <= parse_size(value) <= MAX_SIZE


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.binary()
)
NAMES = st.one_of(st.sampled_from([*OPTIONS, *module.FS_TIER, *module.BACKPRESSURE]), st.text())
ODD = st.recursive(
    st.one_of(SCALARS, st.sampled_from(["fs", "obj", "~/x", "/srv", "lru", object(), 1 + 2j])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner),
        st.dictionaries(st.one_of(NAMES, st.integers()), inner, max_size=5),
    ),
    max_leaves=12,
)
TIERS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["fs", "obj", "X"])},
        optional=dict.fromkeys(("root_dir", "backpressure", "module_path", "locality"), ODD),
    ),
    max_size=3,
)


def outcome_of(
    document: Mapping[str, object], environ: Mapping[str, str]
) -> KVSafeConfig | ConfigError:
    try:
        return parse_config(document, environ=environ)
    except ConfigError as error:
        return error


@given(
    st.dictionaries(NAMES, ODD, max_size=8),
    st.one_of(TIERS, ODD),
    st.dictionaries(st.sampled_from(["HOME", "XDG_STATE_HOME"]), st.text(max_size=20)),
)
@settings(max_examples=250, deadline=None)
def test_never_another_exception(
    extra: dict[str, object], tiers: object, environ: dict[str, str]
) -> None:
    for document in (extra, {**SIZE, **extra, "secondary_tiers": tiers}):
        outcome = outcome_of(document, environ)
        if isinstance(outcome, ConfigError):
            assert outcome.problems
            assert str(outcome).encode()
        else:
            json.dumps(to_vllm_extra(outcome))


# --- what vLLM gets ------------------------------------------------------------------------------


def test_to_vllm_extra() -> None:
    config = parse_config(
        {
            "cpu_bytes_to_use": "1GiB",
            "blocks_per_chunk": 2,
            "secondary_tiers": [{**FS, "backpressure": PRESSURE}],
            "suite": "hmac-sha256",
            "allow_untested_vllm": True,
        },
        environ=ENVIRON,
    )
    extra = to_vllm_extra(config)
    assert extra["cpu_bytes_to_use"] == 1 << 30
    assert extra["spec_name"] == "KVSafeSpec"
    assert extra["blocks_per_chunk"] == 2
    assert not {"block_size", "suite", "state_dir", "key_file", "allow_untested_vllm"} & set(extra)
    again = to_vllm_extra(parse_config(extra, environ=ENVIRON))
    assert again == extra


def test_vllm_may_write_into_what_it_gets() -> None:
    config = parsed(secondary_tiers=[{**FS, "backpressure": dict(PRESSURE)}])
    first = to_vllm_extra(config)
    tiers = first["secondary_tiers"]
    assert isinstance(tiers, list)
    tiers[0]["backpressure"]["alpha"] = 9
    tiers[0].pop("root_dir")
    assert to_vllm_extra(config)["secondary_tiers"] == [{**FS, "backpressure": PRESSURE}]


# --- the engine ----------------------------------------------------------------------------------

PROVEN = EngineFacts(
    vllm_version="0.32.0",
    nnodes=1,
    world_size=2,
    executor_backend="mp",
    kv_cache_dtype="auto",
    model_dtype="torch.bfloat16",
    kv_quant_modes=("NONE",),
    kv_cache_layout="LBHNC",
    group_kinds=("full_attention",),
    hash_algo="sha256",
    none_hash_random=False,
    platform="cpu",
    prefix_caching=True,
    spec_decode=False,
)

UNSAFE: list[tuple[dict[str, object], str, str]] = [
    ({"vllm_version": "0.33.0"}, "vllm_version", "allow_untested_vllm"),
    ({"vllm_version": "0.32.0rc1"}, "vllm_version", "allow_untested_vllm"),
    ({"nnodes": 2}, "nnodes", "allow_multi_node"),
    ({"executor_backend": "ray"}, "nnodes", "allow_multi_node"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "allow_unproven_kv_dtype"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype", "allow_unproven_kv_dtype"),
    ({"model_dtype": "float64"}, "kv_cache_dtype", "allow_unproven_kv_dtype"),
    (
        {"kv_quant_modes": ("NONE", "FP8_PER_TENSOR")},
        "kv_quant_modes",
        "allow_unproven_kv_dtype",
    ),
    ({"kv_cache_layout": "BLHNC"}, "kv_cache_layout", "allow_unproven_kv_layout"),
    ({"group_kinds": ("mamba",)}, "group_kinds", "allow_unproven_groups"),
    ({"group_kinds": ()}, "group_kinds", "allow_unproven_groups"),
    (
        {"group_kinds": ("full_attention", "mla")},
        "group_kinds",
        "allow_unproven_groups",
    ),
    ({"hash_algo": "xxhash"}, "hash_algo", "allow_weak_block_hash"),
    ({"none_hash_random": True}, "none_hash_random", "allow_weak_block_hash"),
    ({"spec_decode": True}, "spec_decode", "allow_unproven_spec_decode"),
]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"vllm_version": "0.32.0+cpu"},
        {"kv_cache_dtype": "float16"},
        {"kv_cache_layout": None},
        {"kv_cache_layout": "LBNHC"},
        {"hash_algo": "sha256_cbor"},
        {"executor_backend": "ray", "world_size": 1},
        {"executor_backend": None},
        {"group_kinds": ("mla", "mla"), "kv_quant_modes": ("NONE", "NONE")},
        {"platform": "cuda"},
    ],
)
def test_proven_engines_start(change: dict[str, object]) -> None:
    facts = msgspec.structs.replace(PROVEN, **change)
    assert refuse_unsafe(facts, parsed()) == ()


def test_mla_needs_prefix_caching() -> None:
    change = {"group_kinds": ("mla",), "kv_quant_modes": ("NONE",)}
    assert refuse_unsafe(msgspec.structs.replace(PROVEN, **change), parsed()) == ()
    bare = msgspec.structs.replace(PROVEN, **change, prefix_caching=False)
    with pytest.raises(ConfigError, match="ignore a loaded prefix") as caught:
        refuse_unsafe(bare, parsed())
    assert keys(caught.value) == ["group_kinds"]
    allowed = refuse_unsafe(bare, parsed(allow_unproven_groups=True))
    assert {complaint.key for complaint in allowed} == {"group_kinds", "prefix_caching"}


@pytest.mark.parametrize(("change", "key", "override"), UNSAFE)
def test_unproven_engines_are_refused_until_overridden(
    change: dict[str, object], key: str, override: str
) -> None:
    facts = msgspec.structs.replace(PROVEN, **change)
    with pytest.raises(ConfigError, match=override) as caught:
        refuse_unsafe(facts, parsed())
    assert keys(caught.value) == [key]
    others = {name: True for name in OVERRIDES if name != override}
    assert [c.key for c in check_engine(facts, parsed(**others))] == [key]
    let_through = refuse_unsafe(facts, parsed(**{override: True}))
    assert [c.key for c in let_through] == [key]


def test_group_mixes_that_are_listed_start() -> None:
    for mix in module.PROVEN_GROUP_MIXES:
        assert len(mix) > 1
        facts = msgspec.structs.replace(PROVEN, group_kinds=tuple(sorted(mix)))
        assert refuse_unsafe(facts, parsed()) == ()


def test_every_engine_rule_and_override_is_tested() -> None:
    fatal = {rule.key for rule in module.ENGINE_RULES if rule.level == "refuse"}
    assert fatal == {key for _, key, _ in UNSAFE}
    outside_the_engine = {"allow_unknown_weights", "allow_unproven_tier"}
    assert {override for _, _, override in UNSAFE} | outside_the_engine == set(OVERRIDES)


@pytest.mark.parametrize("change", [{"prefix_caching": False}, {"platform": "rocm"}])
def test_warnings_do_not_stop_the_start(change: dict[str, object]) -> None:
    (complaint,) = refuse_unsafe(msgspec.structs.replace(PROVEN, **change), parsed())
    assert complaint.level == "warn"


def test_engine_problems_are_reported_together() -> None:
    facts = msgspec.structs.replace(PROVEN, nnodes=2, spec_decode=True, hash_algo="xxhash")
    with pytest.raises(ConfigError) as caught:
        refuse_unsafe(facts, parsed())
    assert keys(caught.value) == ["nnodes", "hash_algo", "spec_decode"]


def test_active_overrides() -> None:
    config = parsed(allow_multi_node=True, allow_untested_vllm=True)
    assert set(config.active_overrides) == {"allow_multi_node", "allow_untested_vllm"}


# --- the page, and the folder rule ---------------------------------------------------------------


def test_markdown_has_every_option_and_its_default() -> None:
    page = options_markdown()
    for name in (*OPTIONS, *module.FS_TIER, *module.BACKPRESSURE):
        assert f"| `{name}` |" in page
    assert "| `cpu_bytes_to_use` | size | required |" in page
    assert "| `quarantine` | text | `aside` |" in page
    assert "| `allow_multi_node` | boolean | `false` |" in page


def test_markdown_command() -> None:
    command = [sys.executable, "-m", "kvsafe.engine.config"]
    page = subprocess.run([*command, "--markdown"], capture_output=True, text=True, check=True)
    assert page.stdout == options_markdown()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2


def test_the_page_is_written_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "configuration.md"
    assert main(["--write", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == options_markdown()


def test_every_key_vllm_reads_is_known_by_name() -> None:
    read = {
        "cpu_bytes_to_use",
        "block_size",
        "blocks_per_chunk",
        "eviction_policy",
        "cache_policy_module_path",
        "secondary_tiers",
        "backpressure",
        "offload_prompt_only",
        "self_describing_kv_events",
        "canonical_layout",
        "store_threshold",
        "spec_name",
        "spec_module_path",
    }
    assert {name for name, option in OPTIONS.items() if option.origin == "vllm"} == read


FILES = sorted(Path(module.__file__).parent.glob("*.py"))


def test_the_modules_of_the_package_are_found() -> None:
    assert {"__init__.py", "options.py", "facts.py"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_package_imports_neither_vllm_nor_torch(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & {"vllm", "torch"}
