# SPDX-License-Identifier: Apache-2.0
"""Drivers: small programs that let the client suite use a client (see `loop.py`)."""
