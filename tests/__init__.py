# SPDX-License-Identifier: Apache-2.0
"""kvsafe's own tests."""
