# SPDX-License-Identifier: Apache-2.0
"""What makes inputs: Atheris where it is installed, else Hypothesis, or a seeded maker.

An engine calls `execute` with one input after the other until `over`. Atheris brings its own
instrumentation and keeps its own corpus; the other two make new inputs from those in `pool`,
into which the caller puts what reached new code.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fuzz.mutate import KINDS, Edit, Maker, apply_edits

ENGINES = ("atheris", "hypothesis", "seeded")
TIMEOUT_S = 60
"""Longest execution under Atheris, in seconds: its clock ends the process."""
_BATCH = 100
_POOL = 400

Execute = Callable[[bytes], None]
Over = Callable[[], bool]


def best() -> str:
    """The best engine that is installed here."""
    return next(name for name in ENGINES if installed(name))


def installed(name: str) -> bool:
    """Whether an engine can be used here."""
    return name == "seeded" or importlib.util.find_spec(name) is not None


def with_seed(execute: Execute, over: Over, pool: Sequence[bytes], seed: int, limit: int) -> None:
    """Inputs from the seed alone."""
    maker = Maker(seed, limit)
    while not over():
        execute(maker.next(pool[-_POOL:]))


def with_hypothesis(
    execute: Execute, over: Over, pool: Sequence[bytes], seed: int, limit: int
) -> None:
    """Inputs that Hypothesis draws, in batches; each batch edits the pool as it stood before."""
    import hypothesis

    batch = 0
    while not over():
        inputs = _inputs(tuple(pool[-_POOL:]), limit)

        @hypothesis.settings(
            max_examples=_BATCH,
            database=None,
            deadline=None,
            phases=(hypothesis.Phase.generate,),
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.seed(seed * 1_000_003 + batch)
        @hypothesis.given(inputs)
        def some(data: bytes) -> None:
            if not over():
                execute(data)

        some()
        batch += 1


def _inputs(pool: tuple[bytes, ...], limit: int) -> Any:
    """Fresh bytes, or one of the pool after a few edits."""
    from hypothesis import strategies as st

    fresh = st.one_of(st.binary(max_size=limit), st.binary(min_size=limit // 2, max_size=limit))
    if not pool:
        return fresh
    numbers = st.integers(0, 0xFFFF)
    edits = st.builds(
        Edit, st.integers(0, KINDS - 1), numbers, numbers, st.binary(min_size=1, max_size=16)
    )
    base = st.sampled_from(pool)
    edited = st.builds(apply_edits, base, st.lists(edits, max_size=6), st.just(limit))
    return st.one_of(fresh, edited, edited)


def with_atheris(
    execute: Execute, folder: Path, seed: int, limit: int, seconds: float, runs: int
) -> None:
    """Inputs by coverage. Does not return: libFuzzer ends the process."""
    atheris = importlib.import_module("atheris")

    arguments = [
        sys.argv[0], str(folder), f"-seed={seed % (1 << 31) or 1}", f"-max_len={limit}",
        f"-timeout={TIMEOUT_S}", "-rss_limit_mb=0", f"-max_total_time={max(1, int(seconds))}",
        "-detect_leaks=0", "-len_control=0", f"-artifact_prefix={folder.parent}/",
    ]  # fmt: skip
    if runs:
        arguments.append(f"-runs={runs}")
    atheris.Setup(arguments, execute)
    atheris.Fuzz()
