# SPDX-License-Identifier: Apache-2.0
"""A folder in shared memory of its own for each test, and processes that are ended with it."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsafe.host.region import SHARED_MEMORY
from tests.host.processes import Child


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty folder on the file system of POSIX shared memory."""
    folder = Path(tempfile.mkdtemp(prefix="kvsafe-test-", dir=SHARED_MEMORY))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def child(shm: Path) -> Iterator[Callable[[], Child]]:
    """Starts processes over the folder of this test."""
    children: list[Child] = []

    def start() -> Child:
        children.append(Child(shm))
        return children[-1]

    yield start
    for one in children:
        one.end()
