# SPDX-License-Identifier: Apache-2.0
"""What the identity says the tensors must be, checked against the tensors that were registered."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvsafe.device.document import GeometryDifference
from kvsafe.device.geometry import Geometry, GroupRef


@dataclass(frozen=True, slots=True)
class ExpectedGroup:
    """One KV-cache group.

    layers: its layer names in the engine's order.
    page_bytes: unpadded bytes of a page, one entry per ref: one per layer, or a single entry
        where the engine packs all layers of a block into one page.
    """

    layers: tuple[str, ...]
    page_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GeometryExpectation:
    """The identity's view of this worker's tensors; sizes in bytes."""

    device_type: str
    blocks_per_chunk: int
    slice_bytes: int
    groups: tuple[ExpectedGroup, ...]


class GeometryMismatch(RuntimeError):
    """The registered tensors are not what the identity says: the worker must not start."""

    def __init__(self, differences: tuple[GeometryDifference, ...]) -> None:
        self.differences = differences
        lines = "\n".join(f"  {difference}" for difference in differences)
        super().__init__(f"registered KV-cache tensors differ from the identity:\n{lines}")


def require_expectation(expectation: GeometryExpectation, geometry: Geometry) -> None:
    """Raise GeometryMismatch, with both sides of every difference, unless all is equal."""
    differences = check_expectation(expectation, geometry)
    if differences:
        raise GeometryMismatch(differences)


def check_expectation(
    expectation: GeometryExpectation, geometry: Geometry
) -> tuple[GeometryDifference, ...]:
    """Every difference between the identity and a geometry that passed `Geometry.check`."""
    pairs = (
        ("device", expectation.device_type, geometry.device_type),
        ("blocks_per_chunk", expectation.blocks_per_chunk, geometry.blocks_per_chunk),
        ("slice_bytes", expectation.slice_bytes, geometry.slice_bytes),
        ("groups.length", len(expectation.groups), len(geometry.groups)),
    )
    found = [GeometryDifference(*pair) for pair in pairs if pair[1] != pair[2]]
    both = zip(expectation.groups, geometry.groups, strict=False)
    for number, (group, refs) in enumerate(both):
        found.extend(_group_differences(f"groups[{number}]", group, refs, geometry))
    found.extend(_stray_layers(expectation, geometry))
    return tuple(found)


def _group_differences(
    name: str, group: ExpectedGroup, refs: tuple[GroupRef, ...], geometry: Geometry
) -> Iterator[GeometryDifference]:
    live = tuple(ref.page_bytes for ref in refs)
    if len(group.page_bytes) != len(live):
        yield GeometryDifference(f"{name}.refs.length", len(group.page_bytes), len(live))
    for index, (want, have) in enumerate(zip(group.page_bytes, live, strict=False)):
        if want != have:
            yield GeometryDifference(f"{name}.page_bytes[{index}]", want, have)
    held = [geometry.tensors[ref.tensor].layers for ref in refs]
    yield from _layer_differences(name, group.layers, held)


def _layer_differences(
    name: str, layers: tuple[str, ...], held: list[tuple[str, ...]]
) -> Iterator[GeometryDifference]:
    """One ref per layer: the ref must hold exactly that layer; else any ref of the group may."""
    anywhere = tuple(layer for names in held for layer in names)
    for index, layer in enumerate(layers):
        place = held[index] if len(held) == len(layers) else anywhere
        if layer not in place:
            yield GeometryDifference(f"{name}.layers[{index}]", layer, place)


def _stray_layers(
    expectation: GeometryExpectation, geometry: Geometry
) -> Iterator[GeometryDifference]:
    known = {layer for group in expectation.groups for layer in group.layers}
    for index, tensor in enumerate(geometry.tensors):
        for layer in tensor.layers:
            if layer not in known:
                yield GeometryDifference(f"tensors[{index}].layers", None, layer)
