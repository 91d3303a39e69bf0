# SPDX-License-Identifier: Apache-2.0
"""Faults of vLLM 0.32, each as a test of what should be: it fails there, and has to."""
