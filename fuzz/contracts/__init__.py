# SPDX-License-Identifier: Apache-2.0
"""Contracts on pure functions, checked symbolically by CrossHair and at random by Hypothesis.

A contract is a function whose first asserts say for which arguments it speaks and whose later
asserts say what must hold. Each module covers one folder of `kvsafe/`; `known_false` holds
contracts that are wrong on purpose, so that a checker that finds nothing is itself found out.
`python -m fuzz.contracts` runs CrossHair over them and writes `spec/contracts.md`.
"""
