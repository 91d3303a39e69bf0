# SPDX-License-Identifier: Apache-2.0
"""The folders are stations that do not know one another; only the engine folder wires them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.tidy.tree import Source, at_import_time, imports, sources

STATIONS = ("seal", "device", "host", "tiers", "lifecycle")
SHARED = "native"
"""How stations load what was built beside them. Knows nothing of kvsafe itself."""
TORCH_FOLDERS = ("device", "engine")
LAZY_FOLDERS = ("cli", "lmcache")
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "vllm")


def breaches(source: Source) -> Iterator[str]:
    """What `source` imports and may not, one sentence each."""
    folder = source.place.split("/")[1]
    always = set(imports(at_import_time(source.tree), source.place))
    for name in imports(ast.walk(source.tree), source.place):
        top, *rest = name.split(".")
        if top == "vllm" and folder != "engine":
            yield f"{source.place} imports {name}: only kvsafe/engine may"
        if top in HEAVY and folder in LAZY_FOLDERS and name in always:
            yield f"{source.place} imports {name} at import time: do it where it is used"
        if top == "torch" and folder not in (*TORCH_FOLDERS, *LAZY_FOLDERS):
            yield f"{source.place} imports {name}: torch belongs to device and engine"
        station = rest[0] if top == "kvsafe" and rest else ""
        if source.place == f"kvsafe/{SHARED}.py" and top == "kvsafe":
            yield f"{source.place} imports {name}: what stations share knows none of them"
        if folder in STATIONS and station not in ("", "__version__", SHARED, folder):
            yield f"{source.place} imports {name}: stations import nothing of kvsafe but themselves"


@pytest.mark.parametrize("source", sources("kvsafe"), ids=lambda source: source.place)
def test_each_folder_imports_only_what_it_may(source: Source) -> None:
    assert list(breaches(source)) == []


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("kvsafe/tiers/fs.py", "def f():\n    import vllm.config"),
        ("kvsafe/cli/demo.py", "from vllm import LLM"),
        ("kvsafe/seal/header.py", "import torch"),
        (
            "kvsafe/seal/header.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        ),
        ("kvsafe/cli/demo.py", "try:\n    import torch\nexcept ImportError:\n    pass"),
        ("kvsafe/cli/demo.py", "class A:\n    import transformers"),
        ("kvsafe/device/plan.py", "from kvsafe.seal import header"),
        ("kvsafe/device/plan.py", "from kvsafe import host"),
        ("kvsafe/host/rows.py", "from ..seal.header import open_row"),
        ("kvsafe/host/rows.py", "from .. import seal"),
        ("kvsafe/lifecycle/monitor.py", "import kvsafe.engine.manager"),
        ("kvsafe/seal/opening.py", "import kvsafe.cli.main"),
        ("kvsafe/native.py", "from kvsafe.seal import header"),
    ],
)
def test_a_breach_is_seen(place: str, text: str) -> None:
    assert list(breaches(Source.of(place, text)))


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("kvsafe/engine/spec.py", "import torch, vllm\nfrom kvsafe.seal import header"),
        ("kvsafe/device/copier.py", "import torch\nfrom .plan import Plan"),
        ("kvsafe/cli/demo.py", "def run():\n    import torch\n    from kvsafe.seal import header"),
        (
            "kvsafe/seal/header.py",
            "import struct\nfrom kvsafe.seal.suites import Suite\nfrom . import cbor",
        ),
    ],
)
def test_what_is_allowed_is_not_called_a_breach(place: str, text: str) -> None:
    assert list(breaches(Source.of(place, text))) == []
