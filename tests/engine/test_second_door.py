# SPDX-License-Identifier: Apache-2.0
"""The second door on real engines: plain `OffloadingConnector`, vLLM's spec, a sealed disk.

Files cross between it and `KVSafeConnector` both ways; damage and other settings are refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvsafe.seal.refusal import RefusalKind
from tests.engine.test_disk_damage import flip
from tests.engine.test_settings import rope
from tests.support import models
from tests.support.engine import Engine, EngineFailed, Nursery, Place, prompt

pytestmark = pytest.mark.engine

STATE = "state"


def stock(root: Path, blocks: int = 1, **options: Any) -> dict[str, Any]:
    """`kv_transfer_config` of a plain `OffloadingConnector` with a sealing tier."""
    tier = {
        "type": "SealingFsTier",
        "module_path": "kvsafe.engine.fs.second_door",
        "root_dir": str(root / "store"),
        "capacity_bytes": "1GiB",
        "state_dir": str(root / STATE),
        **options,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 64 << 20,
            "blocks_per_chunk": blocks,
            "spec_name": "StockOnCpu",
            "spec_module_path": "tests.support.stock_spec",
            "secondary_tiers": [tier],
        },
    }


def own(root: Path, blocks: int = 1) -> dict[str, Any]:
    """`kv_transfer_config` of `KVSafeConnector` over the same folder."""
    tier = {"type": "kvsafe-fs", "root_dir": str(root / "store"), "capacity_bytes": "1GiB"}
    return Place(root).settings(secondary_tiers=[tier], blocks_per_chunk=blocks)


def files(root: Path) -> set[Path]:
    """The chunk files."""
    return set((root / "store" / "objects").rglob("*.chunk"))


def quarantined(root: Path) -> list[str]:
    """Refusal numbers of what was moved aside."""
    folder = root / "store" / "kvsafe-quarantine"
    return sorted(path.name.split("-")[0] for path in folder.iterdir())


def stored_alone(engine: Engine, root: Path, question: list[int]) -> tuple[Any, Path]:
    """Ask a question of one chunk; the answer, and the file that came of it."""
    before = files(root)
    done = engine.stored(question)
    [file] = files(root) - before
    return done, file


def test_files_cross_the_doors_and_damage_is_refused(nursery: Nursery, tmp_path: Path) -> None:
    model = models.qwen3()
    long, other, short = prompt(501, 400), prompt(502, 400), prompt(503, 200)
    with nursery.running(model, kv_transfer_config=stock(tmp_path)) as engine:
        cold = engine.stored(long)
        damaged, file = stored_alone(engine, tmp_path, short)
        assert (cold.cached, damaged.cached, len(files(tmp_path))) == (0, 0, 4)
        assert engine.metrics().total("chunks_sealed_total") == 4
    with nursery.running(model, kv_transfer_config=own(tmp_path)) as engine:
        crossed = engine.ask(long)
        assert (crossed.tokens, crossed.cached) == (cold.tokens, 384)
        assert engine.metrics().refusals() == {}
        back = engine.stored(other)
    flip(file, 20000)
    with nursery.running(model, kv_transfer_config=stock(tmp_path)) as engine:
        for question, first in ((long, cold), (other, back)):
            again = engine.ask(question)
            assert (again.tokens, again.cached) == (first.tokens, 384)
        assert engine.metrics().refusals() == {}
        healed = engine.stored(short)
        assert (healed.tokens, healed.cached) == (damaged.tokens, 0)
        metrics = engine.metrics()
        assert metrics.refusals() == {int(RefusalKind.PAYLOAD_TAG): 1}
        assert metrics.total("chunks_opened_total", place="SealingFsTier") == 6
        assert quarantined(tmp_path) == ["1001"]
        assert file in files(tmp_path)


def test_other_settings_miss_and_their_files_are_refused(nursery: Nursery, tmp_path: Path) -> None:
    """F01 through this door, with its control; then their file in our place."""
    model, question = models.qwen3(), prompt(504, 200)
    with nursery.running(model, kv_transfer_config=stock(tmp_path)) as engine:
        cold, theirs = stored_alone(engine, tmp_path, question)
    with nursery.running(model, kv_transfer_config=stock(tmp_path), **rope()) as engine:
        done, mine = stored_alone(engine, tmp_path, question)
        assert (done.cached, theirs != mine) == (0, True)
    good = mine.read_bytes()
    shutil.copyfile(theirs, mine)
    with nursery.running(model, kv_transfer_config=stock(tmp_path), **rope()) as engine:
        refused = engine.stored(question)
        assert (refused.tokens, refused.cached) == (done.tokens, 0)
        assert engine.metrics().refusals() == {int(RefusalKind.IDENTITY): 1}
        assert "rope" in engine.log()
        assert mine.stat().st_size == len(good)
    with nursery.running(model, kv_transfer_config=stock(tmp_path)) as engine:
        control = engine.ask(question)
        assert (control.tokens, control.cached) == (cold.tokens, 128)


def test_a_reset_revokes_what_this_door_has_stored(nursery: Nursery, tmp_path: Path) -> None:
    """F07: vLLM tells tiers of a reset only by draining them."""
    model, question = models.qwen3(), prompt(505, 200)
    with nursery.running(model, kv_transfer_config=stock(tmp_path)) as engine:
        cold = engine.stored(question)
        assert engine.do("reset") is True
        again = engine.stored(question)
        assert (again.tokens, again.cached) == (cold.tokens, 0)
    with nursery.running(model, kv_transfer_config=own(tmp_path)) as engine:
        assert engine.ask(question).cached == 0


@pytest.mark.parametrize(("name", "blocks"), [("gemma3", 1), ("qwen3", 2)])
def test_other_geometries_cross_too(
    nursery: Nursery, tmp_path: Path, name: str, blocks: int
) -> None:
    """Several groups over one tensor, and several blocks in a chunk."""
    model, question = getattr(models, name)(), prompt(506, 560)
    with nursery.running(model, kv_transfer_config=own(tmp_path, blocks)) as engine:
        cold = engine.stored(question)
    with nursery.running(model, kv_transfer_config=stock(tmp_path, blocks)) as engine:
        crossed = engine.ask(question)
        assert (crossed.tokens, crossed.cached) == (cold.tokens, 512)
        assert engine.metrics().refusals() == {}


def test_what_cannot_be_proven_does_not_start(nursery: Nursery, tmp_path: Path) -> None:
    for options, words in (
        ({"state_dir": str(tmp_path / "store" / "state")}, "state_dir"),
        ({"capacity_byte": 1}, "capacity_byte"),
    ):
        engine = nursery.engine()
        try:
            with pytest.raises(EngineFailed, match=words):
                engine.start(models.qwen3(), kv_transfer_config=stock(tmp_path, **options))
        finally:
            engine.kill()
