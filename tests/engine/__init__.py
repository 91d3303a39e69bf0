# SPDX-License-Identifier: Apache-2.0
"""Tests on the real vLLM engine: every claim is shown where it has to hold."""
