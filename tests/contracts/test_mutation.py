# SPDX-License-Identifier: Apache-2.0
"""The mutation check checks something: known faults are noticed, no fault and no difference is not.

All hunts run in one process of their own, since a fault gets only into what was not imported yet.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.mutation.hunt import HUNG, KILLED, SURVIVED, UNTESTED
from fuzz.mutation.operators import break_tree, mutants
from fuzz.mutation.record import choose, faults_of
from tests.tidy.tree import ROOT

# Source, what is broken, and the quick test that has to notice.
FAULTS = [
    (
        "seal/cbor.py",
        "again != raw -> again == raw",
        "seal/test_cbor.py::test_what_is_canonical_is_taken",
    ),
    (
        "seal/header.py",
        "return bytes(bits) -> return None",
        "seal/test_sealing.py::test_a_coverage_bitmap_has_no_bit_outside",
    ),
    (
        "host/ledger.py",
        "self._last += 1 -> self._last -= 1",
        "host/test_region.py::test_every_allocation_has_a_generation_of_its_own",
    ),
    (
        "host/region.py",
        "raise RegionError('the region is closed') -> pass",
        "host/test_region.py::test_a_closed_region_gives_out_nothing",
    ),
    (
        "device/alias.py",
        "hits.size == 0 -> hits.size != 0",
        "device/test_alias.py::test_neighbours_do_not_meet",
    ),
    (
        "device/order.py",
        "task.waits == 0 -> task.waits != 0",
        "device/test_order.py::test_same_row_and_same_block_wait_others_do_not",
    ),
    (
        "lifecycle/lru.py",
        "return (*order, key) -> return None",
        "lifecycle/test_orders.py::test_lru_evicts_the_front_and_touches_prefixes_tail_first",
    ),
    (
        "lifecycle/monitor.py",
        "entry.pins += step.pins -> entry.pins -= step.pins",
        "lifecycle/test_monitor_words.py::test_many_readers_are_many",
    ),
]
# Without this fault only work is saved: the pages are compared one by one afterwards.
NO_DIFFERENCE = (
    "device/alias.py",
    "left.end <= right.start -> left.end < right.start",
    "device/test_alias.py::test_neighbours_do_not_meet",
)

_HUNTS = """
import json, sys
from fuzz.mutation.hunt import hunt, warm_up
from fuzz.mutation.record import faults_of
wanted, loop = json.load(sys.stdin)
warm_up()
found = []
for source, change, test in wanted:
    file = "kvsafe/" + source
    known = [one for one in faults_of(source.split("/")[0]) if one.file == file]
    [mutant] = [one.mutant for one in known if one.name.endswith(f" {change} #1")]
    found.append(hunt(file, mutant, ["tests/" + test], 60, 120)[::2])
tests = ["tests/" + test for _, _, test in wanted]
found.append(hunt("", None, tests, 60, 240)[::2])
found.append(hunt("", None, [], 60, 120)[::2])
found.append(hunt("", None, [loop], 1, 120)[::2])
print(json.dumps(found))
"""


def test_known_faults_are_noticed_and_nothing_else_is(tmp_path: Path) -> None:
    loop = tmp_path / "test_loop.py"
    loop.write_text("def test_loop() -> None:\n    while True:\n        pass\n")
    done = subprocess.run(
        [sys.executable, "-c", _HUNTS],
        input=json.dumps([[*FAULTS, NO_DIFFERENCE], str(loop)]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *faults, same, control, untested, hung = json.loads(done.stdout.splitlines()[-1])
    for (source, change, test), (outcome, noticed_by) in zip(FAULTS, faults, strict=True):
        assert outcome == KILLED, f"{source}: {change}"
        assert noticed_by.startswith(f"tests/{test}")
    assert (same, control) == ([SURVIVED, ""], [SURVIVED, ""])
    assert (untested[0], hung[0]) == (UNTESTED, HUNG)


SOURCE = '''"""Text."""
LIMIT: int = 3
def f(a, b=2):
    """Text."""
    if a and not b:
        raise ValueError(f"{a + 1}")
    a += 1
    g(a)
    return a < 5
def h() -> int | None:
    return None
'''


def test_a_fault_is_one_change_and_texts_are_left_alone() -> None:
    found = mutants(SOURCE)
    assert [(one.line, one.name, one.before, one.after) for one in found] == [
        (2, "constant", "3", "4"),
        (3, "constant", "2", "3"),
        (5, "and-or", "a and (not b)", "a or not b"),
        (5, "not", "not b", "b"),
        (6, "raise", "raise ValueError(f'{a + 1}')", "pass"),
        (7, "arithmetic", "a += 1", "a -= 1"),
        (7, "constant", "1", "2"),
        (8, "call", "g(a)", "pass"),
        (9, "return", "return a < 5", "return None"),
        (9, "compare", "a < 5", "a <= 5"),
        (9, "constant", "5", "6"),
    ]
    whole = ast.unparse(ast.parse(SOURCE)).splitlines()
    for one in found:
        broken = ast.unparse(break_tree(SOURCE, one)).splitlines()
        assert sum(left != right for left, right in zip(whole, broken, strict=True)) == 1


@pytest.mark.parametrize("folder", ["seal", "host", "device", "lifecycle"])
def test_a_sample_is_the_same_each_time_and_grows(folder: str) -> None:
    faults = faults_of(folder)
    assert len({fault.name for fault in faults}) == len(faults) > 100
    small, large = choose(faults, 20, 1), choose(faults, 40, 1)
    assert set(small) < set(large) and (len(small), len(large)) == (20, 40)
    assert choose(faults, 20, 2) != small
    assert choose(faults, 0, 1) == faults
