# SPDX-License-Identifier: Apache-2.0
"""What is in a checkout of kvsafe's source and not in an installation: trials and fuzz targets."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from kvsafe.cli import UsageError


def load_from_checkout(module: str) -> ModuleType:
    """A module of the checkout that kvsafe runs from, or that this is started in.

    Raises `UsageError` where there is none, or where something that it needs is missing.
    """
    path = Path(*module.split(".")).with_suffix(".py")
    for folder in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (folder / path).is_file() and (folder / "kvsafe").is_dir():
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            return _load(module)
    raise UsageError(
        f"module {module} is not part of an installation: run this in a checkout of kvsafe's source"
    )


def _load(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{module} needs {error.name}, which is not installed") from error
