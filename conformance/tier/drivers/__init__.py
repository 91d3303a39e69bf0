# SPDX-License-Identifier: Apache-2.0
"""One module per kind of tier; each imports what it drives, and nothing else here does."""
