# SPDX-License-Identifier: Apache-2.0
"""The spec refuses what it cannot make rows of, and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config

from fuzz.world import Setting, bench
from kvsafe.device import GeometryExpectation
from kvsafe.engine.config import ConfigError
from kvsafe.engine.spec import Assembly, KVSafeSpec
from tests.support.stations import bare_station

SETTING = Setting()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with bench.quiet():
        yield


def make(folder: Path, kv_cache_config: Any) -> KVSafeSpec:
    """The spec of an engine with this KV cache."""
    extra = {"cpu_bytes_to_use": 1 << 20}
    config = bench.vllm_config(SETTING, "WorldSafeConnector", extra)
    offloading = build_offloading_config(config, kv_cache_config)
    expectation = GeometryExpectation("cpu", 1, offloading.worker_kv_bytes_per_block, ())
    assembly = Assembly(bare_station(folder, slice_bytes=4096), expectation, (), fail_loads=False)
    return KVSafeSpec(offloading, assembly)


def test_an_engine_without_kv_bytes_is_told_which_field_and_what_to_do(tmp_path: Path) -> None:
    whole = bench.kv_cache_config(SETTING)
    for empty in (replace(whole, num_blocks=0), replace(whole, num_blocks=0, kv_cache_tensors=[])):
        with pytest.raises(ConfigError) as refused:
            make(tmp_path, empty)
        [problem] = refused.value.problems
        assert problem.key == "worker_kv_bytes_per_block" and problem.found.startswith("0")
        for way_out in ("--kv-transfer-config", "VLLM_CPU_KVCACHE_SPACE"):
            assert way_out in str(refused.value)
    spec = make(tmp_path, whole)
    assert spec.cpu_page_size_per_worker > 0 and spec.num_chunks > 0
