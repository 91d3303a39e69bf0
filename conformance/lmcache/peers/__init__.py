# SPDX-License-Identifier: Apache-2.0
"""Real peers: vLLM engines with LMCache's connectors or ours, and the servers between them."""
