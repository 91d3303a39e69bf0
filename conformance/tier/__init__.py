# SPDX-License-Identifier: Apache-2.0
"""Trials for disk tiers: attacks and faults as folders, run on any tier. See README.md."""
