# SPDX-License-Identifier: Apache-2.0
"""The load of a request that has to fail: it brings nothing, and fails with the refusal.

Only a failed load makes vLLM end a request with an error. So a request that met a refused chunk
under `kv_load_failure_policy: fail` is given such a load, whatever else there may be for it: as
soon as it asks, in no more blocks than one chunk has, and pinned to nothing.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    SchedulerOffloadConfig,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvsafe.engine.rows.transfer import SealedRowsSpec
from kvsafe.seal.refusal import Refusal


def failing_load(req_id: str, refusal: Refusal, config: SchedulerOffloadConfig) -> TransferJob:
    """A load of no row into no block, withheld with this refusal."""
    rows = SealedRowsSpec([], [], [], 0)
    rows.blocks, rows.withheld = [], refusal
    none = [0] * len(config.kv_group_configs)
    blocks = GPULoadStoreSpec([], group_sizes=none, block_indices=none)
    return TransferJob(req_id=req_id, src_spec=rows, dst_spec=blocks)


def failing_tokens(num_tokens: int, local: int, config: SchedulerOffloadConfig) -> int:
    """For how many tokens it is offered: at least one, and at most those of a chunk.

    `num_tokens` are all that the request has, `local` those that the accelerator has of them:
    never all, since vLLM computes the last one itself.
    """
    chunk = max(int(group.tokens_per_chunk) for group in config.kv_group_configs)
    return min(chunk, num_tokens - local)
