# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: makes kvsafe's names usable in vLLM's JSON."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

CONNECTOR_NAME = "KVSafeConnector"
SPEC_NAME = "KVSafeSpec"
TIERS = {
    "kvsafe-fs": ("kvsafe.engine.fs.tier", "KVSafeFsTier"),
    "kvsafe-lmcache": ("kvsafe.engine.lmcache.tier", "KVSafeLmcacheTier"),
}


def register() -> None:
    """Register connector, spec and tiers by name. vLLM calls this in every process, some twice."""
    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            CONNECTOR_NAME, "kvsafe.engine.connector", CONNECTOR_NAME
        )
    if SPEC_NAME not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(SPEC_NAME, "kvsafe.engine.spec", SPEC_NAME)
    for name, (module, tier) in TIERS.items():
        if name not in SecondaryTierFactory._registry:
            SecondaryTierFactory.register_tier(name, module, tier)
