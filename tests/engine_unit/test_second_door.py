# SPDX-License-Identifier: Apache-2.0
"""Parts of the second door without an engine: who is building the tier, and where bytes lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvsafe.device import ExpectedGroup, GeometryExpectation
from kvsafe.engine.assembly import AssemblyError
from kvsafe.engine.counters import BYTES_VERIFIED, OPENED, Counters
from kvsafe.engine.fs.second_door import SealingFsTier
from kvsafe.engine.identity.found_config import ConfigNotFound, engine_configs
from kvsafe.engine.identity.planned_geometry import GeometryUnknown, planned_geometry
from kvsafe.engine.tiers.self_sealing import TierSeal, refuse_unsealable

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=32
)
PAGE = int(SPEC.page_size_bytes)


def _build(extra: dict[str, Any], vllm_config: Any, kv_cache_config: Any) -> tuple[Any, Any]:
    """As vLLM's connector does: it holds both configurations while the tier is made."""
    return _factory(extra)


def _factory(extra: dict[str, Any]) -> tuple[Any, Any]:
    return engine_configs(extra)


def test_the_configuration_is_found_where_it_is_held() -> None:
    extra: dict[str, Any] = {"cpu_bytes_to_use": 1}
    engine = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    cache = SimpleNamespace(kv_cache_groups=[])
    assert _build(extra, engine, cache) == (engine, cache)


def test_the_configuration_of_another_engine_is_not_taken() -> None:
    extra: dict[str, Any] = {"cpu_bytes_to_use": 1}
    other = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=dict(extra))
    )
    with pytest.raises(ConfigNotFound, match="KVSafeConnector"):
        _build(extra, other, SimpleNamespace(kv_cache_groups=[]))
    with pytest.raises(ConfigNotFound):
        _build(extra, None, None)


def test_it_does_not_start_where_nobody_says_which_engine_it_is(tmp_path: Path) -> None:
    memory = memoryview(bytearray(8192)).cast("B", (2, 4096))
    spec = SimpleNamespace(extra_config={})
    with pytest.raises(ConfigNotFound):
        SealingFsTier(spec, memory, "SealingFsTier", root_dir=str(tmp_path), capacity_bytes=1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_a_batch_leaves_each_file_to_be_opened_by_itself() -> None:
    seal: Any = TierSeal.__new__(TierSeal)
    seal.counters, seal.layout = Counters("aes256-gmac", ()), SimpleNamespace(payload_bytes=9)
    answers: list[Any] = [RuntimeError("ours"), [True, False]]

    def right(*_: object) -> list[bool]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    asked = ([memoryview(b"a"), memoryview(b"b")], [b"k", b"l"], 1, "tier")
    seal._batch = SimpleNamespace(right=right)
    assert seal.right(*asked) == [False, False]
    assert seal.counters.totals[OPENED] == 0
    assert seal.right(*asked) == [True, False]
    assert (seal.counters.totals[OPENED], seal.counters.totals[BYTES_VERIFIED]) == (1, 9)
    seal._batch = None
    assert seal.right(*asked) == [False, False]


@dataclass
class _Tensor:
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0
    host_resident: bool = False
    size: int = 0


@dataclass
class _Cache:
    """As much of `KVCacheConfig` as is looked at."""

    kv_cache_tensors: list[_Tensor]
    kv_cache_groups: list[Any]
    hisparse_host_num_blocks: int | None = None
    prefix_cacheable_group_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.prefix_cacheable_group_ids = tuple(range(len(self.kv_cache_groups)))


def _cache(*tensors: _Tensor, groups: list[list[str]]) -> _Cache:
    specs = [SimpleNamespace(kv_cache_spec=SPEC, layer_names=names) for names in groups]
    return _Cache(list(tensors), specs)


def _expect(groups: list[list[str]], tensors: int, blocks: int = 1) -> GeometryExpectation:
    made = tuple(ExpectedGroup(tuple(names), (PAGE,) * len(names)) for names in groups)
    return GeometryExpectation("cpu", blocks, PAGE * tensors * blocks, made)


def test_layers_one_after_another() -> None:
    groups = [["a", "b", "c"]]
    cache = _cache(_Tensor(["a", "b", "c"], 100 * PAGE, PAGE), groups=groups)
    made = planned_geometry(cache, _expect(groups, 3, 2), pipeline_stages=1)
    assert [tensor.layers for tensor in made.tensors] == [("a",), ("b",), ("c",)]
    assert made.describe()["device"] == "cpu"
    assert made.slice_bytes == 6 * PAGE


def test_groups_over_the_same_bytes_share_a_tensor() -> None:
    groups = [["a", "b"], ["c", "d"]]
    cache = _cache(
        _Tensor(["a", "b"], 100 * PAGE, PAGE), _Tensor(["c", "d"], 100 * PAGE, PAGE), groups=groups
    )
    made = planned_geometry(cache, _expect(groups, 2), pipeline_stages=1)
    assert [tensor.layers for tensor in made.tensors] == [("a", "c"), ("b", "d")]
    assert [[ref.tensor for ref in refs] for refs in made.groups] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("tensor", "stages", "words"),
    [
        (_Tensor(["a"], PAGE, 4 * PAGE), 1, "packed"),
        (_Tensor(["a"], PAGE, PAGE, host_resident=True), 1, "host memory"),
        (_Tensor(["b"], PAGE, PAGE), 1, "no KV-cache tensor"),
        (_Tensor(["a"], PAGE, PAGE), 2, "pipeline"),
    ],
)
def test_what_cannot_be_said_for_certain_is_refused(
    tensor: _Tensor, stages: int, words: str
) -> None:
    with pytest.raises(GeometryUnknown, match=words):
        planned_geometry(
            _cache(tensor, groups=[["a"]]), _expect([["a"]], 1), pipeline_stages=stages
        )
    good = _cache(_Tensor(["a"], PAGE, PAGE), groups=[["a"]])
    assert planned_geometry(good, _expect([["a"]], 1), pipeline_stages=1).tensors


def test_another_slice_length_than_expected_is_refused() -> None:
    cache = _cache(_Tensor(["a"], PAGE, PAGE), groups=[["a"]])
    with pytest.raises(GeometryUnknown, match="slice_bytes"):
        planned_geometry(cache, _expect([["a"]], 2), pipeline_stages=1)


def _spec(blocks: int = 1, *, canonical: bool = False) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(canonical_layout=canonical), blocks_per_chunk=blocks
    )


def test_engines_whose_rows_cannot_be_proven_are_refused() -> None:
    plain, lora = SimpleNamespace(lora_config=None), SimpleNamespace(lora_config=object())
    full = _cache(groups=[["a"]])
    window = _cache(groups=[["a"]])
    window.kv_cache_groups[0].kv_cache_spec = WINDOW
    for vllm_config, cache, spec, words in (
        (lora, full, _spec(), "LoRA"),
        (plain, full, _spec(canonical=True), "canonical"),
        (plain, window, _spec(2), "several blocks"),
    ):
        with pytest.raises(AssemblyError, match=words):
            refuse_unsealable(vllm_config, cache, spec)
    for cache, blocks in ((full, 1), (full, 2), (window, 1)):
        refuse_unsealable(plain, cache, _spec(blocks))
