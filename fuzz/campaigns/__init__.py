# SPDX-License-Identifier: Apache-2.0
"""Faults on the disk store, for real and in number.

    python -m fuzz.campaigns.kills --kills 1000     SIGKILL before, in and after each system call
    python -m fuzz.campaigns.calls                  each call fails, is short, slow or stuck
    python -m fuzz.campaigns.power --states 20000   what was not synced is lost, zeroed or torn
    python -m fuzz.campaigns.full                   small real file systems run full
    python -m fuzz.campaigns.crowd --seconds 60     processes on one folder, some of them killed

Each prints one line of counts (`--json`: one document) and ends with 1 if anything was
wrong. `tests/tiers/test_campaigns.py` runs a short version of each.
"""
