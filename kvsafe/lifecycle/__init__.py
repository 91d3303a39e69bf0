# SPDX-License-Identifier: Apache-2.0
"""The state machine of rows, requests and tiers: states, events, guards, laws, explorer."""
