# SPDX-License-Identifier: Apache-2.0
"""Host rows under the engine: who owns one, when it is sealed, and which block goes where."""
