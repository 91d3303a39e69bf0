# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for a run under coverage: processor time and lines of each case.

Processor time and not wall time: the machine may be busy with other things. Every case, with its
fixtures, is a context of coverage's; what runs outside of all cases, on import, has none.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

_SECONDS: defaultdict[str, float] = defaultdict(float)
_SKIPPED: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Add one case, with its fixtures and the children that it waited for."""
    before = sum(os.times()[:4])
    running = coverage.Coverage.current()
    if running is not None:
        running.switch_context(item.nodeid)
    result = yield
    if running is not None:
        running.switch_context("")
    _SECONDS[item.nodeid] += sum(os.times()[:4]) - before
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what is skipped: it can notice nothing."""
    if report.skipped:
        _SKIPPED.add(report.nodeid)


def pytest_sessionfinish() -> None:
    """Write the file that `cover` reads."""
    found = {name: spent for name, spent in _SECONDS.items() if name not in _SKIPPED}
    Path(os.environ["KVSAFE_SECONDS"]).write_text(json.dumps(found))
