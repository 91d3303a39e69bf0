# SPDX-License-Identifier: Apache-2.0
"""The geometry as a small document, and the comparison of two such documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsafe.device.geometry import DeviceTensor, Geometry, GroupRef

MAX_DIFFERENCES = 16


@dataclass(frozen=True, slots=True)
class GeometryDifference:
    """One leaf that differs; an absent leaf is shown as None."""

    name: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected!r}, found {self.found!r}"


def describe_geometry(geometry: Geometry) -> dict[str, object]:
    """Device type, tensors, groups, blocks per chunk and slice bytes; equal runs are counted."""
    tensors = [_tensor_entry(tensor) for tensor in geometry.tensors]
    groups: list[dict[str, object]] = [{"refs": _ref_runs(refs)} for refs in geometry.groups]
    return {
        "device": geometry.device_type,
        "blocks_per_chunk": geometry.blocks_per_chunk,
        "slice_bytes": geometry.slice_bytes,
        "tensors": _periods(tensors),
        "groups": _counted(groups),
    }


def _tensor_entry(tensor: DeviceTensor) -> dict[str, object]:
    return {
        "page_bytes": tensor.page_bytes,
        "stride": tensor.stride,
        "layers": len(tensor.layers),
    }


def _counted(entries: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Runs of equal neighbours as one entry with its count."""
    return [{"count": len(list(run)), **entry} for entry, run in groupby(entries)]


def _periods(entries: Sequence[dict[str, object]]) -> dict[str, object]:
    """The shortest pattern whose repetition gives `entries`, run-length coded."""
    total = len(entries)
    for period in range(1, total + 1):
        if total % period == 0 and all(
            entries[i] == entries[i - period] for i in range(period, total)
        ):
            return {"repeat": total // period, "of": _counted(entries[:period])}
    return {"repeat": 0, "of": []}


def _ref_runs(refs: Sequence[GroupRef]) -> list[dict[str, int]]:
    """Refs of equal bytes whose tensor indexes form an arithmetic run, as one entry."""
    runs: list[dict[str, int]] = []
    for ref in refs:
        if runs and _joins(runs[-1], ref):
            run = runs[-1]
            run["step"] = (ref.tensor - run["tensor"]) // run["count"]
            run["count"] += 1
        else:
            entry = {"tensor": ref.tensor, "count": 1, "step": 0, "page_bytes": ref.page_bytes}
            runs.append(entry)
    return runs


def _joins(run: Mapping[str, int], ref: GroupRef) -> bool:
    if run["page_bytes"] != ref.page_bytes:
        return False
    if run["count"] == 1:
        return True
    return ref.tensor == run["tensor"] + run["step"] * run["count"]


def compare(
    expected: Mapping[str, object], live: Mapping[str, object]
) -> tuple[GeometryDifference, ...]:
    """Leaves that differ between two geometry documents, at most MAX_DIFFERENCES.

    `expected` may come from a chunk: any shape is taken, values of another type differ, and the
    depth of the walk is bounded by the depth of `live`.
    """
    return tuple(islice(_differences("", expected, live), MAX_DIFFERENCES))


def _differences(name: str, expected: object, live: object) -> Iterator[GeometryDifference]:
    if isinstance(expected, Mapping) and isinstance(live, Mapping):
        yield from _mapping_differences(name, expected, live)
    elif isinstance(expected, list | tuple) and isinstance(live, list | tuple):
        yield from _list_differences(name, expected, live)
    elif not _same_leaf(expected, live):
        yield GeometryDifference(name, expected, live)


def _same_leaf(expected: object, live: object) -> bool:
    # True == 1 == 1.0 in Python; a document that says one is not the one that says the other.
    return type(expected) is type(live) and expected == live


def _mapping_differences(
    name: str, expected: Mapping[object, object], live: Mapping[object, object]
) -> Iterator[GeometryDifference]:
    dot = f"{name}." if name else ""
    for key, value in live.items():
        yield from _differences(f"{dot}{key}", expected.get(key), value)
    for key, value in expected.items():
        if key not in live:
            yield GeometryDifference(f"{dot}{key}", value, None)


def _list_differences(
    name: str, expected: Sequence[object], live: Sequence[object]
) -> Iterator[GeometryDifference]:
    if len(expected) != len(live):
        yield GeometryDifference(f"{name}.length", len(expected), len(live))
    for index, (left, right) in enumerate(zip(expected, live, strict=False)):
        yield from _differences(f"{name}[{index}]", left, right)
