# SPDX-License-Identifier: Apache-2.0
"""Tiny models for tests: the demo's builders with one cache folder for all test runs here."""

from __future__ import annotations

from pathlib import Path

from kvsafe.cli import tinymodel

CACHE = Path(__file__).resolve().parents[2] / ".pytest_cache" / "d" / "kvsafe-tiny-models"


def qwen3() -> Path:
    """Folder of the tiny Qwen3 (full attention), built on first use."""
    return tinymodel.qwen3(CACHE)


def gemma3() -> Path:
    """Folder of the tiny Gemma3 (sliding windows and one full layer), built on first use."""
    return tinymodel.gemma3(CACHE)


def deepseek_mla() -> Path:
    """Folder of the tiny DeepSeek-V2 (MLA), built on first use."""
    return tinymodel.deepseek_mla(CACHE)


def qwen3_lora_adapter(seed: int) -> Path:
    """Folder of a LoRA adapter for `qwen3` whose weights `seed` decides, built on first use."""
    return tinymodel.qwen3_lora_adapter(CACHE, seed)
