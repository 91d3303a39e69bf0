# SPDX-License-Identifier: Apache-2.0
"""Store, evict, load back: from host rows, from disk, after a restart; tokens stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsafe.seal.header import read_fixed
from kvsafe.seal.layout import FIXED, MAGIC
from tests.engine.cases import Bench, Fresh, refused
from tests.support import models
from tests.support.engine import Engine, EngineFailed, Nursery, Place, prompt

pytestmark = pytest.mark.engine


def test_host_rows_serve_what_was_stored(bench: Bench, fresh: Fresh) -> None:
    before = bench.engine.metrics()
    stored = bench.stored(fresh)
    assert stored.cold.cached == 0
    stored.expect_whole(lower=False)
    added = bench.engine.metrics().since(before)
    assert added.total("chunks_stored_total") == added.total("chunks_sealed_total") == 3
    assert added.total("chunks_served_total") == 3
    assert added.total("chunks_opened_total", place="worker") == 3
    assert added.total("chunks_opened_total", place="1:fs") == 0


def test_disk_serves_what_was_stored(bench: Bench, fresh: Fresh) -> None:
    stored = bench.stored(fresh)
    before = bench.engine.metrics()
    stored.expect_whole()
    added = bench.engine.metrics().since(before)
    assert added.total("chunks_opened_total", place="1:fs") == 3
    assert added.total("chunks_opened_total", place="worker") == 3


def test_a_common_prefix_is_served_to_another_prompt(bench: Bench, fresh: Fresh) -> None:
    stored = bench.stored(fresh)
    other = stored.prompt[: 2 * bench.chunk] + fresh(200)
    bench.engine.drop_host()
    assert bench.engine.ask(other).cached == 2 * bench.chunk


def test_files_carry_the_seal_and_names_confirm_no_prompt(bench: Bench, fresh: Fresh) -> None:
    stored = bench.stored(fresh)
    assert len(stored.paths) == 3
    plain = [bytes.fromhex(key) for key in bench.engine.do("keys", prompt=stored.prompt)]
    for path, key in zip(stored.paths, plain, strict=True):
        data = path.read_bytes()
        fixed = read_fixed(data)
        assert fixed.magic == MAGIC
        # vLLM's own tier writes the payload alone, under the plain hash of the tokens.
        assert len(data) == bench.numbers["row_bytes"] == bench.header + fixed.payload_bytes
        assert data[FIXED.size : FIXED.size + len(key)] == key
        assert any(data[bench.header :])
        assert key[:8].hex() not in str(path)


def test_a_restart_finds_the_chunks_on_disk(nursery: Nursery, tmp_path: Path) -> None:
    place, question = Place(tmp_path), prompt(11, 400)
    with nursery.running(models.qwen3(), kv_transfer_config=place.settings()) as engine:
        cold = engine.stored(question)
    assert cold.cached == 0
    with nursery.running(models.qwen3(), kv_transfer_config=place.settings()) as engine:
        again, metrics = engine.ask(question), engine.metrics()
        assert (again.tokens, again.cached) == (cold.tokens, 384)
        assert metrics.total("chunks_opened_total", place="1:fs") == 3
        assert metrics.total("chunks_served_total") == 3
        assert metrics.refusals() == {}
    # Control: another store and another state know nothing of it.
    elsewhere = Place(tmp_path / "elsewhere")
    with nursery.running(models.qwen3(), kv_transfer_config=elsewhere.settings()) as engine:
        assert engine.ask(question).cached == 0


@pytest.mark.parametrize("bench", ["qwen3", "gemma3"], indirect=True)
def test_an_empty_connector_changes_no_token(bench: Bench, nursery: Nursery, fresh: Fresh) -> None:
    """F31, F32: no connector, nothing stored yet, and stored: all give the same tokens."""
    size = bench.chunk
    lengths = [2 * size - 1, 2 * size, 2 * size + 1, 3 * size - 1, 3 * size, 3 * size + 1]
    prompts = [fresh(length) for length in lengths]
    engine = bench.engine
    cold = [engine.stored(item, 6) for item in prompts]
    assert [item.cached for item in cold] == [0] * len(prompts)
    engine.drop_device()
    host = [engine.ask(item, 6) for item in prompts]
    engine.drop_host()
    disk = [engine.ask(item, 6) for item in prompts]
    model = models.qwen3() if bench.name == "qwen3" else models.gemma3()
    with nursery.running(model) as bare:
        without = [bare.ask(item, 6) for item in prompts]
    wanted = [item.tokens for item in without]
    for answers in (cold, host, disk):
        assert [item.tokens for item in answers] == wanted
    for answers in (host, disk):
        cached = [item.cached for item in answers]
        assert all(0 < hit <= length for hit, length in zip(cached, lengths, strict=True)), cached


FAMILIES = ["qwen3", "qwen3-2-arc", "gemma3", "gemma3-2"]


@pytest.mark.parametrize("bench", FAMILIES, indirect=True)
def test_what_is_stored_is_served(bench: Bench, fresh: Fresh) -> None:
    """F27: hits above zero after eviction from the accelerator, for every supported mix."""
    stored = bench.stored(fresh, chunks=4)
    for lower in (False, True):
        before = bench.engine.metrics()
        done = stored.again(lower)
        added = bench.engine.metrics().since(before)
        assert done.tokens == stored.cold.tokens
        assert done.cached >= 2 * bench.chunk
        assert added.total("chunks_served_total") > 0
        assert refused(before, bench.engine) == {}


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_more_chunks_than_rows(nursery: Nursery, tmp_path: Path, policy: str) -> None:
    """F27 with real evictions: nine rows, eighteen chunks, asked again in turns and at once."""
    settings = Place(tmp_path).settings(cpu_bytes_to_use="10MiB", eviction_policy=policy)
    questions = [prompt(20 + index, 400) for index in range(6)]
    with nursery.running(models.qwen3(), kv_transfer_config=settings) as engine:
        assert engine.do("describe")["rows"] == 9
        cold = [engine.stored(question).tokens for question in questions]
        for _ in range(2):
            engine.drop_device()
            again = [engine.ask(question) for question in questions]
            assert [item.tokens for item in again] == cold
            assert [item.cached for item in again] == [384] * 6
        engine.drop_device()
        together = engine.ask_all(questions)
        assert [item.tokens for item in together] == cold
        assert sum(item.cached for item in together) > 0
        engine.settle()
        metrics = engine.metrics()
        assert metrics.total("chunks_opened_total", place="1:fs") > 18
        assert metrics.refusals() == {}


@pytest.mark.parametrize("bench", ["mla", "mla-2"], indirect=True)
def test_mla_bytes_come_back_as_they_were(bench: Bench, fresh: Fresh) -> None:
    """F27 for MLA. The CPU engine ignores a loaded prefix, so bytes are compared, not tokens."""
    stored = bench.stored(fresh, chunks=4)
    blocks = stored.whole // 16
    computed = bench.engine.do("blocks_digest", prompt=stored.prompt, count=blocks)
    assert len(set(computed)) == blocks
    for lower in (False, True):
        before = bench.engine.metrics()
        assert stored.again(lower).cached == stored.whole
        loaded = bench.engine.do("blocks_digest", prompt=stored.prompt, count=blocks)
        assert loaded == computed
        assert refused(before, bench.engine) == {}


def test_mla_on_cpu_is_refused_until_asked_for(nursery: Nursery, tmp_path: Path) -> None:
    engine = nursery.engine()
    try:
        with pytest.raises(EngineFailed, match=r"MLA without prefix .*allow_unproven_groups"):
            engine.start(models.deepseek_mla(), kv_transfer_config=Place(tmp_path).settings())
    finally:
        engine.kill()


def test_without_a_prefix_cache_on_the_accelerator(nursery: Nursery, tmp_path: Path) -> None:
    """vLLM offloads then as well; what comes back must be right all the same."""
    settings, question = Place(tmp_path).settings(), prompt(13, 400)
    with nursery.running(
        models.qwen3(), kv_transfer_config=settings, enable_prefix_caching=False
    ) as engine:
        cold = engine.stored(question)
        again = engine.ask(question)
        assert (again.tokens, again.cached) == (cold.tokens, 384)
        assert engine.metrics().refusals() == {}


def test_stored_and_never_served_is_shown(nursery: Nursery, tmp_path: Path) -> None:
    place, question = Place(tmp_path), prompt(12, 300)
    with nursery.running(models.qwen3(), kv_transfer_config=place.settings()) as engine:
        assert _unserved(engine) == 0
        engine.stored(question)
        assert _unserved(engine) > 0
        engine.drop_device()
        assert engine.ask(question).cached > 0
        assert _unserved(engine) == 0


def _unserved(engine: Engine) -> float:
    return engine.metrics().total("stored_but_never_served_seconds")
