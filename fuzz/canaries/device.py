# SPDX-License-Identifier: Apache-2.0
"""Seeded faults in copy plans, in geometries, in what is copied, and in the order of copies."""

from __future__ import annotations

from typing import Any

from fuzz.canaries import Canary
from fuzz.canaries.tools import fed, gone, instead
from kvsafe.device import alias, cpu, geometry, order, plan, problems, slicemap
from kvsafe.device.order import TaskOrder
from kvsafe.device.plan import Direction
from kvsafe.tiers.lookups import LookupDesk

_single = slicemap._single
_release = TaskOrder._release
_same = alias._same_stride
_keys = TaskOrder._keys
_runs = slicemap._runs
_find_gaps = slicemap.SliceMap._find_gaps
_settle = LookupDesk.settle
_ask = LookupDesk.ask


def _one_fewer(task: Any) -> Any:
    """A finished task wakes all that waited for it but the last."""
    if len(task.followers) > 1:
        task.followers.pop()
    return _release(task)


def _wake_all(task: Any) -> Any:
    ready = list(task.followers)
    task.followers.clear()
    return ready


CANARIES = (
    Canary("blocks may be loaded twice", "plans", "two rows may write one block", 1500,
           gone(plan, "_check_blocks_once")),
    Canary("rows may be stored twice", "plans", "two stores may write one row", 1500,
           gone(plan, "_check_rows_once")),
    Canary("the null block may be written", "plans", "block 0 is a destination", 800,
           instead(plan, "NULL_BLOCK", -1)),
    Canary("off by one in the blocks", "plans", "the block behind the last one is taken", 3000,
           instead(geometry.Geometry, "_reach",
                   lambda self, page: self.num_blocks)),
    Canary("slots need no order", "plans", "a slot may come twice", 3000,
           instead(plan, "pairwise", lambda slots: ())),
    Canary("padding is copied", "plans", "whole pages move, not what the group uses", 800,
           instead(slicemap, "_single",
                   lambda page, slot, block: _single(page._replace(used=page.page_bytes)
                                                     if hasattr(page, "_replace")
                                                     else _whole(page), slot, block))),
    Canary("gaps are left", "plans", "bytes that a store does not write are not zeroed", 400,
           instead(slicemap.SliceMap, "gaps", lambda self, row: ())),
    Canary("off by one in a gap", "plans", "the last byte behind the last page stays", 800,
           instead(slicemap.SliceMap, "_find_gaps",
                   lambda self, *key: _find_gaps(self, *key)[:-1])),
    Canary("a run goes on too far", "plans", "blocks that are no neighbours are joined", 3000,
           instead(slicemap, "_runs",
                   lambda blocks: [_runs(blocks)[0]._replace(length=len(blocks))])),
    Canary("the proof before a load is left out", "plans", "unproven bytes reach the device", 3000,
           instead(cpu, "_steps", lambda engine, verify: {
               Direction.LOAD: [("copy", engine.copy_in)],
               Direction.STORE: [("fence", verify.fence), ("copy", engine.copy_out),
                                 ("after_store", verify.after_store)]})),
    Canary("the fence is left out", "plans", "a late store writes into another's row", 3000,
           instead(cpu, "_steps", lambda engine, verify: {
               Direction.LOAD: [("before_load", verify.before_load), ("copy", engine.copy_in)],
               Direction.STORE: [("copy", engine.copy_out),
                                 ("after_store", verify.after_store)]})),
    Canary("aliases are not looked for", "plans", "two tensors may share bytes", 3000,
           instead(problems, "overlapping_pairs", lambda pages: ())),
    Canary("off by one in an overlap", "plans", "pages that share one byte lie apart", 1500,
           fed(alias, "_same_stride", lambda left, right: (
               alias.StridedBytes(left.start, left.stride, max(1, left.page - 1), left.count),
               right))),
    Canary("a lost wake-up", "order", "of several that wait the last is not woken", 1500,
           instead(TaskOrder, "_release", staticmethod(_one_fewer))),
    Canary("woken too early", "order", "who waits for two is woken by the first", 800,
           instead(TaskOrder, "_release", staticmethod(_wake_all))),
    Canary("rows are not in the order", "order", "two copies of one row run side by side", 800,
           instead(TaskOrder, "_keys", lambda self, row: _keys(self, row)[1:])),
    Canary("a failed load is not remembered", "order", "a store keeps what was never loaded", 1500,
           gone(TaskOrder, "_mark")),
    Canary("a report comes too early", "order", "reported counts for stores before it, too", 4000,
           instead(TaskOrder, "reported", lambda self, jobs: [
               self._bad.pop(key, None) for job in jobs for key in self._bad_of.pop(job, ())])),
    Canary("lookups without a limit", "order", "names pile up for ever", 1500,
           instead(LookupDesk, "ask", lambda self, name, request: _ask(
               self, name, request) if _raised(self) else None)),
    Canary("an answer is given to another", "order", "hits and names are out of step", 800,
           fed(LookupDesk, "answer", lambda self, names, found: (self, names, found[::-1]))),
)  # fmt: skip


def _whole(page: Any) -> Any:
    from dataclasses import replace

    return replace(page, used=page.page_bytes)


def _raised(desk: Any) -> bool:
    desk._limit = 1 << 30
    return True


__all__ = ["CANARIES", "order"]
