# SPDX-License-Identifier: Apache-2.0
"""`kvsafe inspect` over files and folders that anybody may have left."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

from conformance.reader import suites
from fuzz.chunks import SECRETS, VARIANTS, engines, sealed
from fuzz.target import ByteSource, Target, demand
from fuzz.targets.keys import scratch
from fuzz.targets.rows import HEADER, SLICES, edit
from kvsafe.cli import ExitCode
from kvsafe.cli.main import main

_NAMES = (
    "row", "ab" * 20 + ".chunk", "1001-" + "ab" * 20 + ".chunk.0011aabb", "x.bin", "a\nb.chunk",
    "é.chunk", ".tmp-1-2", "ledger", "0_g1", "\x1b[2J.chunk", "%s.chunk", "ff.chunk",
)  # fmt: skip
_KINDS = ("row", "row", "row", "junk", "empty", "folder", "link", "fifo", "sparse", "closed")
_FOLDERS = ("", "objects", "objects/aba", "kvsafe-quarantine", "m_r0/aba/ab_g0", "leases")


class Look(Target):
    """One file, or a folder of them, looked at from outside.

    Oracles: an answer or a `UsageError`; bounded output that is one JSON document without
    control characters and without a secret; a chunk that kvsafe sealed is good; what is called
    good has a right header tag; nothing is changed and nothing outside is read.
    """

    name = "inspect"
    max_len = 300
    memory_mib = 128

    def __init__(self) -> None:
        self._home = scratch("look")
        (self._home / "outside").write_bytes(b"outside" * 999)
        self._keys = self._home / "keys.json"
        self._keys.write_text(json.dumps(_key_file()))
        self._keys.chmod(0o600)

    def close(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)

    def once(self, data: bytes) -> None:
        source = ByteSource(data)
        root = self._home / "root"
        root.mkdir(mode=0o700)
        try:
            if source.below(3) < 2:
                self._one(source, root)
            else:
                self._many(source, root)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def _one(self, source: ByteSource, root: Path) -> None:
        """A row in a file: the verdict, and whether it can be right."""
        number, variant = source.below(len(engines())), source.below(VARIANTS)
        engine, row = engines()[number], bytearray(sealed(number, variant))
        start = bytes(row)
        for _ in range(source.below(4)):
            edit(source, number, row)
        tags = source.below(8)
        if tags >= SLICES:
            engine.retag_slices(row)
        if tags >= HEADER:
            engine.retag_header(row)
        path = root / "row"
        path.write_bytes(row)
        found = self._ask(path)
        demand(path.read_bytes() == row, "a file was changed by being looked at")
        word = found["verdict"] if found else ""
        if bytes(row) == start:
            demand(word == "good", f"'{word}' for a chunk that kvsafe sealed")
        if word in ("good", "stale"):
            again = [bytearray(row) for _ in range(2)]
            for secret, copy in enumerate(again):
                engine.retag_header(copy, secret)
            demand(row in again, "a chunk whose header tag is wrong is called good", "accepted")
            made = tags >= SLICES or _slices_of(number, row)
            demand(made, "a payload that nobody sealed is called good", "accepted")

    def _many(self, source: ByteSource, root: Path) -> None:
        """A folder with anything in it."""
        for _ in range(source.below(7)):
            folder = root / source.pick(_FOLDERS)
            with contextlib.suppress(FileExistsError, NotADirectoryError):
                folder.mkdir(parents=True, exist_ok=True)
                self._put(source, folder / source.pick(_NAMES))
        self._ask(root)

    def _put(self, source: ByteSource, path: Path) -> None:
        kind = source.pick(_KINDS)
        if os.path.lexists(path):
            return
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(self._home / source.pick(("outside", "root", "nowhere")))
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            data = source.some(200) if kind == "junk" else b""
            number = source.below(len(engines()))
            row = bytearray(sealed(number, 0)) if kind in ("row", "closed") else bytearray(data)
            if kind == "row" and source.flag():
                edit(source, number, row)
            path.write_bytes(row)
            if kind == "sparse":
                os.truncate(path, 1 << 40)
            path.chmod(0o000 if kind == "closed" else 0o600)

    def _ask(self, path: Path) -> dict[str, Any]:
        """What the command says, as data; empty for a request that it calls wrong."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["inspect", str(path), "--json", "--key-file", str(self._keys)])
        text = out.getvalue()
        demand(
            len(text) < 400_000 and len(err.getvalue()) < 20_000, "output without bound", "memory"
        )
        for secret in SECRETS[:2]:
            shown = secret.hex() in text or base64.b64encode(secret).decode() in text
            demand(not shown, "a secret in the output")
        if code == ExitCode.MISUSED:
            return {}
        clean = all(char.isprintable() or char in "\n" for char in text)
        demand(clean, "control characters in the output")
        found: dict[str, Any] = json.loads(text)
        return found

    def seeds(self) -> list[bytes]:
        one = [bytes([0, engine, 0, 0]) for engine in range(len(engines()))]
        return [
            *one,
            bytes([2]) + bytes(range(1, 200)),
            bytes([2, 6]) + bytes((7 * n) % 256 for n in range(90)),
        ]


def _slices_of(number: int, row: bytearray) -> bool:
    """Whether every slice is one of a chunk that was sealed."""
    layout = engines()[number].layout
    for place in layout.slices:
        at = layout.header_bytes + place.offset
        part = bytes(row[at : at + place.length])
        if all(part != sealed(number, v)[at : at + place.length] for v in range(VARIANTS)):
            return False
    return True


def _key_file() -> dict[str, Any]:
    """The keys of `fuzz.chunks` as a key file."""
    keys = [
        {
            "id": suites.key_id(secret).hex(), "secret": base64.b64encode(secret).decode(),
            "created": "now", "note": "", "active": number == 0,
        }
        for number, secret in enumerate(SECRETS[:2])
    ]  # fmt: skip
    name = SECRETS[2]
    text = base64.b64encode(name).decode()
    return {"version": 1, "name_id": suites.key_id(name).hex(), "name_secret": text, "keys": keys}
