# SPDX-License-Identifier: Apache-2.0
"""Content digest of weights: real files, changes in place, several processes."""

import json
import multiprocessing
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from kvsafe.engine.identity import weights
from kvsafe.engine.identity.weights import (
    WeightsError,
    code_digest,
    hash_file,
    newest_change_ns,
    read_cache,
    resolve_model_folder,
    weights_digest,
    write_cache,
)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files of this moment enter the cache; the rule itself has a test of its own."""
    monkeypatch.setattr(weights, "SETTLE_NS", -1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for index in (1, 2):
        (folder / f"model-{index}.safetensors").write_bytes(bytes([index]) * 5000)
    (folder / "pytorch_model.bin").write_bytes(b"legacy")
    return folder


class Reads:
    """Progress callback that remembers which files were really read."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.last = (0, 0)

    def __call__(self, done: int, total: int, name: str) -> None:
        self.names.append(name)
        self.last = (done, total)


def rewrite_with_old_mtime(path: Path, data: bytes) -> None:
    """In place: the same inode, size and mtime; only ctime tells."""
    before = path.stat()
    assert before.st_size == len(data)
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    # The file system's clock has coarse ticks: go on until ctime has really moved.
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_digest_is_of_the_content_not_of_the_place(model: Path, tmp_path: Path) -> None:
    digest = weights_digest(model)
    assert digest is not None and digest.startswith("blake3:") and len(digest) == 71
    other = tmp_path / "elsewhere"
    other.mkdir()
    for name in ("model-2.safetensors", "model-1.safetensors"):
        (other / name).write_bytes((model / name).read_bytes())
    assert weights_digest(other, threads=2) == digest


@pytest.mark.parametrize("change", ["byte", "name", "swap", "new", "gone", "index", "quant"])
def test_every_change_of_the_content_changes_the_digest(model: Path, change: str) -> None:
    before = weights_digest(model)
    first, second = model / "model-1.safetensors", model / "model-2.safetensors"
    if change == "byte":
        first.write_bytes(b"\x02" + first.read_bytes()[1:])
    elif change == "name":
        first.rename(model / "model-3.safetensors")
    elif change == "swap":
        first.rename(model / "x")
        second.rename(first)
        (model / "x").rename(second)
    elif change == "new":
        (model / "model-3.safetensors").write_bytes(b"")
    elif change == "gone":
        second.unlink()
    elif change == "index":
        (model / "model.safetensors.index.json").write_text("{}")
    else:
        (model / "hf_quant_config.json").write_text("{}")
    assert weights_digest(model) != before


def test_files_that_are_not_loaded_do_not_matter(model: Path) -> None:
    before = weights_digest(model)
    (model / "pytorch_model.bin").write_bytes(b"other")
    (model / "README.md").write_text("x")
    (model / "original").mkdir()
    (model / "original" / "model.safetensors").write_bytes(b"x")
    assert weights_digest(model) == before
    assert weights_digest(model, load_format="pt") != before


def test_legacy_formats_are_hashed_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x04never opened as a pickle.")
    first = weights_digest(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"\x80\x04never opened as a Pickle.")
    assert first is not None and weights_digest(tmp_path) != first


def test_unknown_is_none(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    (tmp_path / "empty" / "model.safetensors.index.json").write_text("{}")
    assert weights_digest(tmp_path / "empty") is None
    assert weights_digest(model, load_format="dummy") is None


def test_cache_saves_reading_and_sees_a_restored_mtime(model: Path, tmp_path: Path) -> None:
    cache, reads = tmp_path / "cache" / "weights.json", Reads()
    digest = weights_digest(model, cache=cache, progress=reads)
    assert set(reads.names) == {"model-1.safetensors", "model-2.safetensors"}
    assert reads.last == (10000, 10000)

    reads = Reads()
    assert weights_digest(model, cache=cache, progress=reads) == digest
    assert reads.names == []

    rewrite_with_old_mtime(model / "model-1.safetensors", b"\x09" * 5000)
    assert weights_digest(model, cache=cache, progress=reads) != digest
    assert reads.names == ["model-1.safetensors"]


def test_a_file_of_this_moment_is_not_cached(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SETTLE_NS", 3600 * 10**9)
    cache, reads = tmp_path / "weights.json", Reads()
    weights_digest(model, cache=cache)
    weights_digest(model, cache=cache, progress=reads)
    assert set(reads.names) == {"model-1.safetensors", "model-2.safetensors"}


def test_cache_file_is_private_and_replaced(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "weights.json"
    weights_digest(model, cache=cache)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    before = cache.stat().st_ino
    (model / "model-1.safetensors").write_bytes(b"x")
    weights_digest(model, cache=cache)
    assert cache.stat().st_ino != before
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["model", "weights.json", "weights.json.lock"]


def damage(cache: Path, kind: str) -> None:
    found = json.loads(cache.read_text())
    if kind == "text":
        cache.write_bytes(b"\xff{not json")
    elif kind == "shape":
        cache.write_text('{"version": 1, "files": [1, 2]}')
    elif kind == "version":
        cache.write_text(json.dumps({**found, "version": 2}))
    elif kind == "digest":
        for entry in found["files"].values():
            entry["digest"] = "../../etc"
        cache.write_text(json.dumps(found))
    elif kind == "writable by others":
        cache.chmod(0o666)
    elif kind == "link":
        cache.rename(cache.with_name("real"))
        cache.symlink_to(cache.with_name("real"))
    elif kind == "fifo":
        cache.unlink()
        os.mkfifo(cache)
    else:
        cache.write_bytes(b" " * (weights._MAX_CACHE_BYTES + 1))


@pytest.mark.parametrize(
    "kind",
    ["text", "shape", "version", "digest", "writable by others", "link", "fifo", "too large"],
)
def test_a_cache_that_cannot_be_trusted_is_not_used(model: Path, tmp_path: Path, kind: str) -> None:
    cache, reads = tmp_path / "weights.json", Reads()
    digest = weights_digest(model, cache=cache)
    assert len(read_cache(cache)) == 2
    damage(cache, kind)
    assert weights_digest(model, cache=cache, progress=reads) == digest
    assert len(reads.names) == 2


def test_a_cache_that_cannot_be_written_is_no_error(model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert weights_digest(model, cache=blocked / "weights.json") == weights_digest(model)


def test_the_cache_is_bounded(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MAX_CACHE_FILES", 3)
    entry = hash_file(model / "model-1.safetensors")
    write_cache(tmp_path / "c", {f"/{index}": entry for index in range(10)})
    assert list(read_cache(tmp_path / "c")) == ["/7", "/8", "/9"]


def _hash_in_process(
    model: Path, cache: Path, arrived: Any, first: Any, second: Any, results: Any
) -> None:
    """Hash together with the others; who reads first gives a second reader time to show up."""
    weights.SETTLE_NS = -1
    reads = Reads()

    def told(done: int, total: int, name: str) -> None:
        if not reads.names and not first.acquire(block=False):
            second.set()
        elif not reads.names:
            second.wait(1)
        reads(done, total, name)

    arrived.wait(60)
    results.put((weights_digest(model, cache=cache, progress=told), len(set(reads.names))))


def test_of_several_processes_one_hashes(model: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arrived, first = context.Barrier(3), context.Semaphore(1)
    second, results = context.Event(), context.Queue()
    arguments = (model, tmp_path / "weights.json", arrived, first, second, results)
    processes = [context.Process(target=_hash_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert {digest for digest, _ in found} == {weights_digest(model)}
    assert sorted(count for _, count in found) == [0, 0, 2]


def test_a_lock_that_is_never_released_only_costs_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "LOCK_SECONDS", 0.0)
    cache = tmp_path / "weights.json"
    with weights._locked(cache):
        assert weights_digest(model, cache=cache) == weights_digest(model)


def test_a_file_that_changes_while_it_is_read_is_refused(model: Path) -> None:
    def touch(done: int, total: int, name: str) -> None:
        os.utime(model / name, ns=(0, 0))

    with pytest.raises(WeightsError, match="changed while it was read"):
        weights_digest(model, progress=touch)


def test_what_is_no_file_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "model-1.safetensors").unlink()
    os.mkfifo(model / "model-1.safetensors")
    with pytest.raises(WeightsError, match="not a regular file"):
        weights_digest(model)
    (model / "model-1.safetensors").unlink()
    (model / "model-1.safetensors").symlink_to(model / "nowhere")
    with pytest.raises(WeightsError, match="cannot be found"):
        weights_digest(model)
    with pytest.raises(WeightsError, match="cannot be read"):
        weights_digest(tmp_path / "missing")


def hub_snapshot(hub: Path, commit: str, data: bytes) -> Path:
    """The shape of a Hugging Face cache: snapshots hold links to content-named blobs."""
    repository = hub / "models--org--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    blob = repository / "blobs" / f"blob-{commit}"
    blob.write_bytes(data)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def test_links_of_a_hub_snapshot_are_followed(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, "c0ffee", b"weights")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "model.safetensors").write_bytes(b"weights")
    cache = tmp_path / "weights.json"
    assert weights_digest(snapshot, cache=cache) == weights_digest(plain)
    link = snapshot / "model.safetensors"
    other = hub_snapshot(tmp_path, "dead", b"another")
    link.unlink()
    link.symlink_to((other / "model.safetensors").resolve())
    assert weights_digest(snapshot, cache=cache) != weights_digest(plain)


def test_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub"
    main, old = hub_snapshot(hub, "aaa", b"1"), hub_snapshot(hub, "bbb", b"2")
    refs = hub / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("aaa")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    assert resolve_model_folder("org/name") == main
    assert resolve_model_folder("org/name", "bbb") == old
    assert resolve_model_folder("org/name", "ccc") is None
    assert resolve_model_folder("org/other") is None
    assert resolve_model_folder(str(main)) == main
    for model, revision in (("org/../name", None), ("org/name", "../../x"), ("s3://a/b", None)):
        assert resolve_model_folder(model, revision) is None
    (refs / "main").write_text("../../../../etc")
    assert resolve_model_folder("org/name") is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    assert resolve_model_folder("org/name", "bbb") is None
    assert resolve_model_folder("org/name", "bbb", download_dir=hub) == old
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert resolve_model_folder("org/name", "bbb") == old


def test_code_digest_is_of_the_python_files(model: Path) -> None:
    (model / "modeling.py").write_text("a = 1")
    before = code_digest(model)
    (model / "README.md").write_text("x")
    assert code_digest(model) == before
    (model / "modeling.py").write_text("a = 2")
    assert code_digest(model) != before


def test_the_newest_change_is_that_of_a_weight_file_or_of_a_link(tmp_path: Path) -> None:
    real = tmp_path / "v1"
    real.mkdir()
    (real / "model.safetensors").write_bytes(b"one")
    (real / "notes.txt").write_bytes(b"not a weight")
    before = newest_change_ns(real)
    assert before <= time.time_ns()
    (real / "notes.txt").write_bytes(b"changed")
    assert newest_change_ns(real) == before
    time.sleep(0.02)
    (real / "model.safetensors").write_bytes(b"two")
    after = newest_change_ns(real)
    assert after > before
    time.sleep(0.02)
    link = tmp_path / "current"
    link.symlink_to(real)
    assert newest_change_ns(link) > after
