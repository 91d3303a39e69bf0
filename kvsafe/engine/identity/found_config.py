# SPDX-License-Identifier: Apache-2.0
"""The configuration of the engine that is building a tier. vLLM 0.32 does not hand it to tiers.

A secondary tier gets an `OffloadingConfig`: no model, no weights, no rope, no KV dtype. To seal
for an engine one must know which engine it is. What is building the tier knows: it runs on this
thread, further up, with both configurations in its hands. They are looked for there, only read,
and taken only if the spec's own `extra_config` is the very object inside of them; so they cannot
be those of another engine. If vLLM changes this, nothing is found and the tier does not start.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

_DEPTH = 64


class ConfigNotFound(RuntimeError):
    """Nobody up the stack holds the configuration that a spec was made from."""


def engine_configs(extra_config: object) -> tuple[Any, Any]:
    """`(VllmConfig, KVCacheConfig)` of the engine whose connector has this `extra_config`.

    Call it while the engine builds its tiers. Raises `ConfigNotFound`.
    """
    for frame in _callers():
        held = frame.f_locals
        vllm_config, kv_cache_config = held.get("vllm_config"), held.get("kv_cache_config")
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        same = getattr(transfer, "kv_connector_extra_config", None) is extra_config
        if same and hasattr(kv_cache_config, "kv_cache_groups"):
            return vllm_config, kv_cache_config
    raise ConfigNotFound(
        "the tier is not being built by vLLM's OffloadingConnector with a spec of vLLM: it cannot "
        "know which engine it would seal for. Under KVSafeConnector use the type kvsafe-fs"
    )


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
