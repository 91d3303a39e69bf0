# SPDX-License-Identifier: Apache-2.0
"""Where the files of a model are on this machine, without using the network."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_REPOSITORY = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_REVISION = re.compile(r"[\w.-]+(?:/[\w.-]+)*")


def resolve_model_folder(
    model: str, revision: str | None = None, *, download_dir: Path | None = None
) -> Path | None:
    """The local folder of a model: a folder, or its snapshot in the Hugging Face cache.

    Never uses the network. `None` means that no folder is known.
    """
    local = Path(model).expanduser()
    if local.is_dir():
        return local
    if not _REPOSITORY.fullmatch(model) or ".." in model:
        return None
    wanted = revision or "main"
    if not _REVISION.fullmatch(wanted) or ".." in wanted:
        return None
    for hub in (download_dir,) if download_dir else _hub_folders(os.environ):
        repository = hub / f"models--{model.replace('/', '--')}"
        snapshot = repository / "snapshots" / _commit_of(repository, wanted)
        if snapshot.is_dir():
            return snapshot
    return None


def _commit_of(repository: Path, revision: str) -> str:
    try:
        text = (repository / "refs" / revision).read_text(encoding="ascii")[:128].strip()
    except (OSError, ValueError):
        return revision
    return text if _REVISION.fullmatch(text) and ".." not in text else revision


def _hub_folders(environment: Mapping[str, str]) -> Iterable[Path]:
    """Where the Hugging Face libraries keep their snapshots, by their own variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(name):
            return (Path(environment[name]).expanduser(),)
    home = environment.get("HF_HOME")
    if not home:
        cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
        home = f"{cache}/huggingface"
    return (Path(home).expanduser() / "hub",)
