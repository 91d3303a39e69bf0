# SPDX-License-Identifier: Apache-2.0
"""The nursery for the session, and the engines that several tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine import Nursery


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The process that forks engines."""
    pytest.importorskip("vllm")
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    try:
        yield made
    finally:
        made.close()
