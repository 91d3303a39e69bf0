# SPDX-License-Identifier: Apache-2.0
"""Reader of kvsafe chunks, written from the pages in `spec/` alone; imports nothing of kvsafe."""
