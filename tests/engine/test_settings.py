# SPDX-License-Identifier: Apache-2.0
"""F01, F02, F03: chunks of other settings, weights or layouts are never served.

Every "must miss" is followed by the control: changed back, the old chunks are served in full.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvsafe.seal.refusal import RefusalKind
from tests.support import models
from tests.support.engine import Engine, Nursery, Place, prompt

pytestmark = pytest.mark.engine

QUESTION = prompt(101, 400)
WHOLE = 384


def rope(**changes: Any) -> dict[str, Any]:
    """An override of the rope parameters, YaRN unless said otherwise."""
    values = {
        "rope_type": "yarn",
        "factor": 2.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 4096,
        **changes,
    }
    return {"hf_overrides": {"rope_parameters": values}}


CHANGES: list[tuple[dict[str, Any], str]] = [
    (rope(rope_theta=20000.0), "rope.rope_theta"),
    (rope(factor=4.0), "rope.factor"),
    (rope(rope_type="linear"), "rope.rope_type"),
    ({**rope(), "max_model_len": 1024}, "max_model_len"),
]


def test_changed_settings_miss_and_changed_back_hit(nursery: Nursery, tmp_path: Path) -> None:
    place, model = Place(tmp_path), models.qwen3()
    with nursery.running(model, kv_transfer_config=place.settings(), **rope()) as engine:
        cold = engine.stored(QUESTION)
        paths = engine.paths(QUESTION)
    files = {path: path.read_bytes() for path in paths}
    assert len(files) == 3
    for change, field in CHANGES:
        with nursery.running(model, kv_transfer_config=place.settings(), **change) as engine:
            done = engine.stored(QUESTION)
            assert done.cached == 0, field
            _expect_named(engine, field)
            mine = engine.paths(QUESTION)
            assert not set(mine) & set(paths)
            engine.drop_host()
            assert engine.ask(QUESTION).cached == WHOLE
            if field == "rope.rope_theta":
                _expect_refused_in_my_place(engine, paths[1], mine[1], field)
                assert done.tokens != cold.tokens
        assert {path: path.read_bytes() for path in paths} == files
    with nursery.running(model, kv_transfer_config=place.settings(), **rope()) as engine:
        again = engine.ask(QUESTION)
        assert (again.tokens, again.cached) == (cold.tokens, WHOLE)


def _expect_named(engine: Engine, field: str) -> None:
    """Refusal 703 is counted and the log names the field, at start and at the miss."""
    number = int(RefusalKind.IDENTITY_ELSEWHERE)
    for _ in range(200):
        if engine.metrics().refusals().get(number):
            break
    assert engine.metrics().refusals() == {number: 1}
    lines = engine.log().splitlines()
    assert any("another identity are refused" in line and field in line for line in lines)
    assert any(f"refusal {number}" in line and field in line for line in lines)


def _expect_refused_in_my_place(engine: Engine, theirs: Path, mine: Path, field: str) -> None:
    """Their file under my name is an authentic chunk of another identity: refused by field."""
    engine.drop_host()
    shutil.copyfile(theirs, mine)
    before = engine.metrics()
    assert engine.ask(QUESTION).cached == 128
    engine.settle()
    found = {k: v for k, v in engine.metrics().since(before).refusals().items() if v}
    assert found == {int(RefusalKind.IDENTITY): 1}
    lines = [line for line in engine.log().splitlines() if "refusal 701" in line]
    assert lines and all(field in line for line in lines)
    engine.drop_host()
    assert engine.ask(QUESTION).cached == WHOLE


def test_other_weights_in_place_miss(nursery: Nursery, tmp_path: Path) -> None:
    """F02: same path, names and shapes, and even the same times: other bytes."""
    model = shutil.copytree(models.qwen3(), tmp_path / "model")
    weights = model / "model.safetensors"
    original, times = weights.read_bytes(), weights.stat()
    place = Place(tmp_path)
    settings = place.settings()
    with nursery.running(model, kv_transfer_config=settings) as engine:
        cold = engine.stored(QUESTION)
    changed = bytearray(original)
    # The high byte of bfloat16 values in the middle of the file: small changes, all finite.
    for at in range(len(changed) // 2, len(changed) // 2 + 20_000, 2):
        changed[at] ^= 0x10
    weights.write_bytes(changed)
    _keep_times(weights, times)
    with nursery.running(model, kv_transfer_config=settings) as engine:
        other = engine.stored(QUESTION)
        assert other.cached == 0
        _expect_named(engine, "weights")
    weights.write_bytes(original)
    _keep_times(weights, times)
    with nursery.running(model, kv_transfer_config=settings) as engine:
        again = engine.ask(QUESTION)
        assert (again.tokens, again.cached) == (cold.tokens, WHOLE)


def _keep_times(path: Path, info: Any) -> None:
    import os

    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def test_another_explicit_weights_digest_misses(nursery: Nursery, tmp_path: Path) -> None:
    place, model = Place(tmp_path), models.qwen3()
    one, two = "blake3:" + "11" * 32, "blake3:" + "22" * 32
    cached = []
    for digest in (one, two, one):
        settings = place.settings(weights_digest=digest)
        with nursery.running(model, kv_transfer_config=settings) as engine:
            cached.append(engine.stored(QUESTION).cached)
            if digest == two:
                _expect_named(engine, "weights")
    assert cached == [0, 0, WHOLE]


def test_a_real_chunk_of_another_geometry_is_refused(nursery: Nursery, tmp_path: Path) -> None:
    """F03: the same file, opened by a reader whose tensors lie differently."""
    place = Place(tmp_path)
    with nursery.running(models.qwen3(), kv_transfer_config=place.settings()) as engine:
        engine.stored(QUESTION)
        found = engine.do("open_as_other_layouts", prompt=QUESTION, chunk=0)
    assert found.pop("same") == "accepted"
    assert found == {
        "page bytes": int(RefusalKind.GEOMETRY),
        "layer order": int(RefusalKind.GEOMETRY),
        "slices": int(RefusalKind.WRITER),
        "row bytes": int(RefusalKind.GEOMETRY),
        "identity": int(RefusalKind.IDENTITY),
    }


def test_a_file_of_another_dtype_and_block_count(nursery: Nursery, tmp_path: Path) -> None:
    """F03: two bfloat16 blocks have the size of one float32 block; put in place, refused."""
    place, model = Place(tmp_path), models.qwen3()
    with nursery.running(
        model, dtype="bfloat16", kv_transfer_config=place.settings(blocks_per_chunk=2)
    ) as engine:
        engine.stored(QUESTION)
        theirs = engine.paths(QUESTION)[0]
    with nursery.running(model, kv_transfer_config=place.settings()) as engine:
        cold = engine.stored(QUESTION)
        assert cold.cached == 0
        mine = engine.paths(QUESTION)[1]  # ends at the same token as their first chunk
        assert mine.stat().st_size == theirs.stat().st_size
        engine.drop_host()
        shutil.copyfile(theirs, mine)
        before = engine.metrics()
        done = engine.stored(QUESTION)
        assert (done.tokens, done.cached) == (cold.tokens, 128)
        found = engine.metrics().since(before).refusals()
        assert {k for k, v in found.items() if v} == {int(RefusalKind.IDENTITY)}
        engine.drop_host()
        assert engine.ask(QUESTION).cached == WHOLE
