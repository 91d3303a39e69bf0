# SPDX-License-Identifier: Apache-2.0
"""F05, F06: salts and adapters. An adapter is its content, whatever its name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import Fresh
from tests.support import models
from tests.support.engine import Engine, Nursery, Place

pytestmark = pytest.mark.engine

WHOLE = 384


class Adapters:
    """An engine that serves adapters from one folder whose content changes."""

    def __init__(self, nursery: Nursery, root: Path) -> None:
        self._nursery = nursery
        self.place = Place(root)
        self.folder = root / "adapter"
        self.content(1)
        self.engine = self.start()
        self.inplace = False

    def start(self) -> Engine:
        """Start over the same folders."""
        settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
        return self._nursery.engine().start(
            models.qwen3(), kv_transfer_config=self.place.settings(), **settings
        )

    def restart(self) -> None:
        """Stop and start again."""
        self.engine.stop()
        self.engine = self.start()

    def content(self, seed: int) -> None:
        """Replace the files in the folder, as a deployment does: a new folder in its place."""
        fresh = self.folder.with_suffix(".new")
        shutil.copytree(models.qwen3_lora_adapter(seed), fresh)
        if self.folder.exists():
            self.folder.rename(self.folder.with_suffix(".old"))
        fresh.rename(self.folder)
        shutil.rmtree(self.folder.with_suffix(".old"), ignore_errors=True)

    def request(self, name: str = "a", number: int = 1, inplace: bool = False) -> dict[str, Any]:
        """The adapter's part of a request."""
        return {"name": name, "id": number, "path": str(self.folder), "inplace": inplace}

    def reference(self, seed: int, prompt: list[int]) -> tuple[int, ...]:
        """What content `seed` gives, from a folder of its own that nothing was stored under."""
        other = {"name": f"ref-{seed}", "id": 1000 + seed, "inplace": False}
        path = str(models.qwen3_lora_adapter(seed))
        done = self.engine.stored(prompt, lora={**other, "path": path})
        return done.tokens


@pytest.fixture
def adapters(nursery: Nursery, tmp_path: Path) -> Iterator[Adapters]:
    made = Adapters(nursery, tmp_path)
    try:
        yield made
    finally:
        made.engine.stop()


def test_content_decides_what_is_served(adapters: Adapters, fresh: Fresh) -> None:
    engine, prompt = adapters.engine, fresh(400)
    tokens = {seed: adapters.reference(seed, prompt) for seed in (1, 2)}
    assert tokens[1] != tokens[2]

    first = engine.stored(prompt, lora=adapters.request())
    assert (first.tokens, first.cached) == (tokens[1], 0)
    engine.drop_host()
    same = engine.stored(prompt, lora=adapters.request())
    assert (same.tokens, same.cached) == (tokens[1], WHOLE)

    # Other content under the same name, number and path, loaded in place.
    adapters.content(2)
    engine.drop_host()
    other = engine.stored(prompt, lora=adapters.request(inplace=True))
    assert (other.tokens, other.cached) == (tokens[2], 0)

    # Nothing of it came from the accelerator's cache, so all of it is the new content's: stored.
    engine.drop_host()
    other = engine.stored(prompt, lora=adapters.request(inplace=True))
    assert (other.tokens, other.cached) == (tokens[2], WHOLE)

    # The first content again: its own chunks, not those of the second.
    adapters.content(1)
    engine.drop_host()
    back = engine.stored(prompt, lora=adapters.request(inplace=True))
    assert (back.tokens, back.cached) == (tokens[1], WHOLE)

    # Once nothing of the old content can be left on the accelerator, the new one is stored too.
    adapters.content(2)
    assert engine.do("reset") is True
    other = engine.stored(prompt, lora=adapters.request(inplace=True))
    assert (other.tokens, other.cached) == (tokens[2], 0)
    engine.drop_host()
    other = engine.stored(prompt, lora=adapters.request(inplace=True))
    assert (other.tokens, other.cached) == (tokens[2], WHOLE)


def test_blocks_of_the_old_content_are_not_stored_as_the_new(
    adapters: Adapters, fresh: Fresh
) -> None:
    engine, prompt = adapters.engine, fresh(400)
    engine.stored(prompt, lora=adapters.request())
    adapters.content(2)
    before = engine.metrics()
    # vLLM's own prefix cache answers with blocks of the first content: not ours to store.
    engine.stored(prompt + fresh(200), lora=adapters.request(inplace=True))
    assert engine.metrics().since(before).total("chunks_stored_total") == 0
    # Control: a prompt that the accelerator holds nothing of is stored.
    engine.stored(fresh(400), lora=adapters.request(inplace=True))
    assert engine.metrics().since(before).total("chunks_stored_total") > 0


def test_files_replaced_without_a_reload(adapters: Adapters, fresh: Fresh) -> None:
    engine, prompt = adapters.engine, fresh(400)
    first = engine.stored(prompt, lora=adapters.request())
    adapters.content(2)
    engine.drop_host()
    before = engine.metrics()
    done = engine.stored(prompt, lora=adapters.request())
    # The engine may hold either content now: nothing is offered and nothing is stored.
    assert done.cached == 0
    assert engine.metrics().since(before).total("chunks_stored_total") == 0
    assert "is served without offload" in engine.log()
    # Control: loaded in place it is known again, and the old content's chunks are still good.
    adapters.content(1)
    engine.drop_host()
    again = engine.stored(prompt, lora=adapters.request(inplace=True))
    assert (again.tokens, again.cached) == (first.tokens, WHOLE)


def test_a_reload_never_stores_the_old_blocks_as_new(adapters: Adapters, fresh: Fresh) -> None:
    """vLLM's own prefix cache knows adapters by name: its blocks of the old content stay."""
    engine, prompt = adapters.engine, fresh(400)
    right = adapters.reference(2, prompt)
    engine.stored(prompt, lora=adapters.request())
    adapters.content(2)
    stale = engine.stored(prompt, lora=adapters.request(inplace=True))
    assert stale.cached >= WHOLE  # the accelerator's own doing
    engine.drop_host()
    done = engine.stored(prompt, lora=adapters.request(inplace=True))
    assert (done.tokens, done.cached) == (right, 0)


def test_after_a_restart_content_still_decides(adapters: Adapters, fresh: Fresh) -> None:
    prompt = fresh(400)
    right = adapters.reference(2, prompt)
    first = adapters.engine.stored(prompt, lora=adapters.request())
    adapters.restart()
    again = adapters.engine.ask(prompt, lora=adapters.request(number=7))
    assert (again.tokens, again.cached) == (first.tokens, WHOLE)
    adapters.content(2)
    adapters.restart()
    other = adapters.engine.ask(prompt, lora=adapters.request())
    assert (other.tokens, other.cached) == (right, 0)


def test_salt_name_and_base_model_are_kept_apart(adapters: Adapters, fresh: Fresh) -> None:
    engine, prompt = adapters.engine, fresh(400)
    one, two = adapters.request(), adapters.request("b", 2)
    kinds: list[dict[str, Any]] = [{}, {"salt": "x"}, {"salt": "y"}, {"lora": one}, {"lora": two}]
    for kind in kinds:
        assert engine.stored(prompt, **kind).cached == 0, kind
        engine.drop_host()
    for kind in kinds:
        assert engine.stored(prompt, **kind).cached == WHOLE, kind
        engine.drop_host()
    assert engine.ask(prompt, lora=one, salt="x").cached == 0
