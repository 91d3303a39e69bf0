# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures, and what the markers `engine` and `gpu` bring with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import models

ENGINE_TIMEOUT_S = 600
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def pytest_configure() -> None:
    """Keep engines small and offline, also where pytest was not started by make."""
    for name, value in ENGINE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give engine tests time to start an engine; skip gpu tests where there is no CUDA device."""
    for item in items:
        marked_engine = item.get_closest_marker("engine") is not None
        if marked_engine and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


@pytest.fixture(scope="session")
def qwen3_model() -> Path:
    """Folder of the tiny Qwen3."""
    return models.qwen3()


@pytest.fixture(scope="session")
def gemma3_model() -> Path:
    """Folder of the tiny Gemma3."""
    return models.gemma3()


@pytest.fixture(scope="session")
def deepseek_mla_model() -> Path:
    """Folder of the tiny DeepSeek-V2 with MLA."""
    return models.deepseek_mla()
