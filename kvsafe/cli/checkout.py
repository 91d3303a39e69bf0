# SPDX-License-Identifier: Apache-2.0
"""What is in a checkout of kvsafe's source and not in an installation: trials and fuzz targets."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from kvsafe.cli import UsageError

_OURS = Path("kvsafe", "cli", "checkout.py")


def load_from_checkout(module: str) -> ModuleType:
    """A module of the checkout that kvsafe runs from, or that this is started in.

    Raises `UsageError` where there is none, or where something that it needs is missing.
    """
    path = Path(*module.split(".")).with_suffix(".py")
    here, around = Path(__file__).resolve().parents[2], Path.cwd()
    if (here / path).is_file():
        folder = here
    elif all(_is_of_this_user(around / part) for part in ("", path, _OURS)):
        folder = around
    else:
        raise UsageError(
            f"module {module} is not part of an installation: run this in a checkout of kvsafe's "
            "source that nobody else may write to"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return _load(module)


def _is_of_this_user(path: Path) -> bool:
    """Whether nobody else decides what is there: what is in such a folder is run."""
    try:
        info = path.stat()
    except OSError:
        return False
    return info.st_uid in (os.geteuid(), 0) and not info.st_mode & 0o022


def _load(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{module} needs {error.name}, which is not installed") from error
