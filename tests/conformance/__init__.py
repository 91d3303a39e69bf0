# SPDX-License-Identifier: Apache-2.0
"""The reader in `conformance/` and kvsafe's own opener, held against each other."""
