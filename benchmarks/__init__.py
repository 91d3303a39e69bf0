# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: ratios in one run, against the stock class or the bare library call."""
