# SPDX-License-Identifier: Apache-2.0
"""`kvsafe inspect`: what a chunk is, whether it is whole, and nothing of its content."""

from __future__ import annotations

import json
import os
import random
import shlex
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvsafe.cli.inspect.advice import Advice
from kvsafe.cli.inspect.judge import Judge, Verdict
from kvsafe.cli.inspect.keys import Epochs, Keys
from kvsafe.cli.inspect.outline import Outline, outline_of
from kvsafe.cli.inspect.reading import Depth, Reader
from kvsafe.engine.rows.epochs import PRIVATE_EPOCH
from kvsafe.seal.epoch import EpochFile
from kvsafe.seal.identity import IDENTITY_FIELDS
from kvsafe.seal.opening import read_outer
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.suites import Suite
from tests.cli.shelf import Caller, Shelf, flip, key_of, other_state
from tests.seal.rows import EPOCH, OLD_SECRET, World, identity
from tests.tidy.tree import ROOT

VECTORS = ROOT / "conformance" / "vectors"


def number_of(document: Any) -> int | None:
    """The number of the refusal in a JSON answer."""
    return document["refusal"]["number"] if document.get("refusal") else None


def test_every_field_of_a_good_chunk_is_told(shelf: Shelf, call: Caller) -> None:
    shelf.put(1)
    code, text = call.text("inspect", shelf.path(1), "--state-dir", shelf.state)
    assert code == 0
    assert "verdict  good\n" in text
    for field in IDENTITY_FIELDS:
        assert f"\n  {field.name}" in text
    for part in ("blake3-keyed", shelf.world.keyring.active.key_id.hex(), "5 of 5 slots: 0-4"):
        assert part in text
    code, document = call.json("inspect", shelf.path(1), "--state-dir", shelf.state)
    assert (code, document["verdict"], document["proven"]) == (0, "good", True)
    header = document["header"]
    assert (header["epoch"], header["group"], header["payload_bytes"]) == (EPOCH, 1, 160)
    assert header["writers"] == [
        {"rank": 0, "offset": 0, "length": 96},
        {"rank": 1, "offset": 96, "length": 64},
    ]
    assert set(document["identity"]) == {field.name for field in IDENTITY_FIELDS}


def test_no_content_and_no_whole_key_is_shown(shelf: Shelf, call: Caller) -> None:
    shelf.put(1)
    shown = [call.text("inspect", shelf.path(1), "--state-dir", shelf.state)[1]]
    shown.append(json.dumps(call.json("inspect", shelf.path(1), "--state-dir", shelf.state)[1]))
    for text in shown:
        assert key_of(1)[:6].hex() in text
        assert key_of(1)[:8].hex() not in text
        assert shelf.world.payload(1)[:8].hex() not in text


def _write(data: bytes | bytearray) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(data)

    return make


def _truncate(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _socket(path: Path) -> None:
    path.unlink()
    before = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


DAMAGE: dict[str, tuple[int, Callable[[Path], None]]] = {
    "empty": (101, _truncate(0)),
    "a few bytes": (101, _truncate(100)),
    "half a header": (301, _truncate(2048)),
    "no payload": (303, _truncate(4096)),
    "half a payload": (303, _truncate(4096 + 80)),
    "one page more": (801, _truncate(12288)),
    "garbage": (102, _write(random.Random(1).randbytes(8192))),
    "zeros": (102, _write(bytes(8192))),
    "a bit of the key": (401, lambda path: flip(path, 150)),
    "a bit of the header tag": (401, lambda path: flip(path, 4095)),
    "a bit of the payload": (1001, lambda path: flip(path, 4096)),
    "a bit of the tail": (904, lambda path: flip(path, 8191)),
    "a link": (1202, _link),
    "a FIFO": (1202, _fifo),
    "a socket": (1202, _socket),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_wrong_is_refused_by_number(what: str, shelf: Shelf, call: Caller) -> None:
    number, damage = DAMAGE[what]
    shelf.put(1)
    ask = ("inspect", shelf.path(1), "--state-dir", shelf.state)
    assert call.json(*ask)[1]["verdict"] == "good"
    damage(shelf.path(1))
    code, document = call.json(*ask)
    assert (code, document["verdict"], number_of(document)) == (1, "refused", number)
    assert f"refusal {number} at step" in call.text(*ask)[1]


@pytest.mark.parametrize("exchange", [_link, _fifo, _socket])
def test_what_is_exchanged_between_look_and_open_is_not_read(
    exchange: Callable[[Path], None], shelf: Shelf, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.put(1)
    real, path = os.stat, shelf.path(1)

    def stat_and_exchange(name: Any, **options: Any) -> os.stat_result:
        info = real(name, **options)
        if name == path.name:
            exchange(path)
        return info

    monkeypatch.setattr(os, "stat", stat_and_exchange)
    document = call.json("inspect", path, "--state-dir", shelf.state)[1]
    assert number_of(document) == 1202


def test_a_whole_chunk_in_the_place_of_another_is_501(shelf: Shelf, call: Caller) -> None:
    shelf.put(1, 2)
    shelf.put_vllm(1)
    for path in (shelf.path(1), shelf.vllm_path(1)):
        assert call.json("inspect", path, "--state-dir", shelf.state)[1]["verdict"] == "good"
    shelf.path(2).write_bytes(shelf.row(1))
    wrong_group = shelf.vllm_path(1).parent.with_name(f"{shelf.vllm_path(1).parent.name[:2]}_g2")
    wrong_group.mkdir()
    shelf.vllm_path(1).rename(wrong_group / shelf.vllm_path(1).name)
    for path in (shelf.path(2), wrong_group / shelf.vllm_path(1).name):
        document = call.json("inspect", path, "--state-dir", shelf.state)[1]
        assert number_of(document) == 501
        assert document["proven"]
    copied = shelf.folder / "copy.chunk"
    copied.write_bytes(shelf.row(1))
    document = call.json("inspect", copied, "--state-dir", shelf.state)[1]
    assert document["verdict"] == "good"
    assert any("place" in text for text in document["unchecked"])


def test_epochs_are_told_and_are_no_damage(shelf: Shelf, call: Caller) -> None:
    private = PRIVATE_EPOCH | 77
    shelf.put(1)
    shelf.put(2, epoch=EPOCH + 5)
    shelf.put(3, epoch=private)
    assert shelf.epoch.raise_epoch("test") == EPOCH + 1
    found = {}
    for number, epoch in ((1, EPOCH), (2, EPOCH + 5), (3, private)):
        path = shelf.path(number, epoch)
        code, document = call.json("inspect", path, "--state-dir", shelf.state)
        stale = document["stale"] and document["stale"]["number"]
        found[number] = (code, document["verdict"], stale)
    assert found == {1: (0, "stale", 601), 2: (0, "stale", 602), 3: (0, "good", None)}


def test_an_epoch_file_that_engines_share_is_named(shelf: Shelf, call: Caller) -> None:
    shelf.put(1)
    suite, secret = shelf.world.suite, shelf.world.keyring.state_secret
    path = shelf.folder / "epochs" / "epoch-all.json"
    args = ("inspect", shelf.path(1), "--state-dir", shelf.state)
    assert "no epoch file" in call.misuse(*args, "--epoch-file", path)
    EpochFile(path, lambda data: suite.tag(secret, data), first=EPOCH + 3).read()
    assert call.json(*args)[1]["verdict"] == "good"
    code, document = call.json(*args, "--epoch-file", path)
    assert (code, document["verdict"], document["stale"]["number"]) == (0, "stale", 601)


def test_without_the_key_it_says_what_it_cannot(shelf: Shelf, call: Caller, tmp_path: Path) -> None:
    shelf.put(1)
    code, document = call.json("inspect", shelf.path(1), "--no-key")
    assert (code, document["verdict"], document["proven"]) == (0, "unproven", False)
    assert document["identity"]["model"] == "left"
    assert "they need the key" in document["unchecked"][0]
    flip(shelf.path(1), 400)  # in the identity document: no key is needed to see that
    assert number_of(call.json("inspect", shelf.path(1), "--no-key")[1]) == 702
    flip(shelf.path(1), 400)
    other = other_state(tmp_path / "other")
    assert number_of(call.json("inspect", shelf.path(1), "--state-dir", other)[1]) == 204


def test_one_suite_can_be_the_only_one(shelf: Shelf, call: Caller) -> None:
    path = VECTORS / "blake3.bin"
    code, text = call.text("inspect", path)
    assert code == 0
    assert "unkeyed: anyone could have made it" in text
    assert number_of(call.json("inspect", path, "--suite", "blake3-keyed")[1]) == 202


@pytest.mark.parametrize("vector", sorted(VECTORS.glob("*.json")), ids=lambda path: path.stem)
def test_the_golden_rows_and_their_edits(
    vector: Path, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = json.loads(vector.read_text())
    row = vector.with_suffix(".bin").read_bytes()
    expected, path = described["expected"], tmp_path / "row.bin"
    keys = ["--no-key", "--suite", expected["suite"]]
    if expected["secrets"]:
        monkeypatch.setenv("GOLDEN", expected["secrets"][0])
        keys = ["--key-env", "GOLDEN", "--suite", expected["suite"]]
    path.write_bytes(row)
    assert call.json("inspect", path, *keys)[1]["verdict"] == "good"
    for edit in described["refused"]:
        edited = bytearray(row)
        edited[edit["byte"]] ^= edit["xor"]
        path.write_bytes(edited)
        assert number_of(call.json("inspect", path, *keys)[1]) == edit["number"], edit


def test_a_huge_file_is_not_read(shelf: Shelf, call: Caller) -> None:
    shelf.put(1)
    os.truncate(shelf.path(1), 1 << 40)
    ask = ("inspect", shelf.path(1), "--state-dir", shelf.state)
    code, document = call.json(*ask)
    assert (code, document["verdict"]) == (1, "unread")
    assert "--max-row" in document["trouble"]
    os.truncate(shelf.path(1), 8192)
    assert call.json(*ask, "--max-row", "8KiB")[1]["verdict"] == "good"
    assert call.json(*ask, "--max-row", "4096")[1]["verdict"] == "unread"
    assert "max-row" in call.misuse(*ask, "--max-row", "8G")


def test_hostile_text_does_not_reach_the_terminal(tmp_path: Path, call: Caller) -> None:
    evil = "\x1b]0;owned\x07\r\n\u202e"
    shelf = Shelf(tmp_path, World(document=identity(model=evil, namespace=evil)))
    shelf.put(1)
    (shelf.root / "objects" / "abc").mkdir(exist_ok=True, mode=0o700)
    (shelf.root / "objects" / "abc" / f"{evil}.chunk").write_bytes(b"")
    for ask in ((shelf.path(1),), (shelf.root,)):
        text = call.text("inspect", *ask, "--state-dir", shelf.state)[1]
        assert "owned" in text
        assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)


def test_a_folder_is_summed_up(shelf: Shelf, call: Caller) -> None:
    shelf.put(1, 2, 3)
    shelf.put(4, epoch=EPOCH - 1)
    shelf.path(3).write_bytes(bytes(8192))
    (shelf.path(1).parent / ".1234-abcd-1").write_bytes(b"being written")
    code, document = call.json("inspect", shelf.root, "--state-dir", shelf.state)
    assert (code, document["kind"]) == (1, "a kvsafe-fs store")
    assert [(line["epoch"], line["word"], line["files"]) for line in document["chunks"]] == [
        (EPOCH - 1, "stale", 1),
        (EPOCH, "good", 2),
    ]
    assert [(line["number"], line["files"]) for line in document["refused"]] == [(102, 1)]
    assert document["temporary"] == 1
    text = call.text("inspect", shelf.root, "--state-dir", shelf.state)[1]
    assert shelf.world.setting.identity_digest.hex()[:12] in text
    assert "does not begin with the kvsafe magic" in text
    shelf.path(3).unlink()
    assert call.text("inspect", shelf.root, "--state-dir", shelf.state)[0] == 0


def test_a_folder_of_vllm_and_one_with_nothing(shelf: Shelf, call: Caller, tmp_path: Path) -> None:
    shelf.put_vllm(1, 2)
    code, document = call.json("inspect", shelf.vllm_root, "--state-dir", shelf.state)
    assert (code, document["kind"], document["chunks"][0]["files"]) == (0, "files", 2)
    (tmp_path / "empty").mkdir()
    for command in ("inspect", "verify"):
        said = call.misuse(command, tmp_path / "empty", "--state-dir", shelf.state)
        assert "holds no chunk file: name a tier's root_dir" in said
    assert "holds no chunk" in call.misuse("purge", tmp_path / "empty", "--older-than", "0s")
    shelf.put()
    assert call.text("inspect", shelf.root)[0] == 0  # a store that is new


def test_a_part_of_a_store_is_not_taken_for_all_of_it(shelf: Shelf, call: Caller) -> None:
    """There owner, mode and links would not count: a weaker look must not pass for the whole."""
    shelf.put(1)
    shelf.path(1).chmod(0o644)
    keys = ("--state-dir", shelf.state)
    for part in (shelf.root / "objects", shelf.path(1).parent):
        assert "name that\n" in (said := call.misuse("verify", part, *keys))
        assert str(shelf.root) in said
        assert str(shelf.root) in call.misuse("purge", part, "--older-than", "0s", "--yes")
        code = call.text("inspect", part, *keys)[0]
        assert (code, "owner, mode and links" in call.err) == (0, True)
    assert call.text("verify", shelf.root, *keys)[0] == 1
    assert shelf.path(1).exists()


def test_an_epoch_file_of_another_suite_is_not_called_damaged(shelf: Shelf, call: Caller) -> None:
    shelf.put(1)
    shelf.world = World(Suite.HMAC_SHA256)
    shelf.put(2)
    code, text = call.text("inspect", shelf.root, "--state-dir", shelf.state)
    assert code == 0
    assert call.err.count("epoch-left.json") == 1
    assert "is of suite blake3-keyed, so it says nothing about hmac-sha256" in call.err
    assert "not checked in 1: step 6 (epoch)" in text
    path = shelf.state / "epoch-left.json"
    path.write_bytes(path.read_bytes().replace(b'"epoch":7', b'"epoch":9'))
    call.text("inspect", shelf.root, "--state-dir", shelf.state)
    assert "damaged" in call.err


def test_what_to_do_is_said(shelf: Shelf, call: Caller) -> None:
    """Each cause has a way out, and the commands that are named do what they say."""
    shelf.put(1, 2)
    flip(shelf.path(2), 4096)
    shelf.put(3, epoch=EPOCH - 1)
    shelf.put(4, epoch=EPOCH + 1)
    shelf.world = World(secrets=(OLD_SECRET,))
    shelf.put(5)
    shelf.world = World(Suite.BLAKE3)
    shelf.put(6)
    ask = ("verify", shelf.root, "--state-dir", shelf.state)
    code, text = call.text(*ask)
    lines = [line.strip() for line in text.split("what to do\n")[1].splitlines()]
    assert code == 1
    assert [line.partition(" ")[2].split()[0] for line in lines] == [
        "sealed", "of", "from", "of", "damaged,",
    ]  # fmt: skip
    assert "the state folder has not reached" in lines[3]
    assert call.json(*ask)[1]["what_to_do"] == lines
    # `inspect` takes every suite for what it is.
    assert call.json("inspect", *ask[1:])[1]["what_to_do"][:2] == [lines[0], lines[2]]
    for line in (lines[0], lines[1], lines[2], lines[4]):
        words = shlex.split(line.rpartition(": kvsafe ")[2])
        extra = ["--state-dir", str(shelf.state)] if words[0] == "verify" else ["--yes"]
        assert call.text(*words, *extra)[0] == (1 if words[0] == "verify" else 0)
    code, document = call.json(*ask)
    assert (code, document["good"], document["stale"], document["files"]) == (0, 1, 1, 2)
    call.text("purge", shelf.root, "--older-than", "0s", "--yes")
    shelf.world = World()
    shelf.put(1)
    assert "what to do" not in call.text(*ask)[1]


def test_advice_is_bounded_whatever_files_say() -> None:
    advice = Advice()
    for number in range(5000):
        refusal = Refusal.of(RefusalKind.KEY_ID, "key_id", "one", number.to_bytes(8, "big"))
        advice.add(Verdict(refusal))
    assert len(advice.key_ids) == 4096
    assert len(advice.texts("/x")) == 3


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [(8, 9, "another format version"), (10, 77, "of suite 77: no suite of this version")],
)
def test_chunks_of_a_later_kvsafe_are_not_called_damaged(
    offset: int, value: int, words: str, shelf: Shelf, call: Caller
) -> None:
    shelf.put(1, 2)
    data = bytearray(shelf.path(2).read_bytes())
    data[offset] = value
    shelf.path(2).write_bytes(data)
    code, document = call.json("verify", shelf.root, "--state-dir", shelf.state)
    [text] = document["what_to_do"]
    assert (code, words in text, "damaged" in text) == (1, True, False)


def test_a_key_of_another_user_names_that_user(
    shelf: Shelf, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.put(1)
    ask = ("verify", shelf.root, "--state-dir", shelf.state)
    assert call.text(*ask)[0] == 0
    mine = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: mine + 1)
        said = call.misuse(*ask)
    assert said.endswith(f"Or run this as user {mine}.\n")


@pytest.mark.parametrize("kind", ["mode", "links"])
def test_a_file_that_others_may_use_is_1202_in_a_store(
    kind: str, shelf: Shelf, call: Caller
) -> None:
    shelf.put(1)
    ask = ("inspect", shelf.root, "--state-dir", shelf.state)
    assert call.text(*ask)[0] == 0
    if kind == "mode":
        shelf.path(1).chmod(0o644)
    else:
        for number in range(2):
            os.link(shelf.path(1), shelf.folder / f"second-{number}")
    refused = call.json(*ask)[1]["refused"]
    assert [line["number"] for line in refused] == [1202]


def test_looking_does_not_count_as_use(shelf: Shelf, call: Caller) -> None:
    shelf.put(1)
    os.utime(shelf.path(1), (1000, 2000))
    for path in (shelf.path(1), shelf.root):
        call.text("inspect", path, "--state-dir", shelf.state)
    assert shelf.path(1).stat().st_atime == 1000


def test_wrong_requests_name_the_way_out(shelf: Shelf, call: Caller) -> None:
    shelf.put(1)
    assert "name a chunk file" in call.misuse("inspect", shelf.folder / "absent")
    assert "--no-key" in call.misuse("inspect", shelf.path(1), "--key-file", "/nonexistent/k")
    both = call.misuse("inspect", shelf.path(1), "--no-key", "--key-env", "K")
    assert "exclude one another" in both
    assert "unset or empty" in call.misuse("inspect", shelf.path(1), "--key-env", "K_UNSET")
    (shelf.state / "keys.json").chmod(0o644)
    assert "chmod 600" in call.misuse("inspect", shelf.path(1), "--state-dir", shelf.state)
    assert stat.S_IMODE((shelf.state / "keys.json").stat().st_mode) == 0o644


def test_no_key_is_made_and_no_engine_imported(shelf: Shelf, tmp_path: Path) -> None:
    shelf.put(1)
    script = (
        "import sys\nfrom kvsafe.cli.main import main\n"
        f"main(['inspect', {str(shelf.path(1))!r}])\n"
        "print(*{'torch', 'vllm'} & set(sys.modules), 'end')\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    env = {**os.environ, "XDG_STATE_HOME": str(home)}
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env
    )
    assert shown.stdout.endswith("\nend\n")
    assert list(home.iterdir()) == []


WORLD = World()
KEYS = Keys({Suite.BLAKE3_KEYED: WORLD.keyring}, tuple(Suite))
READER = Reader(Judge(KEYS, Epochs(None, KEYS)))


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=12288))
@example(data=b"\x89kvsafe\n")
def test_any_bytes_get_a_verdict(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    (folder / "x.chunk").write_bytes(data)
    fd = os.open(folder, os.O_RDONLY)
    try:
        found = READER.examine(fd, ("x.chunk",), Depth.WHOLE)
    finally:
        os.close(fd)
    assert found.word == "refused"


EDITS = st.lists(st.tuples(st.integers(0, 300), st.binary(min_size=1, max_size=8)), max_size=3)


@settings(max_examples=200, deadline=None)
@given(edits=EDITS, length=st.sampled_from([8192, 4096, 4256, 144, 143, 8191, 1 << 20]))
def test_the_outline_says_what_the_opener_says(edits: list[tuple[int, bytes]], length: int) -> None:
    row = WORLD.chunk()
    for at, data in edits:
        row[at : at + len(data)] = data
    row = bytearray(row[:length].ljust(length, b"\0"))
    view = memoryview(WORLD.retag(row))
    ours = outline_of(view, len(view))
    theirs = read_outer(view, Suite.BLAKE3_KEYED, WORLD.keyring)
    if isinstance(ours, Outline):
        # What only the key tells, or the suite of the reader.
        assert not isinstance(theirs, Refusal) or theirs.number in (202, 204, 401)
    else:
        assert isinstance(theirs, Refusal)
        assert theirs.number in (ours.number, 202, 204)
