# SPDX-License-Identifier: Apache-2.0
"""What requests wait for, and what may be stored or served on their behalf."""
