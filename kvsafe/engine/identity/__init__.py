# SPDX-License-Identifier: Apache-2.0
"""What the running engine computes: read, digested and remembered, before anything is sealed."""
