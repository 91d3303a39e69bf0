# SPDX-License-Identifier: Apache-2.0
"""F15: a real quota. EDQUOT comes from the kernel while the file system says that it has space."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from fuzz.campaigns import full
from kvsafe.tiers import outcome

# Making, filling and removing a file system on a busy disk.
pytestmark = pytest.mark.timeout(400)


def test_a_quota_that_is_used_up(tmp_path: Path) -> None:
    with full.small_disk(full.QUOTA, tmp_path) as disk:
        if disk is None:
            pytest.skip("no right to mount, or no btrfs here")
        met = pytest.raises(OSError, match="Errno")
        with met as error, open(disk / "x", "wb", buffering=0) as file:
            while True:
                file.write(os.urandom(65536))
        assert error.value.errno == errno.EDQUOT
        space = os.statvfs(disk)
        assert space.f_bavail * space.f_frsize > 2 * full.DISK_BYTES
    found, answers = full.campaign(1, seed=1, kinds=(full.QUOTA,))
    assert found.faults == []
    assert answers[f"EDQUOT, {full.QUOTA}"] > 0
    assert answers[f"done, {full.QUOTA}"] > 100


def test_a_store_that_does_not_know_the_error_is_found(tmp_path: Path) -> None:
    """The control: EDQUOT taken for an error of the disk."""
    with patch.object(outcome, "FULL", (errno.ENOSPC,)):
        found, answers = full.campaign(1, seed=1, kinds=(full.QUOTA,))
    if f"rounds, {full.QUOTA}" not in answers:
        pytest.skip("no right to mount, or no btrfs here")
    assert any("did not run full" in text for text in found.other)
