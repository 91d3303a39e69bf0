# SPDX-License-Identifier: Apache-2.0
"""One fault, the tests that run its line, and whether one of them notices.

A child is forked from a process that has everything heavy imported but nothing of `kvsafe`; in
the child the broken module stands in place of the real one.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple

from fuzz.mutation.cover import CHOSEN, ROOT
from fuzz.mutation.operators import Mutant, break_tree

KILLED: Final = "killed"
HUNG: Final = "hung"
SURVIVED: Final = "survived"
UNTESTED: Final = "no test"
NOTICED: Final = (KILLED, HUNG)
_HEAVY: Final = (
    "pytest",
    "hypothesis",
    "hypothesis.stateful",
    "numpy",
    "torch",
    "msgspec",
    "cbor2",
    "blake3",
    "cryptography.hazmat.primitives.kdf.hkdf",
)
_MEMORY_BYTES: Final = 8 << 30
# What costs a second for each fault and tells no more than that a test failed.
_LIGHT: Final = (
    "--assert=plain",
    *("-p", "no:cacheprovider", "-p", "no:anyio", "-p", "no:unraisableexception"),
)


class Fate(NamedTuple):
    """What became of one mutant of one file, and the first test that noticed."""

    file: str
    mutant: Mutant
    outcome: str
    tests: int
    seconds: float
    noticed_by: str = ""


def warm_up(names: Sequence[str] = ()) -> None:
    """Import what the tests need and what is not under test; `names` may be missing here."""
    for name in _HEAVY:
        importlib.import_module(name)
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if any(name.split(".")[0] == "kvsafe" for name in sys.modules):
        raise RuntimeError("kvsafe was imported: no fault would get into it")


def hunt(
    file: str, mutant: Mutant | None, tests: Sequence[str], cpu_s: float, limit_s: float
) -> tuple[str, float, str]:
    """Run `tests` with the fault in place (None: no fault): outcome, seconds, who noticed.

    More than `cpu_s` processor seconds or `limit_s` seconds is `HUNG`.
    """
    if not tests:
        return UNTESTED, 0.0, ""
    start = time.monotonic()
    broken = None if mutant is None else _Broken(file, mutant)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _in_child(broken, tests, math.ceil(cpu_s), theirs)
    os.close(theirs)
    with open(ours) as words:
        outcome = _wait(child, limit_s)
        noticed_by = words.read(2000) if outcome == KILLED else ""
    return outcome, time.monotonic() - start, noticed_by


def _wait(child: int, limit_s: float) -> str:
    handle = os.pidfd_open(child)
    try:
        ended = select.select([handle], [], [], limit_s)[0]
        with contextlib.suppress(ProcessLookupError):
            # Also after its end: a broken test may leave children of its own.
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(handle)
    code = os.waitstatus_to_exitcode(status)
    if not ended or code == -signal.SIGXCPU:
        return HUNG
    return SURVIVED if code == 0 else KILLED


def _in_child(broken: _Broken | None, tests: Sequence[str], cpu_s: int, words: int) -> None:
    code = 3
    try:
        os.setpgid(0, 0)
        quiet = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(quiet, number)
        if broken is not None:
            sys.meta_path.insert(0, broken)
        spent = sum(os.times()[:2])
        limit = math.ceil(spent) + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 30))
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
        code = _run(tests, words)
    finally:
        os._exit(code)


def _run(tests: Sequence[str], words: int) -> int:
    import hypothesis
    import pytest
    from hypothesis import Phase

    # Without shrinking: that a test fails is all that is asked.
    hypothesis.settings.register_profile(
        "mutation", derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
    )
    hypothesis.settings.load_profile("mutation")
    options = ["-x", "-q", "--timeout=120", "--no-header", "--tb=no", "-m", CHOSEN]
    arguments = [*options, *_LIGHT, *tests]
    return int(pytest.main(arguments, plugins=[_Witness(words)]))


class _Witness:
    """A pytest plugin that says through a pipe which test failed, and ends the process."""

    def __init__(self, words: int) -> None:
        self._words = words

    def pytest_runtest_logreport(self, report: object) -> None:
        """One phase of one case."""
        self._tell(report)

    def pytest_collectreport(self, report: object) -> None:
        """One test file that was read."""
        self._tell(report)

    def _tell(self, report: object) -> None:
        if getattr(report, "failed", False):
            os.write(self._words, str(getattr(report, "nodeid", "")).encode()[:1000])
            # Without tearing down: a broken copier may wait there for its deadline.
            os._exit(1)


class _Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds exactly one module, and gives it the broken tree."""

    def __init__(self, file: str, mutant: Mutant) -> None:
        self._path = ROOT / file
        self._name = _module_of(file)
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """The spec of the broken module, None for every other."""
        if fullname != self._name:
            return None
        places = [str(self._path.parent)] if self._path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, self._path, loader=self, submodule_search_locations=places
        )

    def exec_module(self, module: ModuleType) -> None:
        """Run the broken tree as the module."""
        tree = break_tree(self._path.read_text(), self._mutant)
        exec(compile(tree, str(self._path), "exec"), module.__dict__)  # noqa: S102 - our own code


def _module_of(file: str) -> str:
    parts = list(Path(file).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
