# SPDX-License-Identifier: Apache-2.0
"""The quarantine beside vLLM's fs tier is bounded, and nothing is deleted when it is full."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import OffloadKey

from kvsafe.engine.journal import logger
from kvsafe.engine.tiers import objects
from kvsafe.engine.tiers.objects import QUARANTINE_FOLDER, FsObjects
from kvsafe.seal.refusal import Refusal, RefusalKind

REFUSAL = Refusal.of(RefusalKind.PAYLOAD_TAG, "payload", "a", "b")


def _tier(root: Path) -> Any:
    mapper = SimpleNamespace(get_file_name=lambda name: root / bytes(name).decode())
    return SimpleNamespace(file_mapper=mapper, block_size_bytes=4096)


def test_a_full_quarantine_leaves_objects_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "QUARANTINE_LIMIT", 2)
    known = FsObjects(_tier(tmp_path), tmp_path, "aside")
    names = [OffloadKey(f"{number}.bin".encode()) for number in range(4)]
    for name in names:
        (tmp_path / bytes(name).decode()).write_bytes(bytes(4096))
    # Not `caplog`: what other tests did to levels and handlers is no matter of this one.
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *_: lines.append(text))
    assert [known.quarantine(name, REFUSAL) for name in names] == [True, True, False, False]
    aside = tmp_path / QUARANTINE_FOLDER
    assert len(list(aside.iterdir())) == 2
    assert [known.exists(name) for name in names] == [False, False, True, True]
    assert sum("stay in place" in line for line in lines) == 1
    # Emptied, it takes the next one.
    for path in aside.iterdir():
        path.unlink()
    assert known.quarantine(names[2], REFUSAL)
