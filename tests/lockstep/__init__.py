# SPDX-License-Identifier: Apache-2.0
"""The lifecycle's machine and the real classes, given the same calls, compared after each."""
