# SPDX-License-Identifier: Apache-2.0
"""`kvsafe-fs` as a secondary tier of vLLM, through both doors."""
