# SPDX-License-Identifier: Apache-2.0
"""Copy plans and geometry, against judges that go byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fuzz.target import ByteSource, Target, demand
from kvsafe.device import alias, copier, cpu, document, geometry, plan
from kvsafe.device.plan import Direction, RowPlan

_STORE, _LOAD = Direction.STORE, Direction.LOAD
_WRONG: tuple[object, ...] = (-1, True, 1.0, None, "1", 1 << 70)


class Inline:
    """A pool that runs its work at once."""

    def submit(self, work: Callable[[], object]) -> None:
        """Run it."""
        work()

    def close(self, timeout_s: float) -> bool:
        """Nothing runs."""
        return True


class Plans(Target):
    """Geometries, windows and plans: what is refused, and which bytes move when it is not.

    Oracles: a geometry, a window or a plan is taken exactly when a judge that knows every byte
    calls it good; then exactly the bytes move that the layout of `spec/chunk.md` says, and
    every other byte on both sides stays as it was.
    """

    name = "plans"
    max_len = 160
    memory_mib = 64

    def once(self, data: bytes) -> None:
        source = ByteSource(data)
        if source.below(8) == 7:
            _overlap(source)
            return
        made = World(source)
        if made.accepted():
            made.copy(source)

    def seeds(self) -> list[bytes]:
        step = bytes((7 * n) % 251 for n in range(100))
        return [bytes([0]) + bytes(60), bytes([7, 3, 4, 2, 5, 6]), bytes([1]) + step, step]


def _overlap(source: ByteSource) -> None:
    """Two strided sets of bytes: the first pair of pages that meet, found the slow way."""
    sets = []
    for _ in range(2):
        page = source.between(1, 8)
        stride = page + source.below(20)
        sets.append(alias.StridedBytes(source.below(60), stride, page, source.between(1, 9)))
    left, right = sets
    pages = [
        [
            set(range(s.start + i * s.stride, s.start + i * s.stride + s.page))
            for i in range(s.count)
        ]
        for s in sets
    ]
    slow = [(i, j) for i, a in enumerate(pages[0]) for j, b in enumerate(pages[1]) if a & b]
    found = alias.first_overlap(left, right)
    demand(found == (slow[0] if slow else None), "another first overlap than byte by byte")
    demand(bool(list(alias.overlapping_pairs(sets))) == bool(slow), "pairs of sets that overlap")


@dataclass
class Proof:
    """Refuses what it was told to, by step; counts that it was asked."""

    refuse: frozenset[str]
    asked: list[str] = field(default_factory=list)

    def _answer(self, step: str) -> object | None:
        self.asked.append(step)
        return step if step in self.refuse else None

    def before_load(self, row: RowPlan) -> object | None:
        """Before a load."""
        return self._answer("before_load")

    def fence(self, row: RowPlan) -> object | None:
        """Before a store."""
        return self._answer("fence")

    def after_store(self, row: RowPlan) -> object | None:
        """After a store."""
        return self._answer("after_store")


class World:
    """Tensors, groups and a window, as the bytes say."""

    def __init__(self, source: ByteSource) -> None:
        odd = source.below(4) == 3
        self.blocks, self.span = source.between(2, 6), source.between(1, 3)
        if odd and source.below(4) == 3:
            self.span = source.below(2) - 1
        self.tensors = _tensors(source, self.blocks, odd)
        self.groups = tuple(
            tuple(_ref(source, self.tensors, odd) for _ in range(source.between(not odd, 3)))
            for _ in range(source.between(1, 2))
        )
        self.geometry = geometry.Geometry(self.tensors, self.groups, self.span)
        self.window = self._window(source)

    def _window(self, source: ByteSource) -> plan.RowWindow:
        size = self.span * sum(t.page_bytes for t in self.tensors)
        lead, before, after = source.below(9), source.below(9), source.below(9)
        rows, stride = source.between(1, 3), max(0, before + size + after)
        wrong = source.raw(1)[0]
        base = torch.zeros(max(0, lead + rows * stride - (wrong == 255)), dtype=torch.int8)
        if wrong == 254:
            base = base.to(torch.uint8)
        size, before = size + (wrong == 253), before + after + 1 if wrong == 252 else before
        return plan.RowWindow(base, lead - 100 * (wrong == 251), rows, stride, before, size)

    def accepted(self) -> bool:
        """Whether geometry and window are taken; they must be exactly when they are good."""
        try:
            self.geometry.check()
        except geometry.GeometryError:
            demand(not self._sound(), "a good geometry was refused")
            return False
        demand(self._sound(), "a geometry that is not good was taken", "accepted")
        again = document.compare(self.geometry.describe(), self.geometry.describe())
        demand(again == (), "a geometry differs from itself")
        try:
            self.window.check(self.geometry)
        except geometry.GeometryError:
            demand(not self._fits(), "a good window was refused")
            return False
        demand(self._fits(), "a window that is not good was taken", "accepted")
        return True

    def _sound(self) -> bool:
        """Byte by byte: pages inside their storage, none in two places, groups that exist."""
        owners: dict[int, int] = {}
        for number, tensor in enumerate(self.tensors):
            view = tensor.view
            if view.dtype is not torch.int8 or view.ndim != 2 or tensor.page_bytes <= 0:
                return False
            if view.shape[1] != tensor.page_bytes or view.shape[0] != self.tensors[0].view.shape[0]:
                return False
            storage = view.untyped_storage()
            for block in range(view.shape[0]):
                for byte in range(tensor.page_bytes):
                    at = view.storage_offset() + block * view.stride(0) + byte * view.stride(1)
                    address = storage.data_ptr() + at
                    if (
                        not 0 <= at < storage.nbytes()
                        or owners.setdefault(address, number) != number
                    ):
                        return False
            if view.shape[0] > 1 and view.stride(0) < tensor.page_bytes:
                return False
            if tensor.page_bytes > 1 and view.stride(1) != 1:
                return False
        refs = [ref for group in self.groups for ref in group]
        good = all(
            0 <= ref.tensor < len(self.tensors)
            and 0 < ref.page_bytes <= self.tensors[ref.tensor].page_bytes
            for ref in refs
        )
        return bool(self.tensors) and self.span > 0 and good and all(self.groups)

    def _fits(self) -> bool:
        window = self.window
        size = self.span * sum(tensor.page_bytes for tensor in self.tensors)
        rows = [window.rows_offset + n * window.row_stride for n in range(window.num_rows)]
        inside = all(at >= 0 and at + window.row_stride <= window.base.numel() for at in rows)
        sliced = 0 <= window.slice_offset <= window.row_stride - window.slice_bytes
        return inside and sliced and window.slice_bytes == size and window.base.dtype is torch.int8

    def copy(self, source: ByteSource) -> None:
        """Some plans, one after the other, through the copier."""
        _fill(self)
        steps = ("before_load", "fence", "after_store")
        proof = Proof(frozenset(name for name in steps if source.below(6) == 5))
        engine = cpu.CpuEngine(self.geometry, self.window, proof, pool=Inline())
        desk = copier.Copier(self.geometry, self.window, engine)
        for job in range(source.between(1, 3)):
            made = self._plan(source, job)
            before = _bytes(self)
            desk.submit(made)
            [outcome] = desk.poll()
            good = self._allowed(made)
            demand(good or not outcome.ok, "a plan that is not good was carried out", "accepted")
            demand(good or outcome.plan_fault is not None, "a bad plan without its fault")
            demand(not good or outcome.plan_fault is None, "a good plan was refused")
            expected = self._moved(made, before, proof.refuse) if good else before
            demand(_bytes(self) == expected, "other bytes moved than the layout says", "accepted")
            ours = {_LOAD: {"before_load"}, _STORE: {"fence", "after_store"}}[made.direction]
            refused = bool(ours & proof.refuse)
            demand(not good or outcome.ok != refused, "an outcome that is not the proof's")

    def _plan(self, source: ByteSource, job: int) -> plan.CopyPlan:
        direction = source.pick((_STORE, _LOAD))
        rows = []
        for _ in range(source.between(1, 3) - source.rarely()):
            slots = [n for n in range(self.span) if source.below(4)]
            blocks = [(slot, source.below(self.blocks + 1)) for slot in slots]
            if source.rarely():
                blocks = blocks[::-1]
            group, number = source.below(len(self.groups)), source.below(self.window.num_rows)
            rows.append(_bent(source, RowPlan(number, group, tuple(blocks))))
        return plan.CopyPlan(job, direction, tuple(rows))

    def _allowed(self, made: plan.CopyPlan) -> bool:
        """Whether every byte of the plan may move."""
        touched: set[tuple[int, int]] = set()
        for row in made.rows:
            if type(row.row) is not int or not 0 <= row.row < self.window.num_rows:
                return False
            if type(row.group) is not int or not 0 <= row.group < len(self.groups):
                return False
            slots = [slot for slot, _ in row.blocks]
            blocks = [block for _, block in row.blocks]
            if any(type(n) is not int for n in (*slots, *blocks)) or not slots:
                return False
            if slots != sorted(set(slots)) or slots[0] < 0 or slots[-1] >= self.span:
                return False
            if not all(0 < block < self.tensors[0].num_blocks for block in blocks):
                return False
            if len(set(blocks)) != len(blocks):
                return False
            places = {(ref.tensor, b) for ref in self.groups[row.group] for b in blocks}
            if made.direction is _LOAD and places & touched:
                return False
            touched |= places
        numbers = [row.row for row in made.rows]
        unique = made.direction is _LOAD or len(set(numbers)) == len(numbers)
        return bool(made.rows) and unique

    def _moved(
        self,
        made: plan.CopyPlan,
        before: tuple[list[int], list[list[list[int]]]],
        no: frozenset[str],
    ) -> tuple[list[int], list[list[list[int]]]]:
        """Both sides after the plan, moved byte by byte along the layout."""
        host, device = list(before[0]), [[list(page) for page in t] for t in before[1]]
        if ("before_load" if made.direction is _LOAD else "fence") in no:
            return before
        for row in made.rows:
            at = self.window.rows_offset + row.row * self.window.row_stride
            at += self.window.slice_offset
            held = dict(row.blocks)
            for number, tensor in enumerate(self.tensors):
                refs = [r.page_bytes for r in self.groups[row.group] if r.tensor == number]
                for slot in range(self.span):
                    for byte in range(tensor.page_bytes):
                        ours = slot in held and byte < max(refs, default=0)
                        if made.direction is _STORE:
                            host[at] = device[number][held[slot]][byte] if ours else 0
                        elif ours:
                            device[number][held[slot]][byte] = host[at]
                        at += 1
        return host, device


def _tensors(source: ByteSource, blocks: int, odd: bool) -> tuple[geometry.DeviceTensor, ...]:
    """Tensors that lie apart, or take turns in one storage, or meet where they must not."""
    count, packed = source.between(not odd, 3), source.flag()
    pages = [source.between(1, 12) for _ in range(count)]
    stride = sum(pages) + source.below(5)
    room = torch.zeros(blocks * stride + 16, dtype=torch.int8)
    tensors, at = [], source.below(5)
    for number, page in enumerate(pages):
        if packed:
            shift = source.below(3) - 1 if odd and source.flag() else 0
            view = room.as_strided((blocks, page), (stride, 1), max(0, at + shift))
        else:
            more = int(odd and source.rarely())
            view = torch.zeros((blocks + more, page + source.below(3)), dtype=torch.int8)
            view = view[:, :page]
        if odd and source.rarely():
            view = (view.to(torch.uint8), view.t(), view[0], view[:1])[source.below(4)]
        wide = page + int(odd and source.rarely())
        tensors.append(geometry.DeviceTensor(view, wide, (f"layer{number}",)))
        at += page
    return tuple(tensors)


def _ref(
    source: ByteSource, tensors: tuple[geometry.DeviceTensor, ...], odd: bool
) -> geometry.GroupRef:
    count = len(tensors)
    number = source.below(max(1, count)) + (count if odd and source.rarely() else 0)
    page = tensors[number].page_bytes if number < count else 4
    used = page - source.below(3) if source.flag() else page
    return geometry.GroupRef(number, used if odd else max(1, used))


def _bent(source: ByteSource, row: RowPlan) -> RowPlan:
    """The row, sometimes with something in it that no caller of ours would write."""
    wrong, what = source.pick(_WRONG), source.raw(1)[0]
    blocks: tuple[tuple[object, object], ...] = row.blocks
    if what == 255:
        return RowPlan(wrong, row.group, row.blocks)  # type: ignore[arg-type]
    if what == 254:
        return RowPlan(row.row, wrong, row.blocks)  # type: ignore[arg-type]
    if what == 253 and blocks:
        blocks = (*blocks[:-1], (blocks[-1][0], wrong))
    if what == 252 and blocks:
        blocks = ((wrong, blocks[0][1]), *blocks[1:])
    if what == 251:
        blocks = (*blocks, (self_span(blocks), 1))
    return RowPlan(row.row, row.group, blocks)  # type: ignore[arg-type]


def self_span(blocks: tuple[tuple[object, object], ...]) -> int:
    """A slot behind the last one, inside the chunk or just outside it."""
    return 1 + max((slot for slot, _ in blocks if type(slot) is int), default=-1)


def _fill(world: World) -> None:
    """Bytes that tell their place, on both sides."""
    for number, tensor in enumerate(world.tensors):
        count = tensor.view.numel()
        values = (torch.arange(count) * 7 + 31 * number + 1) % 251 - 125
        tensor.view.copy_(values.reshape(tensor.view.shape).to(torch.int8))
    values = (torch.arange(world.window.base.numel()) * 11 + 5) % 253 - 126
    world.window.base.copy_(values.to(torch.int8))


def _bytes(world: World) -> tuple[list[int], list[list[list[int]]]]:
    return world.window.base.tolist(), [tensor.view.tolist() for tensor in world.tensors]
