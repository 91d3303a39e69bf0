# SPDX-License-Identifier: Apache-2.0
"""Rules of the tree that are tests: a rule that nothing enforces is only a wish."""
