# SPDX-License-Identifier: Apache-2.0
"""U: a request whose load failed keeps a reservation against itself and may never be admitted."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from fuzz.world import Setting, bench
from fuzz.world.content import Script, prompt_of

TOKENS, NAME, STEPS = 33, "r", 20


class Remote(KVConnectorBase_V1, SupportsHMA):
    """A connector that always has the first tokens of a prompt, to be loaded asynchronously."""

    has = 0
    loads = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """So many tokens are there."""
        return max(Remote.has - num_computed_tokens, 0), True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A load was admitted."""
        Remote.loads += num_external_tokens > 0

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """Nothing is kept."""
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to say."""
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """There is no worker here."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """There is no worker here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """There is no worker here."""

    def wait_for_save(self) -> None:
        """There is no worker here."""


def loads_after_a_failure(blocks: int, *, failed: bool = True) -> int:
    """How many loads are admitted for one request of 33 tokens that needs 9 of the blocks.

    With `failed` its first load fails, and less is there for the second.
    """
    setting = Setting(blocks=blocks, budget=64)
    Remote.has, Remote.loads = 32 if failed else 24, 0
    with bench.quiet():
        config = bench.vllm_config(setting, Remote.__name__, {})
        assert config.kv_transfer_config is not None
        config.kv_transfer_config.kv_connector_module_path = __name__
        scheduler = bench.scheduler(config, bench.kv_cache_config(setting), setting)
        prompt = prompt_of(0, TOKENS, TOKENS, 0)
        scheduler.add_request(bench.request(NAME, Script(prompt, TOKENS + 4), TOKENS, 1))
        output = scheduler.schedule()
        if failed:
            assert Remote.loads == 1
            report = KVConnectorOutput(finished_recving={NAME}, failed_recving={NAME})
            scheduler.update_from_output(output, ModelRunnerOutput.with_kv_conn_output_only(report))
            Remote.has = 24
        for _ in range(STEPS):
            scheduler.schedule()
    return Remote.loads


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="finding U")
def test_a_request_is_admitted_again_after_its_load_failed() -> None:
    assert loads_after_a_failure(blocks=12) == 2


def test_it_is_where_its_blocks_fit_twice() -> None:
    assert loads_after_a_failure(blocks=24) == 2


def test_the_same_load_is_admitted_if_none_has_failed() -> None:
    assert loads_after_a_failure(blocks=12, failed=False) == 1
