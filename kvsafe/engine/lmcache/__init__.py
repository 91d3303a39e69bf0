# SPDX-License-Identifier: Apache-2.0
"""`kvsafe-lmcache`: a server that LMCache's peers use, as a secondary tier of vLLM."""
