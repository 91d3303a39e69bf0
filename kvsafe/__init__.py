# SPDX-License-Identifier: Apache-2.0
"""kvsafe: KV-cache offload for vLLM that proves every chunk before it is copied back."""

__version__ = "0.1.0.dev0"
