# SPDX-License-Identifier: Apache-2.0
"""Requests that run with an adapter: their keys are bound to the adapter's content."""

import os
from dataclasses import dataclass
from itertools import islice
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.kv_offload.base import make_offload_key

from kvsafe.engine.identity.adapters import (
    AdapterDigest,
    AdapterLedger,
    AdapterUnknown,
    bind_adapter,
)
from kvsafe.engine.journal import logger
from kvsafe.seal.refusal import Refusal, RefusalKind


@dataclass(slots=True)
class AdapterRequestState(RequestOffloadState):
    """vLLM's state of such a request.

    Attributes:
        adapter: digest of the adapter's content, or random bytes where it is not known.
        answer: what the ledger knows of the adapter, None if it knows nothing.
        offload_limit: `max_offload_tokens` as the request has asked for it.
    """

    adapter: bytes = b""
    answer: AdapterDigest | None = None
    offload_limit: int | None = None

    def update_offload_keys(self) -> None:
        """Extend the keys by the block hashes that have become known."""
        for group_config, group_state in zip(
            self.config.kv_group_configs, self.group_states, strict=True
        ):
            stride = group_config.hashes_per_chunk
            first = stride * (len(group_state.offload_keys) + 1) - 1
            for block_hash in islice(self.req.block_hashes, first, None, stride):
                bound = bind_adapter(block_hash, self.adapter)
                key = make_offload_key(bound, group_config.group_idx)
                group_state.offload_keys.append(key)
                end = len(group_state.offload_keys) * group_config.tokens_per_chunk
                self.req_context.set_offload_key_position(key, end)


def bound_state(
    status: RequestOffloadState, request: Any, ledger: AdapterLedger
) -> AdapterRequestState:
    """The state of a new request that has an adapter."""
    lora = request.lora_request
    answer = ledger.digest_for(lora.lora_name, lora.lora_int_id, lora.lora_path, lora.load_inplace)
    known = answer if isinstance(answer, AdapterDigest) else None
    bound = AdapterRequestState(
        config=status.config,
        req=status.req,
        req_context=status.req_context,
        offloading_context=status.offloading_context,
        # An adapter of unknown content: a key of its own that nothing can ever match.
        adapter=os.urandom(32) if known is None else known.digest,
        answer=known,
    )
    bound.offload_limit = bound.max_offload_tokens
    if isinstance(answer, AdapterUnknown):
        logger.warning("kvsafe: adapter %s is served without offload: %s", lora.name, answer.reason)
        bound.max_load_tokens = 0
    if known is None or not known.storable:
        bound.max_offload_tokens = 0
    return bound


def limit_stores(status: RequestOffloadState | None, computed: int) -> None:
    """Decide at each beginning of a request whether it may store what it computes.

    After an adapter was reloaded in place the accelerator's prefix cache may hold blocks of
    the old content under the same hashes. A request that takes nothing from it (`computed` is
    0) computes every block itself, and may store them; one that does may not.
    """
    if isinstance(status, AdapterRequestState) and status.answer is not None:
        fresh = status.answer.storable or computed == 0
        status.max_offload_tokens = status.offload_limit if fresh else 0


def reloaded_since(status: RequestOffloadState | None, ledger: AdapterLedger) -> Refusal | None:
    """Why a request must not store any more, if its adapter is not what it was."""
    if not isinstance(status, AdapterRequestState):
        return None
    if status.answer is not None and ledger.is_current(status.answer):
        return None
    return Refusal.of(
        RefusalKind.SOURCE_HASH, "adapter", "the content of the key", "reloaded since"
    )
