# SPDX-License-Identifier: Apache-2.0
"""Suites and keys on the engine: every suite serves its own, none accepts another's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvsafe.seal.refusal import RefusalKind
from tests.engine.cases import refused
from tests.support import models
from tests.support.engine import Engine, Nursery, Place, prompt

pytestmark = pytest.mark.engine

QUESTION = prompt(801, 400)
WHOLE = 384


def test_no_suite_accepts_the_chunks_of_another(nursery: Nursery, tmp_path: Path) -> None:
    """Also the refusal of a downgrade: a keyed engine takes no unkeyed chunk."""
    place = Place(tmp_path)
    files: dict[str, list[Path]] = {}
    for suite in ("blake3", "hmac-sha256", "blake3-keyed", "aes256-gmac"):
        # A key file is for one suite, so each has a state of its own; the store is shared.
        settings = place.settings(suite=suite, state_dir=str(tmp_path / f"state-{suite}"))
        with nursery.running(models.qwen3(), kv_transfer_config=settings) as engine:
            assert engine.stored(QUESTION).cached == 0
            engine.drop_host()
            assert engine.ask(QUESTION).cached == WHOLE
            mine = files[suite] = engine.paths(QUESTION)
            for other in [name for name in files if name != suite]:
                assert not set(mine) & set(files[other])
                _refused_in_my_place(engine, files[other][1], mine[1], RefusalKind.SUITE)


def test_another_key_is_another_world(nursery: Nursery, tmp_path: Path) -> None:
    one, two = Place(tmp_path), Place(tmp_path, {"state_dir": str(tmp_path / "other-state")})
    with nursery.running(models.qwen3(), kv_transfer_config=one.settings()) as engine:
        cold = engine.stored(QUESTION)
        theirs = engine.paths(QUESTION)
    with nursery.running(models.qwen3(), kv_transfer_config=two.settings()) as engine:
        assert engine.stored(QUESTION).cached == 0
        engine.drop_host()
        assert engine.ask(QUESTION).cached == WHOLE
        mine = engine.paths(QUESTION)
        assert not set(mine) & set(theirs)
        _refused_in_my_place(engine, theirs[1], mine[1], RefusalKind.KEY_ID)
    with nursery.running(models.qwen3(), kv_transfer_config=one.settings()) as engine:
        again = engine.ask(QUESTION)
        assert (again.tokens, again.cached) == (cold.tokens, WHOLE)


def _refused_in_my_place(engine: Engine, theirs: Path, mine: Path, kind: RefusalKind) -> None:
    engine.drop_host()
    good = mine.read_bytes()
    shutil.copyfile(theirs, mine)
    before = engine.metrics()
    assert engine.ask(QUESTION).cached == 128
    assert refused(before, engine) == {int(kind): 1}
    engine.settle()
    mine.write_bytes(good)
    engine.drop_host()
    assert engine.ask(QUESTION).cached == WHOLE
