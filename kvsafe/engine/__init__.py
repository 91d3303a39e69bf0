# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter: the only folder that imports vllm. It wires the stations together."""
