# SPDX-License-Identifier: Apache-2.0
"""Brings vLLM's tests of the version that we support into `.cache/`. None of it is committed.

The source archive comes through pip. Building it is not wanted, so pip's metadata step is
expected to fail; the unpacked source is what it leaves behind.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

VERSION = "0.32.0"
TBLIB = "tblib==3.2.2"
ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "upstream" / VERSION
# The packages whose tests are run; their sources must be those of the installed wheel.
PACKAGES = ("v1/kv_offload", "distributed/kv_transfer/kv_connector/v1/offloading")
# All that vLLM's helpers read of the model that their scheduler tests name.
OPT_125M = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
REVISION = "0" * 40


class FetchError(Exception):
    """The tests could not be had, or are not those of the installed vLLM."""


def installed() -> Path:
    """The folder of the installed vLLM."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise FetchError("vllm is not installed")
    return Path(spec.origin).parent


def fetch() -> Path:
    """The folder that holds vLLM's `tests/`; downloaded at the first call."""
    if not (CACHE / "tests" / "conftest.py").is_file():
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
            source = _unpacked(Path(folder))
            differing = [name for package in PACKAGES for name in _differing(source, package)]
            if differing:
                raise FetchError(f"sources that are not those installed: {differing}")
            _adopt(source)
    _library()
    _model()
    return CACHE


def _unpacked(folder: Path) -> Path:
    print(f"fetching the source archive of vllm {VERSION}", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "vllm"]
    command += ["--no-build-isolation", "--no-clean", "--quiet", "-d", str(folder)]
    command += [f"vllm=={VERSION}"]
    environment = {**os.environ, "TMPDIR": str(folder), "VLLM_TARGET_DEVICE": "empty"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = [path.parent for path in folder.glob("*/vllm_*/tests")]
    if len(found) != 1:
        raise FetchError(f"pip left no source behind:\n{done.stdout}{done.stderr}")
    return found[0]


def _differing(source: Path, package: str) -> list[str]:
    theirs = source / "vllm" / package
    names = [path.relative_to(theirs).as_posix() for path in sorted(theirs.rglob("*.py"))]
    if not names:
        raise FetchError(f"the archive has no {package}")
    _, other, missing = filecmp.cmpfiles(theirs, installed() / package, names, shallow=False)
    return [f"{package}/{name}" for name in (*other, *missing)]


def _adopt(source: Path) -> None:
    CACHE.mkdir(exist_ok=True)
    shutil.copy(source / "pyproject.toml", CACHE)
    shutil.copytree(source / "tests", CACHE / "arriving", symlinks=True)
    (CACHE / "arriving").rename(CACHE / "tests")


def _library() -> None:
    if not (CACHE / "lib" / "tblib").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(CACHE / "lib"), TBLIB], check=True)


def _model() -> None:
    model = CACHE / "hub" / "models--facebook--opt-125m"
    (model / "refs").mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text(REVISION)
    (model / "snapshots" / REVISION).mkdir(parents=True, exist_ok=True)
    (model / "snapshots" / REVISION / "config.json").write_text(json.dumps(OPT_125M))
