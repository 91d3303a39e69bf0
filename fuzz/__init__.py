# SPDX-License-Identifier: Apache-2.0
"""Fuzzing of kvsafe: targets, the engines that drive them, seeded faults that prove they bite."""
