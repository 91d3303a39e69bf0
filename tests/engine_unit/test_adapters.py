# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: the same name and path with other content must be told apart (F06)."""

import os
import time
from pathlib import Path

import pytest

from kvsafe.engine.identity import adapters, weights
from kvsafe.engine.identity.adapters import (
    AdapterDigest,
    AdapterLedger,
    AdapterUnknown,
    bind_adapter,
)

NEVER = 2**62
"""An engine start in the far future: every file is older than it."""


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make(tmp_path / "adapter", b"one")


def make(folder: Path, content: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def rewrite(folder: Path, content: bytes) -> None:
    """Same name, path, inode, size and mtime; other content."""
    path = folder / "adapter_model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    # The file system's clock has coarse ticks: go on until ctime has really moved.
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def ledger(started_ns: int = NEVER, trust_first_sight: bool = False) -> AdapterLedger:
    return AdapterLedger(None, started_ns, trust_first_sight)


def known(answer: AdapterDigest | AdapterUnknown) -> AdapterDigest:
    assert isinstance(answer, AdapterDigest), answer
    return answer


def unknown(answer: AdapterDigest | AdapterUnknown) -> str:
    assert isinstance(answer, AdapterUnknown), answer
    return answer.reason


def test_same_content_has_the_same_digest_everywhere(adapter: Path, tmp_path: Path) -> None:
    book = ledger()
    first = known(book.digest_for("a", 1, str(adapter), False))
    assert known(book.digest_for("a", 1, str(adapter), False)) == first
    assert first.storable and len(first.digest) == 32 and book.is_current(first)
    copy = make(tmp_path / "copy", b"one")
    assert known(ledger().digest_for("b", 7, str(copy), False)).digest == first.digest


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_other_content_has_another_digest(adapter: Path, name: str) -> None:
    before = known(ledger().digest_for("a", 1, str(adapter), False))
    (adapter / name).write_bytes(b"other")
    assert known(ledger().digest_for("a", 1, str(adapter), False)).digest != before.digest


def test_in_place_reload_takes_the_new_content(adapter: Path) -> None:
    book = ledger()
    old = known(book.digest_for("a", 1, str(adapter), False))
    rewrite(adapter, b"two")
    assert not book.is_current(old)
    new = known(book.digest_for("a", 1, str(adapter), True))
    assert new.digest != old.digest
    assert book.is_current(new) and not book.is_current(old)
    # The flag stays set on every later request; nothing has changed, nothing is read.
    assert known(book.digest_for("a", 1, str(adapter), True)) == new
    rewrite(adapter, b"six")
    assert known(book.digest_for("a", 1, str(adapter), True)).digest != new.digest


def test_a_repeated_in_place_request_reads_no_content(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = ledger()
    first = known(book.digest_for("a", 1, str(adapter), True))

    def fail(path: Path) -> None:
        raise AssertionError("content was read again")

    monkeypatch.setattr(adapters, "hash_file", fail)
    assert known(book.digest_for("a", 1, str(adapter), True)) == first
    assert known(book.digest_for("a", 1, str(adapter), False)) == first


def test_change_without_reload_is_unknown_until_a_reload(adapter: Path) -> None:
    book = ledger()
    old = known(book.digest_for("a", 1, str(adapter), False))
    rewrite(adapter, b"two")
    assert "without an in-place load" in unknown(book.digest_for("a", 1, str(adapter), False))
    # Putting the old bytes back proves nothing about what the engine loaded meanwhile.
    rewrite(adapter, b"one")
    unknown(book.digest_for("a", 1, str(adapter), False))
    assert not book.is_current(old)
    assert known(book.digest_for("a", 1, str(adapter), True)).digest == old.digest


def test_a_new_load_of_the_same_name_takes_the_new_content(adapter: Path) -> None:
    book = ledger()
    old = known(book.digest_for("a", 1, str(adapter), False))
    rewrite(adapter, b"two")
    new = known(book.digest_for("a", 2, str(adapter), False))
    assert new.digest != old.digest
    unknown(book.digest_for("a", 1, str(adapter), False))


def test_blocks_of_two_contents_are_not_stored_until_a_reset(adapter: Path) -> None:
    """The accelerator's prefix cache is keyed by name and path, not by content."""
    book = ledger()
    assert known(book.digest_for("a", 1, str(adapter), False)).storable
    rewrite(adapter, b"two")
    new = known(book.digest_for("a", 1, str(adapter), True))
    assert not new.storable
    rewrite(adapter, b"one")
    assert not known(book.digest_for("a", 1, str(adapter), True)).storable
    book.prefix_cache_reset()
    assert known(book.digest_for("a", 1, str(adapter), True)).storable


def test_another_path_or_name_is_not_mixed(adapter: Path, tmp_path: Path) -> None:
    book = ledger()
    known(book.digest_for("a", 1, str(adapter), False))
    other = make(tmp_path / "other", b"two")
    assert known(book.digest_for("a", 2, str(other), False)).storable
    assert known(book.digest_for("b", 3, str(adapter), False)).storable


def test_files_younger_than_the_engine_are_unknown(adapter: Path) -> None:
    """The engine may have loaded the adapter before the change that is seen here."""
    book = ledger(started_ns=0)
    assert "after engine start" in unknown(book.digest_for("a", 1, str(adapter), False))
    unknown(book.digest_for("a", 1, str(adapter), False))
    trusting = ledger(started_ns=0, trust_first_sight=True)
    trusted = known(trusting.digest_for("a", 1, str(adapter), False))
    # An in-place load needs no trust: every model step reads the files again.
    assert known(book.digest_for("a", 1, str(adapter), True)).digest == trusted.digest


def test_default_start_is_now(adapter: Path) -> None:
    book = AdapterLedger(None)
    assert 0 < book.started_ns <= time.time_ns()


def test_moved_links_and_folders_are_seen(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one", b"one"), make(tmp_path / "two", b"two")
    current = tmp_path / "current"
    current.symlink_to(one)
    book = ledger()
    known(book.digest_for("a", 1, str(current), False))
    current.unlink()
    current.symlink_to(two)
    unknown(book.digest_for("a", 1, str(current), False))

    known(book.digest_for("b", 2, str(one), False))
    one.rename(tmp_path / "aside")
    two.rename(one)
    unknown(book.digest_for("b", 2, str(one), False))


def test_a_link_younger_than_the_engine_is_unknown(tmp_path: Path) -> None:
    """Re-pointing a link puts old files in a new place: only the link itself is young."""
    one = make(tmp_path / "one", b"one")
    started = max(path.stat().st_ctime_ns for path in (one, *one.iterdir())) + 1
    current = tmp_path / "current"
    current.symlink_to(one)
    while current.lstat().st_ctime_ns < started:
        current.unlink()
        current.symlink_to(one)
    assert "after engine start" in unknown(ledger(started).digest_for("a", 1, str(current), False))
    assert known(ledger(started).digest_for("a", 1, str(one), False)).storable


@pytest.mark.parametrize("path", ["org/adapter", "/nowhere/at/all", "s3://bucket/adapter"])
def test_what_is_no_local_folder_is_unknown(path: str) -> None:
    assert "not a local folder" in unknown(ledger().digest_for("a", 1, path, False))


def test_incomplete_and_unreadable_folders_are_unknown(adapter: Path) -> None:
    book = ledger()
    answer = known(book.digest_for("a", 1, str(adapter), False))
    (adapter / "adapter_model.safetensors").rename(adapter / "away")
    unknown(book.digest_for("a", 1, str(adapter), False))
    assert not book.is_current(answer)
    os.mkfifo(adapter / "adapter_model.safetensors")
    unknown(book.digest_for("a", 1, str(adapter), True))
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "away").rename(adapter / "adapter_model.safetensors")
    unknown(book.digest_for("a", 1, str(adapter), False))
    assert known(book.digest_for("a", 1, str(adapter), True)).digest == answer.digest


def test_one_number_for_two_adapters_is_unknown(adapter: Path, tmp_path: Path) -> None:
    book = ledger()
    known(book.digest_for("a", 1, str(adapter), False))
    other = make(tmp_path / "other", b"two")
    assert "two adapters" in unknown(book.digest_for("b", 1, str(other), False))
    assert known(book.digest_for("b", 1, str(other), True)).digest


def test_memory_is_bounded_and_forgets_safely(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_MAX_ADAPTERS", 3)
    book = ledger()
    first = known(book.digest_for("n1", 1, str(adapter), False))
    for number in range(2, 6):
        known(book.digest_for(f"n{number}", number, str(adapter), False))
    assert len(book._loads) == len(book._served) == 3
    assert not book.is_current(first)
    assert "older" in unknown(book.digest_for("n1", 1, str(adapter), False))
    # A name that may have been served with other content before it was forgotten.
    assert not known(book.digest_for("n1", 1, str(adapter), True)).storable
    book.prefix_cache_reset()
    assert known(book.digest_for("n1", 1, str(adapter), True)).storable


def test_cache_of_file_digests(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SETTLE_NS", -1)
    cache = tmp_path / "adapters.json"
    first = known(AdapterLedger(cache, NEVER).digest_for("a", 1, str(adapter), False))
    assert len(weights.read_cache(cache)) == 2
    rewrite(adapter, b"two")
    second = known(AdapterLedger(cache, NEVER).digest_for("a", 1, str(adapter), False))
    assert second.digest != first.digest


def test_bound_hashes() -> None:
    one, two = bytes(32), b"\x01" * 32
    for length in (16, 32, 64):
        block = b"\x07" * length
        bound = bind_adapter(block, one)
        assert len(bound) == length and bound != block
        assert bind_adapter(block, one) == bound
        assert bind_adapter(block, two) != bound
        assert bind_adapter(b"\x08" + block[1:], one) != bound
    for block, digest in ((b"short", one), (bytes(32), b"short"), (bytes(65), one)):
        with pytest.raises(ValueError, match="block hash"):
            bind_adapter(block, digest)


def test_a_folder_that_cannot_be_looked_at_is_unknown_and_harms_nobody(tmp_path: Path) -> None:
    """A share that is away answers with other errors than "not there"; `~nobody` with another."""
    too_long = "x" * 5000
    link = tmp_path / "link"
    link.symlink_to(too_long[:4000])
    for path in (str(link), too_long, "~no-such-user-here/adapter", "nul\0byte"):
        assert "local folder" in unknown(ledger().digest_for("a", 1, path, False))


def test_an_adapter_whose_folder_goes_away_is_not_current(tmp_path: Path) -> None:
    made = ledger()
    folder = make(tmp_path / "adapter", b"one")
    answer = made.digest_for("a", 1, str(folder), True)
    assert isinstance(answer, AdapterDigest) and made.is_current(answer)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to("x" * 4000)
    assert not made.is_current(answer)
