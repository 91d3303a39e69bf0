# SPDX-License-Identifier: Apache-2.0
"""Which tests run which line, and how long each takes: each test file once under `coverage`.

The answer for one test file is kept under a digest of that file, its helpers and the sources, so
a new test file costs only itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
CACHE: Final = ROOT / ".cache" / "mutation"
NO_TESTS: Final = 5
# Real engines and devices, and Spin, which looks at its own model and not at this code.
CHOSEN: Final = "not engine and not gpu and not slow"
_MACHINE: Final = "tests/lifecycle/test_machine.py"
# The first of these uses what the second left in a cache; alone it takes as long.
_CACHED: Final = (
    f"{_MACHINE}::test_every_rule_fired_somewhere",
    f"{_MACHINE}::test_every_law_holds_in_every_small_world",
)
# These walk whole worlds, which takes minutes under coverage: they are taken to run every line,
# and come after the tests of which it is known.
BLIND: Final = ("tests/lifecycle/test_figures.py", _MACHINE)
# A test function that takes longer is taken case by case, so that its quick cases can be chosen.
_LONG_S: Final = 5.0
_RC: Final = """[run]
source = kvsafe
data_file = {data}
"""


class CoverageError(Exception):
    """The tests fail without any fault, so nothing can be said about faults."""


class Measured(NamedTuple):
    """One test file: seconds of each test; per source file the tests of each line.

    `loose` are lines that ran outside any test function: on import, or in a fixture.
    """

    seconds: dict[str, float]
    lines: dict[str, dict[str, list[str]]]
    loose: dict[str, list[int]]


class Coverage:
    """Line to tests, for all test files of one folder."""

    def __init__(self, files: Sequence[Measured]) -> None:
        self._files = files
        self._seconds = {name: spent for one in files for name, spent in one.seconds.items()}
        user, owner = _CACHED
        if owner in self._seconds:
            self._seconds[user] = self._seconds[owner]

    def tests(self, cap_s: float) -> list[str]:
        """Node ids of the tests that fit into `cap_s` processor seconds, the quickest first."""
        return self._capped(self._quickest(self._seconds), cap_s)

    def seconds_of(self, tests: Iterable[str]) -> float:
        """Processor seconds that these tests took."""
        return sum(self._seconds[name] for name in tests)

    def tests_of(self, file: str, line: int, cap_s: float) -> list[str]:
        """Node ids of the tests that run `line` of `file` (from the root), the quickest first.

        First those that run it themselves; then, for a line that runs on import, those that use
        the file at all; then the others that import it. At least one, else at most `cap_s`
        processor seconds.
        """
        own: set[str] = set()
        users: set[str] = set()
        others: set[str] = set()
        for one in self._files:
            lines = one.lines.get(file, {})
            own.update(lines.get(str(line), ()))
            if line in one.loose.get(file, ()):
                users.update(name for names in lines.values() for name in names)
                others.update(one.seconds)
        order = [*self._quickest(own), *self._quickest(users - own)]
        return self._capped([*order, *self._quickest(others - users - own)], cap_s)

    def _quickest(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: (self._seconds[name], name))

    def _capped(self, names: list[str], cap_s: float) -> list[str]:
        chosen, left = names[:1], cap_s - self.seconds_of(names[:1])
        for name in names[1:]:
            left -= self._seconds[name]
            if left < 0:
                break
            chosen.append(name)
        return chosen


def measure(folder: str, tests: Iterable[str]) -> Coverage:
    """What `tests` (folders or files, from the root) run of `kvsafe/<folder>`. Minutes at first."""
    sources = sorted((ROOT / "kvsafe" / folder).rglob("*.py"))
    files = sorted({file for name in tests for file in _test_files(ROOT / name)})
    return Coverage([_measured(file, sources) for file in files])


def _test_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))


def _measured(file: Path, sources: Sequence[Path]) -> Measured:
    kept = CACHE / f"{file.parent.name}.{file.stem}.json"
    helpers = [one for one in sorted(file.parent.glob("*.py")) if not one.name.startswith("test_")]
    mark = hashlib.sha256(b"\0".join(one.read_bytes() for one in [*sources, *helpers, file]))
    if kept.exists():
        data = json.loads(kept.read_text())
        if data["mark"] == mark.hexdigest():
            return Measured(**data["measured"])
    print(f"  coverage of {file.relative_to(ROOT)}", file=sys.stderr, flush=True)
    blind = str(file.relative_to(ROOT)) in BLIND
    measured = _run(file, kept.with_suffix(""), blind=blind)
    if blind:
        texts = {str(one.relative_to(ROOT)): one.read_text() for one in sources}
        lines = {name: [*range(1, text.count("\n") + 2)] for name, text in texts.items()}
        measured = measured._replace(loose=lines)
    kept.write_text(json.dumps({"mark": mark.hexdigest(), "measured": measured._asdict()}))
    return measured


def _run(file: Path, scratch: Path, *, blind: bool) -> Measured:
    CACHE.mkdir(parents=True, exist_ok=True)
    data, times, config = (scratch.with_name(scratch.name + end) for end in (".db", ".s", ".rc"))
    config.write_text(_RC.format(data=data))
    data.unlink(missing_ok=True)
    tracer = () if blind else ("-m", "coverage", "run", f"--rcfile={config}")
    done = subprocess.run(
        [
            *(sys.executable, *tracer, "-m", "pytest", "-q", "-p", "fuzz.mutation.seconds"),
            *("-p", "no:cacheprovider", "--timeout=900", "-m", CHOSEN, str(file.relative_to(ROOT))),
        ],
        cwd=ROOT,
        env={**os.environ, "KVSAFE_SECONDS": str(times)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, NO_TESTS):
        raise CoverageError(f"{file.relative_to(ROOT)} fails:\n{done.stdout[-2000:]}")
    measured = _read(data, json.loads(times.read_text()))
    for path in (data, times, config):
        path.unlink(missing_ok=True)
    return measured


def _read(data: Path, cases: dict[str, float]) -> Measured:
    import coverage

    book: Any = coverage.CoverageData(basename=str(data))
    book.read()
    units = _units(cases)
    seconds: defaultdict[str, float] = defaultdict(float)
    for case, spent in cases.items():
        seconds[units[case]] += spent
    lines: dict[str, dict[str, list[str]]] = {}
    loose: dict[str, list[int]] = {}
    for path in book.measured_files():
        source = str(Path(path).relative_to(ROOT))
        contexts = book.contexts_by_lineno(path)
        lines[source] = {
            str(line): sorted({units[name] for name in names if name in units})
            for line, names in contexts.items()
        }
        loose[source] = sorted(line for line, names in contexts.items() if "" in names)
    return Measured(dict(seconds), lines, loose)


def _units(cases: dict[str, float]) -> dict[str, str]:
    """What each case is run as: its whole function, or alone where the function is long."""
    functions: defaultdict[str, float] = defaultdict(float)
    for case, spent in cases.items():
        functions[case.split("[")[0]] += spent
    return {
        case: case if functions[case.split("[")[0]] > _LONG_S else case.split("[")[0]
        for case in cases
    }
