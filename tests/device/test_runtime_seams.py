# SPDX-License-Identifier: Apache-2.0
"""The thin calls into the device runtime, against stand-ins for torch.cuda and its library.

That the runtime does with them what we hope is for `test_cuda_real`; here it is only seen that
each call goes where it says, with what it was given.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvsafe.device import TorchStreams, find_registrar, pinning, streams
from kvsafe.device.pinning import RuntimeRegistrar

DEVICE = torch.device("cuda", 3)


class Recorder:
    """A stream or an event that remembers what it was asked."""

    def __init__(self, answer: object = None) -> None:
        self.calls: list[tuple[str, object]] = []
        self.answer = answer

    def record(self, stream: object) -> None:
        self.calls.append(("record", stream))

    def wait_event(self, event: object) -> None:
        self.calls.append(("wait_event", event))

    def query(self) -> object:
        return self.answer


def test_streams_and_events_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current", device))
    monkeypatch.setattr(streams, "_NEW_STREAM", lambda device: ("new", device))
    monkeypatch.setattr(streams, "_NEW_EVENT", lambda: "event")
    runtime = TorchStreams(DEVICE)
    assert runtime.compute_stream() == ("current", DEVICE)
    assert runtime.new_stream() == ("new", DEVICE)
    assert runtime.new_event() == "event"


def test_marks_and_waits_go_to_the_right_object() -> None:
    runtime, event, stream = TorchStreams(DEVICE), Recorder(1), Recorder()
    runtime.record(event, stream)
    assert (event.calls, stream.calls) == ([("record", stream)], [])
    runtime.wait_event(stream, event)
    assert (event.calls[1:], stream.calls) == ([], [("wait_event", event)])
    assert runtime.query(event) is True
    assert runtime.query(Recorder(0)) is False


def test_work_is_launched_on_device_and_stream_in_inference_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside: list[object] = []
    seen: list[object] = []

    @contextlib.contextmanager
    def entered(what: object) -> Iterator[None]:
        inside.append(what)
        yield
        inside.remove(what)

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    TorchStreams(DEVICE).launch(
        "stream", lambda: seen.extend([*inside, torch.is_inference_mode_enabled()])
    )
    assert seen == [DEVICE, "stream", True]
    assert inside == []


class Library:
    """A runtime library: its calls return `code` and are remembered."""

    def __init__(self, prefix: str, code: int) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        for name, answer in (("HostRegister", code), ("HostUnregister", code), ("GetLastError", 0)):
            setattr(self, prefix + name, self._call(name, answer))

    def _call(self, name: str, answer: int) -> Any:
        def call(*arguments: object) -> int:
            self.calls.append((name, arguments))
            return answer

        return call


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
@pytest.mark.parametrize("code", [0, 2])
def test_an_error_is_handed_on_and_not_left_pending(prefix: str, code: int) -> None:
    library: Any = Library(prefix, code)
    registrar = RuntimeRegistrar(library, prefix)
    assert registrar.register(4096, 8192) == code
    assert registrar.unregister(4096) == code
    drained = [("GetLastError", ())] if code else []
    assert library.calls == [
        ("HostRegister", (4096, 8192, 0)),
        *drained,
        ("HostUnregister", (4096,)),
        *drained,
    ]
    register = getattr(library, f"{prefix}HostRegister")
    assert register.argtypes == [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    assert getattr(library, f"{prefix}HostUnregister").argtypes == [ctypes.c_void_p]


def test_a_library_without_the_calls_is_no_runtime(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def loaded(stem: str) -> str | None:
        asked.append(stem)
        return answers.pop()

    answers: list[str | None] = [None, pinning._loaded_library("libc"), str(tmp_path / "none.so")]
    assert answers[1] is not None
    monkeypatch.setattr(pinning, "_loaded_library", loaded)
    assert [find_registrar() for _ in range(3)] == [None, None, None]
    assert asked == ["libamdhip64" if torch.version.hip else "libcudart"] * 3


@pytest.mark.parametrize(("hip", "prefix"), [(None, "cuda"), ("6.0", "hip")])
def test_the_library_of_this_build_is_taken(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, prefix: str
) -> None:
    library = Library(prefix, 0)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(pinning, "_loaded_library", lambda stem: f"/lib/{stem}.so")
    opened: list[str] = []

    def open_library(path: str) -> Library:
        opened.append(path)
        return library

    fake = SimpleNamespace(
        CDLL=open_library,
        **{name: getattr(ctypes, name) for name in ("c_void_p", "c_size_t", "c_uint")},
    )
    monkeypatch.setattr(pinning, "ctypes", fake)
    registrar = find_registrar()
    assert registrar is not None and registrar.register(1, 2) == 0
    assert opened == [f"/lib/{'libamdhip64' if hip else 'libcudart'}.so"]


def test_only_what_this_process_has_mapped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = (
        "7f00-7f01 r-xp 0 fe:01 1   /opt/lib/libcudart.so.12.1 (deleted)\n"
        "7f00-7f01 r-xp 0 fe:01 1   /opt/libcudart/other.so\n"
        "7f02-7f03 r-xp 0 fe:01 1   /opt/lib/libcudart-8f2.so.12\n"
        "7f04-7f05 r-xp 0 fe:01 1   /opt/lib/xlibamdhip64.so\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda self, **_: maps)
    assert pinning._loaded_library("libcudart") == "/opt/lib/libcudart-8f2.so.12"
    assert pinning._loaded_library("libamdhip64") is None

    def unreadable(self: Path, **_: object) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert pinning._loaded_library("libcudart") is None
