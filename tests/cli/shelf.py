# SPDX-License-Identifier: Apache-2.0
"""Tiers with really sealed chunks for the tests of the commands: state folder, store, vLLM tree."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kvsafe.cli import main
from kvsafe.engine.rows.epochs import PRIVATE_EPOCH
from kvsafe.engine.tiers.names import object_name
from kvsafe.seal.epoch import EpochFile
from kvsafe.seal.keyring import key_id_of
from tests.seal.rows import EPOCH, NAMES, OLD_SECRET, SECRET, World
from tests.tiers.stores import store_at

NAMESPACE = "left"  # what tests.seal.test_identity.sample() says
GROUP = (1).to_bytes(4, "big")


def key_of(number: int) -> bytes:
    """The offload key of chunk `number`."""
    return blake3(number.to_bytes(8, "big")).digest() + GROUP


class Shelf:
    """A state folder, and tiers with chunks of `world`; `number` names a chunk."""

    def __init__(self, folder: Path, world: World | None = None) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.root = folder / "store"
        self.world = world or World()
        write_key_file(self.state, SECRET)
        secret, suite = self.world.keyring.state_secret, self.world.suite
        path = self.state / f"epoch-{NAMESPACE}.json"
        self.epoch = EpochFile(path, lambda data: suite.tag(secret, data), first=EPOCH)
        self.epoch.read()

    def name(self, number: int, epoch: int = EPOCH) -> bytes:
        """The object name."""
        own = self.world.setting.identity_digest
        if epoch & PRIVATE_EPOCH:
            own += epoch.to_bytes(8, "little")
        return object_name(self.world.suite, self.world.keyring.name_secret, own, key_of(number))

    def row(self, number: int, **changes: Any) -> bytearray:
        """The sealed row."""
        return self.world.chunk(key_of(number), fill=number, **changes)

    def put(self, *numbers: int, **changes: Any) -> None:
        """Store chunks through a `ChunkStore`."""
        with store_at(self.root, row_bytes=self.world.layout.row_bytes) as store:
            for number in numbers:
                name = self.name(number, changes.get("epoch", EPOCH))
                outcome = store.put(name, memoryview(self.row(number, **changes)))
                assert outcome.good

    def path(self, number: int, epoch: int = EPOCH) -> Path:
        """Where the store keeps it."""
        name = self.name(number, epoch).hex()
        return self.root / "objects" / name[:3] / f"{name}.chunk"

    def put_vllm(self, *numbers: int) -> None:
        """Write chunks where vLLM's fs tier keeps them."""
        for number in numbers:
            path = self.vllm_path(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.row(number))

    def vllm_path(self, number: int) -> Path:
        """Where vLLM's fs tier keeps it."""
        name = self.name(number)[:-4].hex()
        return self.vllm_root / "model_0123456789ab_r0" / name[:3] / f"{name[3:5]}_g1/{name}.bin"

    @property
    def vllm_root(self) -> Path:
        """The root of the vLLM tree."""
        return self.folder / "vllm"


def write_key_file(state: Path, secret: bytes, name_secret: bytes = NAMES) -> Path:
    """A key file with one key, as an engine would have left it."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    entry = {
        "id": key_id_of(secret).hex(),
        "secret": base64.b64encode(secret).decode(),
        "created": "",
        "note": "",
        "active": True,
    }
    names = {
        "name_id": key_id_of(name_secret).hex(),
        "name_secret": base64.b64encode(name_secret).decode(),
    }
    path = state / "keys.json"
    path.write_text(json.dumps({"version": 1, **names, "keys": [entry]}))
    path.chmod(0o600)
    return path


def other_state(folder: Path) -> Path:
    """A state folder with another key."""
    write_key_file(folder, OLD_SECRET, blake3(b"another name secret").digest())
    return folder


class Caller:
    """Runs `kvsafe` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def text(self, *args: object) -> tuple[int, str]:
        """Exit code and stdout."""
        code = main.main([str(arg) for arg in args])
        out, self.err = self._capsys.readouterr()
        return code, out

    def json(self, *args: object) -> tuple[int, Any]:
        """Exit code and the JSON document on stdout."""
        code, out = self.text(*args, "--json")
        return code, json.loads(out)

    def misuse(self, *args: object) -> str:
        """What is said about a wrong request."""
        code, out = self.text(*args)
        assert (code, out) == (2, "")
        return self.err


def flip(path: Path, offset: int) -> None:
    """Invert one bit, keeping length, mode and times of the file."""
    info = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
