# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.32's own offload tests, run as they are and run with our classes in place of theirs."""
