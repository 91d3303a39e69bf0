# SPDX-License-Identifier: Apache-2.0
"""L: three calls that do harm when they are made wrongly; nobody makes them so today."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager

from tests.findings.stock import key, rows_in_use

A, B = key(1), key(2)


@pytest.fixture
def manager() -> CPUOffloadingManager:
    return CPUOffloadingManager(4)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(
            [A, A],
            marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason="finding L"),
        ),
        pytest.param([A, B], id="two keys"),
    ],
)
def test_one_call_loses_no_row(manager: CPUOffloadingManager, keys: list[OffloadKey]) -> None:
    context = ReqContext(req_id="r")
    manager.prepare_store(keys, context)
    manager.complete_store(keys, context)
    used, there = rows_in_use(manager, [A, B])
    assert used == there


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="finding L")
def test_a_load_that_fails_pins_nothing(manager: CPUOffloadingManager) -> None:
    context = ReqContext(req_id="r")
    manager.prepare_store([A], context)
    manager.complete_store([A], context)
    with contextlib.suppress(Exception):
        manager.prepare_load([A, B], context)
    chunk = manager._policy.get(A)
    assert chunk is not None and chunk.ref_cnt == 0


class Lookups(AsyncLookupManager):
    """Everything is there."""

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return [True for _ in keys]


@pytest.fixture
def lookups() -> Iterator[Lookups]:
    made = Lookups("test")
    yield made
    with contextlib.suppress(AssertionError):
        made.shutdown()


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="finding L")
def test_a_miss_may_be_noted_while_the_answer_is_on_its_way(lookups: Lookups) -> None:
    lookups.lookup(A, ReqContext(req_id="r"))
    lookups.mark_miss([A])
    lookups.flush()


def test_a_miss_may_be_noted_of_a_key_that_nobody_asked_for(lookups: Lookups) -> None:
    lookups.mark_miss([A])
    lookups.flush()
