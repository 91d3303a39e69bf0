# SPDX-License-Identifier: Apache-2.0
"""Pure bytes: identity, header codec, tags and keys; a chunk is sealed, and opened or refused."""
