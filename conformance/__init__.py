# SPDX-License-Identifier: Apache-2.0
"""A second reader of the chunk format, and rows that pin the format."""
