# SPDX-License-Identifier: Apache-2.0
"""LMCache's wire from the outside: suites for servers and clients, lying servers, real peers."""
